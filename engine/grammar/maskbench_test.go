package grammar

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

type maskbenchFile struct {
	Schema json.RawMessage `json:"schema"`
	Tests  []struct {
		Valid bool            `json:"valid"`
		Data  json.RawMessage `json:"data"`
	} `json:"tests"`
}

func TestMaskbench(t *testing.T) {
	dir := os.Getenv("TANDEM_MASKBENCH")
	if dir == "" {
		t.Skip("needs TANDEM_MASKBENCH")
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*.json"))
	refused := map[string]int{}
	var n, nRefused, valid, validRefused, invalid, accepted int
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var f maskbenchFile
		if err := json.Unmarshal(text, &f); err != nil {
			t.Fatal(err)
		}
		n++
		limits := DefaultLimits()
		g, err := Compile(Source{Kind: JSONSchema, Text: f.Schema}, limits)
		if err != nil {
			nRefused++
			var e *Error
			if !errors.As(err, &e) {
				t.Errorf("%s: %v has no keyword", path, err)
			}
			refused[e.Keyword]++
			t.Logf("%s: %v", filepath.Base(path), err)
			continue
		}
		a, err := NewAutomaton(g, nil, limits)
		if err != nil {
			t.Fatal(err)
		}
		root, err := readJSON(f.Schema, 1000)
		if err != nil {
			t.Fatal(err)
		}
		c := newSchemaCompiler(limits)
		if _, err := c.schema(root); err != nil {
			t.Fatal(err)
		}
		o := &orderer{t, c}
		for i, test := range f.Tests {
			v, err := readJSON(test.Data, 1000)
			if err != nil {
				t.Fatal(err)
			}
			ok := false
			for _, s := range o.texts(v, []*value{root}) {
				m, err := a.NewMatcher()
				if err != nil {
					t.Fatal(err)
				}
				err = m.AcceptBytes([]byte(s))
				if errors.Is(err, ErrBudget) {
					t.Errorf("%s: %v", path, err)
				}
				if err == nil && m.Complete() {
					ok = true
				} else if test.Valid {
					t.Logf("%s: valid %d: %v", filepath.Base(path), i, err)
				}
			}
			switch {
			case test.Valid && !ok:
				validRefused++
				t.Logf("%s: refuses valid %d", filepath.Base(path), i)
			case !test.Valid && ok:
				accepted++
				t.Errorf("%s: accepts invalid %d: %s", filepath.Base(path), i, clip(string(test.Data)))
			}
			if test.Valid {
				valid++
			} else {
				invalid++
			}
		}
	}
	t.Logf("%d schemas, %d refused %v; %d valid, %d refused; %d invalid, %d accepted", n, nRefused, refused, valid, validRefused, invalid, accepted)
}
