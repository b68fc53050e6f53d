package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// value describes what a field may hold: a JSON Schema for /openapi.json, and the same rule in
// code. Both are made from one range.
type value struct {
	schema schema
	check  func(r *Request, v []byte) error // stores a good value; v is checked JSON and not null
	most   jsonscan.Bounds                  // bounds of v
	texts  int                              // prompts that a list of texts may have; 0: v is no list of prompts
}

// tree bounds the values that go to a chat template.
var tree = jsonscan.Bounds{Elements: MaxMessages, Values: MaxValues}

// smallValues bounds the values in a field without bounds of its own.
const smallValues = 256

// bounds returns the bounds of a value that begins with b. Fields that are not served have none
// by default, because nothing of their value is kept.
func (v *value) bounds(c Class, b []byte) jsonscan.Bounds {
	switch {
	case v.texts > 0:
		i := jsonscan.Space(b, min(1, len(b)))
		if i < len(b) && isDigit(b[i]) {
			return jsonscan.Bounds{Elements: MaxIDs}
		}
		return jsonscan.Bounds{Elements: v.texts, Values: MaxIDs}
	case v.most != jsonscan.Bounds{}:
		return v.most
	case c == Served:
		return jsonscan.Bounds{Values: smallValues}
	}
	return jsonscan.Bounds{}
}

// Memory that values need in addition to the body, at most: a prompt is copied, rendered and
// tokenized, and a template's values are boxed.
const (
	promptCopies = 3
	treeValue    = 128
)

// cost returns the memory in bytes that storing a value needs.
func (v *value) cost(c Class, bytes, values int) int {
	switch {
	case v.most == tree:
		return promptCopies*bytes + treeValue*values
	case c == Served:
		return promptCopies * bytes
	}
	return 0
}

// short returns v or, where v is long, a short value of the same type. Fields that are not served
// are checked by it: only their type and a few short values matter.
func short(v []byte) []byte {
	const most = 1 << 10
	if len(v) > most {
		switch v[0] {
		case '"':
			return []byte(`"a longer text"`)
		case '[':
			return []byte(`["a longer list"]`)
		case '{':
			return []byte(`{"a longer object":0}`)
		}
	}
	return v
}

func isDigit(c byte) bool { return c == '-' || '0' <= c && c <= '9' }

// kinds has the types of values by their first characters; all others are numbers.
var kinds = map[byte]string{'{': "object", '[': "array", '"': "string", 't': "true", 'f': "false", 'n': "null"}

// quote returns the beginning of a value, at most n bytes.
func quote(v []byte, n int) string {
	return Clip(string(v[:min(len(v), n+utf8.UTFMax)]), n)
}

// elements calls f with each element of a checked list.
func elements(list []byte, f func(i int, e []byte) error) error {
	s := jsonscan.List(list)
	for i := 0; s.Next(); i++ {
		e, _ := s.Value(jsonscan.Bounds{})
		if err := f(i, e); err != nil {
			return err
		}
	}
	return s.Err()
}

// isList checks that v is a list, and not empty if some is set.
func isList(v []byte, words string, some bool) error {
	switch {
	case v[0] != '[':
		return errKind(words, v)
	case some && v[jsonscan.Space(v, 1)] == ']':
		return errEmpty
	}
	return nil
}

func errKind(want string, v []byte) error {
	return fmt.Errorf("must be %s, not %s", want, quote(v, 80))
}

// schema is a JSON Schema.
type schema = map[string]any

// neutral has the values of a refused field that ask for nothing.
type neutral struct {
	schema schema // nil: there are none
	values []any  // as encoding/json decodes them
}

var (
	never       = neutral{}
	zero        = neutral{schema{"const": 0}, []any{0.0}}
	one         = neutral{schema{"const": 1}, []any{1.0}}
	no          = neutral{schema{"const": false}, []any{false}}
	yes         = neutral{schema{"const": true}, []any{true}}
	emptyText   = oneOf("")
	emptyObject = neutral{schema{"type": "object", "maxProperties": 0}, []any{schema{}}}
	emptyList   = neutral{schema{"type": "array", "maxItems": 0}, []any{[]any{}}}
	textOnly    = neutral{schema{"const": []any{"text"}}, []any{[]any{"text"}}}
)

func oneOf(words ...any) neutral { return neutral{schema{"enum": words}, words} }

// is reports whether v, which is short, is one of the values.
func (n *neutral) is(v []byte) bool {
	var x any
	return json.Unmarshal(v, &x) == nil && slices.ContainsFunc(n.values, func(idle any) bool { return reflect.DeepEqual(x, idle) })
}

// Values of which only the type matters.
var (
	anything  = value{schema: schema{}, check: func(*Request, []byte) error { return nil }}
	object    = typed("object", "an object", "{")
	list      = typed("array", "a list", "[")
	anyNumber = typed("number", "a number", "-0123456789")
)

// typed takes values that begin with one of the characters of first.
func typed(name, words, first string) value {
	return value{schema: schema{"type": name}, check: func(_ *Request, v []byte) error {
		if strings.IndexByte(first, v[0]) < 0 {
			return errKind(words, v)
		}
		return nil
	}}
}

// parsed is the value that parse parses and set, which may be nil here and below, stores.
func parsed[T any](s schema, parse func(v []byte) (T, error), set func(*Request, T)) value {
	return value{schema: s, check: func(r *Request, v []byte) error {
		x, err := parse(v)
		if err == nil && set != nil {
			set(r, x)
		}
		return err
	}}
}

// boolean takes true and false.
func boolean(set func(*Request, bool)) value {
	return parsed(schema{"type": "boolean"}, func(v []byte) (bool, error) {
		if v[0] != 't' && v[0] != 'f' {
			return false, errKind("true or false", v)
		}
		return v[0] == 't', nil
	}, set)
}

// whole parses an integer, which may be written as 3 or as 3.0.
func whole(v []byte) (int64, bool) {
	if n, err := strconv.ParseInt(string(v), 10, 64); err == nil {
		return n, true
	}
	f, err := strconv.ParseFloat(string(v), 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return 0, false
	}
	return int64(f), true
}

func integer(low, high int64, set func(*Request, int64)) value {
	return parsed(schema{"type": "integer", "minimum": low, "maximum": high}, func(v []byte) (int64, error) {
		n, ok := whole(v)
		switch {
		case !ok:
			return 0, errKind("an integer", v)
		case n < low:
			return 0, fmt.Errorf("must be at least %d, not %d", low, n)
		case n > high:
			return 0, fmt.Errorf("must be at most %d, not %d", high, n)
		}
		return n, nil
	}, set)
}

// span is a range of numbers, with high included.
type span struct {
	low, high float64
	open      bool // low is excluded
}

func from(low, high float64) span  { return span{low, high, false} }
func above(low, high float64) span { return span{low, high, true} }

func (s span) String() string {
	switch {
	case !s.open:
		return fmt.Sprintf("between %g and %g", s.low, s.high)
	case s.high == math.MaxFloat32:
		return fmt.Sprintf("above %g", s.low)
	}
	return fmt.Sprintf("above %g and at most %g", s.low, s.high)
}

func (s span) schema() schema {
	low := "minimum"
	if s.open {
		low = "exclusiveMinimum"
	}
	return schema{"type": "number", low: s.low, "maximum": s.high}
}

func number(s span, set func(*Request, float32)) value { return parsed(s.schema(), s.number, set) }

// number parses a number within the span. A number that is too small for a float32 stays above 0.
func (s span) number(v []byte) (float32, error) {
	f, err := strconv.ParseFloat(string(v), 64)
	switch {
	case err != nil:
		return 0, errKind("a number", v)
	case f < s.low || f > s.high || s.open && f == s.low:
		return 0, fmt.Errorf("must be %s, not %g", s, f)
	case s.open && f > 0 && float32(f) == 0:
		return math.SmallestNonzeroFloat32, nil
	}
	return float32(f), nil
}

// text takes strings of low to high characters.
func text(low, high int, set func(*Request, string)) value {
	return parsed(textSchema(low, high), func(v []byte) (string, error) { return readText(v, low, high) }, set)
}

func textSchema(low, high int) schema {
	s := schema{"type": "string"}
	if low > 0 {
		s["minLength"] = low
	}
	if high < math.MaxInt {
		s["maxLength"] = high
	}
	return s
}

func readText(v []byte, low, high int) (string, error) {
	if v[0] != '"' {
		return "", errKind("a string", v)
	}
	s := jsonscan.Text(v)
	if n := utf8.RuneCountInString(s); n < low || n > high {
		return "", fmt.Errorf("must have %d to %d characters, not %d", low, high, n)
	}
	return s, nil
}

// texts takes lists of at most high non-empty strings.
func texts(high int, set func(*Request, []string)) value {
	w := parsed(listSchema(textSchema(1, MaxStopChars), 0, high), func(v []byte) (all []string, err error) {
		if err := isList(v, "a list of strings", false); err != nil {
			return nil, err
		}
		err = elements(v, func(i int, e []byte) error {
			s, err := readText(e, 1, MaxStopChars)
			if err != nil {
				return fmt.Errorf("[%d] %w", i, err)
			}
			all = append(all, s)
			return nil
		})
		return all, err
	}, set)
	w.most.Elements = high
	return w
}

var errEmpty = errors.New("must not be empty")

func listSchema(items schema, low, high int) schema {
	s := schema{"type": "array", "items": items}
	if low > 0 {
		s["minItems"] = low
	}
	if high > 0 {
		s["maxItems"] = high
	}
	return s
}

var tokenSchema = schema{"type": "integer", "minimum": 0, "maximum": maxTokenID}

// tokens takes lists of low to high token ids.
func tokens(low, high int, set func(*Request, []int32)) value {
	shown := high
	if high == MaxIDs {
		shown = 0 // it bounds memory, and is not part of the API
	}
	w := parsed(listSchema(tokenSchema, low, shown), func(v []byte) ([]int32, error) {
		if err := isList(v, "a list of token ids", low > 0); err != nil {
			return nil, err
		}
		return tokenIDs(v)
	}, set)
	w.most.Elements = high
	return w
}

// tokenIDs parses a list of token ids that was checked as JSON.
func tokenIDs(list []byte) ([]int32, error) {
	at := jsonscan.Space(list, 1)
	if list[at] == ']' {
		return []int32{}, nil
	}
	ids := make([]int32, 0, 1+bytes.Count(list, []byte{','}))
	for {
		end := jsonscan.PlainEnd(list, at)
		id, ok := tokenID(list[at:end])
		if !ok {
			end, _, _ = jsonscan.Skip(list, at, 0, jsonscan.Bounds{}) // a string may contain a comma
			return nil, fmt.Errorf("[%d] must be a token id, not %s", len(ids), quote(list[at:end], 40))
		}
		ids = append(ids, id)
		if at = jsonscan.Space(list, end); list[at] == ']' {
			return ids, nil
		}
		at = jsonscan.Space(list, at+1)
	}
}

// tokenID parses a token id, which may be written as 3 or as 3.0.
func tokenID(v []byte) (int32, bool) {
	n := int64(0)
	for i, c := range v {
		if c < '0' || c > '9' || i >= 10 {
			if len(v) > 64 || !isDigit(v[0]) {
				return 0, false
			}
			f, err := strconv.ParseFloat(string(v), 64)
			if err != nil || f != math.Trunc(f) || f < 0 || f > maxTokenID {
				return 0, false
			}
			return int32(f), true
		}
		n = 10*n + int64(c-'0')
	}
	return int32(n), len(v) > 0 && n <= maxTokenID
}

// nullable returns a schema that also accepts null.
func nullable(s schema) schema {
	kind, ok := s["type"].(string)
	if !ok {
		if len(s) == 0 {
			return s
		}
		return schema{"anyOf": []schema{s, {"type": "null"}}}
	}
	n := maps.Clone(s)
	n["type"] = []string{kind, "null"}
	return n
}
