package responses

import (
	"fmt"
	"math"
	"strconv"
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

// field is a row of the table.
type field struct {
	name string
	most jsonscan.Bounds // of its value
	// read checks the value and translates it; nil: messages does.
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
	{"instructions", jsonscan.Bounds{}, nil},
	{"input", tree, nil},

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

// label accepts a short string without effect.
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
	read(v, place{"type", &typ}, place{"name", &name})
	switch {
	case is(typ, "text"):
	case is(typ, "json_object"):
		t.add("response_format", []byte(`{"type":"json_object"}`))
	case !is(typ, "json_schema"):
		return kindFault(at+".type", `"text", "json_object" or "json_schema"`, typ)
	case !isText(name):
		return kindFault(at+".name", "a string", name)
	default:
		t.chat = append(t.chat, `"response_format":{"type":"json_schema","json_schema":{`...)
		_ = members(v, func(member string, v []byte) *openai.Error {
			if member != "type" {
				t.chat = append(append(append(openai.AppendString(t.chat, member), ':'), v...), ',')
			}
			return nil
		})
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
		t.chat = appendMember(t.chat, `,"strict":`, f.strict)
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
	read(v, place{"type", &typ}, place{"name", &f.name}, place{"description", &f.description}, place{"parameters", &f.parameters}, place{"strict", &f.strict})
	switch {
	case typ == nil:
		return f, kindFault(at+".type", `"function"`, typ)
	case !is(typ, "function"):
		return f, openai.BadRequest(at+".type", `%s.type: must be "function", not %s: this server runs no tools; the client runs them, and sends their results as function_call_output items`, at, quote(typ))
	case !isText(f.name):
		return f, kindFault(at+".name", "a string", f.name)
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
	read(v, place{"type", &typ}, place{"name", &name})
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

// written returns the beginning of a value, or that it is missing.
func written(v []byte) string {
	if v == nil {
		return "missing"
	}
	return quote(v)
}
