package render

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/engine/tokenizer"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render/jinja"
	"github.com/tandem-serving/tandem/gateway/render/parse"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// TextModel converts between a model's text and tokens: its tokenizer and its chat template.
type TextModel struct {
	tok      *tokenizer.Tokenizer
	messages *tokenizer.MessageCache // the tokens of chats' earlier messages
	chat     *jinja.Template         // nil: the model has none
	efforts  []string                // values of reasoning_effort that the template knows
	template string                  // its source
	format   *parse.Format           // of tool calls and reasoning; nil: the model writes text alone
	bos, eos string
	longest  int // bytes of the longest token

	RejectSpecial  bool // reject messages of users and tools that contain special tokens
	TrustTemplates bool // run the chat templates of requests

	own     bool // chat is a request's own
	maxText int  // bytes of the prompt, if own; 0: any number
}

// Bounds of a request's own template: steps of a render, and bytes of memory for each byte of the
// source. The conversations of a batch share the steps, but each has at least leastSteps. include
// and the like are syntax errors in all templates.
const (
	ownSteps      = 1_000_000
	leastSteps    = 50_000
	templateBytes = 64
)

// with returns the model with a request's own template. charge is as in Model.Prompts.
func (m *Model) with(template string, charge func(bytes int) *openai.Error) (*TextModel, *openai.Error) {
	if !m.Text.TrustTemplates {
		return nil, openai.BadRequest("chat_template", "chat_template is not supported here (got %q): leave it out; a gateway runs a request's own template only with --trust-request-chat-template",
			openai.Clip(template, 80))
	}
	if fault := charge(templateBytes * len(template)); fault != nil {
		return nil, fault
	}
	chat, err := jinja.Parse(template)
	if err != nil {
		return nil, openai.BadRequest("chat_template", "chat_template: %s", openai.Clip(err.Error(), 500))
	}
	t := *m.Text
	t.chat, t.template, t.efforts, t.own, t.maxText = chat, template, knownEfforts(chat), true, m.MaxText()
	return &t, nil
}

// NewTextModel returns the TextModel of a bundle. template, unless empty, replaces the bundle's
// chat template.
func NewTextModel(b *nodepb.Bundle, template string) (*TextModel, error) {
	tok, err := tokenizer.Load(b.TokenizerJson)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	t := &TextModel{tok: tok, messages: tok.NewMessageCache(0), bos: b.BosToken, eos: b.EosToken, longest: tok.LongestToken()}
	if template == "" {
		template = b.ChatTemplate
	}
	if t.template = template; template != "" {
		if t.chat, err = jinja.Parse(template); err != nil {
			return nil, err
		}
		t.efforts = knownEfforts(t.chat)
	}
	return t, nil
}

// CacheStats returns the hits and misses of the cache of messages' tokens, and its size in bytes.
func (t *TextModel) CacheStats() (hits, misses uint64, bytes int) { return t.messages.Stats() }

// Tokenizer returns the model's tokenizer.
func (t *TextModel) Tokenizer() *tokenizer.Tokenizer { return t.tok }

// Template returns the source of the model's chat template; empty: it has none.
func (t *TextModel) Template() string { return t.template }

// HasTemplate reports whether the model has a chat template.
func (t *TextModel) HasTemplate() bool { return t.chat != nil }

// Tokens returns the tokens of a text.
func (t *TextModel) Tokens(text string, addSpecial bool) []int32 {
	return t.messages.Encode(text, addSpecial)
}

// TokensWithin is Tokens, but calls charge with the bytes that it allocates. It stops at the first
// error of charge and returns it.
func (t *TextModel) TokensWithin(text string, addSpecial bool, charge func(bytes int) *openai.Error) (ids []int32, fault *openai.Error) {
	ids, _ = t.messages.EncodeWithin(text, addSpecial, func(n int) bool {
		fault = charge(n)
		return fault == nil
	})
	return ids, fault
}

// Texts longer than the context can hold are rejected before they are tokenized, because tokenizing
// allocates up to 40 times their bytes. Normalizers shorten texts, for instance by removing spaces.
const (
	normalizedTo = 4         // bytes of a text for each byte after normalizing, at most
	anyText      = 256 << 10 // texts up to this many bytes are always tokenized
)

// Fits returns an error that names param if the model's context cannot hold the text.
func (m *Model) Fits(text, param string) *openai.Error {
	if most := m.MaxText(); most > 0 && len(text) > most {
		return openai.ContextTooLong(param, m.MaxLen, "The prompt has %d bytes of text, more than these can hold: shorten it", len(text))
	}
	return nil
}

// MaxText returns the length in bytes of the longest text that is tokenized; 0: unbounded.
func (m *Model) MaxText() int {
	if m.MaxLen == 0 {
		return 0
	}
	return max(anyText, normalizedTo*m.MaxLen*m.Text.longest)
}

// Decode returns the text of tokens.
func (t *TextModel) Decode(ids []int32, skipSpecial bool) string {
	return t.tok.Decode(ids, skipSpecial)
}

// render applies the chat template to a request's messages. start is where in an answer the text
// ends.
func (t *TextModel) render(r *openai.Request) (text string, start parse.Start, fault *openai.Error) {
	in := jinja.Input{
		AddGenerationPrompt:  r.AddGenerationPrompt,
		ContinueFinalMessage: r.ContinueFinal,
		BosToken:             t.bos,
		EosToken:             t.eos,
		Now:                  time.Now(),
		Kwargs:               map[string]jinja.Value{},
	}
	if t.own {
		in.MaxSteps, in.MaxOutput = max(ownSteps/max(r.Conversations, 1), leastSteps), t.maxText
	}
	raw := r.Messages
	if r.MessageParts != nil && t.chat.ContentParts() {
		raw = r.MessageParts
	}
	messages, err := fromJSON(raw)
	if err != nil {
		return "", 0, t.templateFault(err)
	}
	in.Messages = messages.(jinja.List) // Parse has checked that it is a list
	if t.RejectSpecial {
		if fault := t.checkSpecial(in.Messages); fault != nil {
			return "", 0, fault
		}
	}
	for i, m := range in.Messages {
		in.Messages[i] = normalize(m)
	}
	if r.Tools != nil {
		tools, err := fromJSON(r.Tools)
		if err != nil {
			return "", 0, t.templateFault(err)
		}
		in.Tools = tools.(jinja.List) // Parse has checked that it is a list
	}
	if fault := t.setVariables(in.Kwargs, r); fault != nil {
		return "", 0, fault
	}
	if text, err = t.chat.Render(in); err != nil {
		return "", 0, t.templateFault(err)
	}
	return text, t.starts(r, in, text), nil
}

// setVariables sets the variables that a request gives its template by name. chat_template_kwargs
// override the others.
func (t *TextModel) setVariables(vars map[string]jinja.Value, r *openai.Request) *openai.Error {
	if r.ReasoningEffort != "" {
		vars["reasoning_effort"] = t.effort(r.ReasoningEffort)
		for _, name := range thinkingSwitches {
			vars[name] = r.ReasoningEffort != efforts[0]
		}
	}
	for _, field := range []struct {
		name string
		raw  []byte
	}{{"documents", r.Documents}, {"chat_template_kwargs", r.TemplateArgs}} {
		if field.raw == nil {
			continue
		}
		v, err := fromJSON(field.raw)
		if err != nil {
			return openai.BadRequest(field.name, "%s: %s", field.name, openai.Clip(err.Error(), 500))
		}
		if field.name == "documents" {
			vars["documents"] = v
			continue
		}
		d := v.(*jinja.Dict) // Parse has checked that it is an object
		for i := range d.Len() {
			name, v := d.At(i)
			vars[name.(string)] = v
		}
	}
	return nil
}

// normalize returns a message as templates expect it, by vLLM's rules. Members that are null and
// empty lists of tool calls are left out. Content that is null is empty, as is missing content of
// the assistant. The parts of a tool's answer become one string, and the type of other parts is
// text.
func normalize(message jinja.Value) jinja.Value {
	in, ok := message.(*jinja.Dict)
	if !ok {
		return message
	}
	role, _ := member(in, "role").(string)
	out := new(jinja.Dict)
	for i := range in.Len() {
		name, v := in.At(i)
		switch calls, isList := v.(jinja.List); {
		case name == "content":
			v = normalizeContent(v, role == "tool")
		case v == nil, name == "tool_calls" && isList && len(calls) == 0:
			continue
		case name == "tool_calls" && isList:
			for _, call := range calls {
				parseArguments(call)
			}
		}
		out.Set(name, v)
	}
	if _, ok := out.Get("content"); !ok && role == "assistant" {
		out.Set("content", "")
	}
	return out
}

// normalizeContent returns a message's content as a string, or as a list of parts whose type is
// text. With join, the parts become one string, in which line ends separate them.
func normalizeContent(content jinja.Value, join bool) jinja.Value {
	parts, ok := content.(jinja.List)
	switch {
	case content == nil:
		return ""
	case !ok:
		return content
	}
	texts := make([]string, len(parts))
	for i, part := range parts {
		texts[i], ok = part.(string)
		if kind, _ := member(part, "type").(string); !ok {
			texts[i], _ = member(part, openai.PartText(kind)).(string) // Parse has checked that it is a string
		}
		if ok || member(part, "type") != "text" {
			parts[i] = jinja.NewDict("type", "text", "text", texts[i])
		}
	}
	if join {
		return strings.Join(texts, "\n")
	}
	return parts
}

// parseArguments replaces the arguments of a tool call, JSON text in the API, by the values that
// templates expect. Arguments that are empty, null or missing are an empty object. Text that is not
// JSON stays.
func parseArguments(call jinja.Value) {
	function, ok := member(call, "function").(*jinja.Dict)
	if !ok {
		return
	}
	switch arguments := member(function, "arguments").(type) {
	case nil:
		function.Set("arguments", new(jinja.Dict))
	case string:
		if arguments == "" {
			function.Set("arguments", new(jinja.Dict))
		} else if parsed, err := fromJSON([]byte(arguments)); err == nil {
			function.Set("arguments", parsed)
		}
	}
}

// member returns a member of an object; nil if v is not an object.
func member(v jinja.Value, name string) jinja.Value {
	if d, ok := v.(*jinja.Dict); ok {
		v, _ := d.Get(name)
		return v
	}
	return nil
}

// templateFault returns the client's error for messages that the template cannot render.
func (t *TextModel) templateFault(err error) *openai.Error {
	var e *jinja.Error
	param, whose := "messages", "the model's chat template"
	if t.own {
		param, whose = "chat_template", "the request's chat_template"
	}
	if errors.As(err, &e) && errors.Is(err, jinja.ErrRaised) {
		return openai.BadRequest(param, "%s refuses these messages: %s", whose, openai.Clip(e.Msg, 500))
	}
	return openai.BadRequest(param, "%s cannot render these messages: %s", whose, openai.Clip(err.Error(), 500))
}

// Output returns a Text for one choice of the request.
func (t *TextModel) Output(r *openai.Request) *Text {
	return NewText(t.tok, TextOptions{Stops: r.Stop, IncludeStop: r.IncludeStop, SkipSpecial: r.SkipSpecial, MinTokens: r.MinTokens})
}
