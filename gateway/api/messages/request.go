package messages

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// bounds are those of each field. Its texts are bounded by the size of the body.
var bounds = jsonscan.Bounds{Elements: openai.MaxMessages, Values: openai.MaxValues}

// valueCost is the memory in bytes that a value of a body takes at most in the chat's body, in
// addition to its own bytes: the result of a tool, which has three values, gets the tool's name.
const valueCost = 64

// clientTools ends errors about tools that Anthropic's servers run.
const clientTools = "the client runs tools: describe each by name, description and input_schema"

// Fields of a request: served have an effect, ignored change no answer.
var (
	served = []string{
		"model", "messages", "system", "max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k", "tools", "tool_choice",
		"thinking", "output_config", "output_format", "metadata", "service_tier", "container", "mcp_servers",
	}
	ignored = []string{"cache_control", "context_management", "diagnostics", "inference_geo", "speed"}
)

// fields are the served fields of a request.
type fields struct {
	of      map[string][]byte // as they are written; none is null
	unknown []string          // names of fields that are neither served nor ignored, at most maxUnknown
	cost    int               // bytes that the chat's body needs
}

const (
	maxUnknown = 16
	maxShown   = 40 // bytes of a value or name in an error
)

// read reads a body. Of equal names the last one counts.
func read(body []byte) (f fields, fault *openai.Error) {
	f.of, f.cost = map[string][]byte{}, len(body)
	s := jsonscan.Object(body)
	for s.Next() {
		name, most := string(s.Key()), jsonscan.Bounds{}
		serves := slices.Contains(served, name)
		if serves {
			most = bounds
		}
		v, n := s.Value(most)
		switch {
		case errors.Is(s.Err(), jsonscan.ErrElements):
			return f, openai.BadRequest(name, "%s: has too many elements, at most %d are taken", name, most.Elements)
		case errors.Is(s.Err(), jsonscan.ErrValues):
			return f, openai.BadRequest(name, "%s: has too many values in it, at most %d are taken", name, most.Values)
		case v == nil: // invalid
		case serves && v[0] == 'n':
			delete(f.of, name)
		case serves:
			f.of[name] = v
			f.cost += valueCost * n.Values
		case !slices.Contains(ignored, name) && len(f.unknown) < maxUnknown:
			f.unknown = append(f.unknown, openai.Clip(name, maxShown))
		}
	}
	if s.Err() != nil {
		return f, openai.BadRequest("", "the body is not a valid JSON object: %s", s.Err())
	}
	return f, nil
}

// Chat returns the body of the chat completion that body requests.
func (m *Message) Chat(body []byte, charge func(bytes int) *openai.Error) ([]byte, *openai.Error) {
	f, fault := read(body)
	if fault != nil {
		return nil, fault
	}
	if charge != nil {
		if fault := charge(f.cost); fault != nil {
			return nil, fault
		}
	}
	stops, servers, tier := f.of["stop_sequences"], f.of["mcp_servers"], f.of["service_tier"]
	switch {
	case f.of["messages"] == nil:
		return nil, openai.BadRequest("messages", "messages is required: a list of objects with role and content")
	case f.of["max_tokens"] == nil && !m.counts:
		return nil, openai.BadRequest("max_tokens", "max_tokens is required: the most tokens of the answer")
	case stops != nil && stops[0] != '[':
		return nil, openai.BadRequest("stop_sequences", "stop_sequences must be a list of strings, not %s", shown(stops))
	case f.of["container"] != nil:
		return nil, openai.BadRequest("container", "container is not supported here: %s", clientTools)
	case servers != nil && !empty(servers):
		return nil, openai.BadRequest("mcp_servers", "mcp_servers is not supported here: %s", clientTools)
	case tier != nil && word(tier) != "auto" && word(tier) != "standard_only":
		return nil, openai.BadRequest("service_tier", "service_tier must be auto or standard_only, not %s", shown(tier))
	}
	m.older = f.of["output_format"] != nil
	if n, err := strconv.ParseFloat(string(f.of["max_tokens"]), 64); err == nil {
		m.maxTokens = int(min(n, math.MaxInt32))
	}
	// Unknown fields precede the others, under names that no field has, so that the chat reports them.
	dst := append(make([]byte, 0, len(body)+len(body)/8+512), '{')
	for _, name := range f.unknown {
		dst = append(openai.AppendString(dst, name+" of "+Path), ":null,"...)
	}
	for _, part := range [...]func([]byte, *fields) ([]byte, *openai.Error){appendMessages, appendTools, appendToolChoice, appendThinking, appendFormat, appendUser} {
		if dst, fault = part(dst, &f); fault != nil {
			return nil, fault
		}
	}
	for _, name := range [...]string{"model", "max_tokens", "temperature", "top_p", "top_k", "stream"} {
		dst = appendField(dst, `"`+name+`":`, f.of[name])
	}
	dst = appendField(dst, `"stop":`, stops)
	if string(f.of["stream"]) == "true" {
		dst = append(dst, `"stream_options":{"include_usage":true,"continuous_usage_stats":true},`...)
	}
	dst[len(dst)-1] = '}'
	return dst, nil
}

// appendField appends a field of the chat's body and a comma, unless it is absent.
func appendField(dst []byte, name string, v []byte) []byte {
	if v == nil {
		return dst
	}
	return append(append(append(dst, name...), v...), ',')
}

// place is a place in the request, for errors. The indices of a block are negative where there is
// none.
type place struct {
	list               string
	at, block, subpart int
}

func (p place) String() string {
	s := p.list + "[" + strconv.Itoa(p.at) + "]"
	for _, i := range [...]int{p.block, p.subpart} {
		if i >= 0 {
			s += ".content[" + strconv.Itoa(i) + "]"
		}
	}
	return s
}

// fault returns an error about a member of the place; member is empty, or begins with a point.
func (p place) fault(member, format string, args ...any) *openai.Error {
	param := p.String() + member
	return openai.BadRequest(param, "%s %s", param, fmt.Sprintf(format, args...))
}

// members calls f with each member of a checked value that is not null. It returns false if v is no
// object.
func members(v []byte, f func(name string, v []byte)) bool {
	if !jsonscan.IsObject(v) {
		return false
	}
	for s := jsonscan.Object(v); s.Next(); {
		name := s.Key()
		if e := s.Unchecked(); e[0] != 'n' {
			f(string(name), e)
		}
	}
	return true
}

// pick returns the named members of a checked value that are not null; nil: v is no object.
func pick(v []byte, names ...string) (picked map[string][]byte) {
	if jsonscan.IsObject(v) {
		picked = map[string][]byte{}
	}
	members(v, func(name string, e []byte) {
		if slices.Contains(names, name) {
			picked[name] = e
		}
	})
	return picked
}

// elements calls f with each element of a checked list, until it returns an error.
func elements(v []byte, f func(i int, e []byte) *openai.Error) *openai.Error {
	s := jsonscan.List(v)
	for i := 0; s.Next(); i++ {
		if fault := f(i, s.Unchecked()); fault != nil {
			return fault
		}
	}
	return nil
}

// empty reports whether a checked value is an empty list.
func empty(v []byte) bool { return v[0] == '[' && v[jsonscan.Space(v, 1)] == ']' }

// word returns a short string's text. It is empty for every other value.
func word(v []byte) string {
	if !jsonscan.IsString(v) || len(v) > 6*maxShown {
		return ""
	}
	return jsonscan.Text(v)
}

// shown returns the beginning of a value for an error.
func shown(v []byte) string {
	if v == nil {
		return "missing"
	}
	return openai.Clip(string(v[:min(len(v), maxShown+4)]), maxShown)
}

// appendTools appends the tools.
func appendTools(dst []byte, f *fields) ([]byte, *openai.Error) {
	tools := f.of["tools"]
	switch {
	case tools == nil:
		return dst, nil
	case tools[0] != '[':
		return dst, openai.BadRequest("tools", "tools must be a list, not %s", shown(tools))
	}
	dst = append(dst, `"tools":[`...)
	fault := elements(tools, func(i int, e []byte) *openai.Error {
		p := place{"tools", i, -1, -1}
		tool := pick(e, "type", "name", "description", "input_schema", "strict")
		typ, parameters := tool["type"], tool["input_schema"]
		switch {
		case tool == nil:
			return p.fault("", "must be an object, not %s", shown(e))
		case typ != nil && word(typ) != "custom":
			return p.fault(".type", "%s is not supported here: %s", shown(typ), clientTools)
		case !jsonscan.IsObject(parameters):
			return p.fault(".input_schema", "is required: a JSON schema, which is an object, not %s", shown(parameters))
		}
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"type":"function","function":{`...)
		dst = appendField(dst, `"name":`, tool["name"])
		dst = appendField(dst, `"description":`, tool["description"])
		dst = appendField(dst, `"strict":`, tool["strict"])
		dst = append(append(append(dst, `"parameters":`...), parameters...), "}}"...)
		return nil
	})
	return append(dst, "],"...), fault
}

// appendToolChoice appends which tools the answer calls.
func appendToolChoice(dst []byte, f *fields) ([]byte, *openai.Error) {
	v := f.of["tool_choice"]
	if v == nil {
		return dst, nil
	}
	choice := pick(v, "type", "name", "disable_parallel_tool_use")
	if choice == nil {
		return dst, openai.BadRequest("tool_choice", "tool_choice must be an object, not %s", shown(v))
	}
	switch word(choice["type"]) {
	case "auto", "none":
		dst = appendField(dst, `"tool_choice":`, choice["type"])
	case "any":
		dst = append(dst, `"tool_choice":"required",`...)
	case "tool":
		name := choice["name"]
		if !jsonscan.IsString(name) {
			return dst, openai.BadRequest("tool_choice.name", "tool_choice.name must be a string, not %s", shown(name))
		}
		dst = append(append(append(dst, `"tool_choice":{"type":"function","function":{"name":`...), name...), "}},"...)
	default:
		return dst, openai.BadRequest("tool_choice.type", "tool_choice.type must be auto, any, tool or none, not %s", shown(choice["type"]))
	}
	switch single := choice["disable_parallel_tool_use"]; string(single) {
	case "", "false":
	case "true":
		dst = append(dst, `"parallel_tool_calls":false,`...)
	default:
		return dst, openai.BadRequest("tool_choice.disable_parallel_tool_use", "tool_choice.disable_parallel_tool_use must be true or false, not %s", shown(single))
	}
	return dst, nil
}

// Budgets of thinking from which the effort is more than low, and more than medium, in tokens.
const (
	mediumBudget = 4096
	highBudget   = 16384
)

// appendThinking appends how much the model thinks, as its template knows it. Templates know no
// budget, so that it becomes an effort unless there is one.
func appendThinking(dst []byte, f *fields) ([]byte, *openai.Error) {
	config, v := f.of["output_config"], f.of["thinking"]
	output, thinking := pick(config, "effort"), pick(v, "type", "budget_tokens", "display")
	effort := output["effort"]
	switch {
	case config != nil && output == nil:
		return dst, openai.BadRequest("output_config", "output_config must be an object, not %s", shown(config))
	case v == nil:
		return appendField(dst, `"reasoning_effort":`, effort), nil
	case thinking == nil:
		return dst, openai.BadRequest("thinking", "thinking must be an object, not %s", shown(v))
	}
	switch display := thinking["display"]; {
	case word(display) == "omitted":
		dst = append(dst, `"include_reasoning":false,`...)
	case display != nil && word(display) != "summarized":
		return dst, openai.BadRequest("thinking.display", "thinking.display must be summarized or omitted, not %s", shown(display))
	}
	switch word(thinking["type"]) {
	case "disabled":
		return append(dst, `"reasoning_effort":"none",`...), nil
	case "adaptive":
		if effort == nil {
			return append(dst, `"chat_template_kwargs":{"enable_thinking":true,"thinking":true},`...), nil
		}
	case "enabled":
		budget := thinking["budget_tokens"]
		n, err := strconv.ParseFloat(string(budget), 64)
		switch {
		case err != nil || n < 1:
			return dst, openai.BadRequest("thinking.budget_tokens", "thinking.budget_tokens must be a number of tokens, not %s", shown(budget))
		case effort != nil:
		case n < mediumBudget:
			effort = []byte(`"low"`)
		case n < highBudget:
			effort = []byte(`"medium"`)
		default:
			effort = []byte(`"high"`)
		}
	default:
		return dst, openai.BadRequest("thinking.type", "thinking.type must be enabled, adaptive or disabled, not %s", shown(thinking["type"]))
	}
	return appendField(dst, `"reasoning_effort":`, effort), nil
}

// appendFormat appends the schema that the answer matches. appendThinking has checked that
// output_config is an object.
func appendFormat(dst []byte, f *fields) ([]byte, *openai.Error) {
	v, param := pick(f.of["output_config"], "format")["format"], "output_config.format"
	switch older := f.of["output_format"]; {
	case v != nil && older != nil:
		return dst, openai.BadRequest("output_format", "output_format and output_config.format both constrain the answer: send one of them")
	case older != nil:
		v, param = older, "output_format"
	case v == nil:
		return dst, nil
	}
	format := pick(v, "type", "schema")
	switch {
	case format == nil:
		return dst, openai.BadRequest(param, "%s must be an object, not %s", param, shown(v))
	case word(format["type"]) != "json_schema":
		return dst, openai.BadRequest(param+".type", "%s.type must be json_schema, not %s", param, shown(format["type"]))
	case format["schema"] == nil:
		return dst, openai.BadRequest(param+".schema", "%s.schema is required: a JSON schema", param)
	}
	return append(append(append(dst, `"response_format":{"type":"json_schema","json_schema":{"name":"output","schema":`...), format["schema"]...), "}},"...), nil
}

// appendUser appends the name of the end user.
func appendUser(dst []byte, f *fields) ([]byte, *openai.Error) {
	v := f.of["metadata"]
	metadata := pick(v, "user_id")
	if v != nil && metadata == nil {
		return dst, openai.BadRequest("metadata", "metadata must be an object, not %s", shown(v))
	}
	return appendField(dst, `"user":`, metadata["user_id"]), nil
}

// withoutBilling returns a text of the system prompt without the line that Claude Code puts before
// it. The line changes with every request, so that no prefix of the prompt would be found in a
// cache. The text is as it is written; nil: nothing is left.
func withoutBilling(text []byte) []byte {
	if !bytes.HasPrefix(text, []byte(`"x-anthropic-billing-header:`)) {
		return text
	}
	for i := 1; i < len(text)-1; i++ {
		if text[i] != '\\' {
			continue
		}
		switch i++; {
		case text[i] == 'n':
			return append([]byte{'"'}, text[i+1:]...)
		case text[i] == 'u' && bytes.EqualFold(text[i:i+5], []byte("u000a")):
			return append([]byte{'"'}, text[i+5:]...)
		}
	}
	return nil
}
