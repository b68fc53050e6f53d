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
	counts    bool // the request is for a count of its tokens
	older     bool // the request has output_format in place of output_config.format
	maxTokens int  // that the request allows
	id, model string

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
	m.id, m.model = "msg_"+requestID, model
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

// remedies replaces the remedies in errors about chats, and the names of fields there.
var remedies = strings.NewReplacer(
	`tool_choice.function.name must`, `tool_choice.name must`,
	`tool_choice to "none"`, `tool_choice to {"type": "none"}`,
	`(response_format.json_schema.schema)`, `(output_config.format.schema)`, `leave response_format.json_schema.schema out`, `leave output_config.format out`,
	`(parallel_tool_calls)`, `(tool_choice.disable_parallel_tool_use)`, `leave parallel_tool_calls out`, `leave tool_choice.disable_parallel_tool_use out`,
)

// Fault returns an error about the chat's body as an error about the request. The chat's messages
// are not those of the request, so that an error about one of them names its role alone.
func (m *Message) Fault(fault *openai.Error) *openai.Error {
	f := *fault
	for _, r := range renamed {
		if f.Param == r.chat {
			f.Param = r.here
			break
		}
	}
	switch {
	case strings.HasPrefix(f.Param, "tools["):
		f.Param = strings.Replace(strings.Replace(f.Param, ".function", "", 1), ".parameters", ".input_schema", 1)
	case strings.HasPrefix(f.Param, "messages["):
		f.Param = "messages"
		if _, rest, ok := strings.Cut(f.Message, " "); ok {
			f.Message = "messages: a message " + rest
		}
	case f.Param == "messages":
		f.Message = strings.Replace(f.Message, "continue_final_message is set", "a last message of the assistant is continued", 1)
	case f.Param == "" || strings.HasPrefix(f.Param, "tool"):
		f.Message = remedies.Replace(f.Message)
	}
	if rest, ok := strings.CutPrefix(f.Message, fault.Param); ok {
		f.Message = f.Param + rest
	}
	if m.older {
		const format, older = "output_config.format", "output_format"
		f.Param = strings.Replace(f.Param, format, older, 1)
		f.Message = strings.ReplaceAll(f.Message, format, older)
	}
	return &f
}
