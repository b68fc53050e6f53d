package grammar

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
)

// archive returns the files of an archive in testdata.
func archive(t testing.TB, name string) map[string][]byte {
	t.Helper()
	f, err := os.Open("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

// score counts what became of schemas and instances.
type score struct {
	schemas, refused, empty  int
	valid, validRefused      int
	invalid, invalidAccepted int
	nothing                  bool           // the last schema has no valid instance
	keywords                 map[string]int // of refused schemas
	classes                  map[string]int // of refused valid instances
}

// schemaCase is a schema with an automaton and what orders instances.
type schemaCase struct {
	root *value
	a    *Automaton
	o    *orderer
}

// newSchemaCase compiles a schema. It returns nil, and counts it, if the schema is refused by name.
func (s *score) newSchemaCase(t *testing.T, name string, text []byte) *schemaCase {
	t.Helper()
	s.schemas++
	s.nothing = false
	limits := DefaultLimits()
	g, err := Compile(Source{Kind: JSONSchema, Text: text}, limits)
	if err != nil {
		var e *Error
		if !errors.As(err, &e) || e.Keyword == "" {
			t.Fatalf("%s: %v names no keyword", name, err)
		}
		if s.nothing = errors.Is(err, ErrEmpty); s.nothing {
			s.empty++
			return nil
		}
		if e.Keyword == "$ref" && !strings.HasSuffix(e.Reason, "is not in the schema") {
			t.Errorf("%s: %v: only remote references are refused", name, err)
		}
		s.refused++
		s.keywords[e.Keyword]++
		return nil
	}
	a, err := NewAutomaton(g, nil, limits)
	if err != nil {
		t.Fatal(err)
	}
	root, err := readJSON(text, 1000)
	if err != nil {
		t.Fatal(err)
	}
	c := newSchemaCompiler(limits)
	if _, err := c.schema(root); err != nil {
		t.Fatal(err)
	}
	return &schemaCase{root, a, &orderer{t, c}}
}

// accepts reports whether one of the spellings of an instance is accepted.
func (c *schemaCase) accepts(t *testing.T, name string, data []byte) bool {
	t.Helper()
	v, err := readJSON(data, 1000)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	for _, text := range c.o.texts(v, []*value{c.root}) {
		m, err := c.a.NewMatcher()
		if err == nil {
			err = m.AcceptBytes([]byte(text))
		}
		if errors.Is(err, ErrBudget) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil && m.Complete() {
			return true
		}
	}
	return false
}

// count compares the result for an instance with what the case says. class names why a valid one
// may be refused, "" if there is no reason.
func (s *score) count(t *testing.T, name string, data []byte, valid, accepted bool, class string) {
	t.Helper()
	if valid {
		s.valid++
		if !accepted {
			s.validRefused++
			s.classes[class]++
			t.Logf("%s: refuses a valid instance, class %q: %s", name, class, clip(string(data)))
		}
		return
	}
	s.invalid++
	if accepted {
		s.invalidAccepted++
		t.Errorf("%s: accepts an invalid instance: %s", name, clip(string(data)))
	}
}

func (s *score) log(t *testing.T, name string) {
	t.Helper()
	page, err := os.ReadFile("../../bench/results/grammar.md")
	if err != nil {
		t.Fatal(err)
	}
	row := fmt.Sprintf("| %s | %d | %d | %d%s | %d | %d%s | %d | %d |\n", name, s.schemas, s.empty, s.refused, most(s.keywords), s.valid, s.validRefused, most(s.classes), s.invalid, s.invalidAccepted)
	if !strings.Contains(string(page), row) {
		t.Errorf("bench/results/grammar.md lacks the row\n%s", row)
	}
}

// most returns counts as text, the largest first.
func most(counts map[string]int) string {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int { return cmp.Or(counts[b]-counts[a], strings.Compare(a, b)) })
	for i, n := range names {
		names[i] = fmt.Sprintf("%s %d", n, counts[n])
	}
	if names == nil {
		return ""
	}
	return ": " + strings.Join(names, ", ")
}

func newScore() *score { return &score{keywords: map[string]int{}, classes: map[string]int{}} }

// Of maskbench no invalid instance is accepted, at most 3 of 1,000 valid ones are refused, and at
// most 12 of 100 schemas, each by name.
func TestMaskbench(t *testing.T) {
	files := archive(t, "maskbench.tar.gz")
	s := newScore()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		var f struct {
			Schema json.RawMessage
			Tests  []struct {
				Valid bool
				Data  json.RawMessage
			}
		}
		if err := json.Unmarshal(files[name], &f); err != nil {
			t.Fatal(err)
		}
		c := s.newSchemaCase(t, name, f.Schema)
		if c == nil {
			continue
		}
		for _, test := range f.Tests {
			s.count(t, name, test.Data, test.Valid, c.accepts(t, name, test.Data), "")
		}
	}
	s.log(t, "maskbench, every 28th file")
	if s.schemas != 404 || s.validRefused*1000 > 3*s.valid || s.refused*100 > 12*s.schemas {
		t.Error("more is refused than the bounds allow")
	}
}

// Of the required tests of JSON-Schema-Test-Suite no invalid instance is accepted. Valid ones are
// refused only where an integer is written with a fraction, where format is only an annotation, and
// where a metaschema of its own switches assertions off. The only references that are refused are
// remote. bench/results/grammar.md has the numbers.
func TestJSONSchemaTestSuite(t *testing.T) {
	files := archive(t, "json-schema-test-suite.tar.gz")
	schemas := map[string]string{
		"draft4": "http://json-schema.org/draft-04/schema#", "draft6": "http://json-schema.org/draft-06/schema#", "draft7": "http://json-schema.org/draft-07/schema#",
	}
	scores := map[string]*score{}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		draft, file := path.Split(name)
		draft = strings.Trim(draft, "/")
		if scores[draft] == nil {
			scores[draft] = newScore()
		}
		var groups []struct {
			Schema json.RawMessage
			Tests  []struct {
				Valid bool
				Data  json.RawMessage
			}
		}
		if err := json.Unmarshal(files[name], &groups); err != nil {
			t.Fatal(err)
		}
		for _, g := range groups {
			text := []byte(strings.TrimSpace(string(g.Schema)))
			if uri := schemas[draft]; uri != "" && text[0] == '{' && !strings.Contains(string(text), `"$schema"`) {
				comma := ","
				if strings.TrimSpace(string(text[1:])) == "}" {
					comma = ""
				}
				text = append([]byte(`{"$schema":"`+uri+`"`+comma), text[1:]...)
			}
			c := scores[draft].newSchemaCase(t, name, text)
			for _, test := range g.Tests {
				if c == nil && scores[draft].nothing && test.Valid {
					t.Errorf("%s: %s is refused as empty, and %s is valid", name, text, test.Data)
				}
				if c != nil {
					scores[draft].count(t, name, test.Data, test.Valid, c.accepts(t, name, test.Data), suiteClass(file, string(test.Data)))
				}
			}
		}
	}
	for _, draft := range slices.Sorted(maps.Keys(scores)) {
		s := scores[draft]
		s.log(t, "JSON-Schema-Test-Suite, "+draft)
		if s.classes[""] > 0 {
			t.Errorf("%s: valid instances are refused without a class", draft)
		}
	}
}

// suiteClass returns the reason for which a valid instance of the suite may be refused.
func suiteClass(file, data string) string {
	switch {
	case file == "format.json":
		return "format"
	case strings.Contains(data, ".0"):
		return "1.0 for an integer"
	case file == "vocabulary.json":
		return "metaschema"
	}
	return ""
}
