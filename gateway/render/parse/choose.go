package parse

import (
	"bytes"
	"slices"
	"strings"
)

// The call of the probe. A caller of Choose renders a chat in which an assistant's message has this
// call and no text. Templates differ in what they accept, so that it tries several forms: each of
// the ids, the arguments as an object and as text, with and without the message of a tool.
const (
	ProbeName      = "probe_fn"
	ProbeArguments = `{"probe_key":"probe_val"}`
	ProbeID        = "functions.probe_fn:0" // of which Kimi K2's template makes the name
	ProbeShortID   = "call00000"            // for Mistral's templates, which refuse others
)

// Evidence is what is known of a model.
type Evidence struct {
	Template   string // its chat template; empty: it has none
	Probe      string // the chat with the call of the probe, rendered; empty: the template fails
	Vocabulary Vocabulary
}

// Choice is a Format with the reasons for it, as a start reports them.
type Choice struct {
	*Format
	ToolsBecause, ReasoningBecause string
}

// Choose returns the format of a model. Names that are given, by flags, are taken. Otherwise the
// format of calls is the first row that reads the call in the probe, or else the one whose markers
// the template contains. A model whose template shows no format has none.
func Choose(e Evidence, tools, reasoning string) (Choice, error) {
	c := Choice{ToolsBecause: "it is set by flag", ReasoningBecause: "it is set by flag"}
	if tools == "" {
		tools, c.ToolsBecause = e.tools()
	}
	if reasoning == "" {
		reasoning, c.ReasoningBecause = e.reasoning(tools)
	}
	var err error
	c.Format, err = NewFormat(tools, reasoning, e.Vocabulary)
	return c, err
}

func (e *Evidence) tools() (name, because string) {
	for _, whole := range []bool{true, false} {
		for i := range rows {
			if r := &rows[i]; (!whole || r.marked(e.Probe)) && r.reads(e.Probe) {
				return r.name, "the chat template writes calls in this format"
			}
		}
	}
	for _, r := range rules {
		if marker := r.matches(e); marker != "" {
			return r.row, "the chat template contains " + marker
		}
	}
	return "", "the chat template shows no format of tool calls"
}

// marked reports whether a rendered chat has the row's markers of a section and of a call.
func (r *row) marked(probe string) bool {
	contains := func(s string) bool { return strings.Contains(probe, s) }
	return contains(r.section) && (len(r.call) == 0 || slices.ContainsFunc(r.call, contains))
}

// reads reports whether a parser of the row finds the call of the probe in a rendered chat.
func (r *row) reads(probe string) bool {
	at := strings.Index(probe, ProbeName)
	if at < 0 {
		return false
	}
	starts := []int{0}
	switch {
	case r.args == argsHarmony:
		starts[0] = strings.LastIndex(probe[:at], "<|start|>")
	case r.bare != 0:
		// The bracket is at the beginning of the message: behind a token or at the beginning of a line.
		if i := strings.LastIndexByte(probe[:at], r.bare); i >= 0 && (i == 0 || strings.IndexByte(">]\n", probe[i-1]) >= 0) {
			starts = append(starts, i)
		}
		if len(r.call) == 0 {
			starts = starts[1:]
		}
	}
	f := Format{row: *r}
	f.compile(nil)
	for _, start := range starts {
		if start >= 0 && f.readsProbe(probe[start:]) {
			return true
		}
	}
	return false
}

// readsProbe reports whether a text has the call of the probe.
func (f *Format) readsProbe(text string) bool {
	p := f.NewParser(Options{})
	var args []byte
	found := false
	deltas := p.Push(nil, -1, text)
	for _, d := range p.Finish(deltas) {
		switch d.Kind {
		case CallStart:
			found, args = d.Name == ProbeName, args[:0]
		case Arguments:
			args = append(args, d.Text...)
		case CallEnd:
			args = bytes.ReplaceAll(args, []byte(`: "`), []byte(`:"`))
			if found && !d.Incomplete && string(bytes.Join(bytes.Fields(args), nil)) == ProbeArguments {
				return true
			}
		}
	}
	return false
}

// rule names the row of templates that contain all of some texts.
type rule struct {
	row  string
	with []string
}

// rules decide about templates that do not render the probe, the most specific first.
var rules = []rule{
	{"openai", []string{"<|channel|>", "<|message|>"}},
	{"gemma4", []string{"<|tool_call>"}},
	{"functiongemma", []string{"<start_function_call>"}},
	{"deepseek_v4", []string{"<｜DSML｜tool_calls>"}},
	{"deepseek_v32", []string{"<｜DSML｜function_calls>"}},
	{"deepseek_v3", []string{"<｜tool▁calls▁begin｜>", "```json"}},
	{"deepseek_v31", []string{"<｜tool▁calls▁begin｜>"}},
	{"kimi_k2", []string{"<|tool_calls_section_begin|>"}},
	{"minimax_m2", []string{"<minimax:tool_call>"}},
	{"step3", []string{"<steptml:"}},
	{"glm45", []string{"<arg_key>", "<arg_value>"}},
	{"seed_oss", []string{"<seed:tool_call>"}},
	{"qwen3_coder", []string{"<function=", "<parameter="}},
	{"minicpm5", []string{"<function name=", "<param name="}},
	{"lfm2", []string{"<|tool_call_start|>"}},
	{"mistral", []string{"[TOOL_CALLS]", "[ARGS]"}},
	{"mistral_array", []string{"[TOOL_CALLS]"}},
	{"cohere_command3", []string{"<|START_ACTION|>"}},
	{"internlm", []string{"<|action_start|>"}},
	{"phi4_mini_json", []string{"functools["}},
	{"longcat", []string{"<longcat_tool_call>"}},
	{"apertus", []string{"<|tools_prefix|>"}},
	{"olmo3", []string{"<function_calls>"}},
	{"nemotron_json", []string{"<TOOLCALL>"}},
	{"jamba", []string{"<tool_calls>["}},
	{"granite", []string{"<|tool_call|>"}},
	{"hermes", []string{"<tool_call>", `"arguments"`}},
	{"llama3_json", []string{"<|python_tag|>"}},
	{"llama3_json", []string{`"parameters": `, "ipython"}},
	{"pythonic", []string{"func_name1(params"}},
}

// matches returns the first text of the rule if the template has all of them. Tokens that only the
// vocabulary has count for formats with sections, whose templates may write none of their markers.
func (r *rule) matches(e *Evidence) string {
	for _, s := range r.with {
		if !strings.Contains(e.Template, s) {
			if r.row != "kimi_k2" || e.Vocabulary == nil {
				return ""
			}
			if _, ok := e.Vocabulary(s); !ok {
				return ""
			}
		}
	}
	return r.with[0]
}

func (e *Evidence) reasoning(tools string) (name, because string) {
	if tools == "openai" {
		return "openai_gptoss", "it belongs to the format of tool calls"
	}
	for i := range thoughts {
		t := &thoughts[i]
		if len(t.open) == 0 || t.newline && t.prefix == "" {
			continue // others have the same markers
		}
		// Of two formats with the same markers, the second is for rows whose calls do not end reasoning.
		if t.name == "qwen3" && !endsReasoning(tools) {
			continue
		}
		if marker := e.has(t); marker != "" {
			return t.name, "the chat template or the vocabulary contains " + marker
		}
	}
	return "", "the chat template shows no reasoning"
}

// endsReasoning reports whether models with a format of calls end their reasoning by a call.
func endsReasoning(tools string) bool {
	r := find(rows, tools, toolAliases, func(r *row) string { return r.name })
	return r != nil && (r.name == "hermes" || r.name == "qwen3_coder" || r.name == "kimi_k2")
}

// has returns a marker of reasoning that the template contains, or that the vocabulary has as a
// pair of special tokens; empty: it has none.
func (e *Evidence) has(t *thinking) string {
	for _, s := range t.tags {
		if !strings.Contains(e.Template, s) {
			return ""
		}
	}
	for i, s := range t.open {
		end := t.close[min(i, len(t.close)-1)]
		if strings.Contains(e.Template, s) || strings.Contains(e.Template, end) {
			return s
		}
		if e.Vocabulary != nil {
			_, opens := e.Vocabulary(s)
			if _, ends := e.Vocabulary(end); opens && ends {
				return s
			}
		}
	}
	return ""
}
