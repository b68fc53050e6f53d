package responses

import (
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// translation is the work of one call of Chat.
type translation struct {
	*Response
	chat    []byte            // the chat's body so far, each member followed by a comma
	values  map[string][]byte // of the body's members that the table has, as they are written; null is left out
	unknown []string
	dialog  dialog
}

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
		if f := &fields[i]; f.read != nil && t.values[f.name] != nil {
			if fault := f.read(t, f.name, t.values[f.name]); fault != nil {
				return nil, fault
			}
		}
	}
	if t.values["stream_options"] != nil && !t.stream {
		return nil, openai.BadRequest("stream_options", "stream_options needs stream: true")
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
	if fault := t.messages(); fault != nil {
		return nil, fault
	}
	t.chat = append(t.chat, '}')
	if d := &t.dialog; d.dropped > 0 && t.o.Dropped != nil {
		t.o.Dropped(d.dropped, d.field, d.err)
	}
	t.repeat()
	if more := cap(t.chat) + cap(t.echo) - charged; more > 0 { // of encrypted reasoning with many escapes
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
			read(o, place{member, &v})
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
