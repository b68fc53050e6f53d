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

// ErrBody reports that a request's body is not a JSON object.
var ErrBody = errors.New("upstream: the body is not a JSON object")

// bodyError returns the error of a scan through a body. The values are not checked, because the
// server that parses the body does that.
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

// Envelope is the part of a request's body that routing reads. Its slices are parts of the body.
type Envelope struct {
	Model  string // empty: not named
	Stream bool
	Prompt []byte // value of messages, prompt, input, query or token_ids as it is written; nil: none
	// Several reports that the body has more of these members: Prompt is the last one.
	Several bool
	N       int // choices, at least 1
	Batch   int // prompts, at least 1
	// Whole reports that one server has to compute prompt and answer, because the request asks for
	// more than a prompt's KV contains, or for beams.
	Whole bool
	// Logprobs is the largest number of log-probabilities per token that is asked for;
	// math.MaxInt32: those of all tokens. Asked is the member with that number.
	Logprobs int
	Asked    string
	Priority int32 // lower goes first
	// Previous is the id of the stored response that the request continues; empty: none. A value that
	// is no readable string is as it is written.
	Previous string

	modelFrom, modelEnd int // of the model's name; 0: there is none
}

// Member returns the value of an object's member as it is written; nil: it is missing. The object
// may be the beginning of one, and is not checked.
func Member(object []byte, name string) []byte {
	value, _ := member(object, name)
	return value
}

// TextMember returns the text of an object's member; empty: it is missing or no string.
func TextMember(object []byte, name string) string { return unquote(Member(object, name)) }

// ParseEnvelope reads the outermost members of a body. Of members that occur twice the last one
// counts, as it does in the servers' parsers.
func ParseEnvelope(b []byte) (Envelope, error) { return parseEnvelope(b, true) }

// parseEnvelope is ParseEnvelope; outermost reports whether b is the whole body.
func parseEnvelope(b []byte, outermost bool) (Envelope, error) {
	out := Envelope{N: 1, Batch: 1}
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
			if out.Prompt = v; key == "prompt" || key == "messages" { // of several chats
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
		case "previous_response_id":
			if out.Previous = unquote(v); out.Previous == "" && string(v) != "null" && string(v) != `""` {
				out.Previous = string(v)
			}
		case "echo":
			echo = string(v) == "true"
		case "use_beam_search":
			beams = string(v) == "true"
		case "n":
			out.N = choices(v)
		case "sampling_params": // of requests with token ids
			if !outermost {
				continue
			}
			if in, err := parseEnvelope(v, false); err == nil {
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

// asks notes how many log-probabilities a member asks for.
func (o *Envelope) asks(name string, v []byte) {
	n, err := number(v)
	if err != nil { // true, null
		return
	}
	if n < 0 { // those of all tokens
		n = math.MaxInt32
	}
	if n := int(min(n, math.MaxInt32)); n > o.Logprobs {
		o.Logprobs, o.Asked = n, name
	}
}

// priority returns the number in a value of priority, or 0 if it has none.
func priority(v []byte) int32 {
	n, err := number(v)
	if err != nil || n != n {
		return 0
	}
	return int32(min(max(n, math.MinInt32), math.MaxInt32))
}

// number returns the number in a value. Servers also accept 2.0, 2e0 and "2" for 2.
func number(v []byte) (float64, error) {
	if len(v) > 0 && v[0] == '"' {
		v = []byte(strings.TrimSpace(unquote(v)))
	}
	return strconv.ParseFloat(string(v), 64)
}

// choices returns the number in a value of n, or 1 if it has none.
func choices(v []byte) int {
	if n, err := number(v); err == nil && n > 1 {
		return int(min(n, maxChoices))
	}
	return 1
}

// maxChoices replaces larger numbers of choices.
const maxChoices = 1 << 20

// WithModel appends the body b with another model's name to dst. All other bytes stay.
func (o *Envelope) WithModel(dst, b []byte, name string) []byte {
	if o.modelEnd == 0 {
		return append(dst, b...)
	}
	quoted := quote(name)
	dst = append(slices.Grow(dst, len(b)+len(quoted)), b[:o.modelFrom]...)
	dst = append(dst, quoted...)
	return append(dst, b[o.modelEnd:]...)
}

// quote returns a JSON string.
func quote(s string) string {
	quoted, err := json.Marshal(s)
	if err != nil {
		panic(err) // a string always has a JSON form
	}
	return string(quoted)
}
