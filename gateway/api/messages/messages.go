// Package messages serves Anthropic's Messages API over chat completions.
//
// A request is translated into the body of a chat completion. Texts, inputs and schemas are copied
// as they are written, and consecutive messages of one role become one message. The results of
// tools become messages of their own, before the text of the message that has them. The Deltas of
// the answer become content blocks: a block is open until a Delta of another kind comes, so that
// blocks never interleave, and their indices rise by one.
//
// The signature of a thinking block is a constant, and any signature is accepted: thinking that
// comes back is the client's text, as all of its history is. Templates get it as the reasoning of
// its turn.
//
// Invariant: events and ids depend on the Deltas and on what Begin got alone, so that an answer
// that continues on another node is the same. No effect that a request asks for is silently left
// out.
//
// The package does not render prompts, and does not check what a chat checks: its errors are
// returned with the names of this API. It has no clock, no goroutine and no network.
package messages

import (
	"strings"

	"github.com/tandem-serving/tandem/gateway/api/openai"
)

// Paths of the API.
const (
	Path      = "/v1/messages"
	CountPath = Path + "/count_tokens"
)

// RequestIDHeader carries the request's id in answers. Anthropic's clients read it.
const RequestIDHeader = "Request-Id"

// Message is one request and its answer. It implements native.Surface.
type Message struct {
	counts               bool // the request is for a count of its tokens
	maxTokens            int  // that the request allows
	id, requestID, model string

	// The state of a stream.
	open   kind // of the content block that is open
	index  int  // of that block or, if none is open, of the next
	call   int  // index of the chat's call that is the open block
	called bool // there was a call
	finish openai.Finish
}

// New returns a Message for a request of Path.
func New() *Message { return &Message{} }

// NewCount returns a Message for a request of CountPath, of which only Chat and Fault are called.
func NewCount() *Message { return &Message{counts: true} }

// Begin sets the common parts of the answer, and returns its id.
func (m *Message) Begin(requestID string, _ int64, model string) (id string) {
	m.id, m.requestID, m.model = "msg_"+requestID, requestID, model
	return m.id
}

// ClipMaxTokens lets max_tokens be more than the model's context has room for. Agents send the most
// that any model writes.
func (m *Message) ClipMaxTokens() {}

// renamed has fields of chats, and those of this API that become them. Longer names come first.
var renamed = [...]struct{ chat, here string }{
	{"response_format.json_schema.schema", "output_config.format.schema"},
	{"response_format", "output_config.format"},
	{"reasoning_effort", "output_config.effort"},
	{"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"},
	{"stop", "stop_sequences"},
	{"user", "metadata.user_id"},
}

// Fault returns an error about the chat's body as an error about the request.
func (m *Message) Fault(fault *openai.Error) *openai.Error {
	param := fault.Param
	for _, r := range renamed {
		if param == r.chat {
			param = r.here
			break
		}
	}
	if strings.HasPrefix(param, "tools[") {
		param = strings.Replace(strings.Replace(param, ".function", "", 1), ".parameters", ".input_schema", 1)
	}
	if param == fault.Param {
		return fault
	}
	f := *fault
	f.Param = param
	if rest, ok := strings.CutPrefix(f.Message, fault.Param); ok {
		f.Message = param + rest
	}
	return &f
}
