package grammar

import "fmt"

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

// A Source is a grammar before it is compiled.
type Source struct {
	Kind    Kind
	Text    []byte
	Choices []string
}

// A Grammar is a compiled grammar. It is immutable and may be shared.
type Grammar struct {
	p *program
	// Ignored counts the keywords of a JSON schema that assert nothing here: annotations,
	// unknown keywords and formats.
	Ignored int
}

// Compile returns the grammar of a source. The error is an *Error, which names the keyword and
// the place; it wraps ErrBudget if a limit is exceeded.
func Compile(src Source, limits Limits) (*Grammar, error) {
	switch src.Kind {
	case JSONSchema:
		return compileSchema(src.Text, limits)
	case JSONObject:
		return compileSchema([]byte(`{"type":"object"}`), limits)
	case Regex:
		e, err := parsePattern(string(src.Text), "regex", "", true, &limits)
		if err != nil {
			return nil, err
		}
		return compileExpr(e, "regex", &limits)
	case Choice:
		return compileChoice(src.Choices, &limits)
	}
	return nil, &Error{Keyword: "grammar", Reason: fmt.Sprintf("unknown kind %d", src.Kind)}
}

func compileChoice(choices []string, limits *Limits) (*Grammar, error) {
	if len(choices) > limits.Choices {
		return nil, limitError("choice", "", "choices", limits.Choices)
	}
	n := 0
	for i, c := range choices {
		if !validKey(c) || c == "" {
			return nil, &Error{Keyword: "choice", Pointer: fmt.Sprint(i), Reason: "is empty or not UTF-8"}
		}
		n += len(c)
	}
	if n > limits.SourceBytes {
		return nil, limitError("choice", "", "bytes", limits.SourceBytes)
	}
	return compileExpr(oneOfLits(choices), "choice", limits)
}

// compileExpr returns the grammar of one expression without rules.
func compileExpr(e *expr, keyword string, limits *Limits) (*Grammar, error) {
	p, err := link([]*expr{e}, 0, limits)
	if err != nil {
		if e, ok := err.(*Error); ok && e.Keyword == "grammar" {
			return nil, &Error{Keyword: keyword, Reason: e.Reason, Err: e.Err}
		}
		return nil, err
	}
	return &Grammar{p: p}, nil
}
