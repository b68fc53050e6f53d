package openai

import "strconv"

// Encoder writes the answer to one request in the form of its endpoint: one object, or the events
// of a stream (text/event-stream). It is made once for a request. Its methods append to a buffer
// and allocate nothing else.
type Encoder struct {
	surface surface
	head    string // the beginning of an object, up to the list of choices
	event   string // the beginning of an event, up to the list of choices
}

// surface is the form of an answer. It is an enum, not an interface, so that a token needs no
// indirect call.
type surface uint8

const (
	chatSurface surface = iota
	completionSurface
	tokensSurface // token ids without text
)

// NewEncoder makes an encoder with the common parts of an answer. created is in seconds since 1970.
func NewEncoder(on Endpoint, id string, created int64, model, fingerprint string) *Encoder {
	object := func(name string) []byte {
		b := AppendString([]byte(`{"id":`), id)
		b = append(append(append(b, `,"object":"`...), name...), `","created":`...)
		b = strconv.AppendInt(b, created, 10)
		b = AppendString(append(b, `,"model":`...), model)
		b = AppendString(append(b, `,"system_fingerprint":`...), fingerprint)
		return append(b, `,"choices":`...)
	}
	if on == Chat {
		return &Encoder{chatSurface, string(object("chat.completion")), "data: " + string(object("chat.completion.chunk"))}
	}
	return &Encoder{completionSurface, string(object("text_completion")), "data: " + string(object("text_completion"))}
}

// NewTokensEncoder is NewEncoder for TokensPath.
func NewTokensEncoder(id string) *Encoder {
	head := string(append(AppendString([]byte(`{"request_id":`), id), `,"choices":`...))
	return &Encoder{tokensSurface, head, "data: " + head}
}

// AppendDelta appends the events of a delta.
func (e *Encoder) AppendDelta(dst []byte, d *Delta) []byte {
	if e.surface == chatSurface && d.Begin {
		dst = endEvent(appendChatRole(append(dst, e.event...), d), d.Usage.ofPrompt())
	}
	dst = e.appendChoice(append(append(dst, e.event...), '['), d, false)
	return endEvent(append(dst, ']'), d.Usage)
}

// AppendChunk appends the object of one event.
func (e *Encoder) AppendChunk(dst []byte, choices []Delta, u *Usage) []byte {
	dst = appendList(append(dst, e.event[len("data: "):]...), choices, func(dst []byte, c *Delta) []byte { return e.appendChoice(dst, c, false) })
	if u != nil {
		dst = u.Append(append(dst, `,"usage":`...))
	}
	return append(dst, '}')
}

// appendChoice appends a whole choice, or what is new of it.
func (e *Encoder) appendChoice(dst []byte, d *Delta, whole bool) []byte {
	switch e.surface {
	case chatSurface:
		return appendChat(dst, d, whole)
	case tokensSurface:
		return appendTokensDelta(dst, d)
	}
	return appendCompletionDelta(dst, d, whole)
}

// done is the last event of a stream that ended well.
const done = "data: [DONE]\n\n"

// AppendEnd appends the end of a stream. usage is requested by stream_options.include_usage; nil:
// not requested.
func (e *Encoder) AppendEnd(dst []byte, usage *Usage) []byte {
	if usage != nil {
		dst = endEvent(append(append(dst, e.event...), "[]"...), usage)
	}
	return append(dst, done...)
}

func endEvent(dst []byte, u *Usage) []byte {
	if u != nil {
		dst = u.Append(append(dst, `,"usage":`...))
	}
	return append(dst, "}\n\n"...)
}

// AppendWhole appends a whole answer, of one Delta for each choice.
func (e *Encoder) AppendWhole(dst []byte, choices []Delta, u Usage) []byte {
	dst = appendList(append(dst, e.head...), choices, func(dst []byte, c *Delta) []byte { return e.appendChoice(dst, c, true) })
	if e.surface == tokensSurface {
		dst = appendPromptLogprobs(dst, choices)
	}
	dst = u.Append(append(dst, `,"usage":`...))
	if e.surface == chatSurface && len(choices) > 0 {
		dst = choices[0].Prompt.appendWhole(dst)
	}
	if e.surface != tokensSurface {
		dst = append(dst, `,"service_tier":null,"kv_transfer_params":null`...)
	}
	return append(dst, '}')
}
