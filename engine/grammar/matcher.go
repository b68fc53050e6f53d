package grammar

import (
	"fmt"
	"slices"
)

// A Matcher is the state of one output. It is a function of the grammar and of the tokens
// accepted: replaying them on another Automaton gives the same masks. Copies are independent, so
// that a guess may be tried on a copy.
type Matcher struct {
	a     *Automaton
	gen   *generation
	state int32
	done  bool
}

// NewMatcher returns the Matcher of an empty output.
func (a *Automaton) NewMatcher() (Matcher, error) {
	a.begin()
	s, err := a.start()
	return Matcher{a: a, gen: a.generation, state: s}, err
}

// begin prepares a call: it drops the caches that outgrew their limit.
func (a *Automaton) begin() {
	a.work = 0
	if a.bytes > a.limits.CacheBytes {
		a.reset()
	}
}

// sync carries m over to the current generation of its Automaton.
func (m *Matcher) sync() error {
	a := m.a
	a.begin()
	if m.gen == a.generation {
		return nil
	}
	for _, it := range m.gen.states[m.state].items {
		moved := item{it.pos, a.adopt(m.gen, it.stack)}
		if a.set.add(moved) {
			a.set.items = append(a.set.items, moved)
		}
	}
	s, err := a.intern()
	if err != nil {
		return err
	}
	m.gen, m.state = a.generation, s
	return nil
}

// adopt returns a stack of another generation.
func (a *Automaton) adopt(from *generation, stack int32) int32 {
	if stack == 0 {
		return 0
	}
	c := from.cells[stack]
	return a.push(a.adopt(from, c.parent), c.kind, c.val)
}

// Mask writes the tokens that may follow to dst, bit id%64 of word id/64. dst has
// Vocabulary.Words words. It returns ErrDeadEnd if there are none, and ErrBudget if the mask needs
// more steps than Limits.MaskSteps; dst is then unspecified.
func (m *Matcher) Mask(dst []uint64) error {
	k, err := m.mask()
	if err != nil {
		return err
	}
	k.write(m.a.vocab, dst)
	return nil
}

func (m *Matcher) mask() (*mask, error) {
	if err := m.sync(); err != nil {
		return nil, err
	}
	if m.done {
		return nil, ErrDeadEnd
	}
	k, err := m.a.maskOf(m.state)
	if err == nil && k.count == 0 {
		err = ErrDeadEnd
	}
	return k, err
}

// Certain returns the only token that may follow. ok is false if several may, or none.
func (m *Matcher) Certain() (token int32, ok bool) {
	k, err := m.mask()
	if err != nil || k.count != 1 {
		return 0, false
	}
	return k.first, true
}

// Accept appends a token to the output. It returns ErrRefused, and leaves m as it was, if the
// token is not allowed.
func (m *Matcher) Accept(token int32) error {
	if err := m.sync(); err != nil {
		return err
	}
	v := m.a.vocab
	if m.done || token < 0 || int(token) >= 64*v.words {
		return fmt.Errorf("%w: %d", ErrRefused, token)
	}
	if slices.Contains(v.eos, token) && m.a.states[m.state].accept {
		m.done = true
		return nil
	}
	if m.a.states[m.state].hasTok && slices.Contains(m.a.tokens, token) {
		s, err := m.a.stepToken(m.state, token)
		if err != nil {
			return err
		}
		if s != deadState {
			m.state = s
			return nil
		}
	}
	if int(token) >= len(v.tokens) || len(v.tokens[token]) == 0 || slices.Contains(v.eos, token) {
		return fmt.Errorf("%w: %d", ErrRefused, token)
	}
	return m.bytes(v.tokens[token])
}

// AcceptBytes appends bytes to the output. It returns ErrRefused, and leaves m as it was, if they
// are not allowed.
func (m *Matcher) AcceptBytes(b []byte) error {
	if err := m.sync(); err != nil {
		return err
	}
	return m.bytes(b)
}

func (m *Matcher) bytes(b []byte) error {
	s := m.state
	for i, c := range b {
		var err error
		if s, err = m.a.step(s, m.a.p.class[c]); err != nil {
			return err
		}
		if s == deadState {
			return fmt.Errorf("%w: %q at byte %d of %q", ErrRefused, c, i, b)
		}
	}
	m.state = s
	return nil
}

// Complete reports whether the output may end here.
func (m *Matcher) Complete() bool {
	return m.done || m.gen.states[m.state].accept
}

// Finished reports whether the output has ended: an end token was accepted, or nothing but an end
// token may follow.
func (m *Matcher) Finished() bool {
	s := &m.gen.states[m.state]
	return m.done || s.accept && len(s.items) == 1
}
