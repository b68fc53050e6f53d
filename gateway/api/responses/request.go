package responses

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// Bounds of one request, in addition to those of chats.
const (
	MaxMetadata      = 16  // pairs
	MaxMetadataName  = 64  // characters
	MaxMetadataValue = 512 // characters
	maxUnknown       = 16  // names of unknown fields that are passed to the chat, which keeps as many
)

// translation is the work of one call of Chat.
type translation struct {
	*Response
	chat    []byte            // the chat's body so far, each member followed by a comma
	values  map[string][]byte // of the body's members that the table has, as they are written; null is left out
	unknown []string
	dialog  dialog
}

// field is a row of the table.
type field struct {
	name string
	most jsonscan.Bounds // of its value
	// read checks the value and translates it.
	read func(t *translation, name string, v []byte) *openai.Error
}

// tree bounds values that the chat bounds in the same way.
var tree = jsonscan.Bounds{Elements: openai.MaxMessages, Values: openai.MaxValues}

// fields is the table of fields, in the order in which they are read. null means "not given".
var fields = [...]field{
	{"model", jsonscan.Bounds{}, func(t *translation, name string, v []byte) *openai.Error {
		if isText(v) {
			t.model = jsonscan.Text(v)
		}
		return pass(t, name, v)
	}},
	{"stream", jsonscan.Bounds{}, func(t *translation, name string, v []byte) *openai.Error {
		if t.stream = v[0] == 't'; t.stream {
			t.add("stream_options", []byte(`{"include_usage":true}`))
		}
		return pass(t, name, v)
	}},
	{"stream_options", small, (*translation).streamOptions},
	{"include", small, (*translation).include},
	{"instructions", jsonscan.Bounds{}, (*translation).instructions},
	{"input", tree, (*translation).input},

	{"tools", tree, (*translation).tools},
	{"tool_choice", tree, (*translation).toolChoice},
	{"parallel_tool_calls", jsonscan.Bounds{}, pass},
	{"max_tool_calls", jsonscan.Bounds{}, (*translation).maxToolCalls},
	{"text", tree, (*translation).text},
	{"reasoning", small, (*translation).reasoning},

	{"max_output_tokens", jsonscan.Bounds{}, passAs("max_tokens")},
	{"temperature", jsonscan.Bounds{}, pass},
	{"top_p", jsonscan.Bounds{}, pass},
	{"top_logprobs", jsonscan.Bounds{}, func(t *translation, name string, v []byte) *openai.Error {
		t.logprobs = t.logprobs || string(v) != "0"
		return pass(t, name, v)
	}},
	{"truncation", jsonscan.Bounds{}, (*translation).truncation},
	{"service_tier", jsonscan.Bounds{}, pass},

	{"metadata", jsonscan.Bounds{}, (*translation).metadata},
	{"user", jsonscan.Bounds{}, label},
	{"safety_identifier", jsonscan.Bounds{}, label},
	{"prompt_cache_key", jsonscan.Bounds{}, label},
	{"prompt_cache_retention", jsonscan.Bounds{}, label}, // blocks are cached while there is room
	{"prompt_cache_options", jsonscan.Bounds{}, func(_ *translation, name string, v []byte) *openai.Error {
		if !isObject(v) {
			return kindFault(name, "an object", v)
		}
		return nil
	}},

	// State between requests.
	{"store", jsonscan.Bounds{}, refuseTrue("answers are not stored: set store to false, and send the items of earlier answers in input")},
	{"background", jsonscan.Bounds{}, refuseTrue("answers are not stored: leave it out, and set stream to true for long answers")},
	{"previous_response_id", jsonscan.Bounds{}, refuse("answers are not stored: leave it out, and send the items of earlier answers in input")},
	{"conversation", jsonscan.Bounds{}, refuse("conversations are not stored: leave it out, and send the items of earlier answers in input")},
	{"prompt", jsonscan.Bounds{}, refuse("prompts are not stored: send the prompt's text in instructions and input")},
	{"previous_input_messages", jsonscan.Bounds{}, refuse("send the items of earlier turns in input")},
	{"context_management", jsonscan.Bounds{}, refuse("leave it out, and shorten input where the context is too long")},
	{"moderation", jsonscan.Bounds{}, refuse("leave it out: answers are not moderated")},

	// Fields of chats that this API names otherwise.
	{"messages", jsonscan.Bounds{}, refuse("use input")},
	{"max_tokens", jsonscan.Bounds{}, refuse("use max_output_tokens")},
	{"max_completion_tokens", jsonscan.Bounds{}, refuse("use max_output_tokens")},
	{"response_format", jsonscan.Bounds{}, refuse("use text.format")},
	{"reasoning_effort", jsonscan.Bounds{}, refuse("use reasoning.effort")},
	{"verbosity", jsonscan.Bounds{}, refuse("use text.verbosity")},
	{"functions", jsonscan.Bounds{}, refuse("use tools")},
	{"function_call", jsonscan.Bounds{}, refuse("use tool_choice")},
	{"logprobs", jsonscan.Bounds{}, refuse(`use include with "message.output_text.logprobs"`)},
	{"n", jsonscan.Bounds{}, func(_ *translation, name string, v []byte) *openai.Error {
		if string(v) != "1" {
			return openai.BadRequest(name, "n is not supported here (got %s): leave it out; a response is one answer", quote(v))
		}
		return nil
	}},
}

// small bounds values of which only a few parts are read.
var small = jsonscan.Bounds{Values: 256}

// find returns the row of a field; nil: there is none.
func find(name string) *field {
	if i := slices.IndexFunc(fields[:], func(f field) bool { return f.name == name }); i >= 0 {
		return &fields[i]
	}
	return nil
}

// Chat implements native.Surface. It charges for the chat's body and for what the answer repeats.
func (r *Response) Chat(body []byte, charge func(bytes int) *openai.Error) ([]byte, *openai.Error) {
	t := &translation{Response: r, values: map[string][]byte{}}
	fault := openai.Scan(body, func(s *jsonscan.Scanner) *openai.Error { return t.member(s) })
	if fault != nil {
		return nil, fault
	}
	charged := copies*len(body) + 1<<10
	if fault := charge(charged); fault != nil {
		return nil, fault
	}
	t.chat = append(make([]byte, 0, len(body)+256), '{')
	for i := range fields {
		if f := &fields[i]; t.values[f.name] != nil {
			if fault := f.read(t, f.name, t.values[f.name]); fault != nil {
				return nil, fault
			}
		}
	}
	for _, name := range openai.Extras {
		if v := t.values[name]; v != nil {
			t.add(name, v)
		}
	}
	if t.logprobs {
		t.add("logprobs", []byte("true"))
	}
	for _, name := range t.unknown { // the chat logs them
		t.chat = append(append(openai.AppendString(t.chat, name), `:null`...), ',')
	}
	switch {
	case t.values["input"] == nil:
		return nil, openai.BadRequest("input", "input is required: a string or a list of items")
	case t.values["stream_options"] != nil && !t.stream:
		return nil, openai.BadRequest("stream_options", "stream_options needs stream: true")
	}
	t.dialog.report(t.o.Dropped)
	t.chat = append(t.dialog.appendList(append(t.chat, `"messages":`...)), '}')
	t.repeat()
	if more := cap(t.chat) + cap(t.echo) + t.dialog.size() - charged; more > 0 { // of encrypted reasoning with many escapes
		if fault := charge(more); fault != nil {
			return nil, fault
		}
	}
	return t.chat, nil
}

// copies is how often the parts of a body are copied at most: into messages, from there into the
// chat's body, and reasoning twice; or into the members that the answer repeats.
const copies = 4

// member reads one member of the body.
func (t *translation) member(s *jsonscan.Scanner) *openai.Error {
	name := string(s.Key())
	f, most := find(name), jsonscan.Bounds{}
	if f != nil {
		most = f.most
	}
	v, _ := s.Value(most)
	switch {
	case v == nil:
		return openai.Exceeded(openai.Clip(name, 64), most, s.Err())
	case f != nil || slices.Contains(openai.Extras, name):
		if t.values[name] = v; v[0] == 'n' {
			delete(t.values, name)
		}
	case openai.Has(openai.Chat, name):
		if v[0] != 'n' {
			return openai.BadRequest(name, "%s is a field of /v1/chat/completions that %s does not have: leave it out", name, Path)
		}
	default:
		t.ignore(name)
	}
	return nil
}

// ignore keeps the name of an unknown field.
func (t *translation) ignore(name string) {
	if len(t.unknown) < maxUnknown {
		t.unknown = append(t.unknown, openai.Clip(name, 64))
	}
}

// add adds a member to the chat's body.
func (t *translation) add(name string, v []byte) {
	t.chat = append(append(append(append(append(t.chat, '"'), name...), `":`...), v...), ',')
}

// pass passes a field to the chat, which checks it.
func pass(t *translation, name string, v []byte) *openai.Error {
	t.add(name, v)
	return nil
}

// passAs passes a field to the chat by another name.
func passAs(name string) func(*translation, string, []byte) *openai.Error {
	return func(t *translation, _ string, v []byte) *openai.Error { return pass(t, name, v) }
}

func refuse(remedy string) func(*translation, string, []byte) *openai.Error {
	return func(_ *translation, name string, v []byte) *openai.Error {
		return openai.BadRequest(name, "%s is not supported here (got %s): %s", name, quote(v), remedy)
	}
}

// refuseTrue refuses true, and accepts false.
func refuseTrue(remedy string) func(*translation, string, []byte) *openai.Error {
	return func(t *translation, name string, v []byte) *openai.Error {
		switch v[0] {
		case 'f':
			return nil
		case 't':
			return refuse(remedy)(t, name, v)
		}
		return kindFault(name, "true or false", v)
	}
}

// label accepts a short string without effect. The answer repeats it.
func label(_ *translation, name string, v []byte) *openai.Error {
	if !isText(v) {
		return kindFault(name, "a string", v)
	}
	if n := utf8.RuneCountInString(jsonscan.Text(v)); n > openai.MaxLabel {
		return openai.BadRequest(name, "%s: must have at most %d characters, not %d", name, openai.MaxLabel, n)
	}
	return nil
}

func (t *translation) streamOptions(at string, v []byte) *openai.Error {
	if !isObject(v) {
		return kindFault(at, "an object", v)
	}
	return members(v, func(name string, v []byte) *openai.Error {
		param := at + "." + name
		if name != "include_obfuscation" {
			t.ignore(param)
			return nil
		}
		if t.obfuscate = v[0] == 't'; !t.obfuscate && v[0] != 'f' {
			return kindFault(param, "true or false", v)
		}
		return nil
	})
}

func (t *translation) include(at string, v []byte) *openai.Error {
	if !isList(v) {
		return kindFault(at, "a list of strings", v)
	}
	return elements(v, func(i int, v []byte) *openai.Error {
		switch {
		case is(v, "reasoning.encrypted_content"):
			t.encrypt = true
		case is(v, "message.output_text.logprobs"):
			t.logprobs = true
		default:
			param := fmt.Sprintf("%s[%d]", at, i)
			return openai.BadRequest(param, `%s: must be "reasoning.encrypted_content" or "message.output_text.logprobs", not %s`, param, quote(v))
		}
		return nil
	})
}

func (t *translation) truncation(name string, v []byte) *openai.Error {
	switch {
	case is(v, "auto"): // as vLLM does: the oldest tokens are removed
		t.add("truncate_prompt_tokens", []byte("-1"))
	case !is(v, "disabled"):
		return kindFault(name, `"auto" or "disabled"`, v)
	}
	return nil
}

// maxToolCalls checks a bound on calls of built-in tools, of which there are none.
func (t *translation) maxToolCalls(name string, v []byte) *openai.Error {
	if n, err := strconv.ParseFloat(string(v), 64); err != nil || n < 1 || n != math.Trunc(n) { // 3.0 is an integer
		return kindFault(name, "an integer of at least 1", v)
	}
	return nil
}

func (t *translation) metadata(at string, v []byte) *openai.Error {
	if !isObject(v) {
		return kindFault(at, "an object", v)
	}
	n := 0
	for s := jsonscan.Object(v); s.Next(); {
		name := string(s.Key())
		v, _ := s.Value(jsonscan.Bounds{})
		param := at + "." + openai.Clip(name, MaxMetadataName)
		switch n++; {
		case n > MaxMetadata:
			return openai.BadRequest(at, "%s: has too many members, at most %d are taken", at, MaxMetadata)
		case utf8.RuneCountInString(name) > MaxMetadataName:
			return openai.BadRequest(param, "%s: a name must have at most %d characters", param, MaxMetadataName)
		case !isText(v):
			return kindFault(param, "a string", v)
		case utf8.RuneCountInString(jsonscan.Text(v)) > MaxMetadataValue:
			return openai.BadRequest(param, "%s: must have at most %d characters", param, MaxMetadataValue)
		}
	}
	return nil
}

// reasoning passes the effort. A summary is accepted without effect, because the reasoning itself
// is in the answer.
func (t *translation) reasoning(at string, v []byte) *openai.Error {
	if !isObject(v) {
		return kindFault(at, "an object", v)
	}
	return members(v, func(name string, v []byte) *openai.Error {
		param := at + "." + name
		switch name {
		case "effort":
			t.add("reasoning_effort", v)
		case "summary", "generate_summary":
			if !is(v, "auto") && !is(v, "concise") && !is(v, "detailed") {
				return kindFault(param, `"auto", "concise" or "detailed"`, v)
			}
		case "context":
			if !is(v, "auto") {
				return openai.BadRequest(param, "%s is not supported here (got %s): leave it out; the model's chat template decides which reasoning it shows", param, quote(v))
			}
		case "mode":
			if !is(v, "standard") {
				return openai.BadRequest(param, "%s is not supported here (got %s): leave it out", param, quote(v))
			}
		default:
			t.ignore(param)
		}
		return nil
	})
}

// text translates text.format, whose members are those of response_format and, for a schema, of
// response_format.json_schema.
func (t *translation) text(at string, v []byte) *openai.Error {
	if !isObject(v) {
		return kindFault(at, "an object", v)
	}
	return members(v, func(name string, v []byte) *openai.Error {
		param := at + "." + name
		switch name {
		case "format":
			return t.format(param, v)
		case "verbosity":
			t.add(name, v)
		default:
			t.ignore(param)
		}
		return nil
	})
}

func (t *translation) format(at string, v []byte) *openai.Error {
	if !isObject(v) {
		return kindFault(at, "an object", v)
	}
	var typ, name []byte
	flat := []byte{}
	_ = members(v, func(member string, v []byte) *openai.Error {
		switch member {
		case "type":
			typ = v
			return nil
		case "name":
			name = v
		}
		flat = append(append(append(openai.AppendString(flat, member), ':'), v...), ',')
		return nil
	})
	switch {
	case is(typ, "text"):
	case is(typ, "json_object"):
		t.add("response_format", []byte(`{"type":"json_object"}`))
	case !is(typ, "json_schema"):
		return kindFault(at+".type", `"text", "json_object" or "json_schema"`, typ)
	case !isText(name):
		return kindFault(at+".name", "a string", name)
	default:
		t.chat = append(append(t.chat, `"response_format":{"type":"json_schema","json_schema":{`...), flat...)
		t.chat[len(t.chat)-1] = '}'
		t.chat = append(t.chat, "},"...)
	}
	return nil
}

// tools translates functions. The answer repeats them.
func (t *translation) tools(at string, v []byte) *openai.Error {
	if !isList(v) {
		return kindFault(at, "a list", v)
	}
	t.chat = append(t.chat, `"tools":[`...)
	fault := elements(v, func(i int, v []byte) *openai.Error {
		at := fmt.Sprintf("%s[%d]", at, i)
		f, fault := readTool(at, v)
		if fault != nil {
			return fault
		}
		if i > 0 {
			t.chat = append(t.chat, ',')
		}
		t.chat = appendMember(t.chat, `{"type":"function","function":{"name":`, f.name)
		t.chat = appendMember(t.chat, `,"description":`, f.description)
		t.chat = appendMember(t.chat, `,"parameters":`, f.parameters)
		if len(f.strict) > 0 && f.strict[0] != 'f' { // false is the default of chats
			t.chat = appendMember(t.chat, `,"strict":`, f.strict)
		}
		t.chat = append(t.chat, "}}"...)
		return nil
	})
	t.chat = append(t.chat, "],"...)
	return fault
}

// tool is a function, with its members as they are written; nil: not given.
type tool struct{ name, description, parameters, strict []byte }

func readTool(at string, v []byte) (f tool, fault *openai.Error) {
	if !isObject(v) {
		return f, kindFault(at, "an object", v)
	}
	var typ []byte
	_ = members(v, func(name string, v []byte) *openai.Error {
		switch name {
		case "type":
			typ = v
		case "name":
			f.name = v
		case "description":
			f.description = v
		case "parameters":
			f.parameters = v
		case "strict":
			f.strict = v
		}
		return nil
	})
	switch at := at + ".type"; {
	case typ == nil:
		return f, openai.BadRequest(at, `%s is required: "function"`, at)
	case !is(typ, "function"):
		return f, openai.BadRequest(at, `%s: must be "function", not %s: this server runs no tools; the client runs them, and sends their results as function_call_output items`, at, quote(typ))
	case !isText(f.name):
		return f, kindFault(strings.TrimSuffix(at, ".type")+".name", "a string", f.name)
	}
	return f, nil
}

// appendMember appends a member that was given.
func appendMember(dst []byte, name string, v []byte) []byte {
	if v == nil {
		return dst
	}
	return append(append(dst, name...), v...)
}

func (t *translation) toolChoice(at string, v []byte) *openai.Error {
	if isText(v) {
		return pass(t, at, v)
	}
	if !isObject(v) {
		return kindFault(at, "a string or an object", v)
	}
	var typ, name []byte
	_ = members(v, func(member string, v []byte) *openai.Error {
		switch member {
		case "type":
			typ = v
		case "name":
			name = v
		}
		return nil
	})
	switch {
	case is(typ, "allowed_tools"):
		return openai.BadRequest(at+".type", `%s.type "allowed_tools" is not supported here: send only the allowed tools in tools`, at)
	case !is(typ, "function"):
		return openai.BadRequest(at+".type", `%s.type: must be "function", not %s: this server runs no tools; the client runs them`, at, written(typ))
	case !isText(name):
		return kindFault(at+".name", "a string", name)
	}
	t.chat = append(append(append(t.chat, `"tool_choice":{"type":"function","function":{"name":`...), name...), "}},"...)
	return nil
}

// maxRepeated bounds the tools and the instructions that the answer repeats in full, in bytes.
// Longer instructions, and of longer tools the descriptions and parameters, are null.
const maxRepeated = 1 << 20

// repeat sets the members of the response object that repeat the request.
func (t *translation) repeat() {
	long := len(t.values["tools"]) > maxRepeated
	if len(t.values["instructions"]) > maxRepeated {
		delete(t.values, "instructions")
	}
	e := make([]byte, 0, 512)
	add := func(name, otherwise string) {
		e = appendOr(append(e, name...), t.values[strings.Trim(name, `,":`)], otherwise)
	}
	add(`,"instructions":`, "null")
	add(`,"metadata":`, "{}")
	add(`,"parallel_tool_calls":`, "true")
	add(`,"temperature":`, "null")
	add(`,"top_p":`, "null")
	add(`,"top_logprobs":`, "0")
	add(`,"tool_choice":`, `"auto"`)
	e = append(e, `,"tools":[`...)
	if v := t.values["tools"]; v != nil {
		_ = elements(v, func(i int, v []byte) *openai.Error {
			f, _ := readTool("", v)
			if long {
				f.description, f.parameters = nil, nil
			}
			if i > 0 {
				e = append(e, ',')
			}
			e = appendOr(append(e, `{"type":"function","name":`...), f.name, "null")
			e = appendOr(append(e, `,"description":`...), f.description, "null")
			e = appendOr(append(e, `,"parameters":`...), f.parameters, "null")
			e = append(appendOr(append(e, `,"strict":`...), f.strict, "false"), '}')
			return nil
		})
	}
	e = append(e, `],"text":{"format":`...)
	part := func(object, member, otherwise string) {
		var v []byte
		if o := t.values[object]; o != nil {
			_ = members(o, func(name string, given []byte) *openai.Error {
				if name == member {
					v = given
				}
				return nil
			})
		}
		e = appendOr(e, v, otherwise)
	}
	part("text", "format", `{"type":"text"}`)
	e = append(e, `,"verbosity":`...)
	part("text", "verbosity", `"medium"`)
	e = append(e, `},"reasoning":{"effort":`...)
	part("reasoning", "effort", "null")
	e = append(e, `,"summary":`...)
	part("reasoning", "summary", "null")
	e = append(e, '}')
	add(`,"max_output_tokens":`, "null")
	add(`,"max_tool_calls":`, "null")
	add(`,"truncation":`, `"disabled"`)
	add(`,"user":`, "null")
	add(`,"safety_identifier":`, "null")
	add(`,"prompt_cache_key":`, "null")
	t.echo = append(e, `,"service_tier":"default","store":false,"background":false,"previous_response_id":null,"conversation":null`...)
}

// written returns the beginning of a value, or that it is missing.
func written(v []byte) string {
	if v == nil {
		return "missing"
	}
	return quote(v)
}
