package config

import (
	"strings"
	"testing"
)

func TestStructuredOutputs(t *testing.T) {
	for given, want := range map[string]bool{
		"": false, "{}": false, `{"backend":"auto"}`: false, `{"backend":"tandem","disable_fallback":true,"enable_in_reasoning":false}`: false,
		`{"disable_any_whitespace":true}`: true,
	} {
		var c StructuredOutputs
		if err := c.Set(given); err != nil || c.Compact != want || c.String() != given {
			t.Errorf("%s: %+v, %v", given, c, err)
		}
	}
	for given, want := range map[string]string{
		`{"backend":"xgrammar"}`: "xgrammar", `{"disable_additional_properties":true}`: "additionalProperties", `{"enable_in_reasoning":true}`: "enable_in_reasoning",
		`{"reasoning_parser":"x"}`: "reasoning_parser", `{"other":1}`: "other", `[]`: "want a JSON object", `{} {}`: "want a JSON object",
	} {
		if err := new(StructuredOutputs).Set(given); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", given, err, want)
		}
	}
}
