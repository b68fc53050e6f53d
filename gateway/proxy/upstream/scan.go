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

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// ErrBody says that a request's body is no JSON object.
var ErrBody = errors.New("foreign: the body is not a JSON object")

// bodyError returns why the walk through a body ended, nil at its end. The values are not checked:
// the server that parses the body does that.
func bodyError(s *jsonscan.Scanner) error {
	if s.Err() == nil {
		return nil
	}
	return fmt.Errorf("%w (at byte %d)", ErrBody, s.At())
}

// unquote returns the text of a JSON string, or "" if v is none. v has not been checked.
func unquote(v []byte) string {
	switch {
	case len(v) < 2 || v[0] != '"':
		return ""
	case bytes.IndexByte(v, '\\') < 0:
		return string(v[1 : len(v)-1])
	}
	if _, err := jsonscan.Valid(v, jsonscan.Bounds{}); err != nil {
		return ""
	}
	return jsonscan.Text(v)
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
	s := jsonscan.Object(b)
	for s.Next() {
		v := s.Unchecked()
		switch key := string(s.Key()); key {
		case "model":
			out.Model, out.modelFrom, out.modelEnd = unquote(v), s.At()-len(v), s.At()
		case "stream":
			out.Stream = string(v) == "true"
		case "prompt", "messages", "input", "query", "token_ids":
			out.Several = out.Several || out.Prompt != nil
			if out.Prompt = v; key == "prompt" {
				out.Batch = batch(v)
			}
		case "prompt_logprobs":
			logprobs = string(v) != "null"
			out.asks("prompt_logprobs", v)
		case "logprobs":
			out.asks("logprobs", v)
		case "top_logprobs":
			out.asks("top_logprobs", v)
		case "priority":
			out.Priority = priority(v)
		case "echo":
			echo = string(v) == "true"
		case "use_beam_search":
			beams = string(v) == "true"
		case "n":
			out.N = choices(v)
		case "sampling_params": // of requests of tokens
			if !outermost {
				continue
			}
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
	return out, bodyError(&s)
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
