package openai

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// Constrained outputs: response_format of OpenAI, structured_outputs and guided_* of vLLM. Each
// becomes a Grammar, which the caller compiles.

// Grammar is what every answer has to match.
type Grammar struct {
	grammar.Source
	Param string   // the field that has it, for errors
	Whole bool     // it is a structural tag of the whole answer; the rules of tools have their indexes as names
	Own   *Grammar // with Whole: the client's, which the rule named content has; nil: there is none
	Lead  bool     // with Own: an answer that Own has is one of this grammar, too
}

// IsJSON reports whether answers are JSON, or calls where those may be.
func (g *Grammar) IsJSON() bool {
	return g != nil && (g.Kind == grammar.JSONSchema || g.Kind == grammar.JSONObject || g.Own.IsJSON())
}

// Bytes returns the bytes of the grammar's text.
func (g *Grammar) Bytes() int {
	n := len(g.Text)
	for _, c := range g.Choices {
		n += len(c)
	}
	return n
}

// IsContent reports whether the content of an answer is what the client's grammar has. Structural
// tags may have more than the content.
func (g *Grammar) IsContent() bool {
	return g != nil && (g.Kind != grammar.StructuralTag || g.Own.IsContent())
}

// MaxChoiceValues bounds the values of a choice.
const MaxChoiceValues = 10_000

// schemaBounds bounds the values of a schema. Its compilation has bounds of its own.
var schemaBounds = jsonscan.Bounds{Elements: MaxValues, Values: MaxValues}

// keywordText describes schemas in the OpenAPI document.
const keywordText = "A JSON Schema of draft 4, 6, 7, 2019-09 or 2020-12. Enforced: $ref within the schema, type, enum, const, " +
	"properties, required, additionalProperties, patternProperties, propertyNames, minProperties, maxProperties, dependentRequired, " +
	"items, prefixItems, additionalItems, minItems, maxItems, uniqueItems of an enum, contains (one item), " +
	"unevaluatedProperties and unevaluatedItems (without anyOf, oneOf and if), $dynamicRef where one schema has the anchor, minLength, maxLength, pattern, " +
	"format (date, time, date-time, duration, email, hostname, ipv4, ipv6, uuid, uri, uri-reference; int32, int64), " +
	"minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, allOf, anyOf, and oneOf, not, if, then and else where branches can be distinguished. " +
	"Refused by name: remote references, and what else cannot be enforced. " +
	"Annotations, unknown keywords and other formats are ignored. Members come in the order of properties."

var (
	schemaValue       = schema{"type": []string{"object", "boolean"}, "description": keywordText}
	formatSchema      = schema{"anyOf": []schema{formatOf("text"), formatOf("json_object"), jsonFormat, tagFormat}}
	jsonFormat        = schema{"type": "object", "required": []string{"type", "json_schema"}, "properties": schema{"type": schema{"const": "json_schema"}, "json_schema": jsonFormatSchema}}
	jsonFormatSchema  = schema{"type": "object", "required": []string{"schema"}, "properties": schema{"name": schema{"type": "string"}, "description": nullable(schema{"type": "string"}), "strict": nullable(schema{"type": "boolean"}), "schema": schemaValue}}
	tagFormat         = schema{"type": "object", "required": []string{"type"}, "properties": schema{"type": schema{"const": "structural_tag"}}, "description": "structures and triggers, or format, as xgrammar reads them"}
	schemaOrText      = schema{"anyOf": []schema{schemaValue, {"type": "string"}}}
	choiceSchema      = listSchema(textSchema(1, MaxStopChars), 1, MaxChoiceValues)
	grammarSchema     = schema{"type": "string", "minLength": 1, "description": "GBNF if it contains ::=, else Lark"}
	structuredSchemas = schema{
		"json": nullable(schemaOrText), "regex": nullable(textSchema(1, 4096)), "choice": nullable(choiceSchema), "grammar": nullable(grammarSchema),
		"json_object": schema{"type": []string{"boolean", "null"}}, "structural_tag": nullable(schema{"type": []string{"string", "object"}}),
		"disable_any_whitespace": schema{"type": []string{"boolean", "null"}, "description": "no whitespace between JSON tokens"},
		"disable_fallback":       schema{"type": []string{"boolean", "null"}, "description": "accepted without effect: there is one implementation"},
	}
	structuredSchema = schema{"type": "object", "properties": structuredSchemas, "description": "exactly one of json, regex, choice, grammar, json_object and structural_tag"}
)

func formatOf(name string) schema {
	return schema{"type": "object", "required": []string{"type"}, "properties": schema{"type": schema{"const": name}}}
}

// constrain sets the grammar of the request. A second field may have the same grammar, because
// clients of several versions of vLLM send both of its fields.
func (r *Request) constrain(param string, src grammar.Source) error {
	if g := r.Grammar; g != nil {
		if g.Kind != src.Kind || !bytes.Equal(g.Text, src.Text) || !slices.Equal(g.Choices, src.Choices) {
			return BadRequest(param, "%s and %s both constrain the answer: send one of them", g.Param, param)
		}
		src.Compact = g.Compact
	}
	r.Grammar = &Grammar{Source: src, Param: param}
	return nil
}

// members calls f with each member of an object that is not null.
func members(object []byte, f func(name string, v []byte) error) error {
	s := jsonscan.Object(object)
	for s.Next() {
		quoted := s.Name()
		v, _ := s.Value(jsonscan.Bounds{})
		if v == nil || v[0] == 'n' {
			continue
		}
		if err := f(shortName(quoted), v); err != nil {
			return err
		}
	}
	return s.Err()
}

// setFormat takes response_format.
func setFormat(r *Request, v []byte) error {
	if v[0] != '{' {
		return errKind("an object", v)
	}
	typ, given, inner := "", []byte(nil), []byte(nil)
	err := members(v, func(name string, e []byte) error {
		switch name {
		case "type":
			typ, given = jsonscan.Text(e), e
			if e[0] != '"' {
				return BadRequest("response_format.type", "response_format.type must be a string, not %s", quote(e, 80))
			}
		case "json_schema":
			inner = e
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case typ == "text":
		return nil
	case typ == "json_object":
		return r.constrain("response_format", grammar.Source{Kind: grammar.JSONObject})
	case typ == "structural_tag":
		return r.constrain("response_format", grammar.Source{Kind: grammar.StructuralTag, Text: bytes.Clone(v)})
	case typ != "json_schema":
		return BadRequest("response_format.type", "response_format.type must be text, json_object, json_schema or structural_tag, not %s", written(given))
	case inner == nil || inner[0] != '{':
		return BadRequest("response_format.json_schema", "response_format.json_schema must be an object with name and schema")
	}
	var text []byte
	err = members(inner, func(name string, e []byte) error {
		switch name {
		case "schema":
			text = e
		case "name", "description":
			if e[0] != '"' {
				return BadRequest("response_format.json_schema."+name, "response_format.json_schema.%s must be a string, not %s", name, quote(e, 80))
			}
		case "strict": // every schema is enforced
			if e[0] != 't' && e[0] != 'f' {
				return BadRequest("response_format.json_schema.strict", "response_format.json_schema.strict must be true or false, not %s", quote(e, 80))
			}
		default:
			r.unknown("response_format.json_schema." + name)
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case text == nil || text[0] != '{' && text[0] != 't' && text[0] != 'f':
		return BadRequest("response_format.json_schema.schema", "response_format.json_schema.schema is required: a JSON Schema")
	}
	return r.constrain("response_format.json_schema.schema", grammar.Source{Kind: grammar.JSONSchema, Text: bytes.Clone(text)})
}

// setStructured takes structured_outputs.
func setStructured(r *Request, v []byte) error {
	if v[0] != '{' {
		return errKind("an object", v)
	}
	compact, before := false, r.Grammar
	err := members(v, func(name string, e []byte) error {
		param := "structured_outputs." + name
		switch name {
		case "json":
			return r.setSchema(param, e)
		case "regex":
			return r.setRegex(param, e)
		case "choice":
			return r.setChoice(param, e)
		case "grammar":
			return r.setGrammar(param, e)
		case "structural_tag":
			return r.setTag(param, e)
		case "json_object", "disable_any_whitespace", "disable_fallback", "disable_additional_properties":
			if e[0] != 't' && e[0] != 'f' {
				return BadRequest(param, "%s must be true or false, not %s", param, quote(e, 80))
			}
			switch {
			case e[0] == 'f':
			case name == "json_object":
				return r.constrain(param, grammar.Source{Kind: grammar.JSONObject})
			case name == "disable_any_whitespace":
				compact = true
			case name == "disable_additional_properties":
				return BadRequest(param, "%s is not supported here: put additionalProperties into the schema", param)
			}
		case "whitespace_pattern":
			return BadRequest(param, "%s is not supported here: use disable_any_whitespace", param)
		default:
			r.unknown(param)
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case r.Grammar == before:
		return BadRequest("structured_outputs", "structured_outputs must have one of json, regex, choice, grammar, json_object and structural_tag")
	}
	r.Grammar.Compact = compact
	return nil
}

// guided returns the value of a field of vLLM's older form.
func guided(s schema, most jsonscan.Bounds, set func(r *Request, param string, v []byte) error, param string) value {
	return value{schema: s, most: most, check: func(r *Request, v []byte) error { return set(r, param, v) }}
}

// setSchema takes a JSON Schema, or one as a string.
func (r *Request) setSchema(param string, v []byte) error {
	text := bytes.Clone(v)
	switch v[0] {
	case '{', 't', 'f':
	case '"':
		text = []byte(jsonscan.Text(v))
	default:
		return paramError(param, errKind("a JSON Schema, or one as a string", v))
	}
	return r.constrain(param, grammar.Source{Kind: grammar.JSONSchema, Text: text})
}

func (r *Request) setRegex(param string, v []byte) error {
	text, err := someText(v)
	if err != nil {
		return paramError(param, err)
	}
	return r.constrain(param, grammar.Source{Kind: grammar.Regex, Text: []byte(text)})
}

// setGrammar takes GBNF, or else Lark.
func (r *Request) setGrammar(param string, v []byte) error {
	text, err := someText(v)
	if err != nil {
		return paramError(param, err)
	}
	src := grammar.Source{Kind: grammar.Lark, Text: []byte(text)}
	if bytes.Contains(src.Text, []byte("::=")) {
		src.Kind = grammar.EBNF
	}
	return r.constrain(param, src)
}

func (r *Request) setChoice(param string, v []byte) error {
	if err := isList(v, "a list of strings", true); err != nil {
		return paramError(param, err)
	}
	var all []string
	err := elements(v, func(i int, e []byte) error {
		text, err := someText(e)
		if err != nil {
			return paramError(fmt.Sprintf("%s[%d]", param, i), err)
		}
		all = append(all, text)
		return nil
	})
	if err != nil {
		return err
	}
	slices.Sort(all) // equal choices are one grammar, in any order
	return r.constrain(param, grammar.Source{Kind: grammar.Choice, Choices: slices.Compact(all)})
}

// setTag takes a structural tag, or one as a string.
func (r *Request) setTag(param string, v []byte) error {
	text := bytes.Clone(v)
	switch v[0] {
	case '{':
	case '"':
		text = []byte(jsonscan.Text(v))
	default:
		return paramError(param, errKind("a structural tag, or one as a string", v))
	}
	return r.constrain(param, grammar.Source{Kind: grammar.StructuralTag, Text: text})
}

func someText(v []byte) (string, error) {
	if v[0] != '"' {
		return "", errKind("a string", v)
	}
	text := jsonscan.Text(v)
	if text == "" {
		return "", errEmpty
	}
	return text, nil
}

// paramError returns the error of a member of a field.
func paramError(param string, err error) error { return BadRequest(param, "%s: %s", param, err) }

// GrammarError returns the answer to a request whose grammar does not compile.
func GrammarError(g *Grammar, err error) *Error {
	var e *grammar.Error
	if errors.As(err, &e) && g.Whole {
		rule, isRule := strings.CutPrefix(e.Pointer, "#/rules/")
		name, rest, _ := strings.Cut(rule, "/")
		_, at, isSchema := strings.Cut("/"+rest, "/json_schema")
		param := "tools[" + name + "].function.parameters"
		if name == "content" {
			param = g.Own.Param
		}
		switch {
		case !isRule || !isSchema:
		case errors.Is(err, grammar.ErrEmpty): // no other tool can be called either
			return BadRequest(g.Param, "%s: %s: %s at %s: %s", g.Param, param, e.Keyword, Clip("#"+at, 200), e.Reason)
		default:
			return BadRequest(param, "%s: %s at %s: %s", param, e.Keyword, Clip("#"+at, 200), e.Reason)
		}
	}
	if errors.As(err, &e) && g.Kind == grammar.JSONSchema && e.Pointer != "" {
		return BadRequest(g.Param, "%s: %s at %s: %s", g.Param, e.Keyword, Clip(e.Pointer, 200), e.Reason)
	}
	return BadRequest(g.Param, "%s: %s", g.Param, Clip(err.Error(), 1000))
}
