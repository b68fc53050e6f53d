package parse

import (
	"bytes"

	"github.com/tandem-serving/tandem/gateway/render/parse/args"
)

// brackets are the punctuation of arguments: of Python's notation, or of Gemma's.
type brackets struct{ open, equal, close byte }

func (p *Parser) brackets() brackets {
	if p.f.row.args == argsGemma {
		return brackets{'{', ':', '}'}
	}
	return brackets{'(', '=', ')'}
}

// stepPythonic reads calls in the notation of Python, and the arguments of such in Gemma's.
func (p *Parser) stepPythonic(b []byte) bool {
	if p.special && p.f.inside.token(b) != nil {
		if p.state == inList {
			p.leaveList()
		} else {
			p.fail()
		}
		return true
	}
	switch p.state {
	case inArgText:
		return p.stepArgText(b)
	case inArgRaw:
		return p.stepArgRaw(b)
	case inArg:
		return p.stepArg(b)
	}
	c := b[0]
	switch {
	case args.IsSpace(c):
	case p.state == inList:
		return p.stepList(c)
	case p.state == inFunction:
		return p.stepFunction(c)
	case p.state == inKey:
		return p.stepKey(c)
	default:
		return p.stepArgEnd(b)
	}
	if p.state == inFunction {
		p.fail()
		return true
	}
	p.eat(1)
	return true
}

func (p *Parser) stepList(c byte) bool {
	switch {
	case c == '[' && !p.list:
		p.list = true
	case c == ']' && p.list && !p.recording:
		p.eat(1)
		p.list = false
		p.leaveList()
		return true
	case c == ',' && !p.recording:
	case isNameByte(c) && c != '-' && c != '.' && (c < '0' || c > '9'):
		p.state, p.name, p.recording = inFunction, p.name[:0], true
		return true
	default:
		p.leaveList()
		return true
	}
	p.eat(1)
	return true
}

// leaveList ends the calls at something that is none.
func (p *Parser) leaveList() {
	if p.recording {
		p.malformed()
		return
	}
	p.afterCalls()
}

func (p *Parser) stepFunction(c byte) bool {
	switch {
	case isNameByte(c) && len(p.name) < maxName:
		p.name = append(p.name, c)
	case c == '(' && !(p.mid && !p.tools.Knows(p.name)):
		p.state, p.key, p.args = inKey, p.key[:0], 0
	default:
		p.fail()
		return true
	}
	p.eat(1)
	return true
}

// stepKey reads the name of an argument, or the end of the call.
func (p *Parser) stepKey(c byte) bool {
	br := p.brackets()
	python := br.equal == '='
	switch {
	case c == br.close && len(p.key) == 0:
		p.eat(1)
		p.endArguments()
		return true
	case c == br.equal && len(p.key) > 0:
		if !p.open {
			p.start()
		}
		p.key = p.bareKey()
		p.emitKey()
		p.key, p.state = p.key[:0], inArg
	case c == ',' && len(p.key) == 0 && p.args > 0:
	case len(p.key) < maxName && (python && isNameByte(c) || !python && c != ',' && c != br.open && c != br.close):
		p.key = append(p.key, c)
	default:
		p.fail()
		return true
	}
	p.eat(1)
	return true
}

// bareKey returns the argument's name without quotes.
func (p *Parser) bareKey() []byte {
	q := []byte(p.f.row.quote)
	key := bytes.TrimSuffix(bytes.TrimPrefix(p.key, q), q)
	return append(p.key[:0], bytes.Trim(key, `"'`)...)
}

// endArguments ends the call at its closing bracket.
func (p *Parser) endArguments() {
	if !p.open {
		p.start()
	}
	p.endParams()
	if p.state = inList; p.f.row.args == argsGemma {
		p.afterCalls()
	}
}

// stepArg begins the value of an argument.
func (p *Parser) stepArg(b []byte) bool {
	br := p.brackets()
	c := b[0]
	switch {
	case args.IsSpace(c):
		p.eat(1)
		return true
	case c == ',' || c == br.close:
		p.fail()
		return true
	case br.equal == '=' && (c == '\'' || c == '"'):
		return p.openString(b, `"`)
	case br.equal == ':':
		n, m := p.find(&p.f.quote, b)
		if m != nil && n == 0 {
			p.eat(len(m.text))
			p.emit(Arguments, []byte{'"'})
			p.state = inArgText
			return true
		}
		if n == 0 {
			return false
		}
	}
	p.state, p.held, p.depth, p.quote = inArgRaw, p.held[:0], 0, 0
	p.esc = false
	return true
}

// openString begins a string of Python.
func (p *Parser) openString(b []byte, quote string) bool {
	if !p.str.Open(b, p.last) {
		return false
	}
	p.eat(p.str.Opened())
	p.emit(Arguments, []byte(quote))
	p.state = inArgText
	return true
}

func (p *Parser) stepArgText(b []byte) bool {
	if p.f.row.args == argsGemma {
		n, m := p.find(&p.f.quote, b)
		p.tmp = args.AppendEscaped(p.tmp[:0], p.shown(b[:n]))
		p.emit(Arguments, p.tmp)
		if p.at += n; m == nil {
			return n > 0
		}
		p.at += len(m.text)
		p.state = inArgEnd
		return true
	}
	n := 0
	p.tmp, n = p.str.Feed(p.tmp[:0], b, p.last)
	p.emit(Arguments, p.tmp)
	if p.at += n; p.str.Closed {
		p.state = inArgEnd
	}
	return n > 0
}

// stepArgEnd reads what follows a string.
func (p *Parser) stepArgEnd(b []byte) bool {
	br := p.brackets()
	switch c := b[0]; {
	case c == ',' || c == br.close:
		p.emit(Arguments, []byte{'"'})
		p.endArg(c)
	case br.equal == '=' && (c == '\'' || c == '"'): // strings that follow each other are one
		return p.openString(b, "")
	default:
		p.fail()
	}
	return true
}

// endArg reads the comma or the bracket behind an argument.
func (p *Parser) endArg(c byte) {
	p.at++
	if p.state = inKey; c != ',' {
		p.endArguments()
	}
}

// stepArgRaw holds a value that is not a string, and converts it at its end.
func (p *Parser) stepArgRaw(b []byte) bool {
	gemma := p.f.row.args == argsGemma
	n, m := len(b), (*mark)(nil)
	if gemma {
		if i := bytes.IndexAny(b, ",}"); i >= 0 && !p.special {
			b = b[:i+1] // no quote contains these
		}
		n, m = p.find(&p.f.quote, b)
	}
	for i, c := range b[:n] {
		switch {
		case p.esc:
			p.esc = false
		case p.quote == gemmaQuote:
		case p.quote != 0 && c == '\\':
			p.esc = true
		case p.quote != 0:
			if c == p.quote {
				p.quote = 0
			}
		case c == '"' || c == '\'' && !gemma:
			p.quote = c
		case c == '(' || c == '[' || c == '{':
			p.depth++
		case p.depth == 0 && (c == ',' || c == p.brackets().close):
			p.held = append(p.held, b[:i]...)
			p.at += i
			p.convertArg()
			p.endArg(c)
			return true
		case c == ')' || c == ']' || c == '}':
			if p.depth--; p.depth < 0 {
				p.held = append(p.held, b[:i]...)
				p.at += i
				p.fail()
				return true
			}
		}
	}
	p.held = append(p.held, b[:n]...)
	if p.at += n; m == nil {
		return n > 0
	}
	p.held = append(p.held, m.text...)
	p.at += len(m.text)
	switch p.quote {
	case gemmaQuote:
		p.quote = 0
	case 0:
		p.quote = gemmaQuote
	}
	return true
}

// gemmaQuote is the mark of a string between two of Gemma's quotes.
const gemmaQuote = 1

// convertArg passes on the value that was held as JSON.
func (p *Parser) convertArg() {
	v := bytes.TrimSpace(p.held)
	out, ok := args.AppendLiteral(p.tmp[:0], v, p.f.row.quote)
	if !ok {
		out = args.AppendQuoted(p.tmp[:0], v)
	}
	p.tmp = out
	p.emit(Arguments, out)
}
