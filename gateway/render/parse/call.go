package parse

import (
	"bytes"
	"unicode"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/gateway/render/parse/args"
)

// stepBetween reads what is between the parts of a call: markers and white space.
func (p *Parser) stepBetween(b []byte) bool {
	s := &p.f.section
	switch p.state {
	case inAfter:
		s = &p.f.after
	case inParams:
		s = &p.f.params
	case inGap:
		s = &p.f.gap
	case inValueGap:
		s = &p.f.value
	case inNameOpen:
		s = &p.f.nameOpen
	}
	n, m := p.find(s, b)
	space := n - len(bytes.TrimLeft(b[:n], args.Spaces))
	if p.state == inNameOpen {
		space = fit(b[:n], maxName-min(len(p.span), maxName))
	}
	if space < n {
		if p.eat(space); p.state != inNameOpen || space == 0 {
			p.unexpected(b[space])
		}
		return true
	}
	p.eat(space)
	if m == nil {
		return space > 0
	}
	p.marker(m)
	return true
}

// unexpected handles text that is neither a marker nor white space, and begins with c.
func (p *Parser) unexpected(c byte) {
	switch {
	case p.state == inGap && c == '{' && !p.special:
		p.start()
		p.js.Reset()
		p.state = inJSON
	case p.state == inAfter, p.state == inSection && p.used && !p.recording:
		p.stray()
	default:
		p.fail()
	}
}

// marker handles a marker between the parts of a call.
func (p *Parser) marker(m *mark) {
	switch m.role {
	case tag:
		p.eat(len(m.text))
	case nameOpen:
		p.eat(len(m.text))
		p.state = inName
	case paramOpen:
		p.flushWrapped()
		p.eat(len(m.text))
		p.state, p.key = inParam, p.key[:0]
	case valueOpen:
		p.eat(len(m.text))
		p.beginValue(false)
	case callClose, sectionClose, callOpen, sectionOpen, headerStart, messageEnd:
		p.boundary(m)
	default:
		p.fail()
	}
}

// boundary handles a marker at which a call ends, if one is open, or the next one begins.
func (p *Parser) boundary(m *mark) {
	opens := m.role == callOpen || m.role == sectionOpen
	switch p.state {
	case inParams:
		p.endParams()
	case inGap:
		if opens {
			p.fail()
			return
		}
		p.start()
		p.emit(Arguments, []byte("{}"))
		p.endCall(true)
	case inAfter:
	case inSection:
		if !p.used && m.role != callOpen {
			p.fail()
			return
		}
	default:
		p.fail()
		return
	}
	switch m.role {
	case callOpen, sectionOpen:
		p.openCall(m)
	case callClose:
		p.eat(len(m.text))
		p.leave()
	case sectionClose:
		p.eat(len(m.text))
		p.sectioned = false
		p.leave()
	case messageEnd:
		p.at += len(m.text)
		p.leave()
	default:
		p.leave()
	}
}

// stepName reads the name of a call or of a parameter, or an id.
func (p *Parser) stepName(b []byte) bool {
	s, to := &p.f.name, &p.name
	switch {
	case p.state == inID:
		s, to = &p.f.id, &p.id
	case p.state == inParam:
		s, to = &p.f.param, &p.key
	case len(p.name) > 0:
	case args.IsSpace(b[0]):
		p.eat(1)
		return true
	case p.f.row.arrays && !p.special && (b[0] == '[' || b[0] == '{'):
		p.state, p.obj = inObject, object{}
		return true
	}
	n, m := p.find(s, b)
	if k := fit(b[:n], maxName-len(*to)); k < n {
		*to = append(*to, b[:k]...)
		if p.eat(k); k == 0 {
			p.fail()
		}
		return true
	}
	*to = append(*to, b[:n]...)
	if p.eat(n); m == nil {
		return n > 0
	}
	switch {
	case p.state == inParam && m.role == paramNameEnd:
		p.eat(len(m.text))
		p.endParamName()
	case p.state == inParam, m.role == sectionClose:
		p.fail()
	case p.state == inName && !p.endName():
		p.fail()
	case m.role == idOpen:
		p.eat(len(m.text))
		p.state = inID
	default:
		if p.state == inID {
			p.id = append(p.id[:0], bytes.TrimSpace(p.id)...)
		}
		if m.role == nameEnd && (m.text != "{" || p.f.row.args == argsGemma) {
			p.eat(len(m.text))
		}
		p.afterName()
	}
	return true
}

// afterName moves to the arguments of the call whose name is complete.
func (p *Parser) afterName() {
	switch p.f.row.args {
	case argsXML, argsKV:
		p.start()
		p.state = inParams
	case argsGemma:
		p.start()
		p.state, p.key = inKey, p.key[:0]
	default:
		p.state = inGap
	}
}

// endName brings a name into its form, and returns false if it is none.
func (p *Parser) endName() bool {
	name := bytes.TrimSpace(p.name)
	switch r := &p.f.row; {
	case r.args == argsXML:
		value, rest := attribute(name)
		if len(bytes.TrimSpace(rest)) > 0 {
			return false
		}
		name = value
	case r.ids == IDNative: // functions.NAME:INDEX
		p.id = append(p.id[:0], name...)
		name = bytes.TrimPrefix(name, []byte("functions."))
		if i := bytes.LastIndexByte(name, ':'); i >= 0 {
			name = name[:i]
		}
	default:
		for _, prefix := range r.prefix {
			if rest, ok := bytes.CutPrefix(name, []byte(prefix)); ok {
				name = rest
				break
			}
		}
	}
	p.name = append(p.name[:0], name...)
	return isName(p.name)
}

// attribute returns the value of an attribute, with or without quotes, and what follows it.
func attribute(b []byte) (value, rest []byte) {
	if len(b) > 0 && (b[0] == '"' || b[0] == '\'') {
		if i := bytes.IndexByte(b[1:], b[0]); i >= 0 {
			return b[1 : 1+i], b[2+i:]
		}
	}
	if i := bytes.IndexByte(b, ' '); i >= 0 {
		return b[:i], b[i:]
	}
	return b, nil
}

// isName reports whether b may be the name of a function.
func isName(b []byte) bool {
	for _, r := range string(b) {
		if r < utf8.RuneSelf && !isNameByte(byte(r)) && r != ':' && r != '/' || unicode.IsSpace(r) {
			return false
		}
	}
	return len(b) > 0
}

// isNameByte reports whether c belongs to a name in the notation of Python, with dots and hyphens.
func isNameByte(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_' || c == '.' || c == '-' || c >= utf8.RuneSelf
}

// endParamName moves to the value of the parameter whose name is complete.
func (p *Parser) endParamName() {
	key := bytes.TrimSpace(p.key)
	if p.f.row.args == argsKV {
		p.key = append(p.key[:0], key...)
		p.state = inValueGap
		return
	}
	isString := false
	if value, rest := attribute(key); len(rest) == 0 {
		key = value
	} else if rest, ok := bytes.CutPrefix(bytes.TrimSpace(rest), []byte("string=")); ok {
		key, isString = value, string(bytes.Trim(rest, `"'`)) == "true"
	}
	p.key = append(p.key[:0], key...)
	p.beginValue(isString)
}

// beginValue begins a parameter's value. IsString is set if the model declares that it is a string.
func (p *Parser) beginValue(isString bool) {
	is, known := p.tools.Param(p.known, p.key)
	if is == 0 && isString {
		is = args.String
	}
	p.state, p.is, p.held = inValue, is, p.held[:0]
	p.wrap = !known && p.args == 0 && isWrapper(p.key)
	p.text = is == args.String && !p.wrap
	p.line, p.lead = false, p.f.row.newlines
	if p.wrap {
		return
	}
	if p.emitKey(); p.text {
		p.emit(Arguments, []byte{'"'})
	}
}

// isWrapper reports whether models write all arguments as the value of a parameter with the name.
func isWrapper(key []byte) bool {
	switch string(key) {
	case "arguments", "input", "parameters", "properties":
		return true
	}
	return false
}

// emitKey passes on the name of an argument.
func (p *Parser) emitKey() {
	open := byte(',')
	if p.args == 0 {
		open = '{'
	}
	p.args++
	p.tmp = append(args.AppendQuoted(append(p.tmp[:0], open), p.key), ':')
	p.emit(Arguments, p.tmp)
}

func (p *Parser) stepValue(b []byte) bool {
	n, m := p.find(&p.f.valueEnd, b)
	p.valueText(p.shown(b[:n]))
	if p.at += n; m == nil {
		return n > 0
	}
	if m.role == valueClose {
		p.at += len(m.text)
	}
	p.endValue()
	p.state = inParams
	return true
}

// valueText adds to the value.
func (p *Parser) valueText(b []byte) {
	if len(b) == 0 {
		return
	}
	if p.f.row.newlines {
		if p.lead && b[0] == '\n' {
			b = b[1:]
		}
		if p.lead = false; len(b) == 0 {
			return
		}
		if p.line {
			p.addValue([]byte{'\n'})
		}
		if p.line = b[len(b)-1] == '\n'; p.line {
			b = b[:len(b)-1]
		}
	}
	p.addValue(b)
}

func (p *Parser) addValue(b []byte) {
	if !p.text {
		p.held = append(p.held, b...)
		return
	}
	p.tmp = args.AppendEscaped(p.tmp[:0], b)
	p.emit(Arguments, p.tmp)
}

// endValue passes on the value, or the end of a string. An object of all arguments is held until
// the call ends.
func (p *Parser) endValue() {
	switch {
	case p.text:
		p.emit(Arguments, []byte{'"'})
		return
	case p.wrap:
		v := args.AppendValue(p.tmp[:0], p.held, args.Object)
		if p.tmp = v; v[0] == '{' {
			p.held = append(p.held[:0], v...)
			return
		}
		p.wrap = false
		p.emitKey()
	}
	p.tmp = args.AppendValue(p.tmp[:0], p.held, p.is)
	p.emit(Arguments, p.tmp)
}

// flushWrapped passes on an object as the argument by whose name it came, because another
// parameter follows.
func (p *Parser) flushWrapped() {
	if p.wrap {
		p.wrap = false
		p.emitKey()
		p.emit(Arguments, p.held)
	}
}

// endParams ends the call behind its last parameter.
func (p *Parser) endParams() {
	switch {
	case p.wrap:
		p.wrap = false
		p.emit(Arguments, p.held)
	case p.args == 0:
		p.emit(Arguments, []byte("{}"))
	default:
		p.emit(Arguments, []byte{'}'})
	}
	p.endCall(true)
}

// spill passes on what was read of the arguments of a call that ends within them.
func (p *Parser) spill() {
	if !p.open {
		return
	}
	switch p.state {
	case inValue, inParams:
		if p.line {
			p.line = false
			p.addValue([]byte{'\n'})
		}
		if p.wrap {
			p.wrap = false
			p.emitKey()
		}
		if p.state == inValue && !p.text {
			p.emit(Arguments, p.held)
		}
	case inArgRaw:
		p.emit(Arguments, p.held)
	case inParam, inValueGap, inKey:
		if len(p.key) > 0 {
			p.emitKey()
		}
	}
}

// stepJSON passes on arguments.
func (p *Parser) stepJSON(b []byte) bool {
	if p.special && p.f.inside.token(b) != nil {
		p.fail()
		return true
	}
	n, ended := p.feed(b)
	p.emit(Arguments, b[:n])
	switch p.at += n; {
	case p.js.Done:
		p.endCall(p.js.OK())
		p.afterCalls()
	case ended:
		p.fail()
	default:
		return n > 0
	}
	return true
}

// feed reads a JSON value, and returns the number of bytes that belong to it. Ended is set if a
// marker that ends the call follows, although the value is not complete.
func (p *Parser) feed(b []byte) (n int, ended bool) {
	for {
		n += p.js.Feed(b[n:])
		if !p.js.Odd {
			return n, false
		}
		if k, m := p.find(&p.f.inside, b[n:]); k == 0 {
			p.js.Odd = false
			return n, m != nil
		}
	}
}

// afterCalls moves behind the arguments of a call, or behind an array of calls.
func (p *Parser) afterCalls() {
	switch r := &p.f.row; {
	case r.separator != 0:
		p.state, p.recording, p.edge = inSeparate, true, true
	case r.callEnd != "" || r.args == argsHarmony:
		p.state = inAfter
	default:
		p.leave()
	}
}

// stepSeparate reads what separates calls that have no markers.
func (p *Parser) stepSeparate(b []byte) bool {
	switch c := b[0]; {
	case p.special:
		p.malformed()
	case args.IsSpace(c) || c == p.f.row.separator:
		p.eat(1)
	case c == p.f.row.bare:
		p.openCall(nil)
	default:
		p.malformed()
	}
	return true
}
