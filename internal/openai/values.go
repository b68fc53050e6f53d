package openai

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"unicode/utf8"

	"github.com/valyala/fastjson"
)

// value is what a field may hold: its JSON Schema, for /openapi.json, and the
// same in code. Both are made from one range.
type value struct {
	schema schema
	check  func(r *Request, v *fastjson.Value) error // takes what is good; v is not null
}

// schema is a JSON Schema.
type schema = map[string]any

// neutral is the value of a refused field that asks for nothing.
type neutral struct {
	schema schema // nil: there is none
	is     func(*fastjson.Value) bool
}

var (
	never       = neutral{}
	zero        = neutral{schema{"const": 0}, isNumber(0)}
	one         = neutral{schema{"const": 1}, isNumber(1)}
	no          = neutral{schema{"const": false}, isBool(false)}
	yes         = neutral{schema{"const": true}, isBool(true)}
	emptyText   = is("")
	emptyObject = neutral{schema{"type": "object", "maxProperties": 0}, func(v *fastjson.Value) bool {
		o, err := v.Object()
		return err == nil && o.Len() == 0
	}}
	emptyList = neutral{schema{"type": "array", "maxItems": 0}, func(v *fastjson.Value) bool {
		a, err := v.Array()
		return err == nil && len(a) == 0
	}}
	textFormat = neutral{schema{"const": schema{"type": "text"}}, func(v *fastjson.Value) bool {
		o, err := v.Object()
		return err == nil && o.Len() == 1 && string(v.GetStringBytes("type")) == "text"
	}}
	textOnly = neutral{schema{"const": []string{"text"}}, func(v *fastjson.Value) bool {
		a, err := v.Array()
		return err == nil && len(a) == 1 && is("text").is(a[0])
	}}
)

func isNumber(want float64) func(*fastjson.Value) bool {
	return func(v *fastjson.Value) bool {
		f, err := v.Float64()
		return err == nil && f == want
	}
}

func isBool(want bool) func(*fastjson.Value) bool {
	return func(v *fastjson.Value) bool {
		b, err := v.Bool()
		return err == nil && b == want
	}
}

func is(words ...string) neutral {
	return neutral{schema{"enum": words}, func(v *fastjson.Value) bool {
		b, err := v.StringBytes()
		return err == nil && slices.Contains(words, string(b))
	}}
}

// Values of which only the type matters.
var (
	anything  = value{schema{}, func(*Request, *fastjson.Value) error { return nil }}
	object    = typed("object", "an object", fastjson.TypeObject)
	list      = typed("array", "a list", fastjson.TypeArray)
	anyNumber = typed("number", "a number", fastjson.TypeNumber)
)

func typed(name, words string, want fastjson.Type) value {
	return value{schema{"type": name}, func(_ *Request, v *fastjson.Value) error {
		if v.Type() != want {
			return errType(words, v)
		}
		return nil
	}}
}

// boolean takes true and false; set may be nil, here and below.
func boolean(set func(*Request, bool)) value {
	return value{schema{"type": "boolean"}, func(r *Request, v *fastjson.Value) error {
		b, err := v.Bool()
		if err != nil {
			return errType("true or false", v)
		}
		if set != nil {
			set(r, b)
		}
		return nil
	}}
}

// whole takes 3 and 3.0 alike.
func whole(v *fastjson.Value) (int64, bool) {
	if n, err := v.Int64(); err == nil {
		return n, true
	}
	f, err := v.Float64()
	if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return 0, false
	}
	return int64(f), true
}

func integer(low, high int64, set func(*Request, int64)) value {
	return value{schema{"type": "integer", "minimum": low, "maximum": high}, func(r *Request, v *fastjson.Value) error {
		n, ok := whole(v)
		switch {
		case !ok:
			return errType("an integer", v)
		case n < low:
			return fmt.Errorf("must be at least %d, not %d", low, n)
		case n > high:
			return fmt.Errorf("must be at most %d, not %d", high, n)
		}
		if set != nil {
			set(r, n)
		}
		return nil
	}}
}

// span is a range of numbers; high belongs to it.
type span struct {
	low, high float64
	open      bool // low does not belong to it
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

func number(s span, set func(*Request, float32)) value {
	return value{s.schema(), func(r *Request, v *fastjson.Value) error {
		f, err := s.number(v)
		if err == nil && set != nil {
			set(r, f)
		}
		return err
	}}
}

// number reads a number of the span. What is too small for a float32 stays
// above 0.
func (s span) number(v *fastjson.Value) (float32, error) {
	f, err := v.Float64()
	switch {
	case err != nil || math.IsNaN(f) || math.IsInf(f, 0):
		return 0, errType("a number", v)
	case f < s.low || f > s.high || s.open && f == s.low:
		return 0, fmt.Errorf("must be %s, not %g", s, f)
	case s.open && f > 0 && float32(f) == 0:
		return math.SmallestNonzeroFloat32, nil
	}
	return float32(f), nil
}

// text takes strings of low to high characters.
func text(low, high int, set func(*Request, string)) value {
	return value{textSchema(low, high), func(r *Request, v *fastjson.Value) error {
		s, err := readText(v, low, high)
		if err == nil && set != nil {
			set(r, s)
		}
		return err
	}}
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

func readText(v *fastjson.Value, low, high int) (string, error) {
	b, err := v.StringBytes()
	if err != nil {
		return "", errType("a string", v)
	}
	if n := utf8.RuneCount(b); n < low || n > high {
		return "", fmt.Errorf("must have %d to %d characters, not %d", low, high, n)
	}
	return string(b), nil
}

// texts takes lists of non-empty strings.
func texts(low, high int, set func(*Request, []string)) value {
	return value{listSchema(textSchema(1, MaxStopChars), low, high), func(r *Request, v *fastjson.Value) error {
		a, err := readList(v, "a list of strings", low, high)
		if err != nil {
			return err
		}
		var all []string
		for i, e := range a {
			s, err := readText(e, 1, MaxStopChars)
			if err != nil {
				return fmt.Errorf("[%d] %w", i, err)
			}
			all = append(all, s)
		}
		set(r, all)
		return nil
	}}
}

var errEmpty = errors.New("must not be empty")

// readList reads a list of low to high elements; high 0: any number, which the
// bound on a body bounds.
func readList(v *fastjson.Value, words string, low, high int) ([]*fastjson.Value, error) {
	a, err := v.Array()
	switch {
	case err != nil:
		return nil, errType(words, v)
	case len(a) < low:
		return nil, errEmpty
	case high > 0 && len(a) > high:
		return nil, fmt.Errorf("has %d elements, at most %d are taken", len(a), high)
	}
	return a, nil
}

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

// tokens takes lists of token ids; high 0: of any length.
func tokens(low, high int, set func(*Request, []int32)) value {
	return value{listSchema(tokenSchema, low, high), func(r *Request, v *fastjson.Value) error {
		a, err := readList(v, "a list of token ids", low, high)
		if err != nil {
			return err
		}
		ids, err := tokenIDs(a)
		if err != nil {
			return err
		}
		set(r, ids)
		return nil
	}}
}

func tokenIDs(a []*fastjson.Value) ([]int32, error) {
	ids := make([]int32, len(a))
	for i, e := range a {
		n, ok := whole(e)
		if !ok || n < 0 || n > maxTokenID {
			return nil, fmt.Errorf("[%d] must be a token id, not %s", i, clip(e.String(), 40))
		}
		ids[i] = int32(n)
	}
	return ids, nil
}

// nullable is a schema that takes null too.
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

func errType(want string, v *fastjson.Value) error {
	return fmt.Errorf("must be %s, not %s", want, clip(v.String(), 80))
}
