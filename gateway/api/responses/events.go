package responses

import (
	"bytes"
	"strconv"

	"github.com/tandem-serving/tandem/gateway/api/openai"
)

// kind is the type of an output item.
type kind uint8

const (
	noItem kind = iota
	reasoning
	message
	call
)

// kinds has the constant parts of each kind of item and of its events.
var kinds = [...]struct {
	prefix            string // of ids
	event             string // of text; with ".delta" or ".done" at its end
	text              string // the member with the whole text in a done event
	partHead, partEnd string // a content part around its text; empty: the text is in no part
}{
	reasoning: {"rs_", "response.reasoning_text", `,"text":`, `{"type":"reasoning_text","text":`, `}`},
	message:   {"msg_", "response.output_text", `,"text":`, `{"type":"output_text","annotations":[],"logprobs":[`, `}`},
	call:      {"fc_", "response.function_call_arguments", `,"arguments":`, "", ""},
}

// item is an output item that is open. Its memory is used for the next one.
type item struct {
	kind     kind
	place    []byte // members of its events: item_id, output_index and, if it has parts, content_index
	id       []byte // in quotes
	text     []byte // so far: of reasoning, of the message, or the arguments
	logprobs pieces // of the text
	// Of a call.
	index        int
	callID, name string
}

// Statuses of items and of responses.
const (
	inProgress = "in_progress"
	completed  = "completed"
	incomplete = "incomplete"
	failed     = "failed"
)

// status returns how a finished answer, or its last item, ended.
func (r *Response) status() string {
	if r.finish == "length" {
		return incomplete
	}
	return completed
}

// AppendDelta implements native.Surface. More arguments of the open call precede the other parts of
// a Delta, and new calls follow them.
func (r *Response) AppendDelta(dst []byte, d *openai.Delta) []byte {
	if d.Begin {
		dst = r.begin(dst)
	}
	calls := d.Calls
	for ; len(calls) > 0 && calls[0].Name == ""; calls = calls[1:] {
		if r.item.kind == call && r.item.index == calls[0].Index {
			dst = r.appendText(dst, calls[0].Arguments, nil)
		}
	}
	if r.logprobs {
		r.score(d)
	}
	if len(d.Reasoning) > 0 {
		dst = r.appendText(r.change(dst, reasoning, nil), d.Reasoning, nil)
	}
	if len(d.Text) > 0 {
		dst = r.appendText(r.change(dst, message, nil), d.Text, r.pending)
	}
	for i := range calls {
		if dst = r.change(dst, call, &calls[i]); len(calls[i].Arguments) > 0 {
			dst = r.appendText(dst, calls[i].Arguments, nil)
		}
	}
	if len(d.Text)+len(d.Reasoning)+len(d.Calls) > 0 { // the tokens so far are of no later text
		r.pending = r.pending[:0]
	}
	if d.Finish.Reason != "" {
		r.finish = d.Finish.Reason
		dst = r.done(dst, r.status())
	}
	return dst
}

// begin appends the events that precede all others.
func (r *Response) begin(dst []byte) []byte {
	dst = r.appendState(dst, "response.created", inProgress, nil, nil)
	return r.appendState(dst, "response.in_progress", inProgress, nil, nil)
}

// AppendEnd implements native.Surface.
func (r *Response) AppendEnd(dst []byte, usage *openai.Usage) []byte {
	if r.status() == incomplete {
		return r.appendState(dst, "response.incomplete", incomplete, nil, usage)
	}
	return r.appendState(dst, "response.completed", completed, nil, usage)
}

// AppendFault appends the events that end a failed stream. A stream whose head was sent early may
// fail before its first Delta.
func (r *Response) AppendFault(dst []byte, fault *openai.Error) []byte {
	if r.sequence == 0 {
		dst = r.begin(dst)
	}
	return r.appendState(r.done(dst, incomplete), "response.failed", failed, fault, nil)
}

// AppendWhole implements native.Surface. Text precedes calls.
func (r *Response) AppendWhole(dst []byte, choices []openai.Delta, usage openai.Usage) []byte {
	d := &choices[0]
	r.finish = d.Finish.Reason
	if r.logprobs {
		r.whole = ofText(d)
	}
	nItems := len(d.Calls) + min(len(d.Reasoning), 1) + min(len(d.Text), 1)
	put := func(dst []byte, k kind, c *openai.ToolCall, text []byte) []byte {
		if r.nItems > 0 {
			dst = append(dst, ',')
		}
		r.open(k, c)
		r.item.text = append(r.item.text, text...)
		if r.nItems < nItems {
			return r.appendItem(dst, completed)
		}
		return r.appendItem(dst, r.status())
	}
	return r.appendResponse(dst, r.status(), nil, &usage, func(dst []byte) []byte {
		if len(d.Reasoning) > 0 {
			dst = put(dst, reasoning, nil, d.Reasoning)
		}
		if len(d.Text) > 0 {
			dst = put(dst, message, nil, d.Text)
		}
		for i := range d.Calls {
			dst = put(dst, call, &d.Calls[i], d.Calls[i].Arguments)
		}
		return dst
	})
}

// score adds a Delta's log-probabilities to the pending ones. If the Delta's own tokens write all
// of its text, and the text begins a message, the pending ones belong to markers before the
// message.
func (r *Response) score(d *openai.Delta) {
	if len(d.Text) > 0 && r.item.kind != message {
		n := 0
		for i := range d.Logprobs {
			n += len(d.Logprobs[i].Bytes)
		}
		if n >= len(d.Text) {
			r.pending = r.pending[:0]
		}
	}
	if len(r.pending) > 0 && len(d.Logprobs) > 0 {
		r.pending = append(r.pending, ',')
	}
	r.pending = appendLogprobs(r.pending, d.Logprobs)
}

// ofText returns the log-probabilities of the tokens that wrote the text of a whole answer. The
// text follows the reasoning and precedes the calls, which may contain it, too. ofText returns
// those of all tokens if it does not find the text.
func ofText(d *openai.Delta) []openai.TokenLogprob {
	all, text := d.Logprobs, d.Text
	var raw []byte
	for i := range all {
		raw = append(raw, all[i].Bytes...)
	}
	start := bytes.LastIndex(raw, text)
	if len(d.Calls) > 0 {
		from := max(0, bytes.Index(raw, d.Reasoning)) + len(d.Reasoning)
		if i := bytes.Index(raw[min(from, len(raw)):], text); i >= 0 {
			start = from + i
		}
	}
	if start < 0 {
		return all
	}
	first, n, at := len(all), 0, 0
	for i := range all {
		end := at + len(all[i].Bytes)
		if end > start && at < start+len(text) {
			first, n = min(first, i), i+1
		}
		at = end
	}
	return all[min(first, n):n]
}

// change ends the open item and begins one of another kind. An open item of the same kind
// continues, unless it is a call.
func (r *Response) change(dst []byte, k kind, c *openai.ToolCall) []byte {
	if r.item.kind == k && k != call {
		return dst
	}
	dst = r.done(dst, completed)
	r.open(k, c)
	dst = append(append(r.event(dst, "response.output_item.added", ""), `,"output_index":`...), strconv.Itoa(r.nItems-1)...)
	dst = append(r.appendItem(append(dst, `,"item":`...), inProgress), eventEnd...)
	if kinds[k].partHead != "" {
		dst = append(r.event(dst, "response.content_part.added", ""), r.item.place...)
		dst = append(r.appendPart(append(dst, `,"part":`...)), eventEnd...)
	}
	return dst
}

// open begins an item. Its id is made from the request's id and the item's index.
func (r *Response) open(k kind, c *openai.ToolCall) {
	i := &r.item
	i.kind, i.text, i.logprobs = k, i.text[:0], nil
	if c != nil {
		i.index, i.callID, i.name = c.Index, c.ID, c.Name
	}
	id := append(append(append(i.place[:0], kinds[k].prefix...), r.id...), '_')
	id = strconv.AppendInt(id, int64(r.nItems), 10)
	i.id = openai.AppendString(i.id[:0], id)
	i.place = append(append(i.place[:0], `,"item_id":`...), i.id...)
	i.place = strconv.AppendInt(append(i.place, `,"output_index":`...), int64(r.nItems), 10)
	if kinds[k].partHead != "" {
		i.place = append(i.place, `,"content_index":0`...)
	}
	r.nItems++
}

// appendText adds a text to the open item, and appends its event. logprobs are those of a message's
// text.
func (r *Response) appendText(dst, text, logprobs []byte) []byte {
	i := &r.item
	i.text = append(i.text, text...)
	dst = append(append(r.event(dst, kinds[i.kind].event, ".delta"), i.place...), `,"delta":`...)
	at := len(dst)
	dst = openai.AppendString(dst, text)
	if n := len(dst) - at; r.obfuscate {
		dst = append(append(append(dst, `,"obfuscation":"`...), padding[r.sequence%padSize:][:padSize-n%padSize]...), '"')
	}
	if i.kind == message {
		r.keepLogprobs(logprobs)
		dst = append(append(append(dst, `,"logprobs":[`...), logprobs...), ']')
	}
	return append(dst, eventEnd...)
}

// padSize is the multiple to which obfuscated deltas are padded, in bytes, so that the sizes of
// encrypted packets reveal less of the text.
const padSize = 16

const padding = "k3Zq9XvB7mTfW2dRh5LsPj8cNy4GtAe1" // at least twice padSize

// done appends the events of the open item's end, and keeps it.
func (r *Response) done(dst []byte, status string) []byte {
	i := &r.item
	if i.kind == noItem {
		return dst
	}
	k := &kinds[i.kind]
	dst = append(append(r.event(dst, k.event, ".done"), i.place...), k.text...)
	dst = openai.AppendString(dst, i.text)
	switch i.kind {
	case message:
		dst = append(r.appendKept(append(dst, `,"logprobs":[`...)), ']')
	case call:
		dst = openai.AppendString(append(dst, `,"name":`...), i.name)
	}
	dst = append(dst, eventEnd...)
	if k.partHead != "" {
		dst = append(r.event(dst, "response.content_part.done", ""), i.place...)
		dst = append(r.appendPart(append(dst, `,"part":`...)), eventEnd...)
	}
	at := r.keep(status)
	dst = append(append(r.event(dst, "response.output_item.done", ""), `,"output_index":`...), strconv.Itoa(r.nItems-1)...)
	return append(r.appendOutput(append(dst, `,"item":`...), at), eventEnd...)
}

// keep ends the open item, and adds it to the output as JSON, from the returned place on.
func (r *Response) keep(status string) (at int) {
	if len(r.output) > 0 {
		r.output = append(r.output, ',')
	}
	at = len(r.output)
	ofEvents := r.splices
	r.splices = r.outputSplices
	r.output = r.appendItem(r.output, status)
	r.splices, r.outputSplices = ofEvents, r.splices
	r.item.kind = noItem
	return at
}

// appendOutput appends the output from a place on, which is the beginning of an item.
func (r *Response) appendOutput(dst []byte, from int) []byte {
	for _, s := range r.outputSplices {
		if s.At > from {
			dst = append(dst, r.output[from:s.At]...)
			r.splices = append(r.splices, openai.Splice{At: len(dst), Parts: s.Parts})
			from = s.At
		}
	}
	return append(dst, r.output[from:]...)
}

// appendItem appends the open item. While it is in progress it is empty.
func (r *Response) appendItem(dst []byte, status string) []byte {
	i := &r.item
	begun := status == inProgress
	content := func(dst []byte) []byte {
		if dst = append(dst, `,"content":[`...); !begun {
			dst = r.appendPart(dst)
		}
		return append(dst, ']')
	}
	switch i.kind {
	case reasoning:
		dst = append(append(append(dst, `{"type":"reasoning","id":`...), i.id...), `,"summary":[]`...)
		dst = append(content(dst), `,"encrypted_content":`...)
		if r.encrypt && !begun {
			dst = append(r.o.Keys.appendSealed(append(dst, '"'), i.text, r.model, r.o.Owner), '"')
		} else {
			dst = append(dst, "null"...)
		}
	case message:
		dst = append(append(append(dst, `{"type":"message","id":`...), i.id...), `,"role":"assistant"`...)
		dst = content(dst)
	default:
		dst = append(append(dst, `{"type":"function_call","id":`...), i.id...)
		dst = openai.AppendString(append(dst, `,"call_id":`...), i.callID)
		dst = openai.AppendString(append(dst, `,"name":`...), i.name)
		dst = openai.AppendString(append(dst, `,"arguments":`...), i.text)
	}
	return append(append(append(dst, `,"status":"`...), status...), `"}`...)
}

// appendPart appends the content part of the open item.
func (r *Response) appendPart(dst []byte) []byte {
	i := &r.item
	dst = append(dst, kinds[i.kind].partHead...)
	if i.kind == message {
		dst = append(r.appendKept(dst), `],"text":`...)
	}
	return append(openai.AppendString(dst, i.text), kinds[i.kind].partEnd...)
}

// appendLogprobs appends tokens as JSON objects separated by commas.
func appendLogprobs(dst []byte, all []openai.TokenLogprob) []byte {
	for i := range all {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = all[i].Append(dst)
	}
	return dst
}

// eventEnd ends an event.
const eventEnd = "}\n\n"

// event appends the beginning of an event, whose type is base with end at its end.
func (r *Response) event(dst []byte, base, end string) []byte {
	dst = append(append(append(dst, "event: "...), base...), end...)
	dst = append(append(append(dst, "\ndata: {\"type\":\""...), base...), end...)
	dst = strconv.AppendInt(append(dst, `","sequence_number":`...), int64(r.sequence), 10)
	r.sequence++
	return dst
}

// appendState appends an event with the response object.
func (r *Response) appendState(dst []byte, event, status string, fault *openai.Error, usage *openai.Usage) []byte {
	dst = append(r.event(dst, event, ""), `,"response":`...)
	dst = r.appendResponse(dst, status, fault, usage, func(dst []byte) []byte { return r.appendOutput(dst, 0) })
	return append(dst, eventEnd...)
}

// appendResponse appends the response object, with the items that output appends.
func (r *Response) appendResponse(dst []byte, status string, fault *openai.Error, usage *openai.Usage, output func([]byte) []byte) []byte {
	dst = append(append(append(dst, r.head...), status...), `","error":`...)
	if fault != nil {
		dst = append(append(append(dst, `{"code":"`...), errorCode(fault.Status)...), `","message":`...)
		dst = append(openai.AppendString(dst, fault.Message), '}')
	} else {
		dst = append(dst, "null"...)
	}
	if dst = append(dst, `,"incomplete_details":`...); status == incomplete {
		dst = append(dst, `{"reason":"max_output_tokens"}`...)
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(output(append(dst, `,"output":[`...)), `],"usage":`...)
	if usage != nil {
		dst = appendUsage(dst, usage)
	} else {
		dst = append(dst, "null"...)
	}
	return append(append(dst, r.echo...), '}')
}

// errorCode returns the code of a failed response, of those that the API has.
func errorCode(status int) string {
	switch {
	case status == 429:
		return "rate_limit_exceeded"
	case status < 499: // 499 is an aborted request
		return "invalid_prompt"
	}
	return "server_error"
}

func appendUsage(dst []byte, u *openai.Usage) []byte {
	for _, part := range [...]struct {
		name string
		n    int
	}{
		{`{"input_tokens":`, u.Prompt}, {`,"input_tokens_details":{"cached_tokens":`, u.Cached}, {`,"cache_write_tokens":`, 0}, {`},"output_tokens":`, u.Completion},
		{`,"output_tokens_details":{"reasoning_tokens":`, u.Reasoning}, {`},"total_tokens":`, u.Prompt + u.Completion},
	} {
		dst = strconv.AppendInt(append(dst, part.name...), int64(part.n), 10)
	}
	return append(dst, '}')
}
