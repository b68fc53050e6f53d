package parse

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/gateway/render/parse/args"
)

// Constraint is what an answer must be.
type Constraint struct {
	Tools []Tool // whose functions may be called; none only with Content
	// Types are those by which the answer's parser reads arguments.
	Types *args.Tools
	Text  bool // the answer may be text, with calls in it; otherwise it is calls
	One   bool // at most one call
	// Start is where the prompt ends. An answer may begin with reasoning, unless that has ended.
	Start Start
	// Content is the format of the text, as structural tags have it, with no calls in the text; nil:
	// any text. It is within the tags that the model writes around its content.
	Content []byte
}

// Tool is a function with what its calls must match.
type Tool struct {
	Index      int // among the tools of the request
	Name       string
	Parameters []byte // its JSON schema; nil: it has no parameters
	Strict     bool   // the arguments match the schema
}

// Grammar returns a structural tag of engine/grammar that describes answers in the format: an
// answer that matches it is parsed to calls as c demands. Special lists the markers that are tokens
// of the vocabulary. The rule of a tool in the tag has the tool's index as its name, and that of
// Content is named content. The error names the reason if the format cannot be forced.
//
// White space between parts of a call is free, up to a few characters. Members of objects that are
// calls, and whatever precedes the arguments, are spelled as templates spell them.
func (f *Format) Grammar(c Constraint) (tag []byte, special []string, err error) {
	for i := range f.special {
		if s := f.special[i].text; len(c.Tools) > 0 || f.Channels() || f.frames(s) {
			special = append(special, s)
		}
	}
	if slices.Sort(special); special == nil {
		special = []string{"\x00"} // no token: without a list, any part could be one
	}
	b := &grammarBuilder{f: f, r: &f.row, c: &c}
	for i := range c.Tools {
		t := &c.Tools[i]
		if f.row.args == argsPythonic && strings.IndexByte("0123456789.-", t.Name[0]) >= 0 {
			return nil, nil, fmt.Errorf("the name %q cannot be written in the format of the tool call parser %s: begin it with a letter", t.Name, f.row.name)
		}
		b.define(fmt.Sprint(t.Index), b.call(t))
	}
	if f.row.args == argsNone && len(c.Tools) > 0 {
		return nil, nil, fmt.Errorf("the format of the model's tool calls is not known")
	}
	names := make([]node, len(c.Tools))
	for i := range c.Tools {
		names[i] = ruleOf(fmt.Sprint(c.Tools[i].Index))
	}
	if len(names) > 0 {
		b.define("call", either(names...))
	}
	if c.Content != nil {
		b.define("content", c.Content)
	}
	answer := b.answer()
	out := append([]byte(`{"type":"structural_tag","rules":{`), b.rules...)
	out = append(append(append(out, `},"format":`...), answer...), '}')
	return out, special, nil
}

// frames reports whether a marker is one of reasoning or a tag around the content.
func (f *Format) frames(s string) bool {
	return slices.Contains(f.thought.open, s) || slices.Contains(f.thought.close, s) ||
		slices.ContainsFunc(f.wrappers, func(w wrapper) bool { return s == w.open || s == w.close })
}

// node is a format of a structural tag, as JSON.
type node []byte

func format(kind string) node { return append(append(node(`{"type":"`), kind...), '"') }

// members returns an object that has no member yet.
func members() node { return node{'{'} }

func (n node) with(name string, value []byte) node {
	if len(n) > 1 {
		n = append(n, ',')
	}
	return append(append(append(append(n, '"'), name...), `":`...), value...)
}

func (n node) text(name, value string) node {
	return n.with(name, args.AppendQuoted(nil, []byte(value)))
}

func (n node) list(name string, values []string) node {
	out := []byte{'['}
	for i, v := range values {
		if i > 0 {
			out = append(out, ',')
		}
		out = args.AppendQuoted(out, []byte(v))
	}
	return n.with(name, append(out, ']'))
}

func (n node) end() node { return append(n, '}') }

// exactly returns a text in which special tokens are tokens.
func exactly(parts ...string) node {
	return format("const_string").text("value", strings.Join(parts, "")).end()
}

func ruleOf(name string) node   { return format("rule").text("name", name).end() }
func pattern(regex string) node { return format("regex").text("pattern", regex).end() }
func elements(kind string, nodes []node) node {
	out := []byte{'['}
	for i, n := range nodes {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, n...)
	}
	return format(kind).with("elements", append(out, ']')).end()
}
func sequence(nodes ...node) node { return elements("sequence", nodes) }
func either(nodes ...node) node   { return elements("or", nodes) }
func optional(n node) node        { return format("optional").with("content", n).end() }
func star(n node) node            { return format("star").with("content", n).end() }

// gap is white space between parts.
func gap() node { return pattern("[ \n]{0,4}") }

// grammarBuilder builds the structural tag of one constraint.
type grammarBuilder struct {
	f     *Format
	r     *row
	c     *Constraint
	rules []byte
}

func (b *grammarBuilder) define(name string, n node) {
	if len(b.rules) > 0 {
		b.rules = append(b.rules, ',')
	}
	b.rules = append(append(args.AppendQuoted(b.rules, []byte(name)), ':'), n...)
}

// call returns the calls of one tool, from the marker of a call to its end. Calls that are members
// of a list have no markers.
func (b *grammarBuilder) call(t *Tool) node {
	r := b.r
	open := ""
	if len(r.call) > 0 {
		open = r.call[0]
	}
	switch r.args {
	case argsJSON:
		return b.named(open, t)
	case argsObject:
		if r.separator != 0 {
			return b.member(t)
		}
		return sequence(exactly(open), gap(), b.member(t), gap(), exactly(r.callEnd))
	case argsArray:
		return b.member(t)
	case argsXML:
		q := quoteAfter(open)
		n := sequence(exactly(open, q, t.Name, q, r.nameEnd[0]), b.parameters(t), exactly(r.callEnd))
		if len(r.noise) == 4 {
			n = sequence(exactly(r.noise[:3]...), n, exactly(r.noise[3]))
		}
		return n
	case argsKV:
		return sequence(exactly(open, t.Name, r.nameEnd[0]), b.parameters(t), exactly(r.callEnd))
	case argsPythonic:
		return sequence(exactly(t.Name), b.parameters(t))
	case argsGemma:
		return sequence(exactly(open, r.prefix[0], t.Name), b.parameters(t), gap(), exactly(r.callEnd))
	}
	to := " to=functions." + t.Name
	return sequence(either(
		sequence(exactly("<|channel|>commentary", to), optional(exactly(" <|constrain|>json"))),
		sequence(exactly(to, "<|channel|>commentary"), optional(exactly(" <|constrain|>json"))),
	), exactly("<|message|>"), arguments(t))
}

// quoteAfter returns the quote of an attribute if a marker ends with the attribute's name.
func quoteAfter(marker string) string {
	if strings.HasSuffix(marker, "name=") {
		return `"`
	}
	return ""
}

// named returns a call whose arguments are a JSON object behind the name.
func (b *grammarBuilder) named(open string, t *Tool) node {
	r := b.r
	begin := exactly(open, t.Name, r.nameEnd[0])
	switch {
	case r.nameOpen != "":
		begin = exactly(open, "function", r.nameOpen, t.Name, r.nameEnd[0])
	case r.ids == IDNative:
		begin = sequence(exactly(open, "functions.", t.Name, ":"), pattern("[0-9]{1,3}"), exactly(r.nameEnd[0]))
	case r.arrays:
		begin = sequence(exactly(open, t.Name), optional(exactly(r.nameEnd[0])))
	}
	if len(r.noise) == 2 {
		return sequence(begin, exactly(r.noise[0]), gap(), arguments(t), gap(), exactly(r.noise[1]), gap(), exactly(r.callEnd))
	}
	return sequence(begin, arguments(t), gap(), exactly(r.callEnd))
}

// opening returns how a call that is an object is spelled up to its arguments.
func (r *row) opening(name string) string {
	return `{"` + cmp.Or(r.members[0], "name") + `": "` + name + `", "` + cmp.Or(r.members[1], "arguments") + `": `
}

// member returns a call that is an object. An answer without a marker that begins so is the call,
// and no content.
func (b *grammarBuilder) member(t *Tool) node {
	opening := exactly(b.r.opening(t.Name))
	switch {
	case b.r.nameIsKey:
		opening = exactly(`{"`, t.Name, `": `)
	case b.r.members[0] == "tool_name":
		opening = sequence(exactly(`{"tool_call_id": "`), pattern("[0-9]{1,3}"), exactly(`", "tool_name": "`, t.Name, `", "`, b.r.members[1], `": `))
	case b.r.bare != 0 && b.c.Content != nil:
		opening = format("const_string").text("value", b.r.opening(t.Name)).with("commit", []byte("true")).end()
	}
	return sequence(opening, arguments(t), exactly("}"))
}

// present returns the markers that a format has.
func present(marks ...string) []string {
	return slices.DeleteFunc(marks, func(s string) bool { return s == "" })
}

// schema returns the schema of a tool's arguments.
func (t *Tool) schema() []byte {
	switch {
	case !t.Strict:
		return []byte("true")
	case t.Parameters == nil:
		return []byte(`{"additionalProperties":false}`)
	}
	return t.Parameters
}

// arguments returns arguments that are a JSON object.
func arguments(t *Tool) node {
	return format("json_schema").with("object", []byte("true")).with("json_schema", t.schema()).end()
}

// parameters returns arguments that are not a JSON object. The kinds and types of parameters are
// those by which the parser reads them.
func (b *grammarBuilder) parameters(t *Tool) node {
	r := b.r
	n := format("parameters")
	switch r.args {
	case argsPythonic:
		n = n.text("notation", "python").text("open", "(").text("close", ")").text("separator", ",").text("middle", "=")
	case argsGemma:
		n = n.text("notation", "gemma").text("open", "{").text("close", "}").text("separator", ",").text("middle", ":")
		n = n.text("text", ":"+r.quote).text("text_end", r.quote).list("excludes", []string{r.quote})
	default:
		q, begin, middle, end := quoteAfter(r.param), r.param, r.paramName, r.valueEnd
		if r.args == argsKV {
			middle += "\n" + r.value
		}
		if r.newlines {
			middle, end = middle+"\n", "\n"+end
		}
		text := q + middle
		if strings.HasPrefix(r.name, "deepseek") {
			text, middle = q+` string="true"`+middle, ` string="false"`+middle
		}
		words := present(r.param, r.valueEnd, r.callEnd, r.sectionEnd)
		n = n.text("notation", "text").text("begin", begin+q).text("middle", q+middle).text("text", text)
		n = n.text("end", end).text("text_end", end).list("excludes", words)
	}
	if !t.Strict {
		return n.end()
	}
	kinds, types := members(), members() // without a type, which a parameter may be named
	for _, name := range b.c.Types.Params(t.Name) {
		is, _ := b.c.Types.Param(t.Name, []byte(name))
		key := string(args.AppendQuoted(nil, []byte(name)))
		switch key = key[1 : len(key)-1]; {
		case r.args == argsPythonic || r.args == argsGemma || is == 0:
			continue
		case is == args.String:
			kinds = kinds.text(key, "text")
		case is == args.String|args.Null:
			kinds = kinds.text(key, "nullable")
		}
		types = types.list(key, is.Names())
	}
	return n.with("kinds", kinds.end()).with("types", types.end()).with("json_schema", t.schema()).end()
}

// calls returns one or more calls, with what encloses them. With marked, they begin with a marker
// even if the format can do without.
func (b *grammarBuilder) calls(marked bool) node {
	r, call := b.r, ruleOf("call")
	more := func(separator, n node) node {
		if b.c.One {
			return n
		}
		return sequence(n, star(sequence(separator, n)))
	}
	open, end := r.section, r.sectionEnd
	if r.args == argsArray || r.args == argsPythonic {
		if end = r.callEnd; len(r.call) > 0 {
			open = r.call[0]
		}
		list := sequence(exactly("["), more(sequence(exactly(","), gap()), call), exactly("]"))
		if r.perLine {
			list = more(exactly("\n"), call)
		}
		n := sequence(exactly(open), gap(), list, gap(), exactly(end))
		if r.bare != 0 && open != "" && !marked {
			n = either(n, list)
		}
		return n
	}
	switch {
	case r.separator != 0:
		n := more(sequence(exactly(string(r.separator)), gap()), call)
		if marked {
			return sequence(exactly(r.call[0]), gap(), n)
		}
		return sequence(optional(sequence(exactly(r.call[0]), gap())), n)
	case open == "":
		return more(gap(), call)
	}
	return more(gap(), sequence(exactly(open), gap(), more(gap(), call), gap(), exactly(end)))
}

// triggers returns the markers with which calls begin within text.
func (b *grammarBuilder) triggers() (out []string) {
	if b.r.section != "" {
		out = append(out, b.r.section)
	}
	if b.r.section == "" || b.r.loose {
		out = append(out, b.r.call...)
	}
	return out
}

// thought returns a passage of reasoning from its marker on, or from within it; nil: the format has
// none.
func (b *grammarBuilder) thought(within bool) node {
	t := &b.f.thought
	open, end := t.open, t.close
	if t.echo != "" {
		open, end, within = nil, []string{echoClose}, true
	}
	if len(end) == 0 {
		return nil
	}
	words := append(slices.Clone(end), open...)
	if len(b.c.Tools) > 0 && (t.calls || t.echo != "") { // the parser finds calls there
		words = append(words, b.triggers()...)
	}
	begin := anyOf(open)
	if within {
		begin = optional(begin)
	}
	return sequence(begin, format("any_text").list("excludes", words).end(), anyOf(end))
}

// anyOf returns one of several texts.
func anyOf(texts []string) node {
	nodes := make([]node, len(texts))
	for i, s := range texts {
		nodes[i] = exactly(s)
	}
	return either(nodes...)
}

// answer returns the whole answer.
func (b *grammarBuilder) answer() node {
	if b.r.args == argsHarmony {
		return b.harmony()
	}
	lead, led := exactly(""), false
	switch {
	case b.c.Start == InReasoning, b.f.thought.echo != "":
		lead, led = b.thought(true), true
	case b.c.Start == AtBeginning && b.thought(false) != nil && (len(b.c.Tools) > 0 || b.f.Thinks() || b.f.Wraps()):
		lead, led = optional(b.thought(false)), true
	}
	switch {
	case b.c.Content != nil && b.c.Start == InContent:
		return b.content()
	case len(b.c.Tools) == 0 && led && b.f.Wraps():
		return sequence(lead, gap(), b.content())
	case len(b.c.Tools) == 0:
		return sequence(lead, b.content())
	}
	calls := sequence(gap(), b.calls(false))
	switch {
	case !b.c.Text:
		return sequence(lead, calls)
	case b.c.Content != nil:
		return sequence(lead, either(calls, sequence(gap(), b.content())))
	}
	// The parser takes these for markers wherever they come.
	words := slices.Concat(b.triggers(), b.f.thought.open, b.f.thought.close, present(b.r.callEnd, b.r.sectionEnd))
	if b.r.lines { // a bracket at the beginning of a line begins calls
		words = append(words, "\n"+string(b.r.bare))
	}
	free := format("any_text").list("excludes", words)
	if b.r.bare != 0 {
		free = free.list("excludes_first", []string{string(b.r.bare)})
	}
	text := free.end()
	if tags := b.tags(); tags != nil {
		text = sequence(text, star(sequence(anyOf(tags), text)))
	}
	b.define("text", text)
	text = ruleOf("text")
	if b.f.thought.echo == "" && b.thought(false) != nil {
		text = sequence(text, star(sequence(b.thought(false), text)))
	}
	if b.c.Start != InReasoning {
		lead = exactly("")
	}
	if b.r.bare != 0 && len(b.r.call) == 0 {
		return sequence(lead, either(text, calls))
	}
	marked := b.calls(true)
	answer := sequence(text, star(sequence(marked, text)))
	if b.c.One {
		answer = sequence(text, optional(sequence(marked, text)))
	}
	if b.r.bare != 0 {
		answer = either(answer, calls)
	}
	return sequence(lead, answer)
}

// content returns the content within the tags that precede and follow it.
func (b *grammarBuilder) content() node {
	var all []node
	for i := range b.f.wrappers {
		w := &b.f.wrappers[i]
		n := sequence(ruleOf("content"), exactly(w.gap, w.close))
		if b.c.Start != InContent {
			n = sequence(exactly(w.open, w.gap), n)
		}
		all = append(all, n)
	}
	if all == nil {
		return ruleOf("content")
	}
	return either(all...)
}

// tags returns the tags of content that are tokens, which text cannot spell.
func (b *grammarBuilder) tags() (out []string) {
	for i := range b.f.wrappers {
		if w := &b.f.wrappers[i]; w.byID {
			out = append(out, w.open, w.close)
		}
	}
	return out
}

// harmony returns an answer of gpt-oss: messages, the last of which is a call or, with Text, may be
// any message.
func (b *grammarBuilder) harmony() node {
	free := format("any_text").list("excludes", []string{"<|start|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"}).end()
	b.define("text", free)
	message := sequence(exactly("<|channel|>analysis<|message|>"), ruleOf("text"))
	if b.c.Text && b.c.Content == nil {
		message = sequence(exactly("<|channel|>"), either(exactly("analysis"), exactly("commentary"), exactly("final")), exactly("<|message|>"), ruleOf("text"))
	}
	call, next := ruleOf("call"), exactly("<|start|>assistant")
	if len(b.c.Tools) == 0 {
		call = either()
	}
	before := star(sequence(message, exactly("<|end|>"), next))
	last := sequence(call, optional(exactly("<|call|>")))
	if b.c.Text && b.c.Content == nil {
		last = either(last, sequence(message, optional(exactly("<|return|>"))))
	}
	if !b.c.One {
		last = sequence(star(sequence(call, exactly("<|call|>"), next, before)), last)
	}
	if len(b.c.Tools) == 0 {
		last = either()
	}
	if b.c.Content != nil {
		last = either(last, sequence(exactly("<|channel|>final<|message|>"), ruleOf("content"), optional(exactly("<|return|>"))))
	}
	return sequence(before, last)
}
