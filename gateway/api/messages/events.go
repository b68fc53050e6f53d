package messages

import (
	"strconv"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// kind is the kind of a content block.
type kind uint8

const (
	closed kind = iota
	thinking
	text
	toolUse
)

// Signature is that of every thinking block. Anthropic's clients require one, and send it back.
const Signature = "dGFuZGVt"

// AppendDelta appends the events of a Delta. The arguments of the open call come first, because
// other content ends the call.
func (m *Message) AppendDelta(dst []byte, d *openai.Delta) []byte {
	if d.Begin {
		dst = m.appendStart(dst, d.Usage)
	}
	calls := d.Calls
	if len(calls) > 0 && m.open == toolUse && calls[0].Index == m.call {
		dst = m.appendInput(dst, calls[0].Arguments)
		calls = calls[1:]
	}
	if len(d.Reasoning) > 0 {
		dst = m.begin(dst, thinking, `{"type":"thinking","thinking":"","signature":""}`)
		dst = appendEnd(openai.AppendString(m.appendDelta(dst, `{"type":"thinking_delta","thinking":`), d.Reasoning))
	}
	if len(d.Text) > 0 {
		dst = m.begin(dst, text, `{"type":"text","text":""}`)
		dst = appendEnd(openai.AppendString(m.appendDelta(dst, `{"type":"text_delta","text":`), d.Text))
	}
	for i := range calls {
		if c := &calls[i]; c.Name != "" { // nothing follows a call that was closed
			dst = m.appendCall(dst, c)
		}
	}
	if d.Finish.Reason != "" {
		m.finish = d.Finish
		dst = m.close(dst)
	}
	return dst
}

// appendStart appends the first event. u has the tokens of the prompt.
func (m *Message) appendStart(dst []byte, u *openai.Usage) []byte {
	dst = m.appendHead(append(dst, "event: message_start\ndata: {\"type\":\"message_start\",\"message\":"...))
	dst = append(dst, `[],"stop_reason":null,"stop_sequence":null,"usage":`...)
	return append(appendUsage(dst, u), "}}\n\n"...)
}

// appendHead appends the beginning of a message, up to its content.
func (m *Message) appendHead(dst []byte) []byte {
	dst = openai.AppendString(append(dst, `{"id":`...), m.id)
	dst = openai.AppendString(append(dst, `,"type":"message","role":"assistant","model":`...), m.model)
	return append(dst, `,"content":`...)
}

// begin opens a block, unless one of its kind is open.
func (m *Message) begin(dst []byte, k kind, block string) []byte {
	if m.open == k {
		return dst
	}
	dst = m.close(dst)
	m.open = k
	return append(append(m.appendBlockStart(dst), block...), "}\n\n"...)
}

// appendCall appends a call that begins, with the arguments that came with it.
func (m *Message) appendCall(dst []byte, c *openai.ToolCall) []byte {
	dst = m.close(dst)
	m.open, m.call, m.called = toolUse, c.Index, true
	dst = openai.AppendString(append(m.appendBlockStart(dst), `{"type":"tool_use","id":`...), c.ID)
	dst = openai.AppendString(append(dst, `,"name":`...), c.Name)
	dst = append(dst, ",\"input\":{}}}\n\n"...)
	return m.appendInput(dst, c.Arguments)
}

// appendInput appends more of the open call's arguments.
func (m *Message) appendInput(dst, arguments []byte) []byte {
	if len(arguments) == 0 {
		return dst
	}
	return appendEnd(openai.AppendString(m.appendDelta(dst, `{"type":"input_json_delta","partial_json":`), arguments))
}

// close closes the open block, if there is one.
func (m *Message) close(dst []byte) []byte {
	if m.open == closed {
		return dst
	}
	if m.open == thinking {
		dst = appendEnd(append(m.appendDelta(dst, `{"type":"signature_delta","signature":"`), Signature+`"`...))
	}
	dst = append(dst, "event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":"...)
	dst = append(strconv.AppendInt(dst, int64(m.index), 10), "}\n\n"...)
	m.open = closed
	m.index++
	return dst
}

func (m *Message) appendBlockStart(dst []byte) []byte {
	dst = append(dst, "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":"...)
	return append(strconv.AppendInt(dst, int64(m.index), 10), `,"content_block":`...)
}

// appendDelta appends the beginning of an event of the open block. appendEnd appends its end.
func (m *Message) appendDelta(dst []byte, delta string) []byte {
	dst = append(dst, "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":"...)
	return append(append(strconv.AppendInt(dst, int64(m.index), 10), `,"delta":`...), delta...)
}

func appendEnd(dst []byte) []byte { return append(dst, "}}\n\n"...) }

// AppendEnd appends the end of a stream.
func (m *Message) AppendEnd(dst []byte, u *openai.Usage) []byte {
	dst = append(dst, "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{"...)
	full := u != nil && u.Completion < m.maxTokens
	dst = append(appendStop(dst, &m.finish, m.called, full), `},"usage":`...)
	dst = append(appendUsage(dst, u), "}\n\n"...)
	return append(dst, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"...)
}

// AppendKeepAlive appends the event that a stream gets after silence.
func (m *Message) AppendKeepAlive(dst []byte) []byte {
	return append(dst, "event: ping\ndata: {\"type\":\"ping\"}\n\n"...)
}

// appendStop appends the reason of the answer's end. full reports that an answer that ended by its
// length has fewer tokens than allowed, because the context is full. The length precedes a call,
// which may be incomplete, and a call precedes a stop sequence, because the client has to answer
// the call.
func appendStop(dst []byte, f *openai.Finish, called, full bool) []byte {
	switch {
	case f.Reason == "length" && full:
		return append(dst, `"stop_reason":"model_context_window_exceeded","stop_sequence":null`...)
	case f.Reason == "length":
		return append(dst, `"stop_reason":"max_tokens","stop_sequence":null`...)
	case called:
		return append(dst, `"stop_reason":"tool_use","stop_sequence":null`...)
	case f.Stop != "":
		return openai.AppendString(append(dst, `"stop_reason":"stop_sequence","stop_sequence":`...), f.Stop)
	}
	return append(dst, `"stop_reason":"end_turn","stop_sequence":null`...)
}

// appendUsage appends the usage; nil: nothing was counted. input_tokens leaves cached tokens out.
func appendUsage(dst []byte, u *openai.Usage) []byte {
	if u == nil {
		u = &openai.Usage{}
	}
	dst = strconv.AppendInt(append(dst, `{"input_tokens":`...), int64(u.Prompt-u.Cached), 10)
	dst = strconv.AppendInt(append(dst, `,"cache_creation_input_tokens":0,"cache_read_input_tokens":`...), int64(u.Cached), 10)
	dst = strconv.AppendInt(append(dst, `,"output_tokens":`...), int64(u.Completion), 10)
	if u.Reasons {
		dst = append(strconv.AppendInt(append(dst, `,"output_tokens_details":{"thinking_tokens":`...), int64(u.Reasoning), 10), '}')
	}
	return append(dst, '}')
}

// AppendWhole appends an answer that is not streamed: thinking, text, and calls.
func (m *Message) AppendWhole(dst []byte, choices []openai.Delta, u openai.Usage) []byte {
	d := &choices[0] // a request has one
	dst = append(m.appendHead(dst), '[')
	if len(d.Reasoning) > 0 {
		dst = openai.AppendString(append(dst, `{"type":"thinking","thinking":`...), d.Reasoning)
		dst = append(dst, `,"signature":"`+Signature+`"},`...)
	}
	if len(d.Text) > 0 {
		dst = append(openai.AppendString(append(dst, `{"type":"text","text":`...), d.Text), "},"...)
	}
	for i := range d.Calls {
		c := &d.Calls[i]
		dst = openai.AppendString(append(dst, `{"type":"tool_use","id":`...), c.ID)
		dst = openai.AppendString(append(dst, `,"name":`...), c.Name)
		dst = append(appendWholeInput(append(dst, `,"input":`...), c.Arguments), "},"...)
	}
	if dst[len(dst)-1] == ',' {
		dst = dst[:len(dst)-1]
	}
	dst = appendStop(append(dst, "],"...), &d.Finish, len(d.Calls) > 0, u.Completion < m.maxTokens)
	return append(appendUsage(append(dst, `,"usage":`...), &u), '}')
}

// appendWholeInput appends a call's arguments as an object. Arguments that are none, because the
// answer ended within them or the model wrote something else, are text in the member partial_json.
func appendWholeInput(dst, arguments []byte) []byte {
	if len(arguments) == 0 {
		return append(dst, "{}"...)
	}
	if _, err := jsonscan.Valid(arguments, jsonscan.Bounds{}); err == nil && arguments[jsonscan.Space(arguments, 0)] == '{' {
		return append(dst, arguments...)
	}
	return append(openai.AppendString(append(dst, `{"partial_json":`...), arguments), '}')
}

// AppendCount appends the answer of CountPath.
func AppendCount(dst []byte, tokens int) []byte {
	return append(strconv.AppendInt(append(dst, `{"input_tokens":`...), int64(tokens), 10), '}')
}
