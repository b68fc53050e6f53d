package jinja

import (
	"fmt"
	"strings"
	"time"
)

// The bounds of one render. A long chat with tools takes some ten thousand
// steps and its output's bytes a few times over.
const (
	// maxSteps bounds evaluated nodes plus handled elements: a second or two.
	maxSteps = 4_000_000
	// maxOutput bounds the prompt, and each string on the way, in bytes. A
	// million tokens of prose are about 4 MiB.
	maxOutput = 16 << 20
	// outputFloor and outputShare bound it in proportion to what it is made of: bytes
	// for any request, and bytes for each byte of the template and the input, of which
	// every value counts as valueBytes more. The header of a message is 60 bytes.
	outputFloor = 1 << 20
	outputShare = 16
	valueBytes  = 16
	// maxMade bounds the bytes of all strings a render makes together, and
	// with it memory.
	maxMade = 256 << 20
	// maxCalls bounds macros calling macros.
	maxCalls = 64
	// maxRange is how long a range may be, as in Jinja's sandbox.
	maxRange = 100_000
)

// run is one render. The first error stays in err, everything after it is void:
// loops and statements look at err, single expressions need not.
type run struct {
	err   *Error
	line  int // of what is being evaluated, for errors
	steps int // spent of maxSteps
	made  int // bytes spent of maxMade
	calls int // macros running
	most  int // bytes of output
	out   *strings.Builder
	scope *scope
	now   time.Time
	// The tables of filters and tests, for filters that take the name of one.
	filters map[string]*filterDef
	tests   map[string]*testDef
}

// weigh returns the bytes of a value, with valueBytes for each that it is made of.
func weigh(v Value) int {
	n := valueBytes
	switch v := v.(type) {
	case string:
		n += len(v)
	case List:
		for _, e := range v {
			n += weigh(e)
		}
	case *Dict:
		for i := range v.Len() {
			key, e := v.At(i)
			n += weigh(key) + weigh(e)
		}
	}
	return n
}

// fail records the first error and returns nil for convenience.
func (r *run) fail(kind error, format string, args ...any) Value {
	if r.err == nil {
		r.err = &Error{Kind: kind, Line: r.line, Msg: fmt.Sprintf(format, args...)}
	}
	return nil
}

// charge spends steps and reports whether to go on.
func (r *run) charge(n int) bool {
	if r.steps += n; r.steps > maxSteps {
		r.fail(ErrLimit, "more than %d steps", maxSteps)
	}
	return r.err == nil
}

// scans charges for going through s once and reports whether to go on.
func (r *run) scans(s string) bool { return r.charge(len(s) / 256) }

// fits accounts for a string of n bytes before or after it is made, and reports
// whether it is within bounds.
func (r *run) fits(n int) bool {
	r.made += max(n, 0)
	switch {
	case n > maxOutput:
		r.fail(ErrLimit, "a string is longer than %d bytes", maxOutput)
	case r.made > maxMade:
		r.fail(ErrLimit, "more than %d bytes of strings", maxMade)
	}
	return r.err == nil
}

// use fails if v is undefined: most operations on it are errors.
func (r *run) use(v Value) bool {
	if u, ok := v.(*undefined); ok {
		r.fail(ErrRender, "%s", u.msg)
	}
	return r.err == nil
}

// scope holds the variables set in a loop body, macro or block.
type scope struct {
	names  []string
	vals   []Value
	parent *scope
}

func (s *scope) get(name string) (Value, bool) {
	for ; s != nil; s = s.parent {
		for i, n := range s.names {
			if n == name {
				return s.vals[i], true
			}
		}
	}
	return nil, false
}

func (s *scope) set(name string, v Value) {
	for i, n := range s.names {
		if n == name {
			s.vals[i] = v
			return
		}
	}
	s.names, s.vals = append(s.names, name), append(s.vals, v)
}

// push opens a scope within the current one and returns what restores it.
func (r *run) push(parent *scope) (restore func()) {
	outer := r.scope
	r.scope = &scope{parent: parent}
	return func() { r.scope = outer }
}

// capture executes body and returns its output as a string.
func (r *run) capture(body []stmt) string {
	outer := r.out
	r.out = new(strings.Builder)
	r.exec(body)
	s := r.out.String()
	r.out = outer
	return s
}

func (r *run) write(s string) {
	if r.out.Len()+len(s) > r.most {
		r.fail(ErrLimit, "the output is longer than %d bytes, which is %d and %d for each byte of the template and the request, at most %d", r.most, outputFloor, outputShare, maxOutput)
		return
	}
	if r.fits(len(s)) {
		r.out.WriteString(s)
	}
}

// callArgs are evaluated arguments.
type callArgs struct {
	pos   []Value
	names []string
	named []Value // beside names
}

// absent stands for an argument that was not given.
var absent Value = new(struct{ _ byte })

// bind puts arguments in the order of params, absent where none was given. The
// first required ones must be given.
func (r *run) bind(what string, a callArgs, params []string, required int) []Value {
	if len(a.pos) > len(params) {
		r.fail(ErrRender, "%s takes at most %d arguments, got %d", what, len(params), len(a.pos))
		return nil
	}
	out := make([]Value, len(params))
	for i := range out {
		out[i] = absent
	}
	copy(out, a.pos)
	for i, name := range a.names {
		at := -1
		for k, p := range params {
			if p == name {
				at = k
			}
		}
		if at < 0 || out[at] != absent {
			r.fail(ErrRender, "%s got an unexpected keyword argument '%s'", what, name)
			return nil
		}
		out[at] = a.named[i]
	}
	for i := range required {
		if out[i] == absent {
			r.fail(ErrRender, "%s misses argument %d", what, i+1)
			return nil
		}
	}
	return out
}

// args evaluates the arguments of a call.
func (r *run) args(a *argExprs) callArgs {
	var c callArgs
	for _, x := range a.pos {
		c.pos = append(c.pos, x.eval(r))
	}
	for i, x := range a.named {
		c.names = append(c.names, a.names[i])
		c.named = append(c.named, x.eval(r))
	}
	if a.star != nil {
		more, ok := r.items(a.star.eval(r))
		if !ok {
			r.fail(ErrRender, "argument after * must be an iterable")
		}
		c.pos = append(c.pos, more...)
	}
	if a.stars != nil {
		d, ok := a.stars.eval(r).(*Dict)
		if !ok {
			r.fail(ErrRender, "argument after ** must be a mapping")
			return c
		}
		for i, k := range d.keys {
			name, ok := k.(string)
			if !ok {
				r.fail(ErrRender, "keywords must be strings")
				return c
			}
			c.names, c.named = append(c.names, name), append(c.named, d.vals[i])
		}
		r.charge(d.Len())
	}
	return c
}
