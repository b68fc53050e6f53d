package config

import (
	"encoding/json"
	"fmt"
	"strings"
)

// StructuredOutputs is the supported part of vLLM's --structured-outputs-config.
type StructuredOutputs struct {
	Compact bool // no whitespace between JSON tokens
	given   string
}

// String returns the JSON that was set.
func (c *StructuredOutputs) String() string { return c.given }

// Type names the value in help texts.
func (c *StructuredOutputs) Type() string { return jsonType }

// Set parses a JSON object. It refuses values that would change answers and are not served.
func (c *StructuredOutputs) Set(v string) error {
	var in struct {
		Backend    string `json:"backend"`
		Compact    bool   `json:"disable_any_whitespace"`
		NoFallback bool   `json:"disable_fallback"` // there is one implementation
		NoOthers   bool   `json:"disable_additional_properties"`
		Reasoning  bool   `json:"enable_in_reasoning"`
		Parser     string `json:"reasoning_parser"`
	}
	d := json.NewDecoder(strings.NewReader(v))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); v != "" && (err != nil || d.More()) {
		return fmt.Errorf("%s: want a JSON object with backend and disable_any_whitespace", v)
	}
	switch {
	case in.Backend != "" && in.Backend != "auto" && in.Backend != "tandem":
		return fmt.Errorf("%s: backend %q is not there; use auto", v, in.Backend)
	case in.NoOthers:
		return fmt.Errorf("%s: disable_additional_properties is not supported; put additionalProperties into the schemas", v)
	case in.Reasoning:
		return fmt.Errorf("%s: enable_in_reasoning is not supported: answers are constrained behind their reasoning; leave it out", v)
	case in.Parser != "":
		return fmt.Errorf("%s: reasoning_parser is not supported here; use --reasoning-parser", v)
	}
	*c = StructuredOutputs{in.Compact, v}
	return nil
}
