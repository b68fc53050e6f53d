package grammar

import (
	"cmp"
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

	// With thinking: whether the output is within reasoning, and the tokens of reasoning so far.
	inside bool
	spent  int32
}

// NewMatcher returns the Matcher of an empty output.
func (a *Automaton) NewMatcher() (Matcher, error) {
	a.begin()
	s, err := a.start()
	return Matcher{a: a, gen: a.generation, state: s, inside: a.thinking != nil && a.thinking.open}, err
}

// begin prepares a call: it drops the caches that outgrew their limit.
func (a *Automaton) begin() {
	a.work = 0
	a.newEpoch()
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
	a.work = 0
	a.newEpoch()
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
	m.write(k, dst)
	return nil
}

// mask returns the mask of the grammar; nil: all tokens.
func (m *Matcher) mask() (*mask, error) {
	if err := m.sync(); err != nil {
		return nil, err
	}
	if m.done {
		return nil, ErrDeadEnd
	}
	if m.a.free {
		return nil, nil
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
	if err != nil {
		return 0, false
	}
	if id := m.forced(k); id >= 0 {
		return id, true
	}
	if k == nil || k.count != 1 {
		return 0, false
	}
	return k.first, true
}

// Peek returns the matcher after a token, and writes its mask to dst, if all of it is cached. Then
// certain is the only token of the mask, or -1. ok is false otherwise, and where Accept or Mask
// would fail. Nothing is computed, so that Peek takes a bounded time.
func (m *Matcher) Peek(token int32, dst []uint64) (next Matcher, certain int32, ok bool) {
	a := m.a
	v := a.vocab
	if next = *m; a.free {
		if m.done || token < 0 || int(token) >= v.size || slices.Contains(v.eos, token) {
			return Matcher{}, -1, false
		}
		next.note(token)
		return next, next.write(nil, dst), true
	}
	if m.gen != a.generation || m.done || token < 0 || int(token) >= len(v.tokens) || len(v.tokens[token]) == 0 || slices.Contains(v.eos, token) {
		return Matcher{}, -1, false
	}
	if slices.Contains(a.tokens, token) {
		return Matcher{}, -1, false
	}
	s, steps := m.state, 0
	for _, c := range v.tokens[token] {
		switch t := a.trans[int(s)*a.p.classes+int(a.p.class[c])]; {
		case t > deadState:
			s, steps = t, steps+1
		case t <= firstHeavy && a.heavy[firstHeavy-t].to != deadState:
			s, steps = a.heavy[firstHeavy-t].to, steps+int(a.heavy[firstHeavy-t].steps)
		default:
			return Matcher{}, -1, false
		}
	}
	rounded := a.states[s].rounded
	if steps > a.limits.MaskSteps || rounded == unknown {
		return Matcher{}, -1, false
	}
	k := a.states[rounded].mask
	if k == nil || k.count == 0 {
		return Matcher{}, -1, false
	}
	next.state = s
	next.note(token)
	return next, next.write(k, dst), true
}

// Accept appends a token to the output. It returns ErrRefused, and leaves m as it was, if the
// token is not allowed.
func (m *Matcher) Accept(token int32) error {
	if t := m.a.thinking; t != nil && token != t.end && m.inside && m.spent >= t.tokens {
		if k, err := m.mask(); err != nil || m.forced(k) >= 0 {
			return cmp.Or(err, fmt.Errorf("%w: %d", ErrRefused, token))
		}
	}
	err := m.accept(token)
	if err == nil {
		m.note(token)
	}
	return err
}

func (m *Matcher) accept(token int32) error {
	if err := m.sync(); err != nil {
		return err
	}
	v := m.a.vocab
	if m.done || token < 0 || int(token) >= 64*v.words {
		return fmt.Errorf("%w: %d", ErrRefused, token)
	}
	if slices.Contains(v.eos, token) && (m.a.free || m.a.states[m.state].accept) {
		m.done = true
		return nil
	}
	if m.a.free {
		if int(token) >= v.size {
			return fmt.Errorf("%w: %d", ErrRefused, token)
		}
		return nil
	}
	if slices.Contains(m.a.tokens, token) { // it is allowed only where the grammar names it
		s, err := deadState, error(nil)
		if m.a.states[m.state].hasTok {
			s, err = m.a.stepToken(m.state, token)
		}
		switch {
		case err != nil:
			return err
		case s == deadState:
			return fmt.Errorf("%w: %d", ErrRefused, token)
		}
		m.state = s
		return nil
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
		if m.a.work > m.a.limits.MaskSteps {
			return m.a.tooManySteps()
		}
	}
	m.state = s
	return nil
}

// Complete reports whether the output may end here.
func (m *Matcher) Complete() bool {
	return m.done || m.a.free || m.gen.states[m.state].accept
}

// Finished reports whether the output has ended: an end token was accepted, or nothing but an end
// token may follow.
func (m *Matcher) Finished() bool {
	s := &m.gen.states[m.state]
	return m.done || !m.a.free && s.accept && len(s.items) == 1
}
