package parse

import (
	"bytes"
	"slices"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/gateway/render/parse/args"
)

// fit returns the length of the longest beginning of b that has at most room bytes and whole
// characters. Bounds count bytes, so that where text is given up does not depend on its pieces.
func fit(b []byte, room int) int {
	if len(b) <= room {
		return len(b)
	}
	for room > 0 && !utf8.RuneStart(b[room]) {
		room--
	}
	return room
}

// content passes text on as content, except white space that may precede a call.
func (p *Parser) content(b []byte) {
	for len(b) > 0 {
		n := len(b)
		if p.edge || p.f.row.trim {
			n = len(b) - len(bytes.TrimLeft(b, args.Spaces))
			if n = min(n, maxSpace-len(p.space)); n > 0 {
				p.space = append(p.space, b[:n]...)
				b = b[n:]
				continue
			}
			p.flushSpace()
			if p.edge = false; args.IsSpace(b[0]) {
				continue
			}
			if n = len(b); p.f.row.trim {
				if n = bytes.IndexAny(b, args.Spaces); n < 0 {
					n = len(b)
				}
			}
		}
		p.fresh = false
		p.emit(Content, b[:n])
		p.wrote, p.prev = true, b[n-1]
		b = b[n:]
	}
}

// flushSpace passes on white space that precedes content.
func (p *Parser) flushSpace() {
	if len(p.space) == 0 {
		return
	}
	text := p.space
	if p.fresh {
		text = bytes.TrimLeft(text, "\n")
	}
	p.emit(Content, text)
	p.prev, p.fresh = p.space[len(p.space)-1], false
	p.space = p.space[:0]
}

// reasoning passes text on as reasoning, except newlines that may precede its end.
func (p *Parser) reasoning(b []byte) {
	for pre := p.f.thought.prefix; p.prefix < len(pre) && len(b) > 0; b = b[1:] {
		if b[0] != pre[p.prefix] {
			p.flushPrefix()
			break
		}
		p.prefix++
	}
	if p.fresh {
		if b = bytes.TrimLeft(b, "\n"); len(b) == 0 {
			return
		}
		p.fresh = false
	}
	for len(b) > 0 {
		n := len(b) - len(bytes.TrimLeft(b, "\n"))
		if n = min(n, maxSpace-len(p.space)); n > 0 {
			p.space = append(p.space, b[:n]...)
			b = b[n:]
			continue
		}
		p.emit(Reasoning, p.space)
		p.space = p.space[:0]
		if b[0] != '\n' {
			if n = bytes.IndexByte(b, '\n'); n < 0 {
				n = len(b)
			}
			p.emit(Reasoning, b[:n])
			b = b[n:]
		}
	}
}

func (p *Parser) stepText(b []byte) bool {
	if p.one && p.calls == 0 {
		return p.stepFirst(b)
	}
	s := &p.f.text[p.plain]
	if p.tail {
		s = &p.f.tail
	}
	n, m := p.find(s, b)
	if !p.special && p.f.row.bare != 0 && p.plain == 0 {
		if i := p.findBare(b[:n]); i >= 0 {
			p.content(b[:i])
			p.at += i
			p.openCall(nil)
			return true
		}
	}
	p.content(p.shown(b[:n]))
	p.at += n
	if m == nil {
		return n > 0
	}
	switch m.role {
	case thinkOpen:
		p.at += len(m.text)
		p.state, p.fresh, p.prefix = inThink, true, 0
		p.space = p.space[:0]
	case sectionOpen, callOpen:
		p.openCall(m)
	default: // the end of something that has ended
		p.at += len(m.text)
		p.edge = true
		p.tail = p.tail && m.role != callClose && m.role != sectionClose
	}
	return true
}

// stepFirst reads the beginning of an answer that is reasoning, calls or one content. What begins
// with no marker is the content.
func (p *Parser) stepFirst(b []byte) bool {
	if n := len(b) - len(bytes.TrimLeft(b, args.Spaces)); n > 0 && !p.special {
		p.content(b[:n])
		p.at += n
		return true
	}
	n, m := p.find(&p.f.text[p.plain], b)
	switch {
	case n == 0 && m == nil:
		return false
	case p.wraps && m != nil && n == 0 && p.f.opens(m.text) != nil:
		p.at += len(m.text)
		p.space = p.space[:0]
		p.enterContent(p.f.opens(m.text), true)
	case n > 0 || m.role == tag || m.role == thinkClose:
		if p.state = inContent; !p.special && p.f.row.bare == b[0] && p.plain == 0 {
			p.openCall(nil)
		}
	case m.role == thinkOpen:
		p.at += len(m.text)
		p.state, p.fresh, p.prefix = inThink, true, 0
		p.space = p.space[:0]
	default:
		p.openCall(m)
	}
	return true
}

// stepEcho passes on reasoning that is content, up to its end.
func (p *Parser) stepEcho(b []byte) bool {
	n, m := p.find(&p.f.echoEnd, b)
	if p.content(p.shown(b[:n])); m != nil {
		p.content([]byte(m.text)) // also of a token that is not shown, as the marker before it
		n += len(m.text)
		p.state, p.edge = inText, true
	}
	p.at += n
	return n > 0
}

// opens returns the wrapper that a tag opens; nil: none.
func (f *Format) opens(tag string) *wrapper {
	for i := range f.wrappers {
		if f.wrappers[i].open == tag {
			return &f.wrappers[i]
		}
	}
	return nil
}

// enterContent begins the content within w, whose gap comes first if lead is set.
func (p *Parser) enterContent(w *wrapper, lead bool) {
	p.state, p.wrapped, p.gapNext, p.edge = inContent, w, lead && w.gap != "", false
}

// held returns the bytes at the end of b that may be the beginning of what follows the content
// within the wrapper.
func (w *wrapper) held(b []byte) int {
	end := w.gap
	if !w.byID {
		end += w.close
	}
	for n := min(len(end), len(b)); n > 0; n-- {
		if end[:n] == string(b[len(b)-n:]) {
			return n
		}
	}
	return 0
}

// unwrap drops what is held back of the content if that ends with the wrapper: at its closing tag,
// or where the answer ends behind the text of the tag.
func (p *Parser) unwrap(token string) {
	w := p.wrapped
	if w == nil || p.state != inContent {
		return
	}
	end := w.gap
	if !w.byID {
		end += w.close
	}
	switch {
	case w.byID && !p.f.closes(token), !w.byID && token != "":
	case string(p.buf[p.at:]) == end:
		p.at = len(p.buf)
	}
}

// closes reports whether a text is the closing tag of a wrapper.
func (f *Format) closes(text string) bool {
	return slices.ContainsFunc(f.wrappers, func(w wrapper) bool { return w.close == text })
}

// stepContent passes on a content in which markers are text. In gpt-oss's format a message ends
// behind it.
func (p *Parser) stepContent(b []byte) bool {
	n := len(b)
	if p.gapNext {
		if p.gapNext = false; b[0] == p.wrapped.gap[0] {
			p.at++
			return true
		}
	}
	if w := p.wrapped; w != nil {
		switch {
		case p.special && w.byID && p.f.closes(string(b)):
			p.at += n
			p.wrapped = nil
			return true
		case !p.special && !p.last:
			n -= w.held(b)
		}
	}
	if p.f.row.args == argsHarmony {
		n = p.js.Feed(b)
		if p.js.Done {
			p.state = inBody
		}
	}
	p.content(p.shown(b[:n]))
	p.at += n
	return n > 0 || p.state == inBody || p.js.Odd
}

// findBare returns the position in b of the bracket that begins a call without a marker, or -1.
func (p *Parser) findBare(b []byte) int {
	first := !p.wrote
	for i, c := range b {
		if c == p.f.row.bare && (first || p.f.row.lines && p.before(b, i) == '\n') {
			return i
		}
		if !args.IsSpace(c) {
			if first = false; !p.f.row.lines {
				break
			}
		}
	}
	return -1
}

// before returns the byte of the content before b[i].
func (p *Parser) before(b []byte, i int) byte {
	switch {
	case i > 0:
		return b[i-1]
	case len(p.space) > 0:
		return p.space[len(p.space)-1]
	}
	return p.prev
}

func (p *Parser) stepThink(b []byte) bool {
	n, m := p.find(&p.f.think[p.plain], b)
	p.reasoning(p.shown(b[:n]))
	p.at += n
	if m == nil {
		return n > 0
	}
	switch m.role {
	case thinkOpen: // written again, or for the first time although the prompt ends with it
		p.at += len(m.text)
		p.fresh, p.prefix = true, 0
	case thinkClose:
		p.at += len(m.text)
		if p.one && p.plain == 1 && m.text != p.f.ReasoningEnd() { // grammars behind reasoning know one marker
			p.reasoning(p.shown([]byte(m.text)))
			break
		}
		p.flushPrefix()
		p.space = p.space[:0]
		p.state, p.edge, p.fresh = inText, true, !p.f.thought.newline
		if p.one && p.plain == 1 && !(p.wraps && p.f.Wraps()) { // the content begins here
			p.state, p.edge, p.fresh = inContent, false, false
		}
	default: // a call
		p.endThink()
		p.openCall(m)
	}
	return true
}

// flushPrefix passes on a beginning of the reasoning's prefix.
func (p *Parser) flushPrefix() {
	if pre := p.f.thought.prefix; p.prefix < len(pre) {
		n := p.prefix
		p.prefix = len(pre)
		p.reasoning([]byte(pre[:n]))
	}
}

// endThink ends reasoning at something that is not its marker.
func (p *Parser) endThink() {
	p.flushPrefix()
	p.emit(Reasoning, p.space)
	p.space = p.space[:0]
	p.state, p.edge, p.fresh = inText, true, false
}
