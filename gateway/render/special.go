package render

import (
	"fmt"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render/jinja"
)

// checkSpecial refuses messages in which a client wrote a special token, such as the
// one that ends a turn: tokenized, its text would be the control token itself, and
// the rest of the message would look like somebody else's turn. Roles are checked in
// all messages, the rest in those that do not come from the system, the developer or
// the model. A special token that begins in one message and ends in the template's
// own text is not found.
func (t *TextModel) checkSpecial(messages jinja.List) *openai.Error {
	for i, m := range messages {
		d, ok := m.(*jinja.Dict)
		if !ok {
			continue
		}
		role, _ := d.Get("role")
		name, _ := role.(string)
		at := fmt.Sprintf("messages[%d]", i)
		if fault := t.findSpecial(name, at+".role", "", at); fault != nil {
			return fault
		}
		if name == "system" || name == "developer" || name == "assistant" {
			continue
		}
		for k := range d.Len() {
			key, v := d.At(k)
			if key != "role" {
				if fault := t.walkSpecial(v, fmt.Sprintf("%s.%v", at, key), name, at); fault != nil {
					return fault
				}
			}
		}
	}
	return nil
}

// walkSpecial checks every text in a value, keys included. Its depth is bounded by
// that of the request's JSON.
func (t *TextModel) walkSpecial(v jinja.Value, at, role, message string) *openai.Error {
	switch v := v.(type) {
	case string:
		return t.findSpecial(v, at, role, message)
	case jinja.List:
		for i, element := range v {
			if fault := t.walkSpecial(element, fmt.Sprintf("%s[%d]", at, i), role, message); fault != nil {
				return fault
			}
		}
	case *jinja.Dict:
		for i := range v.Len() {
			key, element := v.At(i)
			name, _ := key.(string)
			if fault := t.findSpecial(name, at, role, message); fault != nil {
				return fault
			}
			if fault := t.walkSpecial(element, at+"."+openai.Clip(name, 40), role, message); fault != nil {
				return fault
			}
		}
	}
	return nil
}

// findSpecial checks a text, which is tokenized to find what the prompt would have.
func (t *TextModel) findSpecial(text, at, role, message string) *openai.Error {
	for _, id := range t.tok.Encode(text, false) {
		if !t.tok.IsSpecial(id) {
			continue
		}
		if role != "" {
			role = fmt.Sprintf(" of role %q", openai.Clip(role, 40))
		}
		return openai.BadRequest(message, "%s%s has the special token %q, which this gateway refuses (--special-tokens-in-content reject): leave it out",
			at, role, openai.Clip(t.tok.Decode([]int32{id}, false), 40))
	}
	return nil
}
