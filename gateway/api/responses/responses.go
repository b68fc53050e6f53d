// Package responses serves OpenAI's /v1/responses without stored state.
//
// A body is translated into that of a chat completion, in one pass over a table of fields. Items of
// one turn of the assistant (reasoning, messages and function calls) become one message. The chat's
// Deltas are translated into output items: each change between reasoning, text and a call ends one
// item and begins the next. The events of an item are appended when its text arrives, and the item
// is kept as JSON for the response object at the end.
//
// Invariant: events and ids are functions of the body, the request's id and the Deltas, so that an
// attempt on another node changes none. Only the nonce of encrypted reasoning is random. Each item
// that is added is done before the next one and before the end.
//
// The package does not run tools, and does not know models: the chat's own parser checks the values
// that are the same in both APIs.
package responses

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// Path is the route.
const Path = "/v1/responses"

// Options of a Response.
type Options struct {
	Keys  *Keys  // of encrypted reasoning; required
	Owner string // of the request: a name of its API key; empty: it has none
	// Dropped is called at most once, with the number of reasoning items whose encrypted content does
	// not open, the field of the first one, and the reason.
	Dropped func(n int, field string, err error)
}

// Response is one request and its answer. It implements native.Surface.
type Response struct {
	o Options

	// Set by Chat.
	model     string // as requested; empty: the only model
	stream    bool
	logprobs  bool     // of the output text
	encrypt   bool     // reasoning items have encrypted content
	obfuscate bool     // delta events are padded
	echo      []byte   // members of the response object that repeat the request, each after a comma
	origins   []origin // of the chat's messages

	// Set by Begin.
	id   string // of the request, from which all ids are made
	head []byte // the response object up to its status

	sequence int    // of the next event
	nItems   int    // begun
	item     item   // the open one
	output   []byte // the items that are done, separated by commas, without what outputSplices has
	// Log-probabilities of tokens whose text has not arrived, as JSON objects separated by commas.
	pending []byte
	finish  string                // reason of the end; empty: not yet
	whole   []openai.TokenLogprob // of the text of an answer that is not streamed; nil: the item has them
	kept    int                   // bytes of log-probabilities so far

	outputSplices []openai.Splice
	splices       []openai.Splice // of the events since the last call of Splices
}

// New returns a Response.
func New(o Options) *Response { return &Response{o: o} }

// Begin implements native.Surface.
func (r *Response) Begin(requestID string, created int64, model string) (id string) {
	r.id, id = requestID, "resp_"+requestID
	h := openai.AppendString([]byte(`{"id":`), id)
	h = strconv.AppendInt(append(h, `,"object":"response","created_at":`...), created, 10)
	h = openai.AppendString(append(h, `,"model":`...), model)
	r.head = append(h, `,"status":"`...)
	return id
}

// faultNames replaces fields of chats by the fields of this API that they are made from. Errors
// about other fields may name them, too.
var faultNames = strings.NewReplacer(
	"max_tokens", "max_output_tokens",
	"response_format.json_schema", "text.format", "response_format", "text.format",
	"reasoning_effort", "reasoning.effort",
	"truncate_prompt_tokens", "truncation",
	"tool_choice.function.", "tool_choice.",
	`{"type": "function", "function": {"name": ...}}`, `{"type": "function", "name": ...}`,
)

// Fault implements native.Surface.
func (r *Response) Fault(fault *openai.Error) *openai.Error {
	e := *fault
	switch was := e.Param; {
	case was == "messages": // which is also a word
		if e.Param = "input"; strings.HasPrefix(e.Message, was) {
			e.Message = e.Param + e.Message[len(was):]
		}
	case strings.HasPrefix(was, "messages["):
		names := r.namesOf(was)
		e.Param, e.Message = names.Replace(was), names.Replace(e.Message)
	case strings.HasPrefix(was, "tools["):
		e.Param = strings.Replace(was, ".function", "", 1)
		e.Message = strings.ReplaceAll(e.Message, was, e.Param)
	case was == "verbosity":
		e.Param = "text.verbosity"
		e.Message = strings.ReplaceAll(e.Message, was, e.Param)
	}
	e.Param, e.Message = faultNames.Replace(e.Param), faultNames.Replace(e.Message)
	return &e
}

// namesOf returns the names of this API for the chat's message in which a field is.
func (r *Response) namesOf(field string) *strings.Replacer {
	message := field[:strings.IndexByte(field+"]", ']')] + "]"
	i, err := strconv.Atoi(message[len("messages[") : len(message)-1])
	if err != nil || i < 0 || i >= len(r.origins) {
		return strings.NewReplacer(message, "input")
	}
	o := r.origins[i]
	switch o.item {
	case ofInstructions:
		return strings.NewReplacer(message+".content", "instructions", message, "instructions")
	case ofInput:
		return strings.NewReplacer(message+".content", "input", message, "input")
	}
	item := fmt.Sprintf("input[%d]", o.item)
	if o.output {
		return strings.NewReplacer(message+".content", item+".output", message+".tool_call_id", item+".call_id", message, item)
	}
	return strings.NewReplacer(message, item)
}

// members calls f with each member of a checked object that is not null.
func members(object []byte, f func(name string, v []byte) *openai.Error) *openai.Error {
	for s := jsonscan.Object(object); s.Next(); {
		name := s.Key()
		v, _ := s.Value(jsonscan.Bounds{})
		if v[0] == 'n' {
			continue
		}
		if fault := f(string(name), v); fault != nil {
			return fault
		}
	}
	return nil
}

// place is where the value of a member is stored.
type place struct {
	name string
	v    *[]byte
}

// read stores members of a checked object as they are written. It leaves out those that are null.
// Of equal names the last one counts.
func read(object []byte, places ...place) {
	_ = members(object, func(name string, v []byte) *openai.Error {
		for _, p := range places {
			if p.name == name {
				*p.v = v
			}
		}
		return nil
	})
}

// elements calls f with each element of a checked list.
func elements(list []byte, f func(i int, v []byte) *openai.Error) *openai.Error {
	s := jsonscan.List(list)
	for i := 0; s.Next(); i++ {
		v, _ := s.Value(jsonscan.Bounds{})
		if fault := f(i, v); fault != nil {
			return fault
		}
	}
	return nil
}

// kindFault returns the error about a value of the wrong type; nil: the value is missing.
func kindFault(at, want string, v []byte) *openai.Error {
	if v == nil {
		return openai.BadRequest(at, "%s is required: %s", at, want)
	}
	return openai.BadRequest(at, "%s: must be %s, not %s", at, want, quote(v))
}

// quote returns the beginning of a value.
func quote(v []byte) string { return openai.Clip(string(v[:min(len(v), 84)]), 80) }

// isText, isList and isObject report whether a value, which may be missing, has a type.
func isText(v []byte) bool   { return len(v) > 0 && v[0] == '"' }
func isList(v []byte) bool   { return len(v) > 0 && v[0] == '[' }
func isObject(v []byte) bool { return len(v) > 0 && v[0] == '{' }

// is reports whether a value is the ASCII string want.
func is(v []byte, want string) bool {
	return isText(v) && len(v) <= len(`""`)+len(`\u0000`)*len(want) && jsonscan.Text(v) == want
}

// inner returns a string without its quotes, with its escapes.
func inner(quoted []byte) []byte { return quoted[1 : len(quoted)-1] }

// appendInner appends a text as a JSON string without its quotes.
func appendInner(dst, text []byte) []byte {
	at := len(dst)
	dst = openai.AppendString(dst, text)
	copy(dst[at:], dst[at+1:])
	return dst[:len(dst)-2]
}

// appendCompact appends a checked value without white space, so that it fits into an event.
func appendCompact(dst, v []byte) []byte {
	b := bytes.NewBuffer(dst)
	if err := json.Compact(b, v); err != nil {
		return append(dst, "null"...) // not for a value that was checked
	}
	return b.Bytes()
}

// appendOr appends a checked value, or else otherwise if it is missing.
func appendOr(dst, v []byte, otherwise string) []byte {
	if v == nil {
		return append(dst, otherwise...)
	}
	return appendCompact(dst, v)
}
