package openai

import (
	"fmt"
	"slices"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// Bounds of tools.
const (
	MaxTools    = 1024 // of a request
	MaxToolName = 128  // characters of a function's name
)

// Function is a tool of a request.
type Function struct {
	Name       string
	Parameters []byte // its JSON schema, an object, as the body has it; nil: not given
	Strict     *bool  // the arguments of calls must match the schema; nil: not given
}

// CallRule is what tool_choice and parallel_tool_calls demand of an answer.
type CallRule struct {
	None     bool   // the answer's text is not searched for calls
	Required bool   // the answer is one or more calls
	Name     string // the answer is one call of the function; empty: of any
	One      bool   // the answer has at most one call
}

// Constrained reports whether the calls of an answer depend on a grammar: one is demanded, several
// are forbidden, arguments have a schema, or else the answer has one.
func (r *Request) Constrained() bool {
	return r.Functions != nil && !r.Calls.None && (r.Calls.Required || r.Calls.Name != "" || r.Calls.One || r.HasStrict() || r.Grammar.IsJSON())
}

// HasStrict reports whether a tool is strict.
func (r *Request) HasStrict() bool {
	return slices.ContainsFunc(r.Functions, func(f Function) bool { return f.Strict != nil && *f.Strict })
}

var toolsSchema = listSchema(schema{
	"type": "object", "required": []string{"type", "function"},
	"properties": schema{
		"type": schema{"const": "function"},
		"function": schema{
			"type": "object", "required": []string{"name"},
			"properties": schema{
				"name":        schema{"type": "string", "pattern": fmt.Sprintf("^[A-Za-z0-9_.-]{1,%d}$", MaxToolName)},
				"description": nullable(schema{"type": "string"}),
				"parameters":  nullable(schema{"type": "object"}),
				"strict":      schema{"type": []string{"boolean", "null"}, "description": "the arguments of calls follow parameters"},
			},
		},
	},
}, 0, MaxTools)

// setTools stores the tools' JSON. Tools are checked later, by checkTools, because other servers
// may accept what is refused here.
func setTools(r *Request, v []byte) error {
	if err := isList(v, "a list", false); err != nil {
		return err
	}
	if r.Tools = v; v[jsonscan.Space(v, 1)] == ']' {
		r.Tools = nil
	}
	return nil
}

// checkTools checks the tools and stores their functions.
func (r *Request) checkTools() *Error {
	if r.Tools == nil {
		if r.Calls.Required || r.Calls.Name != "" {
			return BadRequest("tool_choice", "tool_choice needs tools, which are missing")
		}
		return nil
	}
	known := r.Calls.Name == ""
	err := elements(r.Tools, func(i int, e []byte) error {
		if i == MaxTools {
			return BadRequest("tools", "tools: has too many elements, at most %d are taken", MaxTools)
		}
		f, err := readTool(e, fmt.Sprintf("tools[%d]", i))
		r.Functions = append(r.Functions, f)
		known = known || f.Name == r.Calls.Name
		return err
	})
	if err == nil && !known {
		return BadRequest("tool_choice", "tool_choice names the function %q, which is not among tools", Clip(r.Calls.Name, MaxToolName))
	}
	if fault, ok := err.(*Error); ok || err == nil {
		return fault
	}
	return BadRequest("tools", "tools: %s", err)
}

// readTool reads a tool. Of equal names the last one counts.
func readTool(tool []byte, at string) (f Function, err error) {
	var typ, function []byte
	if err := toolMembers(tool, at, func(name string, v []byte) error {
		switch name {
		case "type":
			typ = v
		case "function":
			function = v
		}
		return nil
	}); err != nil {
		return f, err
	}
	if string(typ) != `"function"` {
		return f, BadRequest(at+".type", `%s.type must be "function", not %s`, at, written(typ))
	}
	at += ".function"
	var given []byte // name as it is written
	return f, toolMembers(function, at, func(name string, v []byte) error {
		param := at + "." + name
		switch {
		case v[0] == 'n': // not given
		case name == "name":
			if f.Name, given = "", v; v[0] == '"' {
				f.Name = jsonscan.Text(v)
			}
		case name == "description" && v[0] != '"':
			return BadRequest(param, "%s must be a string, not %s", param, quote(v, 40))
		case name == "parameters":
			if f.Parameters = v; v[0] != '{' {
				return BadRequest(param, "%s must be a JSON schema, which is an object, not %s", param, quote(v, 40))
			}
		case name == "strict":
			strict := v[0] == 't'
			if f.Strict = &strict; !strict && v[0] != 'f' {
				return BadRequest(param, "%s must be true or false, not %s", param, quote(v, 40))
			}
		}
		return nil
	}, func() error {
		if !validName(f.Name) {
			return BadRequest(at+".name", "%s.name must have 1 to %d letters, digits, underscores, points or hyphens, not %s", at, MaxToolName, written(given))
		}
		return nil
	})
}

// toolMembers calls f with the members of a checked value, which must be an object, and then each
// of after.
func toolMembers(v []byte, at string, f func(name string, v []byte) error, after ...func() error) error {
	if v == nil || v[0] != '{' {
		return BadRequest(at, "%s must be an object, not %s", at, written(v))
	}
	s := jsonscan.Object(v)
	for s.Next() {
		name := shortName(s.Name())
		v, _ := s.Value(jsonscan.Bounds{})
		if err := f(name, v); err != nil {
			return err
		}
	}
	for _, f := range after {
		if err := f(); err != nil {
			return err
		}
	}
	return s.Err()
}

// written returns the beginning of a value for an error; nil: the value is missing.
func written(v []byte) string {
	if v == nil {
		return "missing"
	}
	return quote(v, 40)
}

func validName(name string) bool {
	for _, c := range name {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_' || c == '.' || c == '-') {
			return false
		}
	}
	return 0 < len(name) && len(name) <= MaxToolName
}

var toolChoiceSchema = schema{"anyOf": []schema{
	{"enum": []any{"none", "auto", "required"}},
	{"type": "object", "required": []string{"type", "function"}, "properties": schema{
		"type": schema{"const": "function"}, "function": schema{"type": "object", "required": []string{"name"}, "properties": schema{"name": schema{"type": "string"}}},
	}},
}}

// setToolChoice takes a word, or the name of a function.
func setToolChoice(r *Request, v []byte) error {
	switch string(v) {
	case `"none"`:
		r.Calls.None = true
		return nil
	case `"auto"`:
		return nil
	case `"required"`:
		r.Calls.Required = true
		return nil
	}
	var typ, function, name []byte
	if v[0] == '{' {
		if err := members(v, func(member string, e []byte) error {
			switch member {
			case "type":
				typ = e
			case "function":
				function = e
			}
			return nil
		}); err != nil {
			return err
		}
	}
	if string(typ) != `"function"` || function == nil || function[0] != '{' {
		return BadRequest("tool_choice", `tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}, not %s`, quote(short(v), 80))
	}
	if err := members(function, func(member string, e []byte) error {
		if member == "name" {
			name = e
		}
		return nil
	}); err != nil {
		return err
	}
	if name == nil || name[0] != '"' || !validName(jsonscan.Text(name)) {
		return BadRequest("tool_choice", "tool_choice.function.name must be the name of a function in tools, not %s", written(name))
	}
	r.Calls.Name = jsonscan.Text(name)
	return nil
}

// ToolCall is a call that an answer makes, or what is new of it.
type ToolCall struct {
	Index     int    // among the calls of its choice
	ID, Name  string // empty: the call has begun before
	Arguments []byte
}

// ReasonToolCalls is the finish reason of an answer that ended by itself and has calls.
const ReasonToolCalls = "tool_calls"

// AddCall adds the beginning of a call, or more of its arguments if c has no Name. A Delta has at
// most one entry for a call. The memory of earlier entries is used again.
func (d *Delta) AddCall(c ToolCall) {
	n := len(d.Calls)
	if n == 0 || d.Calls[n-1].Index != c.Index {
		if n < cap(d.Calls) {
			d.Calls = d.Calls[:n+1]
		} else {
			d.Calls = append(d.Calls, ToolCall{})
		}
		last := &d.Calls[n]
		*last = ToolCall{Index: c.Index, ID: c.ID, Name: c.Name, Arguments: last.Arguments[:0]}
		n++
	}
	last := &d.Calls[n-1]
	last.Arguments = append(last.Arguments, c.Arguments...)
}

// appendParsed appends the new members of a message that a parser made, each after a comma unless
// it is the first of the object.
func (d *Delta) appendParsed(dst []byte) []byte {
	if len(d.Reasoning) > 0 {
		dst = AppendString(appendName(dst, `"reasoning":`), d.Reasoning)
		dst = AppendString(appendName(dst, `"reasoning_content":`), d.Reasoning)
	}
	if len(d.Calls) > 0 {
		dst = d.appendCalls(appendName(dst, `"tool_calls":`), false)
	}
	return dst
}

func appendName(dst []byte, name string) []byte {
	if dst[len(dst)-1] != '{' {
		dst = append(dst, ',')
	}
	return append(dst, name...)
}

// appendCalls appends the list of calls. Those of a whole message have no index.
func (d *Delta) appendCalls(dst []byte, whole bool) []byte {
	dst = append(dst, '[')
	for i := range d.Calls {
		c := &d.Calls[i]
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, '{')
		if c.Name != "" {
			dst = append(AppendString(append(dst, `"id":`...), c.ID), `,"type":"function"`...)
		}
		if !whole {
			dst = appendInt(appendName(dst, `"index":`), "", c.Index)
		}
		dst = append(appendName(dst, `"function":`), '{')
		if c.Name != "" {
			dst = append(AppendString(append(dst, `"name":`...), c.Name), ',')
		}
		dst = append(AppendString(append(dst, `"arguments":`...), c.Arguments), "}}"...)
	}
	return append(dst, ']')
}
