package grammar

import (
	"strings"
	"testing"
)

// Between JSON tokens there is nothing, a space, or a newline with indentation.
func TestWhitespace(t *testing.T) {
	src := Source{Kind: JSONSchema, Text: []byte(`{"type":"object","properties":{"a":{"type":"array","items":{"type":"integer"}}}}`)}
	for text, want := range map[string]bool{
		`{"a":[1,2]}`: true, `{"a": [1, 2]}`: true, `{ "a" : [ 1 , 2 ] }`: true, "{\n  \"a\": [\n    1,\n    2\n  ]\n}": true, "{\n\t\"a\": [\n\t\t1\n\t]\n}": true, "{\n\"a\"\n:\n[\n]\n}": true,
		`{  "a": [1]}`: false, "{\t\"a\": [1]}": false, "{\n\n\"a\": [1]}": false, "{\r\n\"a\": [1]}": false, "{ \n\"a\": [1]}": false, ` {"a": [1]}`: false, `{"a": [1]} `: false,
		"{\n" + strings.Repeat(" ", 19) + `"a":[]}`: true, "{\n" + strings.Repeat(" ", 20) + `"a":[]}`: false,
	} {
		if got := acceptAll(t, src, text); got != want {
			t.Errorf("%q is accepted: %v", text, got)
		}
	}
	src.Compact = true
	for text, want := range map[string]bool{`{"a":[1,2]}`: true, `{"a": [1]}`: false, "{\n}": false} {
		if got := acceptAll(t, src, text); got != want {
			t.Errorf("compact: %q is accepted: %v", text, got)
		}
	}
}
