package jinja

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// Template is a parsed chat template. It is immutable and safe for concurrent use.
type Template struct {
	src          string
	body         []stmt
	contentParts bool
}

// Parse parses a chat template. The error, if any, is an *Error.
func Parse(src string) (t *Template, err error) {
	defer catch(&err)
	if len(src) > maxSource {
		fail(ErrLimit, 0, "the template is too long")
	}
	p := &parser{toks: lex(src), contentNames: map[string]bool{}}
	return &Template{src: src, body: p.body(), contentParts: p.contentParts}, nil
}

// ContentParts reports whether the template iterates over the parts of a message's content. If not,
// the caller should join content that is a list of text parts to one string before rendering.
func (t *Template) ContentParts() bool { return t.contentParts }

// Compared returns the string literals that the template compares a variable with, by ==, != or in,
// in their order and without duplicates.
func (t *Template) Compared(variable string) (literals []string) {
	toks := lex(t.src)
	for i := range toks {
		if toks[i].kind != tokName || toks[i].text != variable {
			continue
		}
		rest := toks[i+1:]
		for len(rest) > 2 && rest[0].kind == tokOp && rest[0].text == "|" { // a filter, such as lower
			rest = rest[2:]
		}
		for len(rest) > 0 && (rest[0].kind == tokName && (rest[0].text == "not" || rest[0].text == "in") ||
			rest[0].kind == tokOp && slices.Contains([]string{"==", "!=", "[", "("}, rest[0].text)) {
			rest = rest[1:]
		}
		if len(rest) == 0 || rest[0].kind != tokString || &rest[0] == &toks[i+1] {
			continue
		}
		for len(rest) > 0 && (rest[0].kind == tokString || rest[0].kind == tokOp && rest[0].text == ",") {
			if rest[0].kind == tokString && !slices.Contains(literals, rest[0].text) {
				literals = append(literals, rest[0].text)
			}
			rest = rest[1:]
		}
	}
	return literals
}

// Input holds the variables of a render.
type Input struct {
	Messages List // of *Dict, in the order of the chat
	Tools    List // of *Dict; nil: None to the template
	// AddGenerationPrompt asks for the header of the assistant's turn; ContinueFinalMessage for a
	// prompt that ends with the last message's text, so that the model continues it. Not both.
	AddGenerationPrompt  bool
	ContinueFinalMessage bool
	BosToken, EosToken   string           // empty: not defined
	Kwargs               map[string]Value // further variables; they override the ones above
	Now                  time.Time        // for strftime_now; zero: strftime_now fails
	// MaxSteps and MaxOutput, in bytes, are bounds below those of the package; 0: the package's.
	// With MaxOutput, the strings of a render are in proportion to the template and the input.
	MaxSteps, MaxOutput int
}

// reasoningFields are the names of a message's reasoning. As in transformers,
// the first is set from the others, and thinking from it.
var reasoningFields = []string{"reasoning_content", "thinking", "reasoning"}

// continueTag marks the end of the message that is to be continued.
const continueTag = "CONTINUE_FINAL_MESSAGE_TAG "

// Render returns the prompt for in. The error, if any, is an *Error.
func (t *Template) Render(in Input) (prompt string, err error) {
	defer catch(&err)
	messages := make(List, len(in.Messages))
	for i, m := range in.Messages {
		d, ok := m.(*Dict)
		if !ok {
			failInput("message %d is no object", i)
		}
		messages[i] = aliasReasoning(d)
	}
	final := ""
	if in.ContinueFinalMessage {
		final = t.tagFinal(messages, in.AddGenerationPrompt)
	}
	weight := len(t.src) + weigh(messages) + weigh(in.Tools)
	for _, v := range in.Kwargs { // a sum: the order does not matter
		weight += weigh(v)
	}
	r := &run{most: min(cmp.Or(in.MaxOutput, maxOutput), maxOutput, outputFloor+outputShare*weight), maxSteps: min(cmp.Or(in.MaxSteps, maxSteps), maxSteps), out: new(strings.Builder), scope: rootScope(&in, messages), now: in.Now, filters: filters, tests: tests}
	if r.maxMade = maxMade; in.MaxOutput > 0 {
		r.maxMade = min(maxMade, madeShare*r.most)
	}
	r.exec(t.body)
	if in.ContinueFinalMessage {
		return cutAtTag(r.out.String(), final), nil
	}
	return r.out.String(), nil
}

func failInput(format string, args ...any) { fail(ErrInput, 0, format, args...) }

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
			out.Set(m.At(i))
		}
		out.Set("reasoning_content", v)
		return out
	}
	return m
}

// tagFinal appends continueTag to the text of the last of messages, in a copy that replaces it, and
// returns that text.
func (t *Template) tagFinal(messages List, addPrompt bool) string {
	switch {
	case addPrompt:
		failInput("add_generation_prompt and continue_final_message exclude each other")
	case len(messages) == 0:
		failInput("continue_final_message needs a message")
	case !strings.Contains(t.src, "content"):
		failInput("the chat template reads no content that could be continued")
	}
	last := messages[len(messages)-1].(*Dict).clone()
	messages[len(messages)-1] = last
	content, _ := last.Get("content")
	parts, _ := content.(List)
	parts = slices.Clone(parts)
	holder, key := last, "content"
	for i, part := range slices.Backward(parts) {
		if d, ok := part.(*Dict); ok && d.find("text") >= 0 {
			holder, key = d.clone(), "text"
			parts[i] = holder
			last.Set("content", parts)
			break
		}
	}
	v, _ := holder.Get(key)
	text, ok := v.(string)
	if !ok {
		failInput("continue_final_message is set, but the last message has no text to continue")
	}
	holder.Set(key, text+continueTag)
	return text
}

// cutAtTag returns the prompt up to the end of the final message's text.
func cutAtTag(out, final string) string {
	tag := strings.TrimRight(continueTag, " ")
	at := strings.LastIndex(out, tag)
	if at < 0 || !strings.Contains(out, strings.TrimFunc(final, isSpace)) {
		failInput("continue_final_message is set, but the template drops text of the last message")
	}
	if strings.HasPrefix(out[at:], continueTag) {
		return out[:at]
	}
	return strings.TrimRightFunc(out[:at], isSpace)
}
