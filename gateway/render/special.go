package render

import (
	"fmt"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render/jinja"
)

// checkSpecial rejects messages in which a client wrote a special token, such as the one that ends
// a turn. Tokenized, its text would be the control token itself, and the rest of the message would
// look like another role's turn. It checks the role of every message, and the other members of
// messages whose role is not system, developer or assistant. It does not find a special token that
// begins in a message and ends in the template's own text.
func (t *TextModel) checkSpecial(messages jinja.List) (fault *openai.Error) {
	for i, m := range messages {
		d, ok := m.(*jinja.Dict)
		if !ok {
			continue
		}
		role, _ := member(m, "role").(string)
		at := fmt.Sprintf("messages[%d]", i)
		if fault = t.findSpecial(role, at+".role", "", at); fault != nil {
			return fault
		}
		if role == "system" || role == "developer" || role == "assistant" {
			continue
		}
		for k := range d.Len() {
			key, v := d.At(k)
			if key != "role" && !walkTexts(v, fmt.Sprintf("%s.%v", at, key), func(text, where string) bool {
				fault = t.findSpecial(text, where, role, at)
				return fault == nil
			}) {
				return fault
			}
		}
	}
	return nil
}

// walkTexts calls visit with every text in a value, keys included, and its path. It stops and
// returns false if visit does. The depth is bounded by that of the request's JSON.
func walkTexts(v jinja.Value, at string, visit func(text, at string) bool) bool {
	switch v := v.(type) {
	case string:
		return visit(v, at)
	case jinja.List:
		for i, element := range v {
			if !walkTexts(element, fmt.Sprintf("%s[%d]", at, i), visit) {
				return false
			}
		}
	case *jinja.Dict:
		for i := range v.Len() {
			key, element := v.At(i)
			name, _ := key.(string)
			if !visit(name, at) || !walkTexts(element, at+"."+openai.Clip(name, 40), visit) {
				return false
			}
		}
	}
	return true
}

// findSpecial rejects a text that contains special tokens. It tokenizes the text as a prompt.
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
