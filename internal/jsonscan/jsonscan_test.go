package jsonscan

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"
)

// build makes of checked JSON what encoding/json makes of it.
func build(b []byte, at int) (any, int) {
	switch b[at] {
	case '"':
		end := StringEnd(b, at)
		return Text(b[at:end]), end
	case '[':
		list := []any{}
		for at = Space(b, at+1); b[at] != ']'; {
			var v any
			v, at = build(b, at)
			list = append(list, v)
			if at = Space(b, at); b[at] == ',' {
				at = Space(b, at+1)
			}
		}
		return list, at + 1
	case '{':
		object := map[string]any{}
		for at = Space(b, at+1); b[at] != '}'; {
			end := StringEnd(b, at)
			name := Text(b[at:end])
			at = Space(b, Space(b, end)+1)
			object[name], at = build(b, at)
			if at = Space(b, at); b[at] == ',' {
				at = Space(b, at+1)
			}
		}
		return object, at + 1
	}
	end := PlainEnd(b, at)
	switch word := string(b[at:end]); word {
	case "true", "false":
		return word == "true", end
	case "null":
		return nil, end
	default:
		return json.Number(word), end
	}
}

// like fails the test unless the package takes text for what encoding/json does.
func like(t *testing.T, text []byte) {
	t.Helper()
	n, err := Valid(text, Bounds{})
	if err != nil && strings.Contains(err.Error(), "nest deeper") {
		return // encoding/json goes on to 10,000
	}
	if want := json.Valid(text); (err == nil) != want {
		t.Fatalf("%q: %v, encoding/json says valid: %v", text, err, want)
	}
	if err != nil || !utf8.Valid(text) {
		return
	}
	if n.Values < 1 || n.Elements >= n.Values || n.Values > len(text) {
		t.Fatalf("%q: counted %+v", text, n)
	}
	var want any
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber()
	if err := d.Decode(&want); err != nil {
		t.Fatal(err)
	}
	if got, _ := build(text, Space(text, 0)); !reflect.DeepEqual(got, want) {
		t.Fatalf("%q:\ngot  %#v\nwant %#v", text, got, want)
	}
	s := List(text)
	if s.Err() != nil {
		s = Object(text)
	}
	if s.Err() != nil {
		return
	}
	elements := 0
	for ; s.Next(); elements++ {
		v, _ := s.Value(Bounds{})
		if !json.Valid(v) {
			t.Fatalf("%q: element %d is %q", text, elements, v)
		}
	}
	if s.Err() != nil || elements != n.Elements {
		t.Fatalf("%q: %d elements (%v), Valid has counted %d", text, elements, s.Err(), n.Elements)
	}
}

var corpus = []string{
	`{}`, `[]`, `""`, `0`, `-0`, `-`, `01`, `1.`, `.5`, `1e`, `1e+`, `1E-5`, `1.5e400`, `null`, `nul`, `nulll`, `true`, `false`, `NaN`, `Infinity`, `+1`,
	` { "a" : [ 1 , { } , [ ] ] , "b":"c" } `, `{"a":1,"a":2}`, `{"a":1,}`, `[1,]`, `[,1]`, `{,}`, `{"a"}`, `{"a":}`, `{1:2}`, `{"a" 1}`, `[1 2]`, `[1}`, `{]`, `[`, `{`, `"`,
	`"\u00e9\ud83d\ude00\ud800\ud800\u0041\udc00"`, `"\ud800\ud83d\ude00"`, `"\u12"`, `"\u12g4"`, `"\x"`, `"\`, `"\\"`, `"\\\""`, "\"a\nb\"", "\"a\x00b\"", "\"\x7f\u2028\"",
	`"12345678\""`, `"1234567\n9"`, "\"1234567\t9\"", `"éééééééé\/\b\f\r\t"`, "\ufeff{}", `{} x`, `/* */ {}`, `[1]//`, `'a'`, "[1,\v2]", "", " ",
	`{"\u0061":{"b":[null,true,false,-1.25e-3]}}`, "[\"\xff\"]",
}

func TestLikeEncodingJSON(t *testing.T) {
	for _, text := range corpus {
		like(t, []byte(text))
	}
	// Every byte at every place of a word of eight.
	for c := range 256 {
		for i := range 17 {
			text := []byte(`"aaaaaaaaaaaaaaaaa"`)
			text[1+i] = byte(c)
			like(t, text)
		}
	}
}

func FuzzSkip(f *testing.F) {
	for _, text := range corpus {
		f.Add([]byte(text))
	}
	f.Fuzz(like)
}

// Bounds hold for what they name, at the first value beyond them.
func TestBounds(t *testing.T) {
	for _, c := range []struct {
		text string
		most Bounds
		want error
	}{
		{`[1,2,3]`, Bounds{Elements: 3}, nil},
		{`[1,2,3]`, Bounds{Elements: 2}, ErrElements},
		{`{"a":1,"b":2}`, Bounds{Elements: 1}, ErrElements},
		{`[[1,2,3]]`, Bounds{Elements: 1}, nil},
		{`[[1,2,3]]`, Bounds{Values: 5}, nil},
		{`[[1,2,3]]`, Bounds{Values: 4}, ErrValues},
		{`[1,2,3,` + "broken", Bounds{Elements: 2}, ErrElements},
		{`"text"`, Bounds{Elements: 1, Values: 1}, nil},
	} {
		if _, err := Valid([]byte(c.text), c.most); !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%s within %+v: %v, want %v", c.text, c.most, err, c.want)
		}
	}
	for _, c := range []string{"[]", `{"a":}`} {
		nested := func(n int) string {
			inner := "1"
			if c == "[]" {
				return strings.Repeat("[", n) + inner + strings.Repeat("]", n)
			}
			return strings.Repeat(`{"a":`, n) + inner + strings.Repeat("}", n)
		}
		if _, err := Valid([]byte(nested(MaxDepth)), Bounds{}); err != nil {
			t.Errorf("%d deep: %v", MaxDepth, err)
		}
		for _, n := range []int{MaxDepth + 1, 1_000_000} {
			if _, err := Valid([]byte(nested(n)), Bounds{}); !errors.Is(err, errDepth) {
				t.Errorf("%d deep: %v", n, err)
			}
		}
	}
}
