package parse

import (
	"bytes"

	"github.com/tandem-serving/tandem/gateway/render/parse/args"
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// object is the place within an object that is a call, or an array of them.
type object struct {
	state   objectState
	array   bool
	member  memberKind // whose value comes
	started bool       // the call of this object has started
	has     bool       // its arguments are held
	nested  bool       // the call is the value of the member "function"
}

type objectState uint8

const (
	objectOpen objectState = iota // before an object
	objectKey
	objectName // in a member's name
	objectColon
	objectValue
	objectText // in a string: the call's name or id
	objectArgs // in arguments that are passed on
	objectHeld // in arguments that precede the name, or are a string
	objectSkip // in another value
	objectNext // behind a member
	objectBetween
)

type memberKind uint8

const (
	memberOther memberKind = iota
	memberName
	memberID
	memberArgs
	memberCall
)

func (p *Parser) stepObject(b []byte) bool {
	o := &p.obj
	if p.special && p.f.inside.token(b) != nil {
		p.leaveObject()
		return true
	}
	switch o.state {
	case objectName, objectText, objectArgs, objectHeld, objectSkip:
		return p.objectText(b)
	}
	c := b[0]
	if args.IsSpace(c) {
		p.eat(1)
		return true
	}
	switch {
	case o.state == objectOpen && c == '{':
		p.name, p.id, p.held = p.name[:0], p.id[:0], p.held[:0]
		*o = object{state: objectKey, array: o.array}
	case o.state == objectOpen && c == '[' && !o.array && p.f.row.args != argsObject:
		o.array = true
	case o.state == objectKey && c == '"':
		p.js.Reset()
		p.key, o.state = p.key[:0], objectName
		return true
	case o.state == objectColon && c == ':':
		o.state = objectValue
	case o.state == objectValue:
		return p.objectValue(c)
	case o.state == objectNext && c == ',':
		o.state = objectKey
	case (o.state == objectNext || o.state == objectKey) && c == '}':
		p.eat(1)
		p.closeObject()
		return true
	case o.state == objectBetween && c == ',':
		o.state, p.recording = objectOpen, true
	case (o.state == objectBetween || o.state == objectOpen) && c == ']' && o.array && p.used:
		p.eat(1)
		p.recording, p.span = false, p.span[:0]
		p.afterCalls()
		return true
	default:
		p.leaveObject()
		return true
	}
	p.eat(1)
	return true
}

// objectText reads a value, or a member's name.
func (p *Parser) objectText(b []byte) bool {
	o := &p.obj
	switch o.state {
	case objectName, objectText:
		b = b[:fit(b, maxName-len(p.key))]
	case objectHeld:
		b = b[:fit(b, maxHeld-len(p.held))]
	}
	if len(b) == 0 {
		p.leaveObject()
		return true
	}
	n, ended := p.feed(b)
	switch o.state {
	case objectName, objectText:
		p.key = append(p.key, b[:n]...)
	case objectHeld:
		p.held = append(p.held, b[:n]...)
	case objectArgs:
		p.emit(Arguments, b[:n])
	}
	if p.eat(n); !p.js.Done {
		if ended {
			p.leaveObject()
		}
		return n > 0 || ended
	}
	state := o.state
	o.state = objectNext
	switch {
	case state == objectArgs:
		p.endCall(p.js.OK())
	case state == objectHeld:
		if o.has = true; len(p.name) > 0 {
			p.heldArguments()
		}
	case state == objectSkip:
	case !p.js.OK():
		p.leaveObject()
	case state == objectName:
		o.state = objectColon
		p.memberNamed(jsonscan.Text(p.key))
	case o.member == memberID:
		p.id = append(p.id[:0], jsonscan.Text(p.key)...)
	default:
		if p.name = append(p.name[:0], jsonscan.Text(p.key)...); !isName(p.name) {
			p.leaveObject()
		} else if o.has && !o.started {
			p.heldArguments()
		}
	}
	return true
}

// memberNamed decides what the value of a member is.
func (p *Parser) memberNamed(name string) {
	o := &p.obj
	switch o.member = memberOther; name {
	case "name", "tool_name":
		o.member = memberName
	case "id", "tool_call_id":
		o.member = memberID
	case "arguments", "parameters":
		o.member = memberArgs
	case "function":
		o.member = memberCall
	}
	switch {
	case p.f.row.nameIsKey && !o.started:
		if o.member, p.name = memberArgs, append(p.name[:0], name...); !isName(p.name) {
			p.leaveObject()
		}
	case o.started:
		o.member = memberOther
	case (o.member == memberOther || o.member == memberID) && p.bare && name != "type" && name != "id":
		p.leaveObject() // an answer in JSON, and no call
	}
}

// objectValue begins the value of a member with the byte c.
func (p *Parser) objectValue(c byte) bool {
	o := &p.obj
	if p.one && p.bare && p.calls == 0 && o.member == memberArgs && !p.spelled(c) {
		p.leaveObject()
		return true
	}
	p.js.Reset()
	switch o.state = objectSkip; {
	case o.member == memberCall && c == '{' && !o.nested:
		p.eat(1)
		o.state, o.nested = objectKey, true
	case o.member == memberArgs && c == '{' && len(p.name) > 0:
		p.start()
		o.state, o.started = objectArgs, true
	case o.member == memberArgs && (c == '{' || c == '"' || c == 'n'):
		o.state, p.held = objectHeld, p.held[:0]
	case o.member == memberArgs, o.member == memberName && c != '"':
		p.leaveObject()
	case o.member == memberName, o.member == memberID && c == '"':
		o.state, p.key = objectText, p.key[:0]
	}
	return true
}

// spelled reports whether the object that was read, before arguments that begin with c, is the
// beginning of a call as grammars spell it. A grammar allows no content that begins so.
func (p *Parser) spelled(c byte) bool {
	text := bytes.TrimLeft(p.span, args.Spaces)
	if p.obj.array {
		text = bytes.TrimPrefix(text, []byte("["))
	}
	return c == '{' && p.tools.Knows(p.name) && string(text) == p.f.row.opening(string(p.name))
}

// heldArguments passes on the call whose arguments were held.
func (p *Parser) heldArguments() {
	held, ok := p.held, true
	if held[0] == '"' && args.TypeOf(held) != 0 {
		held = []byte(jsonscan.Text(held))
	}
	switch {
	case args.TypeOf(held) == args.Null:
		held = []byte("{}")
	case len(held) == 0 || held[0] != '{':
		p.leaveObject()
		return
	default:
		ok = args.TypeOf(held) == args.Object
	}
	p.start()
	p.emit(Arguments, held)
	p.endCall(ok)
	p.obj.started = true
}

// closeObject ends an object.
func (p *Parser) closeObject() {
	o := &p.obj
	if o.nested {
		o.state, o.nested = objectNext, false
		return
	}
	if !o.started {
		if o.has = !p.f.row.needsArgs; len(p.name) == 0 || !o.has {
			p.malformed()
			return
		}
		p.start()
		p.emit(Arguments, []byte("{}"))
		p.endCall(true)
	}
	if o.array {
		o.state = objectBetween
		return
	}
	p.afterCalls()
}

// leaveObject ends an object, or an array of them, at something that does not belong to it.
func (p *Parser) leaveObject() {
	switch {
	case p.recording:
		p.malformed()
	case p.open:
		p.fail()
	default:
		p.afterCalls()
	}
}
