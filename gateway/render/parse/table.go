package parse

// argsKind is how a format writes a call's arguments.
type argsKind uint8

const (
	argsNone     argsKind = iota // the format has no calls
	argsJSON                     // a JSON object behind the name
	argsObject                   // {"name":…,"arguments":{…}}
	argsArray                    // an array of such objects
	argsXML                      // a named element for each parameter
	argsKV                       // an element for a parameter's name, and one for its value
	argsPythonic                 // [f(a=1, b="x"), g()]
	argsGemma                    // f{a:1,b:<|"|>x<|"|>}
	argsHarmony                  // a JSON object as a message to the function
)

// row is a format of tool calls. Each part is a marker of the model's output; empty: the format
// has none. White space between parts is optional.
type row struct {
	name string // as --tool-call-parser
	args argsKind

	section, sectionEnd string   // around all calls
	call                []string // before a call; of argsPythonic before the list
	callEnd             string
	nameOpen            string   // ends what precedes the name
	prefix              []string // of the name, which may be missing
	nameEnd             []string // ends the name; "{" and "\n" do not belong to what follows
	id                  string   // precedes an id behind the name

	param, paramName string // around a parameter's name
	value, valueEnd  string // around its value
	quote            string // around a string of argsGemma

	noise     []string // between calls, and between a call's parts
	tags      []string // around the content, in pairs
	separator byte     // between calls that have no markers
	bare      byte     // begins calls that have no marker, at the beginning of the answer
	ids       IDStyle
	members   [2]string // how models write name and arguments in an object, unless as "name" and "arguments"

	lines     bool // bare begins calls also at the beginning of a line
	loose     bool // calls may come without a section
	needsArgs bool // an object without arguments is no call
	nameIsKey bool // {"f":{…}} instead of {"name":"f","arguments":{…}}
	arrays    bool // instead of a name an array or object of calls may come
	newlines  bool // one newline at either end of a value does not belong to it
	perLine   bool // calls of argsPythonic are lines and not a list
	trim      bool // white space before a call does not belong to the content
}

// IDStyle is how the template of a model expects the ids of calls.
type IDStyle uint8

const (
	IDOpenAI  IDStyle = iota // "call_" and 24 letters and digits
	IDMistral                // 9 letters and digits
	IDNative                 // the model's own, Delta.ID
)

// rows are the formats of tool calls. Their order is the order of preference where several parse
// what a template renders.
var rows = []row{
	{name: "openai", args: argsHarmony},
	{
		name: "gemma4", args: argsGemma, call: []string{"<|tool_call>"}, callEnd: "<tool_call|>",
		prefix: []string{"call:", ":"}, nameEnd: []string{"{"}, quote: `<|"|>`, trim: true,
	},
	{
		name: "functiongemma", args: argsGemma, call: []string{"<start_function_call>"},
		callEnd: "<end_function_call>", prefix: []string{"call:"}, nameEnd: []string{"{"},
		quote: "<escape>",
	},
	{
		name: "deepseek_v4", args: argsXML, section: "<｜DSML｜tool_calls>", sectionEnd: "</｜DSML｜tool_calls>",
		call: []string{"<｜DSML｜invoke name="}, callEnd: "</｜DSML｜invoke>", nameEnd: []string{">"},
		param: "<｜DSML｜parameter name=", paramName: ">", valueEnd: "</｜DSML｜parameter>",
	},
	{
		name: "deepseek_v32", args: argsXML, section: "<｜DSML｜function_calls>",
		sectionEnd: "</｜DSML｜function_calls>",
		call:       []string{"<｜DSML｜invoke name="}, callEnd: "</｜DSML｜invoke>", nameEnd: []string{">"},
		param: "<｜DSML｜parameter name=", paramName: ">", valueEnd: "</｜DSML｜parameter>",
	},
	{
		name: "deepseek_v3", args: argsJSON, section: "<｜tool▁calls▁begin｜>",
		sectionEnd: "<｜tool▁calls▁end｜>",
		call:       []string{"<｜tool▁call▁begin｜>"}, callEnd: "<｜tool▁call▁end｜>", nameOpen: "<｜tool▁sep｜>",
		nameEnd: []string{"\n", "{"}, noise: []string{"```json", "```"}, loose: true,
	},
	{
		name: "deepseek_v31", args: argsJSON, section: "<｜tool▁calls▁begin｜>",
		sectionEnd: "<｜tool▁calls▁end｜>",
		call:       []string{"<｜tool▁call▁begin｜>"}, callEnd: "<｜tool▁call▁end｜>",
		nameEnd: []string{"<｜tool▁sep｜>"}, loose: true,
	},
	{
		name: "kimi_k2", args: argsJSON, section: "<|tool_calls_section_begin|>",
		sectionEnd: "<|tool_calls_section_end|>",
		call:       []string{"<|tool_call_begin|>"}, callEnd: "<|tool_call_end|>",
		nameEnd: []string{"<|tool_call_argument_begin|>"},
		ids:     IDNative, loose: true,
	},
	{
		name: "minimax_m2", args: argsXML, section: "<minimax:tool_call>", sectionEnd: "</minimax:tool_call>",
		call: []string{"<invoke name="}, callEnd: "</invoke>", nameEnd: []string{">"},
		param: "<parameter name=", paramName: ">", valueEnd: "</parameter>",
	},
	{
		name: "step3", args: argsXML, section: "<｜tool_calls_begin｜>", sectionEnd: "<｜tool_calls_end｜>",
		call: []string{"<steptml:invoke name="}, callEnd: "</steptml:invoke>", nameEnd: []string{">"},
		param: "<steptml:parameter name=", paramName: ">", valueEnd: "</steptml:parameter>",
		noise: []string{"<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<｜tool_call_end｜>"},
	},
	{
		name: "hy_v3", args: argsKV, section: "<tool_calls>", sectionEnd: "</tool_calls>",
		call: []string{"<tool_call>"}, callEnd: "</tool_call>", nameEnd: []string{"<tool_sep>"},
		param: "<arg_key>", paramName: "</arg_key>", value: "<arg_value>", valueEnd: "</arg_value>",
	},
	{
		name: "hunyuan", args: argsJSON, section: "<tool_calls>", sectionEnd: "</tool_calls>",
		call: []string{"<tool_call>"}, callEnd: "</tool_call>", nameEnd: []string{"\n", "{"},
		noise: []string{"```json", "```"},
	},
	{
		name: "longcat_kv", args: argsKV, call: []string{"<longcat_tool_call>"},
		callEnd: "</longcat_tool_call>", nameEnd: []string{"\n"},
		param: "<longcat_arg_key>", paramName: "</longcat_arg_key>", value: "<longcat_arg_value>",
		valueEnd: "</longcat_arg_value>",
	},
	{
		name: "solar_open2", args: argsXML, call: []string{"<|tool_call:start|>"},
		callEnd: "<|tool_call:end|>", nameEnd: []string{"\n"},
		param: "<|tool_arg:start|>", paramName: "<|tool_arg:value|>", valueEnd: "<|tool_arg:end|>",
	},
	{
		name: "glm45", args: argsKV, call: []string{"<tool_call>"}, callEnd: "</tool_call>",
		nameEnd: []string{"\n"},
		param:   "<arg_key>", paramName: "</arg_key>", value: "<arg_value>", valueEnd: "</arg_value>",
	},
	{
		name: "seed_oss", args: argsXML, section: "<seed:tool_call>", sectionEnd: "</seed:tool_call>",
		call: []string{"<function="}, callEnd: "</function>", nameEnd: []string{">"},
		param: "<parameter=", paramName: ">", valueEnd: "</parameter>", newlines: true,
	},
	{
		name: "qwen3_coder", args: argsXML, section: "<tool_call>", sectionEnd: "</tool_call>",
		call: []string{"<function="}, callEnd: "</function>", nameEnd: []string{">"},
		param: "<parameter=", paramName: ">", valueEnd: "</parameter>", loose: true, newlines: true,
	},
	{
		name: "minicpm5", args: argsXML, call: []string{"<function name="}, callEnd: "</function>",
		nameEnd: []string{">"},
		param:   "<param name=", paramName: ">", valueEnd: "</param>",
	},
	{
		name: "llama3_function", args: argsJSON, call: []string{"<function="}, callEnd: "</function>",
		nameEnd: []string{">"},
	},
	{name: "lfm2", args: argsPythonic, call: []string{"<|tool_call_start|>"}, callEnd: "<|tool_call_end|>"},
	{name: "mistral_array", args: argsArray, call: []string{"[TOOL_CALLS]"}, ids: IDMistral},
	{
		name: "mistral", args: argsJSON, call: []string{"[TOOL_CALLS]"},
		nameEnd: []string{"[ARGS]", "{"}, id: "[CALL_ID]", arrays: true, ids: IDMistral,
	},
	{
		name: "cohere_command3", args: argsArray, call: []string{"<|START_ACTION|>"},
		callEnd: "<|END_ACTION|>", members: [2]string{"tool_name", "parameters"},
		tags: []string{"<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"},
	},
	{
		name: "internlm", args: argsObject, section: "<|action_start|>", sectionEnd: "<|action_end|>",
		call: []string{"<|plugin|>"}, members: [2]string{"name", "parameters"},
	},
	{name: "phi4_mini_json", args: argsArray, call: []string{"functools"}},
	{
		name: "longcat", args: argsObject, call: []string{"<longcat_tool_call>"},
		callEnd: "</longcat_tool_call>",
	},
	{
		name: "apertus", args: argsArray, call: []string{"<|tools_prefix|>"},
		callEnd: "<|tools_suffix|>", nameIsKey: true, trim: true,
	},
	{
		name: "olmo3", args: argsPythonic, call: []string{"<function_calls>"},
		callEnd: "</function_calls>", perLine: true,
	},
	{name: "nemotron_json", args: argsArray, call: []string{"<TOOLCALL>"}, callEnd: "</TOOLCALL>"},
	{
		name: "gigachat3", args: argsObject,
		call: []string{"<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>"},
	},
	{name: "jamba", args: argsArray, call: []string{"<tool_calls>"}, callEnd: "</tool_calls>"},
	{name: "granite-20b-fc", args: argsObject, call: []string{"<function_call>"}},
	{name: "hermes", args: argsObject, call: []string{"<tool_call>"}, callEnd: "</tool_call>"},
	{name: "granite", args: argsArray, call: []string{"<|tool_call|>", "<tool_call>"}},
	{
		name: "llama3_json", args: argsObject, call: []string{"<|python_tag|>"}, separator: ';',
		bare: '{', needsArgs: true, members: [2]string{"name", "parameters"},
	},
	{
		name: "llama4_pythonic", args: argsPythonic, call: []string{"<|python_start|>"},
		callEnd: "<|python_end|>", bare: '[', lines: true,
	},
	{name: "pythonic", args: argsPythonic, bare: '[', lines: true},
	{name: "xlam", args: argsArray, bare: '[', needsArgs: true},
}

// thinking is a format of reasoning.
type thinking struct {
	name    string   // as --reasoning-parser
	open    []string // before reasoning; the prompt may end with it
	close   []string // behind reasoning
	prefix  string   // of the reasoning, dropped
	tags    []string // around the content, in pairs
	echo    string   // begins the content, which contains the reasoning
	calls   bool     // a tool call ends the reasoning
	newline bool     // newlines at the beginning of the content belong to it
	lines   bool     // tags and content have a newline between them
}

// echoClose ends reasoning that is content.
const echoClose = "</think>"

// thoughts are the formats of reasoning, in the order in which a template is searched for them.
var thoughts = []thinking{
	{name: "openai_gptoss"}, // the channel named analysis: the row of tool calls reads it
	{
		name: "gemma4", open: []string{"<|channel>"}, close: []string{"<channel|>"},
		prefix: "thought\n", newline: true,
	},
	{name: "mistral", open: []string{"[THINK]"}, close: []string{"[/THINK]"}, calls: true},
	{name: "seed_oss", open: []string{"<seed:think>"}, close: []string{"</seed:think>"}},
	{name: "solar_open2", open: []string{"<|think:start|>"}, close: []string{"<|think:end|>"}},
	{name: "longcat", open: []string{"<longcat_think>"}, close: []string{"</longcat_think>"}},
	{name: "minimax_m3", open: []string{"<mm:think>"}, close: []string{"</mm:think>"}},
	{name: "kimi_vl", open: []string{"◁think▷"}, close: []string{"◁/think▷"}},
	{name: "cohere_command3", open: []string{"<|START_THINKING|>"}, close: []string{"<|END_THINKING|>"}},
	{
		name: "granite", open: []string{"Here is my thought process:", "Here's my thought process:"},
		close: []string{"Here is my response:", "Here's my response:"},
	},
	{
		name: "hunyuan_a13b", open: []string{"<think>"}, close: []string{"</think>"},
		tags: []string{"<answer>", "</answer>"}, lines: true,
	},
	{name: "step3p5", open: []string{"<think>"}, close: []string{"</think>"}, newline: true},
	{name: "minimax_m2_append_think", echo: "<think>"},
	{name: "qwen3", open: []string{"<think>"}, close: []string{"</think>"}, calls: true},
	{name: "deepseek_r1", open: []string{"<think>"}, close: []string{"</think>"}},
}

// aliases are further names, of vLLM for the most part, of rows and of thoughts.
var (
	toolAliases = map[string]string{
		"cohere_command4": "cohere_command3", "ernie45": "hermes", "glm47": "glm45", "granite4": "hermes",
		"hunyuan_a13b": "jamba", "llama4_json": "llama3_json", "mimo": "qwen3_coder", "poolside_v1": "glm45",
		"qwen3_xml": "qwen3_coder", "step3p5": "qwen3_coder", "gpt_oss": "openai", "harmony": "openai",
	}
	thinkingAliases = map[string]string{
		"cohere_command4": "cohere_command3", "deepseek_v3": "deepseek_r1", "deepseek_v4": "deepseek_r1",
		"ernie45": "deepseek_r1", "glm45": "deepseek_r1", "glm47": "deepseek_r1", "holo2": "deepseek_r1",
		"hy_v3": "deepseek_r1", "kimi_k2": "qwen3", "mimo": "qwen3", "minimax_m2": "deepseek_r1",
		"nemotron_v3": "deepseek_r1", "olmo3": "deepseek_r1", "poolside_v1": "deepseek_r1", "step3": "deepseek_r1",
	}
)
