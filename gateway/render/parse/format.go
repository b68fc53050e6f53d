package parse

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// Vocabulary returns the id of the token that a tokenizer adds to its vocabulary for a text; ok is
// false if there is none. Special tokens are such tokens, and others that decode to plain text.
type Vocabulary func(text string) (id int32, ok bool)

// Format is how a model writes tool calls and reasoning. It is immutable and shared by the parsers
// of all requests.
type Format struct {
	row     row
	thought thinking
	special []special

	// The markers of each state. Of the pairs the second is for requests without tools.
	text     [2]set
	tail     set // of text behind a call whose end has not come
	think    [2]set
	section  set
	nameOpen set
	name     set
	id       set
	gap      set // between a name and its JSON
	after    set // behind a call's arguments
	params   set
	param    set
	value    set // between a parameter's name and its value
	valueEnd set
	inside   set // markers that end a call wherever they come as tokens
	quote    set
	header   set
	body     set
	echoEnd  set // of reasoning that is content

	wrappers []wrapper // of which an answer has one
}

// wrapper is a pair of tags around the content.
type wrapper struct {
	open, close string // without newlines
	gap         string // between each and the content
	byID        bool   // close is a token
}

// special is a token that is a marker.
type special struct {
	id   int32
	text string
}

// NewFormat returns the format with the names of a tool call parser and of a reasoning parser, or
// of one of them. Names are those of vLLM's flags. A marker that is a token
// of the vocabulary matches only as that token. Without a vocabulary all markers match by their
// text.
func NewFormat(tools, reasoning string, v Vocabulary) (*Format, error) {
	f := &Format{}
	if tools != "" {
		r := find(rows, tools, toolAliases, func(r *row) string { return r.name })
		if r == nil {
			return nil, fmt.Errorf("unknown tool call parser %q: known are %s", tools, strings.Join(ToolParsers(), ", "))
		}
		f.row = *r
	}
	if reasoning != "" {
		t := find(thoughts, reasoning, thinkingAliases, func(t *thinking) string { return t.name })
		if t == nil {
			return nil, fmt.Errorf("unknown reasoning parser %q: known are %s", reasoning, strings.Join(ReasoningParsers(), ", "))
		}
		f.thought = *t
		if t.name == "openai_gptoss" && f.row.name == "" {
			f.row = rows[0]
		}
	}
	f.compile(v)
	return f, nil
}

// find returns the entry of a table with a name or an alias; nil: there is none.
func find[T any](table []T, name string, aliases map[string]string, nameOf func(*T) string) *T {
	if to, ok := aliases[name]; ok {
		name = to
	}
	for i := range table {
		if nameOf(&table[i]) == name {
			return &table[i]
		}
	}
	return nil
}

// names returns the sorted names of a table's entries and their aliases.
func names[T any](table []T, aliases map[string]string, nameOf func(*T) string) []string {
	out := slices.Sorted(maps.Keys(aliases))
	for i := range table {
		out = append(out, nameOf(&table[i]))
	}
	slices.Sort(out)
	return out
}

// ToolParsers returns the names of the tool call parsers, aliases included.
func ToolParsers() []string { return names(rows, toolAliases, func(r *row) string { return r.name }) }

// ReasoningParsers returns the names of the reasoning parsers, aliases included.
func ReasoningParsers() []string {
	return names(thoughts, thinkingAliases, func(t *thinking) string { return t.name })
}

// Tools returns the name of the tool call parser; empty: there is none.
func (f *Format) Tools() string { return f.row.name }

// Reasoning returns the name of the reasoning parser; empty: there is none.
func (f *Format) Reasoning() string { return f.thought.name }

// Channels reports whether answers are messages on channels, of which one has the content.
func (f *Format) Channels() bool { return f.row.args == argsHarmony }

// IDs returns how the model's template expects the ids of calls.
func (f *Format) IDs() IDStyle { return f.row.ids }

// Wraps reports whether answers have tags around the content.
func (f *Format) Wraps() bool { return len(f.wrappers) > 0 }

// Thinks reports whether tokens of the vocabulary, and no other text, begin and end reasoning.
func (f *Format) Thinks() bool {
	begin, end := f.ThinkingTokens()
	return end != "" && f.isToken(begin)
}

// ReasoningEnd returns the marker that ends reasoning; empty: the format has none.
func (f *Format) ReasoningEnd() string {
	if len(f.thought.close) == 0 {
		return ""
	}
	return f.thought.close[0]
}

// ThinkingTokens returns the tokens of the vocabulary that begin and end reasoning; empty: the
// format has none.
func (f *Format) ThinkingTokens() (begin, end string) {
	t := &f.thought
	if len(t.close) != 1 || !f.isToken(t.close[0]) {
		return "", ""
	}
	return t.open[0], t.close[0]
}

// isToken reports whether a marker is a token.
func (f *Format) isToken(s string) bool {
	return slices.ContainsFunc(f.special, func(x special) bool { return x.text == s })
}

// compile builds the sets of markers.
func (f *Format) compile(v Vocabulary) {
	r, t := &f.row, &f.thought
	isSpecial := func(text string) bool {
		if v == nil {
			return false
		}
		id, ok := v(text)
		if ok && f.textOf(id) == "" {
			f.special = append(f.special, special{id, text})
		}
		return ok
	}
	add := func(to *set, as role, texts ...string) { to.add(as, isSpecial, texts...) }

	for i := range f.text {
		for _, s := range []*set{&f.text[i], &f.think[i]} {
			add(s, thinkOpen, t.open...)
			add(s, thinkClose, t.close...)
		}
		add(&f.text[i], tag, t.tags...)
		add(&f.text[i], tag, r.tags...)
		if i == 1 || r.args == argsHarmony {
			break
		}
		calls := []*set{&f.text[i]}
		if t.calls {
			calls = append(calls, &f.think[i])
		}
		for _, s := range calls {
			add(s, sectionOpen, r.section)
			if r.section == "" || r.loose {
				add(s, callOpen, r.call...)
			}
		}
	}
	ends := func(to *set) {
		add(to, callClose, r.callEnd)
		add(to, sectionClose, r.sectionEnd)
	}
	next := func(to *set) {
		ends(to)
		add(to, callOpen, r.call...)
		add(to, sectionOpen, r.section)
		add(to, tag, r.noise...)
	}
	f.tail = set{marks: append([]mark{}, f.text[0].marks...), first: f.text[0].first, byText: f.text[0].byText}
	ends(&f.tail)
	next(&f.section)
	next(&f.gap)
	next(&f.after)

	add(&f.nameOpen, nameOpen, r.nameOpen)
	ends(&f.nameOpen)
	add(&f.name, nameEnd, r.nameEnd...)
	add(&f.name, idOpen, r.id)
	add(&f.id, nameEnd, r.nameEnd...)
	ends(&f.name)
	ends(&f.id)
	if r.args == argsKV {
		add(&f.name, paramOpen, r.param)
	}

	add(&f.params, paramOpen, r.param)
	next(&f.params)
	add(&f.param, paramNameEnd, r.paramName)
	ends(&f.param)
	add(&f.value, valueOpen, r.value)
	ends(&f.value)
	add(&f.valueEnd, valueClose, r.valueEnd)
	add(&f.valueEnd, paramOpen, r.param)
	ends(&f.valueEnd)

	if t.echo != "" {
		add(&f.echoEnd, thinkClose, echoClose)
	}
	ends(&f.inside)
	add(&f.inside, callOpen, r.call...)
	add(&f.inside, sectionOpen, r.section)
	add(&f.inside, thinkOpen, t.open...)
	add(&f.quote, quote, r.quote)

	for _, tags := range [][]string{r.tags, t.tags} {
		for i := 0; i+1 < len(tags); i += 2 {
			w := wrapper{open: tags[i], close: tags[i+1], byID: isSpecial(tags[i]) && isSpecial(tags[i+1])}
			if t.lines {
				w.gap = "\n"
			}
			f.wrappers = append(f.wrappers, w)
		}
	}
	// The vocabulary has the tags of its models, unless these write them by other tokens.
	known := slices.DeleteFunc(slices.Clone(f.wrappers), func(w wrapper) bool { return !w.byID })
	f.wrappers = f.wrappers[:min(1, len(f.wrappers))]
	if len(known) > 0 {
		f.wrappers = known
	}

	if r.args == argsHarmony {
		for _, s := range []*set{&f.header, &f.body, &f.gap, &f.inside, &f.after} {
			add(s, headerStart, "<|start|>")
			add(s, messageEnd, "<|end|>", "<|return|>", "<|call|>")
		}
		add(&f.header, headerChannel, "<|channel|>")
		add(&f.header, headerConstrain, "<|constrain|>")
		add(&f.header, headerEnd, "<|message|>")
		add(&f.body, headerChannel, "<|channel|>")
	}
}

// sets returns the markers of all states.
func (f *Format) sets() []*set {
	return []*set{
		&f.text[0], &f.think[0], &f.tail, &f.section, &f.nameOpen, &f.name, &f.id, &f.gap, &f.after, &f.params, &f.param,
		&f.value, &f.valueEnd, &f.inside, &f.quote, &f.header, &f.body,
	}
}

// textOf returns the marker that is a token; empty: the token is none.
func (f *Format) textOf(id int32) string {
	for i := range f.special {
		if f.special[i].id == id {
			return f.special[i].text
		}
	}
	return ""
}

// StartsInReasoning reports whether an answer begins with reasoning. Generation is the part of the
// prompt that the template adds for the answer: its end that a rendering without a generation
// prompt lacks. It has no text of messages. Its last marker of reasoning decides.
func (f *Format) StartsInReasoning(generation string) bool {
	open, end := -1, -1
	for _, s := range f.thought.open {
		open = max(open, strings.LastIndex(generation, s))
	}
	for _, s := range f.thought.close {
		end = max(end, strings.LastIndex(generation, s))
	}
	return open > end
}

// A Start is the part of an answer in which a prompt ends.
type Start uint8

const (
	AtBeginning     Start = iota // no part has begun
	InReasoning                  // behind the marker of reasoning
	BehindReasoning              // behind the marker of its end
	InContent                    // behind a tag that precedes the content
)

// StartOf returns the Start of a prompt that ends with the part for the answer. It is InReasoning
// by StartsInReasoning only.
func (f *Format) StartOf(prompt string) Start {
	prompt = strings.TrimRight(prompt, " \n")
	for i := range f.wrappers {
		if strings.HasSuffix(prompt, f.wrappers[i].open) {
			return InContent
		}
	}
	for _, s := range f.thought.close {
		if strings.HasSuffix(prompt, s) {
			return BehindReasoning
		}
	}
	return AtBeginning
}

// AppendID appends an id for a call whose Delta has none. Equal seeds give equal ids, so that the
// ids of a request that is attempted again do not change.
func (s IDStyle) AppendID(dst []byte, name string, seed uint64, call int) []byte {
	n := 24
	switch s {
	case IDMistral:
		n = 9
	case IDNative:
		dst = append(append(append(dst, "functions."...), name...), ':')
		return strconv.AppendInt(dst, int64(call), 10)
	default:
		dst = append(dst, "call_"...)
	}
	const letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	rnd := rand.New(rand.NewPCG(seed, uint64(call)))
	for range n {
		dst = append(dst, letters[rnd.IntN(len(letters))])
	}
	return dst
}
