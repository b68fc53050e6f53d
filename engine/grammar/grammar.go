package grammar

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// A Kind names the language that a grammar is written in.
type Kind uint8

const (
	JSONSchema    Kind = iota // drafts 4, 6, 7, 2019-09 and 2020-12
	JSONObject                // any JSON object; the text is ignored
	Regex                     // the whole output matches
	Choice                    // one of Source.Choices
	EBNF                      // GBNF, as llama.cpp reads it; the rule root is the first
	Lark                      // a subset of Lark's notation; the rule start is the first
	StructuralTag             // free text with tagged parts
)

// Version identifies what grammars accept. A release that changes the masks of any grammar raises
// it, so that a request does not continue under other masks on a node of another release.
const Version = 4

// A Source is a grammar before it is compiled.
type Source struct {
	Kind    Kind
	Text    []byte
	Choices []string
	// After, if it is set, lets free text come first, up to and with this marker: the end of
	// reasoning. It is one special token where the vocabulary has it.
	After string
	// Compact allows no whitespace between JSON tokens.
	Compact bool
	// MaskSteps, if it is not 0, replaces Limits.MaskSteps where the grammar runs.
	MaskSteps int
	// Lead is the number of leading spaces that the model's decoder drops from an output. The
	// grammar describes the text without them.
	Lead int
	// Special lists the special tokens that After and the markers of structural tags may contain.
	// Where the vocabulary has such a token, it is demanded as a token and cannot be spelled, and it
	// is allowed in markers only. Without a list a marker is one token if the vocabulary has one of
	// that name.
	Special []string
}

// A Grammar is a compiled grammar. It is immutable and may be shared.
type Grammar struct {
	p *program
	// Ignored counts the keywords of a JSON schema that assert nothing here: annotations,
	// unknown keywords and formats.
	Ignored int

	thinking *thinking // nil: reasoning has no bound
	free     bool      // every token is allowed, within the bound
}

// Compile returns the grammar of a source. The error is an *Error, which names the keyword and
// the place; it wraps ErrBudget if a limit is exceeded.
func Compile(src Source, limits Limits) (*Grammar, error) {
	if src.Compact {
		limits.Whitespace = 0
	}
	rules, start, c, err := src.rules(&limits)
	if err != nil {
		return nil, named(src.Kind, err)
	}
	if c != nil {
		limits.steps = &c.steps
	}
	if src.After != "" {
		t := &tagCompiler{c: newSchemaCompiler(limits), special: src.Special}
		before, err := t.free(boolValue(true), []string{src.After})
		if err != nil {
			return nil, named(src.Kind, err)
		}
		rules = append(rules, seq(before, t.marker(src.After), ruleRef(start)))
		start = int32(len(rules) - 1)
	}
	p, err := link(rules, start, &limits)
	if errors.Is(err, ErrEmpty) && c != nil {
		if e := c.emptySchema(); e != nil {
			err = e
		}
	}
	if err == nil && src.Lead > 0 && src.After == "" && src.Kind != StructuralTag {
		p, err = linkLead(p, rules, start, src.Lead, &limits)
	}
	if err != nil {
		if c != nil {
			err = c.largest(err)
		}
		return nil, named(src.Kind, err)
	}
	for _, s := range src.Special {
		p.tokens = append(p.tokens, tokenRef{s, true})
	}
	g := &Grammar{p: p}
	if c != nil {
		g.Ignored = c.ignored
	}
	if src.Kind == StructuralTag {
		if g.thinking, g.free, err = readThinking(src.Text, &limits); err != nil {
			return nil, named(src.Kind, err)
		}
	}
	return g, nil
}

// linkLead links rules whose output may begin with spaces that the decoder drops. It refuses a
// grammar whose own text may begin with a space, because that space would be dropped.
func linkLead(without *program, rules []*expr, start int32, lead int, limits *Limits) (*program, error) {
	a, err := NewAutomaton(&Grammar{p: without}, nil, *limits)
	if err != nil {
		return nil, err
	}
	m, err := a.NewMatcher()
	if err != nil {
		return nil, err
	}
	if m.AcceptBytes([]byte(" ")) == nil {
		return nil, &Error{Keyword: "grammar", Reason: "the text may begin with a space, which this model's tokenizer drops"}
	}
	rules = append(rules, seq(rep(lit(" "), 0, int32(lead)), ruleRef(start)))
	return link(rules, int32(len(rules)-1), limits)
}

// keywords are the names of kinds in errors.
var keywords = [...]string{"json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag"}

// named returns err as an *Error that names the kind of the grammar.
func named(kind Kind, err error) error {
	var e *Error
	if !errors.As(err, &e) {
		e = &Error{Keyword: "grammar", Reason: err.Error()}
		if errors.Is(err, ErrBudget) {
			e.Err = ErrBudget
		}
	}
	if e.Keyword != "grammar" || int(kind) >= len(keywords) {
		return e
	}
	c := *e
	c.Keyword = keywords[kind]
	return &c
}

// rules returns the rules of a source, the first of them, and the compiler of its schemas; nil: it
// has none.
func (src Source) rules(limits *Limits) (rules []*expr, start int32, c *schemaCompiler, err error) {
	switch src.Kind {
	case JSONSchema, JSONObject:
		text := src.Text
		if src.Kind == JSONObject {
			text = []byte(`{"type":"object"}`)
		}
		c, start, err := compileSchema(text, limits)
		if err != nil {
			return nil, 0, nil, err
		}
		return c.rules, start, c, nil
	case Regex:
		e, err := parsePattern(string(src.Text), "regex", "", true, limits)
		return []*expr{e}, 0, nil, err
	case Choice:
		e, err := compileChoice(src.Choices, limits)
		return []*expr{e}, 0, nil, err
	case EBNF:
		rules, start, err = compileEBNF(src.Text, gbnf, limits)
		return rules, start, nil, err
	case Lark:
		rules, start, err = compileEBNF(src.Text, larkNotation, limits)
		return rules, start, nil, err
	case StructuralTag:
		if c, start, err = compileTags(src.Text, src.Special, limits); err != nil {
			return nil, 0, nil, err
		}
		return c.rules, start, c, nil
	}
	return nil, 0, nil, &Error{Keyword: "grammar", Reason: fmt.Sprintf("unknown kind %d", src.Kind)}
}

func compileChoice(choices []string, limits *Limits) (*expr, error) {
	if len(choices) > limits.Choices {
		return nil, limitError("choice", "", "choices", limits.Choices)
	}
	n := 0
	for i, c := range choices {
		if !utf8.ValidString(c) || c == "" {
			return nil, &Error{Keyword: "choice", Pointer: fmt.Sprint(i), Reason: "is empty or not UTF-8"}
		}
		n += len(c)
	}
	if n > limits.SourceBytes {
		return nil, limitError("choice", "", "bytes", limits.SourceBytes)
	}
	return oneOfLits(choices), nil
}
