package grammar

import "testing"

// The classes of states in which masks differ from llguidance's, as bench/grammar -compare found
// them over maskbench, and what we do there.
func TestDifferences(t *testing.T) {
	schema := func(s string) Source { return Source{Kind: JSONSchema, Text: []byte(s)} }
	for _, c := range []struct {
		class   string
		src     Source
		yes, no []string
	}{
		// A key that is not declared is written without \u as long as it may still become a
		// declared one: \u0061 would spell a, and the declared member would be there twice.
		{"escapes in keys", schema(`{"type":"object","properties":{"ab":{"type":"integer"}}}`),
			[]string{`{"ac\u0063":1}`, `{"x\u0062":"s"}`}, []string{`{"\u0061b":"s"}`, `{"a\u0062":"s"}`, `{"\u0063":1}`}},
		// RFC 3339 allows a second 60 only where a leap second was. jsonschema refuses it too.
		{"leap seconds", schema(`{"type":"string","format":"date-time"}`),
			[]string{`"2024-01-01T23:59:59Z"`}, []string{`"2024-01-01T23:59:60Z"`}},
		// A class that excludes the backslash excludes its escape.
		{"escaped characters that a pattern excludes", schema(`{"type":"string","maxLength":260,"pattern":"^[A-Z][^:\\\\+]*$"}`),
			[]string{`"Gx/"`, `"G\""`}, []string{`"G\\"`}},
	} {
		for _, s := range c.yes {
			if !acceptAll(t, c.src, s) {
				t.Errorf("%s: refuses %s", c.class, s)
			}
		}
		for _, s := range c.no {
			if acceptAll(t, c.src, s) {
				t.Errorf("%s: accepts %s", c.class, s)
			}
		}
	}
}
