package openai

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// Fields whose values need more than a type and a range.

var idSchema = schema{"type": "string", "pattern": fmt.Sprintf("^[!-~]{1,%d}$", MaxID)}

func setRequestID(r *Request, v []byte) error {
	if v[0] != '"' {
		return errKind("a string", v)
	}
	if r.RequestID = jsonscan.Text(v); !ValidID(r.RequestID) {
		return fmt.Errorf("must have 1 to %d printable ASCII characters", MaxID)
	}
	return nil
}

// ValidID reports whether a client's id may be used and returned.
func ValidID[T string | []byte](id T) bool {
	if len(id) == 0 || len(id) > MaxID {
		return false
	}
	for i := range len(id) {
		if id[i] <= ' ' || id[i] > '~' {
			return false
		}
	}
	return true
}

var stopSchema = schema{"anyOf": []schema{textSchema(1, MaxStopChars), listSchema(textSchema(1, MaxStopChars), 0, MaxStops)}}

func setStop(r *Request, v []byte) error {
	r.Stop = nil
	add := func(_ int, e []byte) error {
		if e[0] != '"' {
			return errKind("a string or a list of strings", v)
		}
		s := jsonscan.Text(e)
		if n := utf8.RuneCountInString(s); n == 0 || n > MaxStopChars {
			return fmt.Errorf("a stop string must have 1 to %d characters, not %d", MaxStopChars, n)
		}
		r.Stop = append(r.Stop, s)
		return nil
	}
	if v[0] == '[' {
		return elements(v, add)
	}
	return add(0, v)
}

// Bias is added to one token's logit.
type Bias struct {
	Token int32
	Value float32
}

var biasSpan = from(-100, 100)

// Nine digits are enough for every token id.
var biasSchema = schema{"type": "object", "propertyNames": schema{"pattern": "^(0|[1-9][0-9]{0,8})$"},
	"additionalProperties": biasSpan.schema(), "maxProperties": MaxBias}

// setBias takes {"token id": number}.
func setBias(r *Request, v []byte) error {
	if v[0] != '{' {
		return errKind(`an object like {"42": -1}`, v)
	}
	byToken := map[int32]float32{}
	for s := jsonscan.Object(v); s.Next(); {
		e, _ := s.Value(jsonscan.Bounds{})
		name := jsonscan.Text(s.Name())
		id, err := strconv.ParseUint(name, 10, 31)
		if err != nil || len(name) > 9 || strconv.FormatUint(id, 10) != name {
			return fmt.Errorf("names must be token ids, not %q", Clip(name, 40))
		}
		if byToken[int32(id)], err = biasSpan.number(e); err != nil {
			return fmt.Errorf("of token %d %w", id, err)
		}
	}
	r.LogitBias = nil
	for id, f := range byToken {
		r.LogitBias = append(r.LogitBias, Bias{id, f})
	}
	slices.SortFunc(r.LogitBias, func(a, b Bias) int { return cmp.Compare(a.Token, b.Token) })
	return nil
}

var streamSchema = schema{"type": "object", "properties": schema{
	"include_usage":          nullable(schema{"type": "boolean"}),
	"continuous_usage_stats": nullable(schema{"type": "boolean"}),
}}

func setStreamOptions(r *Request, v []byte) error {
	if v[0] != '{' {
		return errKind("an object", v)
	}
	r.hasOptions = true
	defer func() { r.ContinuousUsage = r.ContinuousUsage && r.IncludeUsage }()
	for s := jsonscan.Object(v); s.Next(); {
		e, _ := s.Value(jsonscan.Bounds{})
		name := "stream_options." + shortName(s.Name())
		var at *bool
		switch name {
		case "stream_options.include_usage":
			at = &r.IncludeUsage
		case "stream_options.continuous_usage_stats":
			at = &r.ContinuousUsage
		default:
			r.unknown(name)
			continue
		}
		if e[0] != 't' && e[0] != 'f' && e[0] != 'n' {
			return BadRequest(name, "%s must be true or false, not %s", name, quote(e, 80))
		}
		*at = e[0] == 't'
	}
	return nil
}

var truncateSchema = schema{"anyOf": []schema{{"const": -1}, {"type": "integer", "minimum": 1, "maximum": math.MaxInt32}}}

func setTruncate(r *Request, v []byte) error {
	n, ok := whole(v)
	switch {
	case !ok:
		return errKind("an integer", v)
	case n < 1 && n != -1 || n > math.MaxInt32:
		return fmt.Errorf("must be -1, for what fits, or at least 1, not %d", n)
	}
	r.Truncate = int(n)
	return nil
}

var (
	left, right = oneOf("left"), oneOf("right")
	sideSchema  = oneOf("left", "right").schema
)

func setSide(r *Request, v []byte) error {
	if !left.is(v) && !right.is(v) {
		return errKind(`"left" or "right"`, v)
	}
	r.truncationSide, r.TruncateEnd = true, right.is(v)
	return nil
}

var documentsSchema = listSchema(schema{"type": "object"}, 0, 0)

func setDocuments(r *Request, v []byte) error {
	if err := isList(v, "a list of objects", false); err != nil {
		return err
	}
	err := elements(v, func(i int, d []byte) error {
		if d[0] != '{' {
			return fmt.Errorf("[%d] must be an object, not %s", i, quote(d, 40))
		}
		return nil
	})
	r.Documents = v
	return err
}

func setTemplateArgs(r *Request, v []byte) error {
	if v[0] != '{' {
		return errKind("an object", v)
	}
	r.TemplateArgs = v
	return nil
}

// ReasoningEfforts are the values of reasoning_effort, from the least to the most.
var ReasoningEfforts = []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}

var effortSchema = schema{"type": "string", "enum": ReasoningEfforts}

func setEffort(r *Request, v []byte) error {
	if v[0] != '"' {
		return errKind("a string", v)
	}
	if r.ReasoningEffort = jsonscan.Text(v); !slices.Contains(ReasoningEfforts, r.ReasoningEffort) {
		return fmt.Errorf("must be one of %s, not %s", strings.Join(ReasoningEfforts, ", "), quote(v, 40))
	}
	return nil
}

// promptsOf takes a prompt, or a list of at most so many.
func promptsOf(most int) value {
	return value{texts: most, check: setPrompt, schema: schema{"anyOf": []schema{
		{"type": "string"},
		listSchema(tokenSchema, 1, 0),
		listSchema(schema{"anyOf": []schema{{"type": "string"}, listSchema(tokenSchema, 1, 0)}}, 1, most),
	}}}
}

var encodingSchema = oneOf("float", "base64").schema

func setEncoding(r *Request, v []byte) error {
	if r.Base64 = string(v) == `"base64"`; !r.Base64 && string(v) != `"float"` {
		return errKind(`"float" or "base64"`, v)
	}
	return nil
}

// setText takes a string of any length.
func setText(r *Request, v []byte) error {
	if v[0] != '"' {
		return errKind("a string", v)
	}
	r.Prompts = []Prompt{{Text: jsonscan.Text(v)}}
	return nil
}

// setPrompt takes "text", ["text", …], [1, 2, …] and [[1, 2], …].
func setPrompt(r *Request, v []byte) error {
	if v[0] == '"' {
		return setText(r, v)
	}
	if err := isList(v, "a string, a list of strings, or token ids", true); err != nil {
		return err
	}
	if isDigit(v[jsonscan.Space(v, 1)]) {
		ids, err := tokenIDs(v)
		r.Prompts = []Prompt{{Tokens: ids}}
		return err
	}
	r.Prompts = nil
	return elements(v, func(i int, e []byte) error {
		switch e[0] {
		case '"':
			r.Prompts = append(r.Prompts, Prompt{Text: jsonscan.Text(e)})
		case '[':
			ids, err := tokenIDs(e)
			if err != nil {
				return fmt.Errorf("[%d]%w", i, err)
			}
			if len(ids) == 0 {
				return fmt.Errorf("[%d] must not be empty", i)
			}
			r.Prompts = append(r.Prompts, Prompt{Tokens: ids})
		default:
			return fmt.Errorf("[%d] must be a string or a list of token ids, not %s", i, quote(e, 40))
		}
		return nil
	})
}

// partTexts has the types of content parts that are served, and the member of each with its text.
var partTexts = map[string]string{"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}

// PartText returns the member with the text of a content part of a type; empty: it is not served.
func PartText(kind string) string { return partTexts[kind] }

// partSchema returns the schema of content parts of the types, whose text is in one member.
func partSchema(kinds ...string) schema {
	member := PartText(kinds[0])
	return schema{"type": "object", "required": []string{"type", member}, "properties": schema{"type": schema{"enum": kinds}, member: schema{"type": "string"}}}
}

// Other members of a message go to the template as they are.
var messagesSchema = listSchema(schema{
	"type":     "object",
	"required": []string{"role"},
	"properties": schema{
		"role": schema{"type": "string", "minLength": 1},
		"content": schema{"anyOf": []schema{
			{"type": []string{"string", "null"}},
			{"type": "array", "items": schema{"anyOf": []schema{
				{"type": "string"},
				partSchema("text", "input_text", "output_text"), partSchema("refusal"), partSchema("thinking"),
			}}},
		}},
	},
}, 1, 0)

// message has the members of a message that are read, each as it is written; nil: it is missing.
type message struct{ role, content, reasoning, reasoningContent []byte }

// readMessage reads a checked object. Of equal names the last one counts.
func readMessage(object []byte) (m message, err error) {
	s := jsonscan.Object(object)
	for s.Next() {
		name := s.Name()
		v, _ := s.Value(jsonscan.Bounds{})
		switch shortName(name) {
		case "role":
			m.role = v
		case "content":
			m.content = v
		case "reasoning":
			m.reasoning = v
		case "reasoning_content":
			m.reasoningContent = v
		}
	}
	return m, s.Err()
}

// hasParts reports whether the content is a list of parts.
func (m *message) hasParts() bool { return jsonscan.IsList(m.content) }

// setMessages stores the messages' JSON, with the order of their members, after checking the
// members that every template uses. A list of text parts becomes one string, in which line ends
// separate the parts; reasoning_content is added as reasoning, too.
func setMessages(r *Request, v []byte) error {
	if err := isList(v, "a list", true); err != nil {
		return err
	}
	parts, reasoning := false, false
	err := elements(v, func(i int, e []byte) error {
		if e[0] != '{' {
			return fmt.Errorf("[%d] must be an object, not %s", i, quote(e, 40))
		}
		m, err := readMessage(e)
		if err != nil {
			return err
		}
		if len(m.role) <= len(`""`) || m.role[0] != '"' {
			return BadRequest(fmt.Sprintf("messages[%d].role", i), "messages[%d].role is required: a string", i)
		}
		reasoning = reasoning || m.reasoningContent != nil && m.reasoning == nil
		if m.content == nil || m.content[0] == 'n' || m.content[0] == '"' {
			return nil
		}
		parts = true
		return checkParts(i, m.content)
	})
	if err != nil {
		return err
	}
	r.Messages, r.MessageParts = v, nil
	if reasoning {
		r.Messages = rewrite(v, false)
	}
	if parts {
		r.MessageParts, r.Messages = r.Messages, rewrite(v, true)
	}
	return nil
}

// rewrite returns messages with reasoning_content as reasoning, too, and, with join, with lists of
// parts as one string.
func rewrite(messages []byte, join bool) []byte {
	dst := make([]byte, 0, len(messages)+len(messages)/16)
	dst = append(dst, '[')
	_ = elements(messages, func(i int, e []byte) error { // it was checked before
		if i > 0 {
			dst = append(dst, ',')
		}
		m, _ := readMessage(e)
		dst = append(dst, '{')
		first, content := true, false
		for s := jsonscan.Object(e); s.Next(); {
			name := s.Name()
			v, _ := s.Value(jsonscan.Bounds{})
			joined := join && m.hasParts() && shortName(name) == "content"
			if joined && content { // it was written at the place of the first one
				continue
			}
			if !first {
				dst = append(dst, ',')
			}
			first = false
			dst = append(append(dst, name...), ':')
			if joined {
				content = true
				dst = appendJoined(dst, m.content)
			} else {
				dst = append(dst, v...)
			}
		}
		if m.reasoningContent != nil && m.reasoning == nil {
			dst = append(append(dst, `,"reasoning":`...), m.reasoningContent...)
		}
		dst = append(dst, '}')
		return nil
	})
	return append(dst, ']')
}

// partText returns a part's text as it is written, or nil, and the type of a part that is an
// object.
func partText(part []byte) (text []byte, typ string) {
	switch part[0] {
	case '"':
		return part, "text"
	case '{':
	default:
		return nil, ""
	}
	if kind := lastMember(part, "type"); jsonscan.IsString(kind) {
		typ = shortName(kind)
	}
	if text = lastMember(part, PartText(typ)); !jsonscan.IsString(text) {
		text = nil
	}
	return text, typ
}

// lastMember returns the value of an object's member as it is written; nil: it is missing. Of equal
// names the last one counts.
func lastMember(object []byte, name string) (value []byte) {
	for s := jsonscan.Object(object); s.Next(); {
		quoted := s.Name()
		if v, _ := s.Value(jsonscan.Bounds{}); shortName(quoted) == name {
			value = v
		}
	}
	return value
}

func checkParts(i int, content []byte) error {
	if content[0] != '[' {
		return BadRequest(fmt.Sprintf("messages[%d].content", i), "messages[%d].content must be a string or a list of parts", i)
	}
	return elements(content, func(j int, p []byte) error {
		text, typ := partText(p)
		param := fmt.Sprintf("messages[%d].content[%d]", i, j)
		member := PartText(typ)
		switch {
		case typ == "":
			return BadRequest(param+".type", "%s.type is required: a string, and only text is supported", param)
		case member == "":
			return BadRequest(param+".type", "%s.type %q is not supported: only text is", param, Clip(typ, 40))
		case text == nil:
			return BadRequest(param+"."+member, "%s.%s must be a string", param, member)
		}
		return nil
	})
}

// appendJoined appends the text of parts as one string, with their escapes.
func appendJoined(dst, parts []byte) []byte {
	dst = append(dst, '"')
	_ = elements(parts, func(j int, p []byte) error { // it was checked before
		if j > 0 {
			dst = append(dst, '\\', 'n')
		}
		text, _ := partText(p)
		dst = append(dst, text[1:len(text)-1]...)
		return nil
	})
	return append(dst, '"')
}

// LastContent returns the text of a chat's last message, if it has this role.
func LastContent(messages []byte, role string) string {
	var last []byte
	if err := elements(messages, func(_ int, e []byte) error { last = e; return nil }); err != nil || last == nil {
		return ""
	}
	m, err := readMessage(last)
	if err != nil || shortName(m.role) != role || !jsonscan.IsString(m.content) {
		return ""
	}
	return jsonscan.Text(m.content)
}
