package upstream

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// ErrBody says that a request's body is no JSON object.
var ErrBody = errors.New("foreign: the body is not a JSON object")

// field is one member of a JSON object, as positions in its bytes.
type field struct {
	key       []byte // between its quotes, escapes and all
	start     int    // of the key's opening quote
	from, end int    // of the value
}

// scanner walks the members of a JSON object without looking into their values:
// strings are skipped at the speed of a search for quotes. What it skips it does
// not check; the server that parses the body does.
type scanner struct {
	b    []byte
	at   int
	done bool
	bad  bool
}

func scan(b []byte) scanner {
	s := scanner{b: b}
	s.space()
	if s.at >= len(b) || b[s.at] != '{' {
		s.bad = true
		return s
	}
	s.at++
	return s
}

// err says where the walk ended; nil: behind a whole object.
func (s *scanner) err() error {
	if s.bad {
		return fmt.Errorf("%w (at byte %d)", ErrBody, min(s.at, len(s.b)))
	}
	return nil
}

func (s *scanner) space() {
	for s.at < len(s.b) {
		switch s.b[s.at] {
		case ' ', '\t', '\n', '\r':
			s.at++
		default:
			return
		}
	}
}

// next is the next member; false behind the last, and where the JSON is broken.
func (s *scanner) next() (f field, ok bool) {
	if s.bad || s.done {
		return f, false
	}
	s.space()
	if s.at < len(s.b) && s.b[s.at] == ',' {
		s.at++
		s.space()
	}
	switch {
	case s.at >= len(s.b):
		s.bad = true
		return f, false
	case s.b[s.at] == '}':
		s.at++
		s.space()
		s.done, s.bad = true, s.at < len(s.b)
		return f, false
	case s.b[s.at] != '"':
		s.bad = true
		return f, false
	}
	f.start = s.at
	if s.at = skipString(s.b, s.at); s.at < 0 {
		s.at, s.bad = len(s.b), true
		return f, false
	}
	f.key = s.b[f.start+1 : s.at-1]
	s.space()
	if s.at >= len(s.b) || s.b[s.at] != ':' {
		s.bad = true
		return f, false
	}
	s.at++
	s.space()
	f.from = s.at
	if s.at = skipValue(s.b, s.at); s.at < 0 {
		s.at, s.bad = len(s.b), true
		return f, false
	}
	f.end = s.at
	return f, true
}

// skipString is the position behind the string that opens at i; -1: it does not
// end.
func skipString(b []byte, i int) int {
	for i++; ; i++ {
		j := bytes.IndexByte(b[i:], '"')
		if j < 0 {
			return -1
		}
		i += j
		escaped := false
		for k := i - 1; b[k] == '\\'; k-- {
			escaped = !escaped
		}
		if !escaped {
			return i + 1
		}
	}
}

// skipValue is the position behind the value at i; -1: there is none, or it does
// not end.
func skipValue(b []byte, i int) int {
	depth, start := 0, i
	for i < len(b) {
		switch b[i] {
		case '"':
			if i = skipString(b, i); i < 0 || depth == 0 {
				return i
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return after(start, i)
			}
			if depth--; depth == 0 {
				return i + 1
			}
		case ',', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return after(start, i)
			}
		}
		i++
	}
	return -1
}

// after is where a plain value that began at start ends.
func after(start, end int) int {
	if end == start {
		return -1
	}
	return end
}

// is says whether a member has the name; names may be written with escapes.
func (f *field) is(name string) bool {
	if bytes.IndexByte(f.key, '\\') < 0 {
		return string(f.key) == name
	}
	return unquote(append(append([]byte{'"'}, f.key...), '"')) == name
}

// unquote is the text of a JSON string; empty when it is none.
func unquote(raw []byte) (s string) {
	if len(raw) < 2 || raw[0] != '"' {
		return ""
	}
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1 : len(raw)-1])
	}
	if json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

// Body is what routing looks at in a request's body. Its slices are part of it.
type Body struct {
	Model  string // empty: not named
	Stream bool
	Prompt []byte // value of messages, prompt, input, query or token_ids, as written; nil: none
	// Several says that more members than Prompt's could be it: it is the last.
	Several bool
	N       int // choices, at least 1
	Batch   int // prompts, at least 1
	// Whole says that one server has to compute the prompt and the answer: it is
	// asked for what a prompt's KV alone does not tell, or for several answers to it.
	Whole bool
	// Logprobs is the most log-probabilities that are asked for with a token; all
	// of them are more than any number. Asked is the member that does.
	Logprobs int
	Asked    string
	Priority int32 // lower goes first

	modelFrom, modelEnd int // of the name's value; 0: none
}

// Look reads a body's outermost members. Of members that occur twice the last
// counts, as it does for the servers' own parsers.
func Look(b []byte) (Body, error) { return look(b, true) }

// look is Look; outermost says whether b is the whole body.
func look(b []byte, outermost bool) (Body, error) {
	out := Body{N: 1, Batch: 1}
	var logprobs, echo, beams bool
	s := scan(b)
	for f, ok := s.next(); ok; f, ok = s.next() {
		v := b[f.from:f.end]
		switch {
		case f.is("model"):
			out.Model, out.modelFrom, out.modelEnd = unquote(v), f.from, f.end
		case f.is("stream"):
			out.Stream = string(v) == "true"
		case f.is("prompt"):
			out.Several = out.Several || out.Prompt != nil
			out.Prompt, out.Batch = v, batch(v)
		case f.isPrompt():
			out.Several = out.Several || out.Prompt != nil
			out.Prompt = v
		case f.is("prompt_logprobs"):
			logprobs = string(v) != "null"
			out.asks("prompt_logprobs", v)
		case f.is("logprobs"):
			out.asks("logprobs", v)
		case f.is("top_logprobs"):
			out.asks("top_logprobs", v)
		case f.is("priority"):
			out.Priority = priority(v)
		case f.is("echo"):
			echo = string(v) == "true"
		case f.is("use_beam_search"):
			beams = string(v) == "true"
		case f.is("n"):
			out.N = choices(v)
		case outermost && f.is("sampling_params"): // of requests of tokens
			if in, err := look(v, false); err == nil {
				out.N = max(out.N, in.N)
				if in.Logprobs > out.Logprobs {
					out.Logprobs, out.Asked = in.Logprobs, in.Asked
				}
				logprobs = logprobs || in.Whole
			}
		}
	}
	out.Whole = logprobs || echo || beams
	return out, s.err()
}

// asks takes note of how many log-probabilities a member asks for.
func (o *Body) asks(name string, v []byte) {
	n, err := number(v)
	if err != nil { // true, null
		return
	}
	if n < 0 { // as many as there are tokens
		n = math.MaxInt32
	}
	if n := int(min(n, math.MaxInt32)); n > o.Logprobs {
		o.Logprobs, o.Asked = n, name
	}
}

// priority is the number in a value of priority; 0 for what is none.
func priority(v []byte) int32 {
	n, err := number(v)
	if err != nil || n != n {
		return 0
	}
	return int32(min(max(n, math.MinInt32), math.MaxInt32))
}

// number is the number in a value, which servers take as 2.0, 2e0 and "2", too.
func number(v []byte) (float64, error) {
	if len(v) > 0 && v[0] == '"' {
		v = []byte(strings.TrimSpace(unquote(v)))
	}
	return strconv.ParseFloat(string(v), 64)
}

// choices is the number in a value of n; 1 for anything that is no number.
func choices(v []byte) int {
	if n, err := number(v); err == nil && n > 1 {
		return int(min(n, maxChoices))
	}
	return 1
}

// maxChoices is what larger numbers of choices are taken for.
const maxChoices = 1 << 20

// WithModel is the body with another model's name, appended to dst; every other
// byte stays.
func (o *Body) WithModel(dst, b []byte, name string) []byte {
	if o.modelEnd == 0 {
		return append(dst, b...)
	}
	quoted := quote(name)
	dst = append(slices.Grow(dst, len(b)+len(quoted)), b[:o.modelFrom]...)
	dst = append(dst, quoted...)
	return append(dst, b[o.modelEnd:]...)
}

// quote is a text as JSON.
func quote(s string) string {
	quoted, err := json.Marshal(s)
	if err != nil {
		panic(err) // strings can be written
	}
	return string(quoted)
}
