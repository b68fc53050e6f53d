package grammar

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

func TestJSONSchemaTestSuite(t *testing.T) {
	dir := os.Getenv("TANDEM_JSON_SCHEMA_TEST_SUITE")
	if dir == "" {
		t.Skip("needs TANDEM_JSON_SCHEMA_TEST_SUITE")
	}
	for _, draft := range []string{"draft2020-12", "draft7", "draft6", "draft4"} {
		files, _ := filepath.Glob(filepath.Join(dir, draft, "*.json"))
		refused := map[string]int{}
		var n, bad, valid, validRefused, invalid, accepted int
		for _, path := range files {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			var groups []struct {
				Description string
				Schema      json.RawMessage
				Tests       []struct {
					Description string
					Data        json.RawMessage
					Valid       bool
				}
			}
			if err := json.Unmarshal(text, &groups); err != nil {
				t.Fatal(err)
			}
			for _, g := range groups {
				n++
				limits := DefaultLimits()
				gr, err := Compile(Source{Kind: JSONSchema, Text: g.Schema}, limits)
				if err != nil {
					bad++
					refused[err.(*Error).Keyword]++
					if err.(*Error).Keyword == "json_schema" && err.(*Error).Reason == "accepts no text" {
						bad--
					}
					continue
				}
				a, err := NewAutomaton(gr, nil, limits)
				if err != nil {
					t.Fatal(err)
				}
				root, err := readJSON(g.Schema, 1000)
				if err != nil {
					t.Fatal(err)
				}
				c := newSchemaCompiler(limits)
				if _, err := c.schema(root); err != nil {
					t.Fatal(err)
				}
				o := &orderer{t, c}
				for _, test := range g.Tests {
					v, err := readJSON(test.Data, 1000)
					if err != nil {
						continue
					}
					ok := false
					for _, s := range o.texts(v, []*value{root}) {
						m, _ := a.NewMatcher()
						if m.AcceptBytes([]byte(s)) == nil && m.Complete() {
							ok = true
						}
					}
					if test.Valid {
						valid++
					} else {
						invalid++
					}
					if test.Valid && !ok {
						validRefused++
						t.Logf("%s %s: %q: refuses valid %q %s", draft, filepath.Base(path), g.Description, test.Description, clip(string(test.Data)))
					}
					if !test.Valid && ok {
						accepted++
						t.Errorf("%s %s: %q: accepts invalid %q %s", draft, filepath.Base(path), g.Description, test.Description, clip(string(test.Data)))
					}
				}
			}
		}
		t.Logf("%s: %d schemas, %d refused %v; %d valid, %d refused; %d invalid, %d accepted", draft, n, bad, refused, valid, validRefused, invalid, accepted)
	}
}
