package responses

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// dialog is the state of writing the chat's messages. Texts are JSON strings without their quotes.
//
// Instructions and the system messages at the beginning become one system message, because many
// templates take only one. The items of the assistant between two others become one message, except
// that a message that directly follows a message is one of its own.
type dialog struct {
	system bool   // the first system message is open
	later  bool   // no further text belongs to it
	turn   turn   // of the assistant
	origin origin // of what is translated

	dropped int    // reasoning items that do not open
	field   string // of the first of them
	err     error  // why it does not
}

// origin is where the first part of one of the chat's messages comes from.
type origin struct {
	item   int32 // index in the input, or one of the constants below
	output bool  // the item is a function_call_output
}

const (
	ofInstructions = -1
	ofInput        = -2 // which is a string
)

// turn is what will be one message of the assistant. Its parts may be parts of the body.
type turn struct {
	open                      bool
	reasoning, content, calls []byte // calls are JSON objects separated by commas
	hasContent                bool
	last                      kind
	origin                    origin
}

// Separators of texts that become one.
const (
	betweenSystem = `\n\n`
	betweenTexts  = `\n`
)

// join returns a text, after the text and the separator that precede it if has is set. It changes
// no memory that it has not allocated.
func join(before []byte, has bool, separator string, text []byte) []byte {
	if !has {
		return text[:len(text):len(text)]
	}
	return append(append(before, separator...), text...)
}

// addSystem adds a message of the roles system and developer.
func (t *translation) addSystem(text []byte) {
	switch d := &t.dialog; {
	case d.later:
		t.addMessage(`{"role":"system","content":"`, text, `"},`)
	case d.system:
		t.chat = append(append(t.chat, betweenSystem...), text...)
	default:
		d.system = true
		t.origins = append(t.origins, d.origin)
		t.chat = append(append(t.chat, `{"role":"system","content":"`...), text...)
	}
}

// addMessage ends the message before and adds one. end may leave it open.
func (t *translation) addMessage(head string, text []byte, end string) {
	t.endMessage()
	t.origins = append(t.origins, t.dialog.origin)
	t.chat = append(append(append(t.chat, head...), text...), end...)
}

// endMessage ends the first system message and the assistant's turn, if one is open.
func (t *translation) endMessage() {
	d := &t.dialog
	if d.later = true; d.system {
		d.system = false
		t.chat = append(t.chat, `"},`...)
	}
	a := &d.turn
	if !a.open {
		return
	}
	t.origins = append(t.origins, a.origin)
	if t.chat = append(t.chat, `{"role":"assistant","content":`...); a.hasContent || len(a.calls) == 0 {
		t.chat = append(append(append(t.chat, '"'), a.content...), '"')
	} else {
		t.chat = append(t.chat, "null"...)
	}
	if len(a.reasoning) > 0 { // templates read one of the two
		for _, name := range [...]string{`,"reasoning":"`, `,"reasoning_content":"`} {
			t.chat = append(append(append(t.chat, name...), a.reasoning...), '"')
		}
	}
	if len(a.calls) > 0 {
		t.chat = append(append(append(t.chat, `,"tool_calls":[`...), a.calls...), ']')
	}
	t.chat = append(t.chat, "},"...)
	*a = turn{}
}

// assistant returns the open turn, for an item of a kind.
func (t *translation) assistant(k kind) *turn {
	d := &t.dialog
	if !d.turn.open || d.turn.last == message && k == message {
		t.endMessage()
		d.turn.origin = d.origin
	}
	d.turn.open, d.turn.last = true, k
	return &d.turn
}

// messages translates the instructions and the input.
func (t *translation) messages() *openai.Error {
	t.chat = append(t.chat, `"messages":[`...)
	t.dialog.origin.item = ofInstructions
	if v := t.values["instructions"]; v != nil && !isText(v) {
		return kindFault("instructions", "a string", v)
	} else if len(v) > len(`""`) {
		t.addSystem(inner(v))
	}
	if fault := t.input("input", t.values["input"]); fault != nil {
		return fault
	}
	t.endMessage()
	t.chat = bytes.TrimSuffix(t.chat, []byte{','})
	t.chat = append(t.chat, ']')
	return nil
}

func (t *translation) input(at string, v []byte) *openai.Error {
	switch {
	case isText(v):
		t.dialog.origin.item = ofInput
		t.addMessage(`{"role":"user","content":"`, inner(v), `"},`)
		return nil
	case !isList(v):
		return kindFault(at, "a string or a list of items", v)
	case v[jsonscan.Space(v, 1)] == ']':
		return openai.BadRequest(at, "%s: must not be empty", at)
	}
	return elements(v, func(i int, v []byte) *openai.Error {
		at := fmt.Sprintf("%s[%d]", at, i)
		if !isObject(v) {
			return kindFault(at, "an object", v)
		}
		var it inputItem
		read(v, place{"type", &it.typ}, place{"role", &it.role}, place{"content", &it.content}, place{"id", &it.id}, place{"call_id", &it.callID}, place{"name", &it.name},
			place{"arguments", &it.arguments}, place{"output", &it.output}, place{"summary", &it.summary}, place{"encrypted_content", &it.encryptedContent})
		t.dialog.origin = origin{item: int32(i), output: is(it.typ, "function_call_output")}
		return t.item(at, &it)
	})
}

// inputItem has the members of an item that are read, as they are written; nil: missing or null.
type inputItem struct {
	typ, role, content, id          []byte
	callID, name, arguments, output []byte
	summary, encryptedContent       []byte
}

// item translates one item of the input.
func (t *translation) item(at string, it *inputItem) *openai.Error {
	switch typ := it.typ; {
	case is(typ, "message"), typ == nil && it.role != nil:
		return t.message(at, it)
	case is(typ, "function_call"):
		return t.functionCall(at, it)
	case is(typ, "function_call_output"):
		if !isText(it.callID) {
			return kindFault(at+".call_id", "a string", it.callID)
		}
		text, _, fault := texts(at+".output", it.output, "input_text", "output_text", "text")
		if fault != nil {
			return fault
		}
		t.addMessage(`{"role":"tool","tool_call_id":`, it.callID, `,"content":"`)
		t.chat = append(append(t.chat, text...), `"},`...)
	case is(typ, "reasoning"):
		return t.reasoningItem(at, it)
	case is(typ, "item_reference"), typ == nil && it.id != nil:
		return openai.BadRequest(at, "%s is an item_reference, and items are not stored: send the item itself", at)
	case typ == nil:
		return openai.BadRequest(at+".type", "%s.type is required: a string", at)
	default:
		return openai.BadRequest(at+".type", "%s.type: must be message, reasoning, function_call or function_call_output, not %s: this server runs no tools; the client runs them", at, quote(typ))
	}
	return nil
}

func (t *translation) message(at string, it *inputItem) *openai.Error {
	text, several, fault := texts(at+".content", it.content, "input_text", "output_text", "text", "refusal")
	switch {
	case fault != nil:
		return fault
	case is(it.role, "system"), is(it.role, "developer"):
		t.addSystem(text)
	case is(it.role, "user") && several:
		t.addMessage(`{"role":"user","content":`, appendParts(nil, it.content), `},`)
	case is(it.role, "user"):
		t.addMessage(`{"role":"user","content":"`, text, `"},`)
	case is(it.role, "assistant"):
		a := t.assistant(message)
		a.content, a.hasContent = join(a.content, a.hasContent, betweenTexts, text), true
	default:
		return kindFault(at+".role", `"user", "assistant", "system" or "developer"`, it.role)
	}
	return nil
}

func (t *translation) functionCall(at string, it *inputItem) *openai.Error {
	for _, m := range []struct {
		name string
		v    []byte
	}{{".call_id", it.callID}, {".name", it.name}, {".arguments", it.arguments}} {
		if !isText(m.v) {
			return kindFault(at+m.name, "a string", m.v)
		}
	}
	a := t.assistant(call)
	a.calls = join(a.calls, len(a.calls) > 0, ",", []byte(`{"id":`))
	a.calls = append(append(a.calls, it.callID...), `,"type":"function","function":{"name":`...)
	a.calls = append(append(a.calls, it.name...), `,"arguments":`...)
	a.calls = append(append(a.calls, it.arguments...), "}}"...)
	return nil
}

// reasoningItem adds reasoning: its content, else its encrypted content, else its summary.
func (t *translation) reasoningItem(at string, it *inputItem) *openai.Error {
	var content, summary []byte
	var fault *openai.Error
	if it.content != nil {
		content, _, fault = texts(at+".content", it.content, "reasoning_text", "text")
	}
	if it.summary != nil && fault == nil {
		summary, _, fault = texts(at+".summary", it.summary, "summary_text", "text")
	}
	switch sealed := it.encryptedContent; {
	case fault != nil:
		return fault
	case sealed != nil && !isText(sealed):
		return kindFault(at+".encrypted_content", "a string", sealed)
	case len(content) == 0 && sealed != nil:
		text, err := t.o.Keys.open(jsonscan.Text(sealed), t.model, t.o.Owner)
		if err == nil {
			content = appendInner(nil, text)
			break
		}
		if d := &t.dialog; d.dropped == 0 {
			d.field, d.err = at+".encrypted_content", err
		}
		t.dialog.dropped++
	}
	if len(content) == 0 {
		content = summary
	}
	if len(content) > 0 {
		a := t.assistant(reasoning)
		a.reasoning = join(a.reasoning, len(a.reasoning) > 0, betweenTexts, content)
	}
	return nil
}

// texts returns a string, or the texts of a list of parts of these types as one, as a JSON string
// without its quotes. several reports whether there are several parts.
func texts(at string, v []byte, types ...string) (text []byte, several bool, fault *openai.Error) {
	if isText(v) {
		return inner(v), false, nil
	}
	if !isList(v) {
		return nil, false, kindFault(at, "a string or a list of parts", v)
	}
	n := 0
	fault = elements(v, func(i int, e []byte) *openai.Error {
		part, fault := partText(fmt.Sprintf("%s[%d]", at, i), e, types)
		if fault != nil {
			return fault
		}
		switch n++; n {
		case 1:
			text = inner(part) // of the body, which is not changed
		case 2:
			text = join(append(make([]byte, 0, len(v)), text...), true, betweenTexts, inner(part))
		default:
			text = join(text, true, betweenTexts, inner(part))
		}
		return nil
	})
	return text, n > 1, fault
}

// partText returns the text of a part, as it is written.
func partText(at string, v []byte, types []string) ([]byte, *openai.Error) {
	if !isObject(v) {
		return nil, kindFault(at, "an object", v)
	}
	var typ, text, refusal []byte
	read(v, place{"type", &typ}, place{"text", &text}, place{"refusal", &refusal})
	name := ".text"
	if is(typ, "refusal") {
		name, text = ".refusal", refusal
	}
	switch {
	case typ == nil:
		return nil, openai.BadRequest(at+".type", "%s.type is required: a string", at)
	case !slices.ContainsFunc(types, func(want string) bool { return is(typ, want) }):
		return nil, openai.BadRequest(at+".type", "%s.type %s is not supported: only text is", at, quote(typ))
	case !isText(text):
		return nil, kindFault(at+name, "a string", text)
	}
	return text, nil
}

// appendParts appends checked parts as those of chats, for templates that read them.
func appendParts(dst, parts []byte) []byte {
	dst = append(dst, '[')
	_ = elements(parts, func(i int, v []byte) *openai.Error {
		if i > 0 {
			dst = append(dst, ',')
		}
		text, _ := partText("", v, []string{"input_text", "output_text", "text", "refusal"})
		dst = append(append(append(dst, `{"type":"text","text":`...), text...), '}')
		return nil
	})
	return append(dst, ']')
}
