package parse

import (
	"unicode/utf8"

	"github.com/tandem-serving/tandem/gateway/render/parse/args"
)

// Bounds of what a Parser holds back, in bytes. Text beyond them is passed on as content.
const (
	maxName  = 256     // of a call's name, id or parameter's name, or of a header of gpt-oss
	maxSpace = 256     // white space that may precede a call
	maxHeld  = 4 << 20 // arguments that precede their call's name
)

// Kind is what a Delta is about.
type Kind uint8

const (
	Content   Kind = iota // Text is the next piece of the content
	Reasoning             // Text is the next piece of the reasoning
	CallStart             // the call with the index Call begins, with its Name
	Arguments             // Text is the next piece of the call's arguments, which are a JSON object
	CallEnd               // the call has no more arguments
)

// Delta is one event of an answer.
type Delta struct {
	Kind Kind
	Call int    // index of the call, from 0
	Name string // of CallStart
	ID   string // of CallStart, as the model wrote it; empty: the caller makes one
	Text []byte // never empty where the kind has text; see Push for how long it is valid
	// Incomplete is set on CallEnd if the arguments are not a complete, valid JSON object: the answer
	// ended within them, or the model wrote something else.
	Incomplete bool
}

// state is what a Parser expects next.
type state uint8

const (
	inText state = iota
	inThink
	inSection  // between calls of a section
	inNameOpen // what precedes a name
	inName
	inID
	inGap      // between a name and its JSON
	inJSON     // arguments that are passed on
	inObject   // an object or array that contains calls
	inAfter    // behind a call's arguments
	inSeparate // between calls that have no markers
	inParams   // between parameters
	inParam    // a parameter's name
	inValueGap // between a parameter's name and its value
	inValue
	inList     // between the calls of argsPythonic
	inFunction // the name of such a call
	inKey      // before or in the name of an argument
	inArg      // before an argument's value
	inArgText  // a string
	inArgRaw   // another value
	inArgEnd   // behind a string
	inHeader
	inBody
	inEcho    // reasoning that is content
	inContent // content in which markers are text
)

// Parser reads one answer. It belongs to one goroutine.
type Parser struct {
	f     *Format
	tools *args.Tools
	plain int  // 1: the request has no tools
	one   bool // Options.OneContent
	wraps bool // Options.Wrapped

	// The text that is not read yet, and the deltas that are.
	buf     []byte // from at on
	at      int
	special bool // buf is the text of one special token
	hidden  bool // which does not belong to the content
	last    bool // no text follows that could complete a marker
	done    bool // the answer has ended
	dst     []Delta
	out     []byte // the texts in dst
	from    int    // of out: the text of the last delta

	// Content and reasoning.
	state    state
	tail     bool     // the end of a call may still come
	wrote    bool     // content that is not white space was passed on
	prev     byte     // the last byte of the content
	edge     bool     // white space that comes next may precede a call
	fresh    bool     // newlines that come next belong to a marker of reasoning
	space    []byte   // white space that is held back
	prefix   int      // bytes of the reasoning's prefix that have come
	thinking int      // tokens of reasoning
	wrapped  *wrapper // the tags around the content, which has begun; nil: there are none
	gapNext  bool     // the wrapper's gap comes next

	// Calls. What is read of one before it starts is recorded, because it may be content after all.
	recording bool
	span      []byte
	sectioned bool // a section is open
	used      bool // which has had a call
	bare      bool // the call has no marker
	mid       bool // and began behind other text
	list      bool // calls of argsPythonic are in brackets
	calls     int  // that have started
	open      bool // the last of them has not ended
	known     string
	name, id  []byte // of the call; known is the name of the call that is open
	obj       object

	// Headers of gpt-oss; name, key and id have the texts of their parts.
	part     role // the last marker
	begun    bool // there was a marker
	analysis bool // the message is reasoning

	// Arguments of the call.
	args  int    // parameters so far
	key   []byte // name of a parameter, or of an object's member
	is    args.Types
	wrap  bool   // the value may be an object of all arguments
	text  bool   // the value is passed on as a string
	lead  bool   // a newline that comes next does not belong to the value
	line  bool   // a newline that may not belong to the value is held back
	held  []byte // a value that is passed on when it is complete
	depth int    // of brackets in it
	quote byte   // of the string in it that is open; 0: none
	esc   bool   // behind a backslash in that string
	js    args.Scanner
	str   args.PythonString
	tmp   []byte // of one step
}

// Options are what a parser needs to know of its request.
type Options struct {
	Tools *args.Tools // nil: not known; names and types are then those of the answer
	// NoTools is set for requests without tools, and for those that forbid calls. Markers of calls are
	// content then.
	NoTools bool
	// Reasoning is set if the prompt ends within reasoning (Format.StartsInReasoning).
	Reasoning bool
	// OneContent is set if a grammar makes the answer: what follows the reasoning is calls, or else one
	// content in which markers are text. Without tools, reasoning and tags the whole answer is that
	// content.
	OneContent bool
	// Wrapped is set with OneContent if the grammar has the format's reasoning and the tags around
	// its content (Constraint.Content). Start is that of the prompt, if it is InContent.
	Wrapped bool
	Start   Start
}

// NewParser returns a parser at the beginning of an answer.
func (f *Format) NewParser(o Options) *Parser {
	p := &Parser{f: f, tools: o.Tools, edge: !o.NoTools, one: o.OneContent, wraps: o.OneContent && o.Wrapped}
	if o.NoTools {
		p.plain = 1
	}
	switch {
	case f.row.args == argsHarmony:
		p.enterHeader(false)
	case p.wraps && o.Start == InContent && f.Wraps():
		p.enterContent(&f.wrappers[0], false)
	case p.wraps && f.Wraps() && !o.Reasoning:
		p.edge = true // white space that precedes the tag does not belong to the content
	case o.OneContent && o.NoTools && !o.Reasoning && !o.Wrapped:
		p.state = inContent
	case o.Reasoning:
		p.state = inThink
	case o.OneContent && f.thought.echo != "":
		p.state = inEcho
	}
	return p
}

// Push reads the next token and its text, and appends what is known to dst. Dst has the deltas of
// this parser that the caller has not used yet; their texts are valid until a call with an empty
// dst. Text is what the token completes, in whole characters. It may be empty, also for a special
// token that is a marker. A negative id is that of no token. Each token of a frame is pushed.
func (p *Parser) Push(dst []Delta, id int32, text string) []Delta {
	if p.done {
		return dst
	}
	m := p.tokenText(id)
	if m == "" && p.passes(text) {
		if len(dst) == 0 {
			p.out = p.out[:0]
		}
		p.dst, p.fresh, p.prev = dst, false, text[len(text)-1]
		p.buf = append(p.buf, text...)
		p.emit(Content, p.buf)
		p.buf = p.buf[:0]
		return p.finish()
	}
	before := p.InReasoning()
	p.begin(dst)
	if m != "" {
		n := len(text) - len(m)
		if p.hidden = n < 0 || text[n:] != m; !p.hidden {
			text = text[:n]
		}
		p.read(text)
		p.unwrap(m)
		p.last = true
		p.run()
		p.special = true
		p.buf = append(p.buf[:0], m...)
		p.at = 0
		p.run()
		p.last, p.special, p.hidden = false, false, false
	} else {
		p.read(text)
	}
	if before || p.InReasoning() {
		p.thinking++
	}
	return p.finish()
}

// passes reports whether text is content as it is: none is held back, and no marker begins in it.
// Most tokens of most answers are of this kind.
func (p *Parser) passes(text string) bool {
	if !p.wrote || p.edge || len(p.buf)+len(p.space) > 0 || p.f.row.trim {
		return false
	}
	switch {
	case p.state == inContent && p.f.row.args != argsHarmony && (p.wrapped == nil || p.wrapped.byID && p.wrapped.gap == ""):
	case p.state != inText || p.tail || p.f.row.bare != 0 && p.plain == 0:
		return false
	default:
		s := &p.f.text[p.plain]
		for i := range len(text) {
			if s.byText && s.first[text[i]] {
				return false
			}
		}
	}
	r, size := utf8.DecodeLastRuneInString(text)
	return r != utf8.RuneError || size > 1
}

// Finish ends the answer: text that was held back is passed on, and a call that is open ends. The
// parser ignores what is pushed after it.
func (p *Parser) Finish(dst []Delta) []Delta {
	if p.done {
		return dst
	}
	p.begin(dst)
	p.unwrap("")
	p.last = true
	p.run()
	p.end()
	p.done = true
	return p.finish()
}

// Calls returns the number of calls that have started. An answer with calls that ends by itself has
// the finish reason tool_calls.
func (p *Parser) Calls() int { return p.calls }

// ReasoningTokens returns the number of tokens of the reasoning, its markers included.
func (p *Parser) ReasoningTokens() int { return p.thinking }

// InReasoning reports whether the next token belongs to reasoning, unless it is a marker.
func (p *Parser) InReasoning() bool {
	return p.state == inThink || p.state == inBody && p.analysis
}

func (p *Parser) tokenText(id int32) string {
	if id < 0 {
		return ""
	}
	return p.f.textOf(id)
}

func (p *Parser) begin(dst []Delta) {
	if p.dst = dst; len(dst) == 0 {
		p.out = p.out[:0]
	}
	if e := p.f.thought.echo; e != "" && !p.wrote && p.state != inContent {
		p.emit(Content, []byte(e))
		p.wrote = true
	}
}

func (p *Parser) finish() (dst []Delta) {
	dst, p.dst = p.dst, nil
	return dst
}

// read reads text by parts, because a step may look at all that has come.
func (p *Parser) read(text string) {
	const part = 1 << 10
	for text != "" {
		n := min(part, len(text))
		p.buf = append(p.buf, text[:n]...)
		p.run()
		p.buf = p.buf[:copy(p.buf, p.buf[p.at:])]
		p.at, text = 0, text[n:]
	}
}

// run reads the text as far as it can. Each step reads some of it or changes the state.
func (p *Parser) run() {
	end := len(p.buf)
	if !p.last {
		end -= unfinished(p.buf[p.at:])
	}
	for p.at < end {
		if !p.step(p.buf[p.at:end]) {
			if !p.last {
				return
			}
			p.fail()
		}
	}
}

// unfinished returns the number of bytes at the end of b that begin a character and do not end it.
func unfinished(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if tail := b[len(b)-n:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return 0
			}
			return n
		}
	}
	return 0
}

// step reads from the beginning of b, which is not empty. It returns false if more text is needed.
func (p *Parser) step(b []byte) bool {
	switch p.state {
	case inText:
		return p.stepText(b)
	case inThink:
		return p.stepThink(b)
	case inSection, inAfter, inParams, inGap, inValueGap, inNameOpen:
		return p.stepBetween(b)
	case inName, inID, inParam:
		return p.stepName(b)
	case inJSON:
		return p.stepJSON(b)
	case inObject:
		return p.stepObject(b)
	case inSeparate:
		return p.stepSeparate(b)
	case inValue:
		return p.stepValue(b)
	case inHeader:
		return p.stepHeader(b)
	case inBody:
		return p.stepBody(b)
	case inEcho:
		return p.stepEcho(b)
	case inContent:
		return p.stepContent(b)
	}
	return p.stepPythonic(b)
}

// find finds a marker of s in b, or in the special token that b is.
func (p *Parser) find(s *set, b []byte) (n int, m *mark) {
	if p.special {
		if m := s.token(b); m != nil {
			return 0, m
		}
		return len(b), nil
	}
	return s.find(b, p.last)
}

// shown returns text, or nothing if it is that of a special token that the caller leaves out.
func (p *Parser) shown(text []byte) []byte {
	if p.special && p.hidden {
		return nil
	}
	return text
}

// eat reads n bytes that belong to a call or are markers.
func (p *Parser) eat(n int) {
	if p.recording {
		p.span = append(p.span, p.buf[p.at:p.at+n]...)
	}
	p.at += n
}

// emit appends text to the last delta if that is of the same kind, or else a delta with the text.
func (p *Parser) emit(kind Kind, text []byte) {
	if len(text) == 0 {
		return
	}
	call := 0
	if kind == Arguments {
		call = p.calls - 1
	}
	if n := len(p.dst); n == 0 || p.dst[n-1].Kind != kind || p.dst[n-1].Call != call {
		p.from = len(p.out)
		p.dst = append(p.dst, Delta{Kind: kind, Call: call})
	}
	p.out = append(p.out, text...)
	p.dst[len(p.dst)-1].Text = p.out[p.from:len(p.out):len(p.out)]
}

// openCall begins a call, or a section of calls, at its marker; nil: at its bracket.
func (p *Parser) openCall(m *mark) {
	if !p.recording {
		p.recording = true
		p.span = append(p.span[:0], p.space...)
		p.space = p.space[:0]
	}
	p.name, p.id, p.key, p.held, p.args = p.name[:0], p.id[:0], p.key[:0], p.held[:0], 0
	if m != nil {
		p.eat(len(m.text))
	}
	if m != nil && m.role == sectionOpen {
		p.state, p.sectioned, p.used = inSection, true, false
		return
	}
	p.bare, p.list, p.mid = m == nil, false, m == nil && p.wrote
	switch r := &p.f.row; r.args {
	case argsObject, argsArray:
		p.state, p.obj = inObject, object{}
	case argsPythonic:
		p.state = inList
	default:
		p.state = inName
		if r.nameOpen != "" {
			p.state = inNameOpen
		}
	}
}

// malformed passes on what was read of a call that has not started as content.
func (p *Parser) malformed() {
	p.recording, p.state, p.tail, p.sectioned = false, inText, false, false
	if p.one && p.calls == 0 {
		p.state = inContent
	}
	span := p.span
	p.content(span)
	p.span = span[:0]
	if p.f.row.args == argsHarmony {
		p.state, p.analysis = inBody, false
	}
}

// start begins the call whose name is complete.
func (p *Parser) start() {
	p.known = string(p.name)
	p.dst = append(p.dst, Delta{Kind: CallStart, Call: p.calls, Name: p.known, ID: string(p.id)})
	p.calls++
	p.open, p.used, p.recording = true, true, false
	p.span, p.space = p.span[:0], p.space[:0]
	p.fresh = false
}

// endCall ends the call that is open.
func (p *Parser) endCall(complete bool) {
	if p.open {
		p.open = false
		p.dst = append(p.dst, Delta{Kind: CallEnd, Call: p.calls - 1, Incomplete: !complete})
	}
}

// fail ends a call at something that does not belong to it.
func (p *Parser) fail() {
	if p.recording {
		p.malformed()
		return
	}
	p.spill()
	p.endCall(false)
	p.leave()
	p.stray()
}

// stray moves from behind a call to the content that follows.
func (p *Parser) stray() {
	switch p.sectioned = false; {
	case p.state == inHeader:
	case p.f.row.args == argsHarmony:
		p.state, p.analysis = inBody, false
	default:
		p.state, p.tail = inText, true
	}
}

// leave moves behind a call.
func (p *Parser) leave() {
	p.edge, p.tail = true, false
	switch r := &p.f.row; {
	case r.args == argsHarmony:
		p.enterHeader(false)
	case p.sectioned:
		p.state = inSection
	default:
		p.state = inText
	}
}

// end ends the answer in any state.
func (p *Parser) end() {
	switch {
	case p.state == inThink:
		p.endThink()
	case p.state == inHeader && p.begun && p.isHeader():
	case p.state == inGap && p.f.row.args == argsHarmony:
		p.start()
	case p.recording:
		p.malformed()
	}
	p.spill()
	p.endCall(false)
	if p.calls == 0 || p.f.row.trim && !p.edge {
		p.flushSpace()
	}
}
