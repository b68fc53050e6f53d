package parse

import "bytes"

// enterHeader begins a header of gpt-oss. Begun is set behind the marker of its beginning.
func (p *Parser) enterHeader(begun bool) {
	p.state, p.recording, p.begun, p.part = inHeader, true, begun, 0
	p.name, p.key, p.id, p.span = p.name[:0], p.key[:0], p.id[:0], p.span[:0]
}

// stepHeader reads a header: a role, a recipient, a channel and the type of the message.
func (p *Parser) stepHeader(b []byte) bool {
	n, m := p.find(&p.f.header, b)
	if n > 0 {
		k := fit(b[:n], maxName-min(len(p.span), maxName))
		if p.part == 0 && !p.begun && !p.isRole(b[:n]) || k == 0 {
			p.malformed()
			return true
		}
		if k < n {
			n, m = k, nil
		}
		switch p.part {
		case headerChannel:
			p.key = append(p.key, b[:n]...)
		case headerConstrain:
			p.id = append(p.id, b[:n]...)
		default:
			p.name = append(p.name, b[:n]...)
		}
		p.eat(n)
	}
	if m == nil {
		return n > 0
	}
	if (m.role == headerStart || m.role == messageEnd) && !p.isHeader() {
		p.malformed()
		return true
	}
	p.eat(len(m.text))
	switch m.role {
	case headerStart, messageEnd:
		p.enterHeader(m.role == headerStart)
	case headerEnd:
		p.endHeader()
	default:
		if p.begun, p.part = true, m.role; m.role == headerChannel {
			p.key = p.key[:0]
		}
	}
	return true
}

// isRole reports whether the header may begin with what was read of it and b. Text that it may not
// begin with is an answer without a header.
func (p *Parser) isRole(b []byte) bool {
	text := bytes.TrimLeft(append(p.name[:len(p.name):len(p.name)], b...), " \n")
	for _, begin := range []string{"assistant", "to="} {
		n := min(len(begin), len(text))
		if begin[:n] == string(text[:n]) {
			return true
		}
	}
	return false
}

// isHeader reports whether all words of the header that was read are those of a header.
func (p *Parser) isHeader() bool {
	for _, part := range [][]byte{p.name, p.key, p.id} {
		for word := range bytes.FieldsSeq(part) {
			switch string(word) {
			case "assistant", "analysis", "commentary", "final", "json", "code":
			default:
				if !bytes.HasPrefix(word, []byte("to=")) {
					return false
				}
			}
		}
	}
	return true
}

// endHeader begins the message behind a header.
func (p *Parser) endHeader() {
	to := recipient(p.name)
	if len(to) == 0 {
		to = recipient(p.key)
	}
	name, isFunction := bytes.CutPrefix(to, []byte("functions."))
	if p.plain == 0 && isName(name) && (isFunction || p.tools != nil && p.tools.Knows(name)) {
		p.name, p.id, p.state = append(p.name[:0], name...), p.id[:0], inGap
		return
	}
	p.recording, p.state = false, inBody
	channel, _, _ := bytes.Cut(bytes.TrimSpace(p.key), []byte(" "))
	p.analysis = string(channel) == "analysis"
	if p.one && string(channel) == "final" {
		p.state = inContent
		p.js.Reset()
	}
}

// recipient returns the recipient in a part of a header; empty: there is none.
func recipient(part []byte) []byte {
	_, to, ok := bytes.Cut(part, []byte("to="))
	if !ok {
		return nil
	}
	if i := bytes.IndexAny(to, " \n"); i >= 0 {
		to = to[:i]
	}
	return to
}

// stepBody reads a message that is content or reasoning.
func (p *Parser) stepBody(b []byte) bool {
	n, m := p.find(&p.f.body, b)
	if p.at += n; p.analysis {
		p.emit(Reasoning, p.shown(b[:n]))
	} else {
		p.content(p.shown(b[:n]))
	}
	if m == nil {
		return n > 0
	}
	p.enterHeader(false)
	if m.role == messageEnd {
		p.at += len(m.text)
	}
	return true
}
