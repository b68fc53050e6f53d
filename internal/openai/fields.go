package openai

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/valyala/fastjson"
)

// The fields whose values need more than a type and a range.

var idSchema = schema{"type": "string", "pattern": fmt.Sprintf("^[!-~]{1,%d}$", MaxID)}

func setRequestID(r *Request, v *fastjson.Value) error {
	b, err := v.StringBytes()
	if err != nil {
		return errType("a string", v)
	}
	if !ValidID(b) {
		return fmt.Errorf("must have 1 to %d printable ASCII characters", MaxID)
	}
	r.RequestID = string(b)
	return nil
}

// ValidID says whether an id from outside may be used and echoed.
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

func setStop(r *Request, v *fastjson.Value) error {
	values := []*fastjson.Value{v}
	if v.Type() == fastjson.TypeArray {
		values = v.GetArray()
	}
	if len(values) > MaxStops {
		return fmt.Errorf("has %d strings, at most %d are taken", len(values), MaxStops)
	}
	var stops []string
	for _, s := range values {
		b, err := s.StringBytes()
		if err != nil {
			return errType("a string or a list of strings", v)
		}
		if n := utf8.RuneCount(b); n == 0 || n > MaxStopChars {
			return fmt.Errorf("a stop string must have 1 to %d characters, not %d", MaxStopChars, n)
		}
		stops = append(stops, string(b))
	}
	r.Stop = stops
	return nil
}

// Bias is added to one token's logit.
type Bias struct {
	Token int32
	Value float32
}

var biasSpan = from(-100, 100)

// Nine digits hold every token id there is.
var biasSchema = schema{"type": "object", "propertyNames": schema{"pattern": "^(0|[1-9][0-9]{0,8})$"},
	"additionalProperties": biasSpan.schema(), "maxProperties": MaxBias}

// setBias takes {"token id": number}.
func setBias(r *Request, v *fastjson.Value) error {
	o, err := v.Object()
	if err != nil {
		return errType(`an object like {"42": -1}`, v)
	}
	if o.Len() > MaxBias {
		return fmt.Errorf("has %d entries, at most %d are taken", o.Len(), MaxBias)
	}
	byToken := map[int32]float32{}
	o.Visit(func(key []byte, v *fastjson.Value) {
		name := string(key)
		id, e := strconv.ParseUint(name, 10, 31)
		if e != nil || len(name) > 9 || strconv.FormatUint(id, 10) != name {
			err = cmp.Or(err, fmt.Errorf("names must be token ids, not %q", clip(name, 40)))
			return
		}
		f, e := biasSpan.number(v)
		if e != nil {
			err = cmp.Or(err, fmt.Errorf("of token %d %w", id, e))
			return
		}
		byToken[int32(id)] = f
	})
	if err != nil {
		return err
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

func setStreamOptions(r *Request, v *fastjson.Value) error {
	o, err := v.Object()
	if err != nil {
		return errType("an object", v)
	}
	r.hasOptions = true
	o.Visit(func(key []byte, v *fastjson.Value) {
		name := "stream_options." + string(key)
		var at *bool
		switch string(key) {
		case "include_usage":
			at = &r.IncludeUsage
		case "continuous_usage_stats":
			at = &r.ContinuousUsage
		default:
			r.unknown(name)
			return
		}
		b, e := v.Bool()
		if e != nil && v.Type() != fastjson.TypeNull && err == nil {
			err = BadRequest(name, "%s must be true or false, not %s", name, clip(v.String(), 80))
		}
		*at = b
	})
	return err
}

var truncateSchema = schema{"anyOf": []schema{{"const": -1}, {"type": "integer", "minimum": 1, "maximum": math.MaxInt32}}}

func setTruncate(r *Request, v *fastjson.Value) error {
	n, ok := whole(v)
	switch {
	case !ok:
		return errType("an integer", v)
	case n < 1 && n != -1 || n > math.MaxInt32:
		return fmt.Errorf("must be -1, for what fits, or at least 1, not %d", n)
	}
	r.Truncate = int(n)
	return nil
}

var sideSchema = schema{"enum": []string{"left", "right"}}

func setSide(r *Request, v *fastjson.Value) error {
	switch s, _ := textOf(v); string(s) {
	case "left", "right":
		r.truncationSide, r.TruncateEnd = true, string(s) == "right"
		return nil
	}
	return errType(`"left" or "right"`, v)
}

var documentsSchema = listSchema(schema{"type": "object"}, 0, 0)

func setDocuments(r *Request, v *fastjson.Value) error {
	a, err := readList(v, "a list of objects", 0, 0)
	if err != nil {
		return err
	}
	for i, d := range a {
		if d.Type() != fastjson.TypeObject {
			return fmt.Errorf("[%d] must be an object, not %s", i, clip(d.String(), 40))
		}
	}
	r.Documents = appendValue(nil, v)
	return nil
}

func setTools(r *Request, v *fastjson.Value) error {
	if err := list.check(r, v); err != nil {
		return err
	}
	r.Tools = appendValue(nil, v)
	return nil
}

func setTemplateArgs(r *Request, v *fastjson.Value) error {
	if v.Type() != fastjson.TypeObject {
		return errType("an object", v)
	}
	r.TemplateArgs = appendValue(nil, v)
	return nil
}

var promptSchema = schema{"anyOf": []schema{
	{"type": "string"},
	listSchema(tokenSchema, 1, 0),
	listSchema(schema{"anyOf": []schema{{"type": "string"}, listSchema(tokenSchema, 1, 0)}}, 1, MaxPrompts),
}}

// setPrompt takes "text", ["text", …], [1, 2, …] and [[1, 2], …].
func setPrompt(r *Request, v *fastjson.Value) error {
	r.Prompts = nil
	if b, err := v.StringBytes(); err == nil {
		r.Prompts = []Prompt{{Text: string(b)}}
		return nil
	}
	a, err := readList(v, "a string, a list of strings, or token ids", 1, 0)
	if err != nil {
		return err
	}
	if a[0].Type() == fastjson.TypeNumber {
		ids, err := tokenIDs(a)
		if err != nil {
			return err
		}
		r.Prompts = []Prompt{{Tokens: ids}}
		return nil
	}
	if len(a) > MaxPrompts {
		return fmt.Errorf("has %d prompts, at most %d are taken", len(a), MaxPrompts)
	}
	for i, e := range a {
		switch e.Type() {
		case fastjson.TypeString:
			r.Prompts = append(r.Prompts, Prompt{Text: string(e.GetStringBytes())})
		case fastjson.TypeArray:
			ids, err := tokenIDs(e.GetArray())
			if err != nil {
				return fmt.Errorf("[%d]%w", i, err)
			}
			if len(ids) == 0 {
				return fmt.Errorf("[%d] must not be empty", i)
			}
			r.Prompts = append(r.Prompts, Prompt{Tokens: ids})
		default:
			return fmt.Errorf("[%d] must be a string or a list of token ids, not %s", i, clip(e.String(), 40))
		}
	}
	return nil
}

var textKinds = []string{"text", "input_text", "output_text"}

// Other names of a message go to the template as they are.
var messagesSchema = listSchema(schema{
	"type":     "object",
	"required": []string{"role"},
	"properties": schema{
		"role": schema{"type": "string", "minLength": 1},
		"content": schema{"anyOf": []schema{
			{"type": []string{"string", "null"}},
			{"type": "array", "items": schema{"anyOf": []schema{
				{"type": "string"},
				{"type": "object", "required": []string{"type", "text"}, "properties": schema{
					"type": schema{"enum": textKinds}, "text": schema{"type": "string"}}},
			}}},
		}},
	},
}, 1, 0)

// setMessages keeps the messages' JSON, with the order of their fields, after
// looking at what every template relies on. Lists of text parts become one
// string, parts separated by line ends; reasoning_content is also reasoning.
func setMessages(r *Request, v *fastjson.Value) error {
	a, err := readList(v, "a list", 1, 0)
	if err != nil {
		return err
	}
	r.MessageParts = nil
	joinedOf := map[*fastjson.Value]string{} // of messages whose content is parts
	for i, m := range a {
		if m.Type() != fastjson.TypeObject {
			return fmt.Errorf("[%d] must be an object, not %s", i, clip(m.String(), 40))
		}
		if role, ok := textOf(m.Get("role")); !ok || len(role) == 0 {
			return BadRequest(fmt.Sprintf("messages[%d].role", i), "messages[%d].role is required: a string", i)
		}
		if why := m.Get("reasoning_content"); why != nil && m.Get("reasoning") == nil {
			m.Set("reasoning", why)
		}
		c := m.Get("content")
		if c == nil || c.Type() == fastjson.TypeNull || c.Type() == fastjson.TypeString {
			continue
		}
		joined, err := joinParts(i, c)
		if err != nil {
			return err
		}
		joinedOf[m] = joined
	}
	if len(joinedOf) > 0 {
		r.MessageParts = appendValue(nil, v)
		for m, joined := range joinedOf {
			m.Set("content", stringValue(joined))
		}
	}
	r.Messages = appendValue(nil, v)
	return nil
}

func joinParts(i int, c *fastjson.Value) (string, error) {
	parts, err := c.Array()
	if err != nil {
		return "", BadRequest(fmt.Sprintf("messages[%d].content", i), "messages[%d].content must be a string or a list of parts", i)
	}
	var all []string
	for j, p := range parts {
		if s, ok := textOf(p); ok {
			all = append(all, string(s))
			continue
		}
		param := fmt.Sprintf("messages[%d].content[%d]", i, j)
		if kind := string(p.GetStringBytes("type")); !slices.Contains(textKinds, kind) {
			return "", BadRequest(param+".type", "%s.type %q is not supported: only text is", param, clip(kind, 40))
		}
		b, ok := textOf(p.Get("text"))
		if !ok {
			return "", BadRequest(param+".text", "%s.text must be a string", param)
		}
		all = append(all, string(b))
	}
	return strings.Join(all, "\n"), nil
}

// LastWords is the text of the last of a chat's messages, if it has this role.
func LastWords(messages []byte, role string) string {
	v, err := fastjson.ParseBytes(messages)
	if err != nil {
		return ""
	}
	a := v.GetArray()
	if len(a) == 0 || string(a[len(a)-1].GetStringBytes("role")) != role {
		return ""
	}
	return string(a[len(a)-1].GetStringBytes("content"))
}

// textOf is the value of a string; false for everything else, nil included.
func textOf(v *fastjson.Value) ([]byte, bool) {
	if v == nil || v.Type() != fastjson.TypeString {
		return nil, false
	}
	return v.GetStringBytes(), true
}
