package jinja

import (
	"slices"
	"strings"
	"time"
)

// The bounds of one render. A long chat with tools takes some ten thousand
// steps and its output's bytes a few times over.
const (
	// maxSteps bounds evaluated nodes plus handled elements: a second or two.
	maxSteps = 4_000_000
	// maxOutput bounds the prompt, and each intermediate string, in bytes. A
	// million tokens of prose are about 4 MiB.
	maxOutput = 16 << 20
	// outputFloor and outputShare bound the output in proportion to its sources: bytes
	// for any request, and bytes for each byte of the template and the input, of which
	// every value counts as valueBytes more. The header of a message is 60 bytes.
	outputFloor = 1 << 20
	outputShare = 16
	valueBytes  = 16
	// maxMade bounds the total bytes of the strings that a render creates, and with it memory.
	maxMade = 256 << 20
	// madeShare bounds them to so many times the output, where the input bounds the output.
	madeShare = 16
	// maxCalls bounds nested macro calls.
	maxCalls = 64
	// maxRange bounds the length of a range, as in Jinja's sandbox.
	maxRange = 100_000
)

// run is one render. An error ends it by a panic; see fail.
type run struct {
	line  int // line of the evaluated node, for errors
	steps int // spent of maxSteps
	made  int // bytes spent of maxMade
	calls int // running macros
	most  int // bytes of output

	maxSteps int
	maxMade  int
	out      *strings.Builder
	scope    *scope
	now      time.Time
	// The tables of filters and tests, for filters that take the name of one.
	filters, tests map[string]*builtin
}

// weigh returns the bytes of a value, with valueBytes for each value in it.
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
		for i, key := range v.keys {
			n += weigh(key) + weigh(v.vals[i])
		}
	}
	return n
}

// fail ends the render with an error of the current line. It does not return; the result lets
// callers write it as their return value.
func (r *run) fail(kind error, format string, args ...any) Value {
	fail(kind, r.line, format, args...)
	return nil
}

// reject fails for an operand of the wrong type: with its own message if v is undefined.
func (r *run) reject(v Value, format string, args ...any) Value {
	r.use(v)
	return r.fail(ErrRender, format, args...)
}

// charge spends steps.
func (r *run) charge(n int) {
	if r.steps += n; r.steps > r.maxSteps {
		r.fail(ErrLimit, "more than %d steps", r.maxSteps)
	}
}

// at charges for a node and records its line for errors.
func (r *run) at(line int) {
	r.charge(1)
	r.line = line
}

// scans charges for one pass over s.
func (r *run) scans(s string) { r.charge(len(s) / 256) }

// scansKey charges for one pass over a key of a dict.
func (r *run) scansKey(key Value) {
	if s, ok := asStr(key); ok {
		r.scans(s)
	}
}

// fits accounts for a string of n bytes, before or after it is created.
func (r *run) fits(n int) {
	r.made += max(n, 0)
	switch {
	case n > maxOutput:
		r.fail(ErrLimit, "a string is longer than %d bytes", maxOutput)
	case r.made > r.maxMade:
		r.fail(ErrLimit, "more than %d bytes of strings", r.maxMade)
	}
}

// use fails if a value is undefined: most operations on it are errors.
func (r *run) use(vs ...Value) {
	for _, v := range vs {
		if u, ok := v.(*undefined); ok {
			r.fail(ErrRender, "%s", u.msg)
		}
	}
}

// scope holds the variables set in a loop body, macro or block.
type scope struct {
	names  []string
	vals   []Value
	parent *scope
}

func (s *scope) get(name string) (Value, bool) {
	for ; s != nil; s = s.parent {
		if i := slices.Index(s.names, name); i >= 0 {
			return s.vals[i], true
		}
	}
	return nil, false
}

func (s *scope) set(name string, v Value) {
	if i := slices.Index(s.names, name); i >= 0 {
		s.vals[i] = v
		return
	}
	s.names, s.vals = append(s.names, name), append(s.vals, v)
}

// push opens a scope within parent and returns a function that restores the current one.
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

// write adds s to the output. It returns flowNext, as assign does.
func (r *run) write(s string) flow {
	if r.out.Len()+len(s) > r.most {
		r.fail(ErrLimit, "the output is longer than %d bytes, which is %d and %d for each byte of the template and the request, at most %d", r.most, outputFloor, outputShare, maxOutput)
	}
	r.fits(len(s))
	r.out.WriteString(s)
	return flowNext
}
