package messages

import (
	"bytes"
	"errors"
	"fmt"
	"math"
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

// fields are the fields of a request that have an effect, as they are written; nil: absent or null.
type fields struct {
	model, messages, system, maxTokens, stopSequences, stream, temperature, topP, topK, tools, toolChoice,
	thinking, outputConfig, outputFormat, metadata, serviceTier, container, mcpServers []byte

	unknown [][]byte // names of other fields, at most maxUnknown
	cost    int      // bytes that the chat's body needs
}

const (
	maxUnknown = 16
	maxShown   = 40 // bytes of a value or name in an error
)

// at returns where a field is stored. known reports fields without a place: they change no answer.
func (f *fields) at(name string) (field *[]byte, known bool) {
	switch name {
	case "model":
		return &f.model, true
	case "messages":
		return &f.messages, true
	case "system":
		return &f.system, true
	case "max_tokens":
		return &f.maxTokens, true
	case "stop_sequences":
		return &f.stopSequences, true
	case "stream":
		return &f.stream, true
	case "temperature":
		return &f.temperature, true
	case "top_p":
		return &f.topP, true
	case "top_k":
		return &f.topK, true
	case "tools":
		return &f.tools, true
	case "tool_choice":
		return &f.toolChoice, true
	case "thinking":
		return &f.thinking, true
	case "output_config":
		return &f.outputConfig, true
	case "output_format":
		return &f.outputFormat, true
	case "metadata":
		return &f.metadata, true
	case "service_tier":
		return &f.serviceTier, true
	case "container":
		return &f.container, true
	case "mcp_servers":
		return &f.mcpServers, true
	case "cache_control", "context_management", "diagnostics", "inference_geo", "speed":
		return nil, true
	}
	return nil, false
}

// read reads a body. Of equal names the last one counts.
func read(body []byte) (f fields, fault *openai.Error) {
	f.cost = len(body)
	s := jsonscan.Object(body)
	for s.Next() {
		name := s.Key()
		field, known := f.at(string(name))
		most := bounds
		if field == nil {
			most = jsonscan.Bounds{}
		}
		v, n := s.Value(most)
		switch {
		case errors.Is(s.Err(), jsonscan.ErrElements):
			return f, openai.BadRequest(string(name), "%s: has too many elements, at most %d are taken", name, most.Elements)
		case errors.Is(s.Err(), jsonscan.ErrValues):
			return f, openai.BadRequest(string(name), "%s: has too many values in it, at most %d are taken", name, most.Values)
		case v == nil: // invalid
		case field != nil:
			if *field = v; v[0] == 'n' {
				*field = nil
			}
			f.cost += valueCost * n.Values
		case !known && len(f.unknown) < maxUnknown:
			f.unknown = append(f.unknown, name)
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
	switch {
	case f.messages == nil:
		return nil, openai.BadRequest("messages", "messages is required: a list of objects with role and content")
	case f.maxTokens == nil && !m.counts:
		return nil, openai.BadRequest("max_tokens", "max_tokens is required: the most tokens of the answer")
	case f.stopSequences != nil && f.stopSequences[0] != '[':
		return nil, openai.BadRequest("stop_sequences", "stop_sequences must be a list of strings, not %s", shown(f.stopSequences))
	case f.container != nil:
		return nil, openai.BadRequest("container", "container is not supported here: %s", clientTools)
	case f.mcpServers != nil && !empty(f.mcpServers):
		return nil, openai.BadRequest("mcp_servers", "mcp_servers is not supported here: %s", clientTools)
	case f.serviceTier != nil && string(f.serviceTier) != `"auto"` && string(f.serviceTier) != `"standard_only"`:
		return nil, openai.BadRequest("service_tier", "service_tier must be auto or standard_only, not %s", shown(f.serviceTier))
	}
	if n, err := strconv.ParseFloat(string(f.maxTokens), 64); err == nil {
		m.maxTokens = int(min(n, math.MaxInt32))
	}
	// Unknown fields precede the others, under names that no field has, so that the chat reports them.
	dst := append(make([]byte, 0, len(body)+len(body)/8+512), '{')
	for _, name := range f.unknown {
		dst = append(openai.AppendString(dst, openai.Clip(string(name), maxShown)+" of "+Path), ":null,"...)
	}
	for _, part := range [...]func([]byte, *fields) ([]byte, *openai.Error){appendMessages, appendTools, appendToolChoice, appendThinking, appendFormat, appendUser} {
		if dst, fault = part(dst, &f); fault != nil {
			return nil, fault
		}
	}
	dst = appendField(dst, `"model":`, f.model)
	dst = appendField(dst, `"max_tokens":`, f.maxTokens)
	dst = appendField(dst, `"stop":`, f.stopSequences)
	dst = appendField(dst, `"temperature":`, f.temperature)
	dst = appendField(dst, `"top_p":`, f.topP)
	dst = appendField(dst, `"top_k":`, f.topK)
	dst = appendField(dst, `"stream":`, f.stream)
	if string(f.stream) == "true" {
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
	if v == nil || v[0] != '{' {
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

// isString reports whether a checked value is a string; nil is none.
func isString(v []byte) bool { return v != nil && v[0] == '"' }

// word returns a short string's text. It is empty for every other value.
func word(v []byte) string {
	if !isString(v) || len(v) > 6*maxShown {
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
	if f.tools == nil {
		return dst, nil
	}
	if f.tools[0] != '[' {
		return dst, openai.BadRequest("tools", "tools must be a list, not %s", shown(f.tools))
	}
	dst = append(dst, `"tools":[`...)
	fault := elements(f.tools, func(i int, e []byte) *openai.Error {
		p := place{"tools", i, -1, -1}
		var name, description, schema, strict, typ []byte
		if !members(e, func(member string, v []byte) {
			switch member {
			case "name":
				name = v
			case "description":
				description = v
			case "input_schema":
				schema = v
			case "strict":
				strict = v
			case "type":
				typ = v
			}
		}) {
			return p.fault("", "must be an object, not %s", shown(e))
		}
		switch {
		case typ != nil && word(typ) != "custom":
			return p.fault(".type", "%s is not supported here: %s", shown(typ), clientTools)
		case schema == nil || schema[0] != '{':
			return p.fault(".input_schema", "is required: a JSON schema, which is an object, not %s", shown(schema))
		}
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"type":"function","function":{`...)
		dst = appendField(dst, `"name":`, name)
		dst = appendField(dst, `"description":`, description)
		dst = appendField(dst, `"strict":`, strict)
		dst = append(append(append(dst, `"parameters":`...), schema...), "}}"...)
		return nil
	})
	return append(dst, "],"...), fault
}

// appendToolChoice appends which tools the answer calls.
func appendToolChoice(dst []byte, f *fields) ([]byte, *openai.Error) {
	if f.toolChoice == nil {
		return dst, nil
	}
	var typ, name, single []byte
	if !members(f.toolChoice, func(member string, v []byte) {
		switch member {
		case "type":
			typ = v
		case "name":
			name = v
		case "disable_parallel_tool_use":
			single = v
		}
	}) {
		return dst, openai.BadRequest("tool_choice", "tool_choice must be an object, not %s", shown(f.toolChoice))
	}
	switch word(typ) {
	case "auto", "none":
		dst = appendField(dst, `"tool_choice":`, typ)
	case "any":
		dst = append(dst, `"tool_choice":"required",`...)
	case "tool":
		if !isString(name) {
			return dst, openai.BadRequest("tool_choice.name", "tool_choice.name must be a string, not %s", shown(name))
		}
		dst = append(append(append(dst, `"tool_choice":{"type":"function","function":{"name":`...), name...), "}},"...)
	default:
		return dst, openai.BadRequest("tool_choice.type", "tool_choice.type must be auto, any, tool or none, not %s", shown(typ))
	}
	switch string(single) {
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
	var effort, typ, budget, display []byte
	if f.outputConfig != nil && !members(f.outputConfig, func(member string, v []byte) {
		if member == "effort" {
			effort = v
		}
	}) {
		return dst, openai.BadRequest("output_config", "output_config must be an object, not %s", shown(f.outputConfig))
	}
	if f.thinking == nil {
		return appendField(dst, `"reasoning_effort":`, effort), nil
	}
	if !members(f.thinking, func(member string, v []byte) {
		switch member {
		case "type":
			typ = v
		case "budget_tokens":
			budget = v
		case "display":
			display = v
		}
	}) {
		return dst, openai.BadRequest("thinking", "thinking must be an object, not %s", shown(f.thinking))
	}
	switch word(display) {
	case "omitted":
		dst = append(dst, `"include_reasoning":false,`...)
	case "summarized":
	default:
		if display != nil {
			return dst, openai.BadRequest("thinking.display", "thinking.display must be summarized or omitted, not %s", shown(display))
		}
	}
	switch word(typ) {
	case "disabled":
		return append(dst, `"reasoning_effort":"none",`...), nil
	case "adaptive":
		if effort == nil {
			return append(dst, `"chat_template_kwargs":{"enable_thinking":true,"thinking":true},`...), nil
		}
	case "enabled":
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
		return dst, openai.BadRequest("thinking.type", "thinking.type must be enabled, adaptive or disabled, not %s", shown(typ))
	}
	return appendField(dst, `"reasoning_effort":`, effort), nil
}

// appendFormat appends the schema that the answer matches.
func appendFormat(dst []byte, f *fields) ([]byte, *openai.Error) {
	format, param := f.outputFormat, "output_format"
	twice := false
	members(f.outputConfig, func(member string, v []byte) { // appendThinking has checked that it is an object
		if member == "format" {
			format, param, twice = v, "output_config.format", f.outputFormat != nil
		}
	})
	if twice {
		return dst, openai.BadRequest("output_format", "output_format and output_config.format both constrain the answer: send one of them")
	}
	if format == nil {
		return dst, nil
	}
	var typ, schema []byte
	if !members(format, func(member string, v []byte) {
		switch member {
		case "type":
			typ = v
		case "schema":
			schema = v
		}
	}) {
		return dst, openai.BadRequest(param, "%s must be an object, not %s", param, shown(format))
	}
	switch {
	case word(typ) != "json_schema":
		return dst, openai.BadRequest(param+".type", "%s.type must be json_schema, not %s", param, shown(typ))
	case schema == nil:
		return dst, openai.BadRequest(param+".schema", "%s.schema is required: a JSON schema", param)
	}
	return append(append(append(dst, `"response_format":{"type":"json_schema","json_schema":{"name":"output","schema":`...), schema...), "}},"...), nil
}

// appendUser appends the name of the end user.
func appendUser(dst []byte, f *fields) ([]byte, *openai.Error) {
	var user []byte
	if f.metadata != nil && !members(f.metadata, func(member string, v []byte) {
		if member == "user_id" {
			user = v
		}
	}) {
		return dst, openai.BadRequest("metadata", "metadata must be an object, not %s", shown(f.metadata))
	}
	return appendField(dst, `"user":`, user), nil
}

// withoutBilling returns a text of the system prompt without the line that Claude Code puts before
// it. The line changes with every request, so that no prefix of the prompt would be found in a
// cache. The text is as it is written; nil: nothing is left.
func withoutBilling(text []byte) []byte {
	if !bytes.HasPrefix(text, []byte(`"x-anthropic-billing-header:`)) {
		return text
	}
	if _, rest, ok := bytes.Cut(text, []byte(`\n`)); ok {
		return append([]byte{'"'}, rest...)
	}
	return nil
}
