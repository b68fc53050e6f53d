package parse

import (
	"strings"
	"testing"
)

// sample is a text in a format with its meaning.
type sample struct {
	tools, reasoning string
	open             bool // the prompt ends within reasoning
	text             string
	want             answer
}

// twoCalls are the calls of most samples. In their arguments, braces, brackets, quotes and markers
// within strings are text.
func twoCalls(first, second string) []call {
	return []call{{Name: "find_city", Args: first}, {Name: "now", Args: second}}
}

const (
	rawArgs = `{"q": "a {b] \"c\" é\n</x>", "n": 12345678901234567890, "deep": {"l": [1.50, null]}}`
	ourArgs = `{"q":"a {b] \"c\" é\n</x>","n":12345678901234567890,"deep":{"l": [1.50, null]}}`
)

var samples = []sample{
	{tools: "hermes", reasoning: "qwen3", text: "<think>\nHm.\n</think>\n\nLook: <tool_call>\n{\"name\": \"find_city\", \"arguments\": " + rawArgs + "}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>", want: answer{"Look: ", "Hm.", twoCalls(rawArgs, "{}")}},
	{tools: "hermes", text: "<tool_call>{\"arguments\": " + rawArgs + ", \"name\": \"find_city\"}</tool_call> and <tool_call>{\"name\":\"now\"}", want: answer{" and ", "", twoCalls(rawArgs, "{}")}},
	{tools: "hermes", text: "<tool_call>{\"name\":\"find_city\",\"arguments\":\"{\\\"a\\\": 1}\"}</tool_call><tool_call>{\"name\":\"now\",\"arguments\":null}</tool_call>done", want: answer{"done", "", twoCalls(`{"a": 1}`, "{}")}},
	{tools: "longcat", text: "<longcat_tool_call>{\"name\": \"find_city\", \"arguments\": " + rawArgs + "}</longcat_tool_call><longcat_tool_call>{\"name\": \"now\"}</longcat_tool_call>", want: answer{"", "", twoCalls(rawArgs, "{}")}},
	{tools: "granite-20b-fc", text: "<function_call> {\"name\": \"find_city\", \"arguments\": " + rawArgs + "}\n<function_call> {\"name\": \"now\", \"arguments\": {}}", want: answer{"", "", twoCalls(rawArgs, "{}")}},
	{tools: "llama3_json", text: "<|python_tag|>{\"name\": \"find_city\", \"parameters\": " + rawArgs + "}; {\"name\": \"now\", \"parameters\": {}}", want: answer{"", "", twoCalls(rawArgs, "{}")}},
	{tools: "llama4_json", text: " {\"type\": \"function\", \"name\": \"find_city\", \"parameters\": " + rawArgs + "}\n{\"name\": \"now\", \"arguments\": {}} Bye", want: answer{" Bye", "", twoCalls(rawArgs, "{}")}},
	{tools: "llama3_json", text: "{\"answer\": {\"name\": \"x\"}}", want: answer{Content: "{\"answer\": {\"name\": \"x\"}}"}},
	{tools: "internlm", text: "Well.<|action_start|><|plugin|>\n{\"name\": \"find_city\", \"parameters\": " + rawArgs + "}<|action_end|>\n<|action_start|><|plugin|>{\"name\": \"now\", \"parameters\": {}}<|action_end|>\n", want: answer{"Well.", "", twoCalls(rawArgs, "{}")}},

	{tools: "mistral_array", text: "Ok[TOOL_CALLS] [{\"name\": \"find_city\", \"arguments\": " + rawArgs + ", \"id\": \"abcdefghi\"}, {\"id\": \"123456789\", \"name\": \"now\", \"arguments\": {}}]", want: answer{"Ok", "", []call{{Name: "find_city", Args: rawArgs}, {Name: "now", ID: "123456789", Args: "{}"}}}},
	{tools: "mistral", reasoning: "mistral", text: "[THINK]Hm.[/THINK]Ok[TOOL_CALLS]find_city[ARGS]" + rawArgs + "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}", want: answer{"Ok", "Hm.", []call{{Name: "find_city", Args: rawArgs}, {Name: "now", ID: "123456789", Args: "{}"}}}},
	{tools: "mistral", reasoning: "mistral", text: "[THINK]Hm.[TOOL_CALLS]find_city" + rawArgs + "[TOOL_CALLS][{\"name\":\"now\",\"arguments\":{}}]", want: answer{"", "Hm.", twoCalls(rawArgs, "{}")}},
	{tools: "granite", text: "<|tool_call|>[{\"name\": \"find_city\", \"arguments\": " + rawArgs + "}, {\"name\": \"now\", \"arguments\": {}}]", want: answer{"", "", twoCalls(rawArgs, "{}")}},
	{tools: "granite", reasoning: "granite", text: "Here is my thought process: Hm.\n\nHere is my response:\nYes.<tool_call>[{\"name\": \"find_city\", \"arguments\": " + rawArgs + "},{\"name\":\"now\"}]", want: answer{"Yes.", " Hm.", twoCalls(rawArgs, "{}")}},
	{tools: "phi4_mini_json", text: "functools[{\"name\": \"find_city\", \"arguments\": " + rawArgs + "}, {\"name\": \"now\", \"arguments\": {}}]", want: answer{"", "", twoCalls(rawArgs, "{}")}},
	{tools: "phi4_mini_json", text: "import functools\nfunc", want: answer{Content: "import functools\nfunc"}},
	{tools: "jamba", reasoning: "hunyuan_a13b", text: "<think>\nHm.\n</think>\n<answer>\nYes.<tool_calls>[{\"name\": \"find_city\", \"arguments\": " + rawArgs + "},\n{\"name\": \"now\", \"arguments\": {}}]</tool_calls></answer>", want: answer{"Yes.", "Hm.", twoCalls(rawArgs, "{}")}},
	{tools: "cohere_command3", reasoning: "cohere_command3", text: "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n{\"tool_call_id\": \"0\", \"tool_name\": \"find_city\", \"parameters\": " + rawArgs + "},\n{\"tool_call_id\": \"1\", \"tool_name\": \"now\", \"parameters\": {}}\n]<|END_ACTION|>", want: answer{"", "Hm.", []call{{Name: "find_city", ID: "0", Args: rawArgs}, {Name: "now", ID: "1", Args: "{}"}}}},
	{tools: "apertus", text: "<|tools_prefix|>[{\"find_city\": " + rawArgs + "}, {\"now\": {}}]<|tools_suffix|>", want: answer{"", "", twoCalls(rawArgs, "{}")}},
	{tools: "xlam", text: "[{\"name\": \"find_city\", \"arguments\": " + rawArgs + "}, {\"name\": \"now\", \"arguments\": {}}]", want: answer{"", "", twoCalls(rawArgs, "{}")}},

	{tools: "nemotron_json", text: "<TOOLCALL>[{\"name\": \"find_city\", \"arguments\": " + rawArgs + "}, {\"id\": \"7\", \"type\": \"function\", \"function\": {\"name\": \"now\", \"arguments\": \"{}\"}}]</TOOLCALL>", want: answer{"", "", []call{{Name: "find_city", Args: rawArgs}, {Name: "now", ID: "7", Args: "{}"}}}},
	{tools: "gigachat3", text: "Ok<|function_call|>{\"name\": \"find_city\", \"arguments\": " + rawArgs + "}<|function_call|>{\"name\": \"now\"}", want: answer{"Ok", "", twoCalls(rawArgs, "{}")}},
	{tools: "hunyuan", text: "<tool_calls><tool_call>find_city\n```json\n" + rawArgs + "\n```</tool_call>\n<tool_call>now\n```json\n{}\n```</tool_call></tool_calls>", want: answer{"", "", twoCalls(rawArgs, "{}")}},
	{tools: "llama3_function", text: "Ok<function=find_city>" + rawArgs + "</function>\n<function=now>{}</function>", want: answer{"Ok", "", twoCalls(rawArgs, "{}")}},
	{tools: "hy_v3", text: "<tool_calls>\n<tool_call>find_city<tool_sep>\n<arg_key>q</arg_key>\n<arg_value>a {b] \"c\" é\n</x></arg_value>\n<arg_key>n</arg_key>\n<arg_value>12345678901234567890</arg_value>\n<arg_key>deep</arg_key>\n<arg_value>{\"l\": [1.50, null]}</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>", want: answer{"", "", twoCalls(ourArgs, "{}")}},
	{tools: "longcat_kv", reasoning: "longcat", text: "<longcat_think>Hm.</longcat_think><longcat_tool_call>find_city\n<longcat_arg_key>q</longcat_arg_key>\n<longcat_arg_value>a {b] \"c\" é\n</x></longcat_arg_value>\n<longcat_arg_key>n</longcat_arg_key><longcat_arg_value>12345678901234567890</longcat_arg_value><longcat_arg_key>deep</longcat_arg_key><longcat_arg_value>{\"l\": [1.50, null]}</longcat_arg_value></longcat_tool_call><longcat_tool_call>now</longcat_tool_call>", want: answer{"", "Hm.", twoCalls(ourArgs, "{}")}},
	{tools: "deepseek_v3", reasoning: "deepseek_r1", open: true, text: "Hm.\n</think>\n\nOk<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find_city\n```json\n" + rawArgs + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", want: answer{"Ok", "Hm.", twoCalls(rawArgs, "{}")}},
	{tools: "deepseek_v31", text: "Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find_city<｜tool▁sep｜>" + rawArgs + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", want: answer{"Ok", "", twoCalls(rawArgs, "{}")}},
	{tools: "deepseek_v32", text: "Ok\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"find_city\">\n<｜DSML｜parameter name=\"q\" string=\"true\">a {b] \"c\" é\n</x></｜DSML｜parameter>\n<｜DSML｜parameter name=\"n\" string=\"false\">12345678901234567890</｜DSML｜parameter>\n<｜DSML｜parameter name=\"deep\" string=\"false\">{\"l\": [1.50, null]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>", want: answer{"Ok\n\n", "", twoCalls(ourArgs, "{}")}},
	{tools: "deepseek_v4", text: "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"find_city\">\n<｜DSML｜parameter name=\"q\" string=\"true\">a {b] \"c\" é\n</x></｜DSML｜parameter>\n<｜DSML｜parameter name=\"n\" string=\"false\">12345678901234567890</｜DSML｜parameter>\n<｜DSML｜parameter name=\"deep\" string=\"false\">{\"l\": [1.50, null]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>", want: answer{"", "", twoCalls(ourArgs, "{}")}},
	{tools: "kimi_k2", reasoning: "kimi_k2", text: "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.find_city:0<|tool_call_argument_begin|>" + rawArgs + "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", want: answer{"", "Hm.", []call{{Name: "find_city", ID: "functions.find_city:0", Args: rawArgs}, {Name: "now", ID: "functions.now:1", Args: "{}"}}}},

	{tools: "qwen3_coder", reasoning: "qwen3", open: true, text: "Hm.\n</think>\n\n<tool_call>\n<function=find_city>\n<parameter=q>\na {b] \"c\" é\n</x>\n</parameter>\n<parameter=n>\n12345678901234567890\n</parameter>\n<parameter=deep>\n{\"l\": [1.50, null]}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", want: answer{"", "Hm.", twoCalls(ourArgs, "{}")}},
	{tools: "qwen3_coder", text: "Look <function=find_city><parameter=q>a {b] \"c\" é\n</x><parameter=n>12345678901234567890<parameter=deep>{\"l\": [1.50, null]}</function>\n<function=now></function>", want: answer{"Look ", "", twoCalls(ourArgs, "{}")}},
	{tools: "seed_oss", reasoning: "seed_oss", text: "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=find_city>\n<parameter=q>a {b] \"c\" é\n</x></parameter>\n<parameter=n>12345678901234567890</parameter>\n<parameter=deep>{\"l\": [1.50, null]}</parameter>\n</function>\n</seed:tool_call><seed:tool_call><function=now></function></seed:tool_call>", want: answer{"", "Hm.", twoCalls(ourArgs, "{}")}},
	{tools: "minimax_m2", reasoning: "minimax_m2", text: "<minimax:tool_call>\n<invoke name='find_city'>\n<parameter name=\"q\">a {b] \"c\" é\n</x></parameter>\n<parameter name=n>12345678901234567890</parameter>\n<parameter name=\"deep\">{\"l\": [1.50, null]}</parameter>\n</invoke>\n<invoke name=now>\n</invoke>\n</minimax:tool_call>", want: answer{"", "", twoCalls(ourArgs, "{}")}},
	{tools: "step3", text: "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"find_city\"><steptml:parameter name=\"q\">a {b] \"c\" é\n</x></steptml:parameter><steptml:parameter name=\"n\">12345678901234567890</steptml:parameter><steptml:parameter name=\"deep\">{\"l\": [1.50, null]}</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"now\"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>", want: answer{"", "", twoCalls(ourArgs, "{}")}},
	{tools: "solar_open2", reasoning: "solar_open2", text: "<|think:start|>Hm.<|think:end|><|tool_call:start|>find_city\n<|tool_arg:start|>q<|tool_arg:value|>a {b] \"c\" é\n</x><|tool_arg:end|>\n<|tool_arg:start|>n<|tool_arg:value|>12345678901234567890<|tool_arg:end|>\n<|tool_arg:start|>deep<|tool_arg:value|>{\"l\": [1.50, null]}<|tool_arg:end|>\n<|tool_call:end|><|tool_call:start|>now\n<|tool_call:end|>", want: answer{"", "Hm.", twoCalls(ourArgs, "{}")}},
	{tools: "minicpm5", text: "<function name=\"find_city\"><param name=\"q\">a {b] \"c\" é\n</x></param><param name=\"n\">12345678901234567890</param><param name=\"deep\">{\"l\": [1.50, null]}</param></function>\n<function name=\"now\"></function>", want: answer{"", "", twoCalls(ourArgs, "{}")}},
	{tools: "glm45", reasoning: "glm45", text: "<think>Hm.</think>\n<tool_call>find_city\n<arg_key>q</arg_key>\n<arg_value>a {b] \"c\" é\n</x></arg_value>\n<arg_key>n</arg_key>\n<arg_value>12345678901234567890</arg_value>\n<arg_key>deep</arg_key>\n<arg_value>{\"l\": [1.50, null]}</arg_value>\n</tool_call>\n<tool_call>now</tool_call>", want: answer{"", "Hm.", twoCalls(ourArgs, "{}")}},

	{tools: "pythonic", text: "[find_city(q='a {b] \"c\" é\\n</x>', n=-1.5, deep={'l': [True, None, ('x', .5e)], 2: {}}), now()]", want: answer{"", "", twoCalls(`{"q":"a {b] \"c\" é\n</x>","n":-1.5,"deep":"{'l': [True, None, ('x', .5e)], 2: {}}"}`, "{}")}},
	{tools: "pythonic", text: "Sure:\n[find_city(q=\"\"\"a \"b\" \\\nc\"\"\" 'd', w={'x', 1}, t=(), e='', f=\"\"), now(),]\nDone", want: answer{"Sure:\n\nDone", "", twoCalls(`{"q":"a \"b\" cd","w":["x",1],"t":[],"e":"","f":""}`, "{}")}},
	{tools: "pythonic", text: "[1, 2]\n[link](http://x)\n[f(", want: answer{Content: "[1, 2]\n[link](http://x)\n[f("}},
	{tools: "llama4_pythonic", text: "<|python_start|>[find_city(q='\\u00e9\\x41\\U0001F600\\q', n={'a': {1: None}}), now()]<|python_end|>", want: answer{"", "", twoCalls(`{"q":"\u00e9A😀\\q","n":{"a":{"1":null}}}`, "{}")}},
	{tools: "olmo3", reasoning: "olmo3", text: "<think>Hm.</think><function_calls>find_city(q=\"a\", n=1)\nnow()</function_calls>", want: answer{"", "Hm.", twoCalls(`{"q":"a","n":1}`, "{}")}},
	{tools: "lfm2", text: "<|tool_call_start|>[find_city(q=\"a\", n=1), now()]<|tool_call_end|>Done", want: answer{"Done", "", twoCalls(`{"q":"a","n":1}`, "{}")}},
	{tools: "gemma4", reasoning: "gemma4", text: "<|channel>thought\nHm.<channel|>Ok \n<|tool_call>call:find_city{q:<|\"|>a {b] \"c\" é\n</x><|\"|>,n:-1,deep:{<|\"|>l<|\"|>:[1.50,null,<|\"|>}<|\"|>],m:{}}}<tool_call|><|tool_call>call:now{}<tool_call|>", want: answer{"Ok", "Hm.", twoCalls(`{"q":"a {b] \"c\" é\n</x>","n":-1,"deep":{"l":[1.50,null,"}"],"m":{}}}`, "{}")}},
	{tools: "functiongemma", text: "<start_function_call>call:find_city{q:<escape>a<escape>,b:hello world}<end_function_call><start_function_call>call:now{}<end_function_call>", want: answer{"", "", twoCalls(`{"q":"a","b":"hello world"}`, "{}")}},

	{tools: "openai", text: "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look: <|end|><|start|>assistant<|channel|>commentary to=functions.find_city <|constrain|>json<|message|>" + rawArgs + "<|call|><|start|>assistant to=functions.now<|channel|>commentary<|message|><|call|>", want: answer{"Look: ", "Hm.", twoCalls(rawArgs, "{}")}},
	{tools: "openai", text: "<|channel|>analysis to=functions.find_city code<|message|>" + rawArgs + "<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", want: answer{"Yes.", "", []call{{Name: "find_city", Args: rawArgs}}}},
	{tools: "openai", text: "assistant<|channel|>commentary<|channel|>commentary to=browser.open<|message|>text<|call|>", want: answer{Content: "text"}},
	{tools: "openai", text: "Just an answer.", want: answer{Content: "Just an answer."}},
	{reasoning: "kimi_vl", text: "◁think▷Hm.◁/think▷Ok ◁", want: answer{Content: "Ok ◁", Reasoning: "Hm."}},
	{reasoning: "minimax_m3", text: "<mm:think>Hm.</mm:think>Ok", want: answer{Content: "Ok", Reasoning: "Hm."}},
	{reasoning: "step3p5", text: "<think>Hm.\n</think>\nOk", want: answer{Content: "\nOk", Reasoning: "Hm."}},
	{reasoning: "hunyuan_a13b", text: "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", want: answer{Content: "Yes.\n", Reasoning: "Hm."}},
	{reasoning: "qwen3", text: "\n\n", want: answer{Content: "\n\n"}},
	{tools: "hermes", text: "<tool_call>{\"name\":\"find_city\",\"arguments\":{\"a\":1</tool_call>More<tool_call>{\"name\":\"now\",\"arguments\":{\"b\":{}}</tool_call> end", want: answer{"More end", "", []call{{Name: "find_city", Args: `{"a":1`, Incomplete: true}, {Name: "now", Args: `{"b":{}}`}}}},
	{tools: "mistral", text: "[TOOL_CALLS]find_city{\"a\": [1][TOOL_CALLS]now{}", want: answer{Calls: []call{{Name: "find_city", Args: `{"a": [1]`, Incomplete: true}, {Name: "now", Args: "{}"}}}},
	{tools: "hermes", text: "  \n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"x\": NaN}}\n</tool_call>\n", want: answer{Calls: []call{{Name: "now", Args: `{"x": NaN}`, Incomplete: true}}}},
}

func (s *sample) format(t testing.TB, v Vocabulary) *Format {
	t.Helper()
	f, err := NewFormat(s.tools, s.reasoning, v)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestSamples(t *testing.T) {
	rowsSeen := map[string]bool{}
	for _, s := range samples {
		f := s.format(t, nil)
		rowsSeen[f.Tools()], rowsSeen["reasoning "+f.Reasoning()] = true, true
		got := parse(t, f, Options{Reasoning: s.open}, s.text)
		if !equal(got, s.want) {
			t.Errorf("%s %s: %q:\n got %+v\nwant %+v", s.tools, s.reasoning, s.text, got, s.want)
		}
	}
	for _, r := range rows {
		if !rowsSeen[r.name] {
			t.Errorf("no sample of %s", r.name)
		}
	}
}

func equal(a, b answer) bool {
	if a.Content != b.Content || a.Reasoning != b.Reasoning || len(a.Calls) != len(b.Calls) {
		return false
	}
	for i := range a.Calls {
		if a.Calls[i] != b.Calls[i] {
			return false
		}
	}
	return true
}

// Without tools, the markers of calls are content and those of reasoning are not.
func TestNoTools(t *testing.T) {
	for _, s := range samples {
		f := s.format(t, nil)
		a := parse(t, f, Options{Reasoning: s.open, NoTools: true}, s.text)
		if len(a.Calls) > 0 || !strings.Contains(a.Reasoning, s.want.Reasoning) {
			t.Errorf("%s: %+v", s.text, a)
		}
	}
}
