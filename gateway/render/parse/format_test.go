package parse

import (
	"slices"
	"strings"
	"testing"
)

// The names of vLLM's parsers are known, except those of formats that no row has.
func TestNames(t *testing.T) {
	without := []string{"minimax_m3", "kimi_k3", "inkling"}
	for _, name := range strings.Fields(`deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 cohere_command3 cohere_command4 ernie45 glm45
		glm47 granite-20b-fc granite granite4 hermes poolside_v1 hunyuan_a13b hy_v3 internlm jamba lfm2 kimi_k2 kimi_k3 llama3_json
		llama4_json llama4_pythonic longcat mimo minimax_m2 minimax_m3 minicpm5 mistral olmo3 openai phi4_mini_json pythonic
		qwen3_coder qwen3_xml seed_oss step3 step3p5 inkling xlam gigachat3 functiongemma gemma4 apertus solar_open2`) {
		if _, err := NewFormat(name, "", nil); err != nil != slices.Contains(without, name) {
			t.Errorf("tool call parser %s: %v", name, err)
		}
	}
	without = []string{"kimi_k3", "inkling"}
	for _, name := range strings.Fields(`deepseek_r1 deepseek_v3 deepseek_v4 poolside_v1 cohere_command3 cohere_command4 ernie45 gemma4 glm45
		glm47 openai_gptoss granite holo2 hunyuan_a13b hy_v3 kimi_k2 kimi_k3 mimo minimax_m2 minimax_m2_append_think minimax_m3
		mistral nemotron_v3 olmo3 qwen3 seed_oss step3 step3p5 inkling solar_open2`) {
		if _, err := NewFormat("", name, nil); err != nil != slices.Contains(without, name) {
			t.Errorf("reasoning parser %s: %v", name, err)
		}
	}
	for _, name := range ToolParsers() {
		if _, err := NewFormat(name, "", nil); err != nil {
			t.Error(err)
		}
	}
	for _, name := range ReasoningParsers() {
		if _, err := NewFormat("", name, nil); err != nil {
			t.Error(err)
		}
	}
	_, err := NewFormat("luck", "", nil)
	if err == nil || !strings.Contains(err.Error(), `unknown tool call parser "luck": known are `) || !strings.Contains(err.Error(), "hermes, ") {
		t.Error(err)
	}
}

// The last marker of reasoning at the end of a prompt decides whether the answer begins with it.
func TestStartsInReasoning(t *testing.T) {
	f, err := NewFormat("", "qwen3", nil)
	if err != nil {
		t.Fatal(err)
	}
	for generation, want := range map[string]bool{
		"":                                 false,
		"<|im_start|>assistant\n":          false,
		"<|im_start|>assistant\n<think>\n": true,
		"<|im_start|>assistant\n<think>\n\n</think>\n\n": false,
		"<｜Assistant｜></think>":                          false,
		"</think>a<think>b":                              true,
	} {
		if got := f.StartsInReasoning(generation); got != want {
			t.Errorf("%q: %v", generation, got)
		}
	}
}

// Tokens of reasoning are counted from the first one to the marker of its end.
func TestReasoningTokens(t *testing.T) {
	for _, c := range []struct {
		format string
		open   bool
		tokens []string
		want   int
	}{
		{"qwen3", false, []string{"<think>", "a", "b", "</think>", "c"}, 4},
		{"qwen3", true, []string{"a", "b", "</think>", "c"}, 3},
		{"qwen3", true, []string{"a", "b"}, 2},
		{"qwen3", false, []string{"a", "</think>", "b"}, 0},
		{"openai_gptoss", false, []string{"<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "c"}, 4},
	} {
		f, err := NewFormat("", c.format, vocabulary)
		if err != nil {
			t.Fatal(err)
		}
		p := f.NewParser(Options{Reasoning: c.open})
		for _, text := range c.tokens {
			id, ok := vocabulary(text)
			if !ok {
				id = 7
			}
			p.Push(nil, id, text)
		}
		if got := p.ReasoningTokens(); got != c.want {
			t.Errorf("%s: %d tokens of reasoning in %q, want %d", c.format, got, c.tokens, c.want)
		}
	}
}

// Ids have the form that templates expect, depend on the seed and the call, and on nothing else.
func TestIDs(t *testing.T) {
	for _, c := range []struct {
		parser, prefix string
		length         int
	}{{"hermes", "call_", 29}, {"mistral", "", 9}, {"kimi_k2", "functions.f:3", 13}} {
		f, err := NewFormat(c.parser, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		id := func(seed uint64, call int) string { return string(f.IDs().AppendID(nil, "f", seed, call)) }
		a := id(1, 3)
		if len(a) != c.length || !strings.HasPrefix(a, c.prefix) || a != id(1, 3) || a == id(1, 4) || a == id(2, 3) && c.parser != "kimi_k2" {
			t.Errorf("%s: %s, %s, %s", c.parser, a, id(1, 4), id(2, 3))
		}
	}
}

func TestChoose(t *testing.T) {
	const chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
	for _, c := range []struct {
		name             string
		e                Evidence
		tools, reasoning string // flags
		want, because    string
	}{
		{name: "nothing", want: " ", because: "shows no format"},
		{name: "probe", e: Evidence{Template: "[TOOL_CALLS]", Probe: chat + "<tool_call>\n{\"name\": \"probe_fn\", \"arguments\": {\"probe_key\": \"probe_val\"}}\n</tool_call>"}, want: "hermes ", because: "writes calls"},
		{name: "array", e: Evidence{Probe: chat + "<tool_call>[{\"name\": \"probe_fn\", \"arguments\": {\"probe_key\": \"probe_val\"}}]"}, want: "granite ", because: "writes calls"},
		{name: "example", e: Evidence{Template: "<tool_call> \"arguments\" <think>", Probe: "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>" + chat + "probe_fn"}, want: "hermes qwen3", because: "contains <tool_call>"},
		{name: "vocabulary", e: Evidence{Vocabulary: func(s string) (int32, bool) { return 5, strings.Contains(s, "tool_calls_section") }}, want: "kimi_k2 ", because: "contains <|tool_calls_section_begin|>"},
		{name: "flags", e: Evidence{Probe: chat + "functools"}, tools: "glm47", reasoning: "deepseek_r1", want: "glm45 deepseek_r1", because: "flag"},
		{name: "python", e: Evidence{Probe: chat + "[probe_fn(probe_key=\"probe_val\")]<|im_end|>"}, want: "pythonic ", because: "writes calls"},
		{name: "other values", e: Evidence{Probe: chat + "{\"function\": {\"name\": \"probe_fn\", \"parameters\": {\"probe_key\": \"probe_val\"}}}"}, want: " ", because: "shows no format"},
	} {
		got, err := Choose(c.e, c.tools, c.reasoning)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if s := got.Tools() + " " + got.Reasoning(); s != c.want || !strings.Contains(got.ToolsBecause, c.because) {
			t.Errorf("%s: %q because %s, want %q", c.name, s, got.ToolsBecause, c.want)
		}
	}
	if _, err := Choose(Evidence{}, "luck", ""); err == nil {
		t.Error("an unknown parser is chosen")
	}
}
