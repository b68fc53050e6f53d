package jinja

import (
	"strconv"
	"strings"
	"time"
)

// Template is a parsed chat template. It is immutable: render it concurrently.
type Template struct {
	src          string
	body         []stmt
	contentParts bool
}

// Parse parses a chat template. The error, if any, is an *Error.
func Parse(src string) (*Template, error) {
	if len(src) > maxSource {
		return nil, &Error{Kind: ErrLimit, Msg: "the template is too long"}
	}
	toks, err := lex(src)
	if err != nil {
		return nil, err
	}
	p := &parser{toks: toks, contentNames: map[string]bool{}}
	body := p.body()
	if p.err != nil {
		return nil, p.err
	}
	return &Template{src: src, body: body, contentParts: p.contentParts}, nil
}

// ContentParts reports whether the template goes through the parts of a
// message's content. Where it does not, content that came as a list of text
// parts should be joined to one string before it is rendered.
func (t *Template) ContentParts() bool { return t.contentParts }

// Input is what a template is rendered with.
type Input struct {
	Messages List // of *Dict, in the order of the chat
	Tools    List // of *Dict; nil: None to the template
	// AddGenerationPrompt asks for the header of the assistant's turn;
	// ContinueFinalMessage for a prompt that ends with the last message's
	// text, so that the model goes on with it. Not both.
	AddGenerationPrompt  bool
	ContinueFinalMessage bool
	BosToken, EosToken   string           // empty: not defined
	Kwargs               map[string]Value // further variables; they win over the ones above
	Now                  time.Time        // for strftime_now; zero: the template may not ask
}

// reasoningFields are the names a message's reasoning comes under. As in
// transformers, the first is filled from the others, and thinking from it.
var reasoningFields = []string{"reasoning_content", "thinking", "reasoning"}

// continueTag marks the end of the message that is to be continued.
const continueTag = "CONTINUE_FINAL_MESSAGE_TAG "

// Render returns the prompt for in. The error, if any, is an *Error.
func (t *Template) Render(in Input) (string, error) {
	messages := make(List, len(in.Messages))
	for i, m := range in.Messages {
		d, ok := m.(*Dict)
		if !ok {
			return "", inputError("message " + strconv.Itoa(i) + " is no object")
		}
		messages[i] = aliasReasoning(d)
	}
	final := ""
	if in.ContinueFinalMessage {
		var err error
		if final, err = t.tagFinal(messages, in.AddGenerationPrompt); err != nil {
			return "", err
		}
	}
	weight := len(t.src) + weigh(messages) + weigh(in.Tools)
	for _, v := range in.Kwargs { // a sum: the order does not matter
		weight += weigh(v)
	}
	r := &run{most: min(maxOutput, outputFloor+outputShare*weight), out: new(strings.Builder), scope: rootScope(&in, messages), now: in.Now, filters: filters, tests: tests}
	r.exec(t.body)
	if r.err != nil {
		return "", r.err
	}
	out := r.out.String()
	if in.ContinueFinalMessage {
		return cutAtTag(out, final)
	}
	return out, nil
}

func inputError(msg string) error { return &Error{Kind: ErrInput, Msg: msg} }

// rootScope holds the template's variables.
func rootScope(in *Input, messages List) *scope {
	context := new(scope)
	context.set("messages", messages)
	context.set("tools", nil)
	if in.Tools != nil {
		context.set("tools", in.Tools)
	}
	context.set("documents", nil)
	context.set("add_generation_prompt", in.AddGenerationPrompt)
	if in.BosToken != "" {
		context.set("bos_token", in.BosToken)
	}
	if in.EosToken != "" {
		context.set("eos_token", in.EosToken)
	}
	for name, v := range in.Kwargs { // distinct names: the order does not matter
		context.set(name, v)
	}
	return &scope{parent: context}
}

func aliasReasoning(m *Dict) *Dict {
	for _, field := range reasoningFields {
		v, _ := m.Get(field)
		if v == nil {
			continue
		}
		out := NewDict("thinking", v)
		for i := range m.Len() {
			out.put(m.At(i))
		}
		out.Set("reasoning_content", v)
		return out
	}
	return m
}

// tagFinal puts continueTag behind the last message's text, in place in
// messages, and returns that text.
func (t *Template) tagFinal(messages List, addPrompt bool) (string, error) {
	if addPrompt {
		return "", inputError("add_generation_prompt and continue_final_message exclude each other")
	}
	if len(messages) == 0 {
		return "", inputError("continue_final_message needs a message")
	}
	if !strings.Contains(t.src, "content") {
		return "", inputError("the chat template reads no content that could be continued")
	}
	last := messages[len(messages)-1].(*Dict).clone()
	messages[len(messages)-1] = last
	content, _ := last.Get("content")
	switch c := content.(type) {
	case string:
		last.Set("content", c+continueTag)
		return c, nil
	case List:
		parts := append(List(nil), c...)
		for i := len(parts) - 1; i >= 0; i-- {
			part, ok := parts[i].(*Dict)
			if !ok {
				continue
			}
			if text, ok := part.Get("text"); ok {
				s, isString := text.(string)
				if !isString {
					break
				}
				part = part.clone()
				part.Set("text", s+continueTag)
				parts[i] = part
				last.Set("content", parts)
				return s, nil
			}
		}
	}
	return "", inputError("continue_final_message is set, but the last message has no text to continue")
}

// cutAtTag ends the prompt where the final message's text ends.
func cutAtTag(out, final string) (string, error) {
	tag := strings.TrimRight(continueTag, " ")
	at := strings.LastIndex(out, tag)
	if at < 0 || !strings.Contains(out, strings.TrimFunc(final, isSpace)) {
		return "", inputError("continue_final_message is set, but the template drops text of the last message")
	}
	if strings.HasPrefix(out[at:], continueTag) {
		return out[:at], nil
	}
	return strings.TrimRightFunc(out[:at], isSpace), nil
}
