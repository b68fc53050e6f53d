package render

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render/jinja"
	"github.com/tandem-serving/tandem/gateway/render/parse"
	"github.com/tandem-serving/tandem/gateway/render/parse/args"
)

// ChooseFormat sets the format of the model's tool calls and reasoning. The names are those of
// parsers, empty for what the chat template shows, or parse.None. A model without a chat template
// has no format.
func (t *TextModel) ChooseFormat(tools, reasoning string) (parse.Choice, error) {
	const because = "there is no chat template"
	if t.chat == nil {
		return parse.Choice{Format: &parse.Format{}, ToolsBecause: because, ReasoningBecause: because}, nil
	}
	c, err := parse.Choose(parse.Evidence{Template: t.template, Probe: probe(t.chat), Vocabulary: t.tok.Added}, tools, reasoning)
	if err == nil && c.Tools()+c.Reasoning() != "" {
		t.format = c.Format
	}
	return c, err
}

// Format returns how the model writes tool calls and reasoning; nil: it writes text alone.
func (t *TextModel) Format() *parse.Format { return t.format }

// probe renders the call of the probe by a template, in the first of several forms of a chat that
// the template accepts; empty: it accepts none.
func probe(template *jinja.Template) string {
	tools := jinja.List{jinja.NewDict("type", "function", "function", jinja.NewDict(
		"name", "other_fn", "description", "Does something.",
		"parameters", jinja.NewDict("type", "object", "properties", jinja.NewDict("x", jinja.NewDict("type", "string", "description", "A value.")), "required", jinja.List{"x"}),
	))}
	for form := range 16 {
		content, id, answered := jinja.Value(""), parse.ProbeID, form&1 == 0
		if form&2 != 0 {
			id = parse.ProbeShortID
		}
		if form&4 != 0 {
			content = nil
		}
		args := jinja.Value(jinja.NewDict("probe_key", "probe_val"))
		if form&8 != 0 {
			args = parse.ProbeArguments
		}
		call := jinja.NewDict("id", id, "type", "function", "function", jinja.NewDict("name", parse.ProbeName, "arguments", args))
		messages := jinja.List{
			jinja.NewDict("role", "user", "content", "Hi"),
			jinja.NewDict("role", "assistant", "content", content, "tool_calls", jinja.List{call}),
		}
		if answered {
			messages = append(messages, jinja.NewDict("role", "tool", "tool_call_id", id, "name", "other", "content", "1"))
		}
		text, err := template.Render(jinja.Input{Messages: messages, Tools: tools, BosToken: "<s>", EosToken: "</s>", Now: time.Unix(1e9, 0)})
		if err == nil && strings.Contains(text, parse.ProbeName) && strings.Contains(text, "probe_val") {
			return text
		}
	}
	return ""
}

// maxGeneration bounds, in bytes, what a template adds to a prompt for the answer.
const maxGeneration = 512

// starts returns where in an answer a rendered prompt ends.
func (t *TextModel) starts(r *openai.Request, in jinja.Input, prompt string) parse.Start {
	switch {
	case t.format == nil:
		return parse.AtBeginning
	case t.reasons(r, in, prompt):
		return parse.InReasoning
	case r.ContinueFinal && t.format.Wraps():
		return parse.InContent
	case !r.AddGenerationPrompt:
		return parse.AtBeginning
	}
	return t.format.StartOf(prompt[max(0, len(prompt)-maxGeneration):])
}

// reasons reports whether the answer to a rendered prompt begins within reasoning. Only the part of
// the prompt counts that the template added for the answer, because messages may contain markers.
// It is found by a second rendering, which only prompts need that end with a marker.
func (t *TextModel) reasons(r *openai.Request, in jinja.Input, prompt string) bool {
	f := t.format
	switch {
	case f.Reasoning() == "":
		return false
	case r.ContinueFinal:
		return f.StartsInReasoning(openai.LastContent(r.Messages, "assistant"))
	case !r.AddGenerationPrompt || !f.StartsInReasoning(prompt[max(0, len(prompt)-maxGeneration):]):
		return false
	}
	in.AddGenerationPrompt = false
	without, err := t.chat.Render(in)
	if err != nil {
		return false // the template needs what was asked for
	}
	same := 0
	for same < min(len(prompt), len(without)) && prompt[same] == without[same] {
		same++
	}
	if same == len(prompt) { // the template adds the same in any case
		same = strings.LastIndexByte(strings.TrimRight(prompt, "\n"), '\n') + 1
	}
	return f.StartsInReasoning(prompt[same:])
}

// CheckTools refuses a request for calls if the model's format is not known, or calls are off.
func (m *Model) CheckTools(r *openai.Request, off bool) *openai.Error {
	switch {
	case r.Functions == nil || r.Calls.None:
		return nil
	case off:
		return openai.BadRequest("tools", `tools: this gateway does not read tool calls (--enable-auto-tool-choice=false): set tool_choice to "none"`)
	case m.Text == nil || m.Text.format == nil || m.Text.format.Tools() == "":
		return openai.BadRequest("tools", `tools: the format of tool calls of model %q is not known: set --tool-call-parser at the gateway, or tool_choice to "none"`, openai.Clip(m.Name, 200))
	}
	return nil
}

// maxSchemas bounds, in bytes, the schemas of which a grammar is made: it holds several copies of
// them while it is built. The compilation accepts no more.
var maxSchemas = grammar.DefaultLimits().SourceBytes

// ConstrainCalls sets the request's grammar to one of answers in the model's format, if calls
// depend on a grammar, or if the model writes more than the content that the client's grammar has:
// reasoning before it, tags around it, or messages on channels. start is that of the prompts. JSON
// that the request demands of its answer is one of an answer without calls, and has no effect if
// calls are forced.
func (m *Model) ConstrainCalls(r *openai.Request, start parse.Start) *openai.Error {
	functions := r.Functions
	if !r.Constrained() {
		if !m.surrounds(r, start) {
			return nil
		}
		functions = nil
	}
	forced := r.Calls.Required || r.Calls.Name != ""
	param := "tools"
	switch {
	case functions == nil:
		param, forced = r.Grammar.Param, false
	case forced:
		param = "tool_choice"
	case r.Calls.One:
		param = "parallel_tool_calls"
	case !r.HasStrict():
		param = r.Grammar.Param
	}
	c := parse.Constraint{Text: !forced, One: r.Calls.One || r.Calls.Name != "", Start: start, Types: ArgumentTypes(r.Functions)}
	size := 0
	switch g := r.Grammar; {
	case g == nil:
	case functions != nil && !g.IsJSON():
		return openai.BadRequest(param, "%s and %s both constrain the answer: send one of them", param, g.Param)
	case forced: // an answer of calls has no text that could be JSON
	default:
		if size = g.Bytes(); size <= maxSchemas {
			c.Content = contentFormat(&g.Source)
		}
		if c.Content == nil && (functions == nil || size <= maxSchemas) { // its compilation is refused
			return nil
		}
	}
	for i, f := range functions {
		if r.Calls.Name != "" && r.Calls.Name != f.Name {
			continue
		}
		strict := forced
		if f.Strict != nil {
			strict = *f.Strict
		}
		if strict {
			size += len(f.Parameters)
		}
		c.Tools = append(c.Tools, parse.Tool{Index: i, Name: f.Name, Parameters: f.Parameters, Strict: strict})
	}
	if size > maxSchemas {
		return openai.BadRequest(param, "%s: the schemas have %d bytes, at most %d are compiled: shorten them", param, size, maxSchemas)
	}
	text, special, err := m.Text.format.Grammar(c)
	if err != nil {
		return openai.BadRequest(param, "%s: %s", param, err)
	}
	g := &openai.Grammar{Source: grammar.Source{Kind: grammar.StructuralTag, Text: text, Special: special}, Param: param, Whole: true, Own: r.Grammar}
	if g.Own != nil {
		g.Compact, g.Lead = g.Own.Compact, functions == nil && !m.Text.format.Channels() && !m.Text.format.Wraps()
		if g.Lead && len(text) > maxSchemas { // only as a part it is too long
			return nil
		}
	}
	r.Grammar = g
	return nil
}

// surrounds reports whether the model writes more than the content that the grammar of a chat has.
// Reasoning may precede the content if tokens mark it, which no content can have.
func (m *Model) surrounds(r *openai.Request, start parse.Start) bool {
	if m.Text == nil || m.Text.format == nil || r.Endpoint != openai.Chat || !r.AddGenerationPrompt || r.Grammar == nil || r.Grammar.Kind == grammar.StructuralTag {
		return false
	}
	f := m.Text.format
	return f.Channels() || f.Wraps() || start == parse.AtBeginning && f.Thinks() && !m.Text.dropsSpaces()
}

// dropsSpaces reports whether the decoder drops spaces at the beginning of an answer. Nodes find
// such spaces at the beginning of the client's grammar only.
func (t *TextModel) dropsSpaces() bool { return t.tok != nil && t.tok.LeadingSpaces() > 0 }

// contentFormat returns a grammar as a format of a structural tag; nil: it is no JSON where it has
// to be, or a structural tag.
func contentFormat(src *grammar.Source) []byte {
	quoted := func(head string, s []byte) []byte { return append(args.AppendQuoted([]byte(head), s), '}') }
	switch src.Kind {
	case grammar.JSONSchema:
		if !json.Valid(src.Text) {
			return nil
		}
		return append(append([]byte(`{"type":"json_schema","json_schema":`), src.Text...), '}')
	case grammar.JSONObject:
		return []byte(`{"type":"json_schema","json_schema":{"type":"object"}}`)
	case grammar.Regex:
		return quoted(`{"type":"regex","pattern":`, src.Text)
	case grammar.EBNF:
		return quoted(`{"type":"grammar","grammar":`, src.Text)
	case grammar.Lark:
		return quoted(`{"type":"lark","grammar":`, src.Text)
	case grammar.Choice:
		out := []byte(`{"type":"choice","values":[`)
		for i, s := range src.Choices {
			if i > 0 {
				out = append(out, ',')
			}
			out = args.AppendQuoted(out, []byte(s))
		}
		return append(out, "]}"...)
	}
	return nil
}

// BoundThinking sets the request's grammar to one that bounds the tokens of reasoning, if the
// request has a bound. start is as in ConstrainCalls, which precedes.
func (m *Model) BoundThinking(r *openai.Request, start parse.Start) *openai.Error {
	const param = "thinking_token_budget"
	if r.ThinkingBudget == nil {
		return nil
	}
	var begin, end string
	if m.Text != nil && m.Text.format != nil {
		begin, end = m.Text.format.ThinkingTokens()
	}
	switch {
	case end == "":
		return openai.BadRequest(param, "%s needs reasoning that a token of the vocabulary ends, which model %q does not have: leave it out", param, openai.Clip(m.Name, 200))
	case r.IgnoreEOS:
		return openai.BadRequest(param, "%s and ignore_eos exclude each other", param)
	}
	quoted := func(s string) string { return string(args.AppendQuoted(nil, []byte(s))) }
	head := fmt.Sprintf(`{"thinking":{"begin":%s,"end":%s,"tokens":%d,"open":%t},`, quoted(begin), quoted(end), *r.ThinkingBudget, start == parse.InReasoning)
	if r.Grammar == nil {
		r.Grammar = &openai.Grammar{Source: grammar.Source{Kind: grammar.StructuralTag, Text: []byte(head + `"format":{"type":"anything"}}`)}, Param: param, Whole: true}
		return nil
	}
	g := r.Grammar
	switch {
	case g.Bytes() > maxSchemas: // its compilation is refused
		return nil
	case g.Whole:
		g.Text, g.Lead = append([]byte(head), g.Text[1:]...), false
		return nil
	case start != parse.InReasoning: // the grammar has no reasoning
		return nil
	case g.Kind == grammar.StructuralTag:
		return openai.BadRequest(param, "%s and %s exclude each other", param, g.Param)
	}
	content := contentFormat(&g.Source)
	if content == nil { // its compilation is refused
		return nil
	}
	whole := &openai.Grammar{Param: g.Param, Whole: true, Own: g}
	whole.Kind, whole.Compact, whole.Special = grammar.StructuralTag, g.Compact, []string{end}
	whole.Text = fmt.Appendf(nil, `%s"rules":{"content":%s},"format":{"type":"sequence","elements":[{"type":"any_text","excludes":[%s]},{"type":"const_string","value":%s},{"type":"rule","name":"content"}]}}`,
		head, content, quoted(end), quoted(end))
	r.Grammar = whole
	return nil
}

// ArgumentTypes returns the types of the functions' parameters, by which answers are parsed.
func ArgumentTypes(functions []openai.Function) *args.Tools {
	tools := make([]args.Tool, len(functions))
	for i, f := range functions {
		tools[i] = args.Tool{Name: f.Name, Parameters: f.Parameters}
	}
	return args.NewTools(tools)
}
