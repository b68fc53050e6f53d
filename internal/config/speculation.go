package config

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Speculation is the supported part of vLLM's --speculative-config: a draft model proposes
// tokens, or they are those that followed the same n-gram before.
type Speculation struct {
	Tokens   int    // draft tokens per step; 0: none
	Model    string // the draft model; empty: none
	Min, Max int    // length of the n-gram, without a draft model
	given    string
}

// defaultLookup is vLLM's default of both bounds of the lookup.
const defaultLookup = 5

// Methods, by vLLM's names.
const (
	ngram      = "ngram"
	draftModel = "draft_model"
)

func or(p *string) string {
	if p == nil {
		return ""
	}
	return *p
}

// String returns the JSON that was set.
func (c *Speculation) String() string { return c.given }

// Type names the value in help texts.
func (c *Speculation) Type() string { return jsonType }

// jsonType is the Type of flags whose value is JSON; in a file it may be a
// mapping.
const jsonType = "JSON"

// Set parses a JSON object; nothing, null and {} mean no speculation.
func (c *Speculation) Set(v string) error {
	var in struct {
		Method *string `json:"method"`
		Model  *string `json:"model"`
		Tokens *int    `json:"num_speculative_tokens"`
		Max    *int    `json:"prompt_lookup_max"`
		Min    *int    `json:"prompt_lookup_min"`
	}
	if v == "" {
		v = "{}"
	}
	// The method first: the members of others are not known here.
	var kind struct{ Method string }
	if json.Unmarshal([]byte(v), &kind) == nil && kind.Method != "" && kind.Method != ngram && kind.Method != draftModel {
		return fmt.Errorf("%s: method %q is not supported; use %q or %q, or leave the flag out: answers are the same without it", v, kind.Method, ngram, draftModel)
	}
	d := json.NewDecoder(strings.NewReader(v))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil || d.More() {
		return fmt.Errorf("%s: want a JSON object with method, model, num_speculative_tokens, prompt_lookup_max and prompt_lookup_min (%v)", v, err)
	}
	*c = Speculation{given: v}
	if in.Method == nil && in.Model == nil && in.Tokens == nil && in.Max == nil && in.Min == nil {
		c.given = ""
		return nil
	}
	method, model := "", or(in.Model)
	if in.Method != nil {
		method = *in.Method
	} else if method = strings.Trim(model, "[]"); method != ngram && model != "" {
		method = draftModel
	}
	switch {
	case method == "":
		return fmt.Errorf("%s: give method %q or %q, or leave the flag out: answers are the same without it", v, ngram, draftModel)
	case method == draftModel && model == "":
		return fmt.Errorf("%s: method %q needs model, the folder of the draft model", v, draftModel)
	case method == draftModel && (in.Max != nil || in.Min != nil):
		return fmt.Errorf("%s: prompt_lookup_max and prompt_lookup_min need method %q", v, ngram)
	}
	if in.Tokens == nil || *in.Tokens < 1 {
		return fmt.Errorf("%s: num_speculative_tokens must be at least 1", v)
	}
	if c.Tokens = *in.Tokens; method == draftModel {
		c.Model = model
		return nil
	}
	c.Min, c.Max = defaultLookup, defaultLookup
	switch {
	case in.Max != nil && in.Min != nil:
		c.Min, c.Max = *in.Min, *in.Max
	case in.Max != nil:
		c.Min, c.Max = *in.Max, *in.Max
	case in.Min != nil:
		c.Min, c.Max = *in.Min, *in.Min
	}
	if c.Min < 1 || c.Max < c.Min {
		return fmt.Errorf("%s: prompt_lookup_min %d and prompt_lookup_max %d: want 1 <= min <= max", v, c.Min, c.Max)
	}
	return nil
}
