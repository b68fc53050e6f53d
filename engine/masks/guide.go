package masks

import (
	"errors"
	"sync/atomic"

	"github.com/tandem-serving/tandem/engine/grammar"
)

// errRules means that the mask allowed tokens, and other rules of the request none of them.
var errRules = errors.New("other rules of the request (bad_words, min_tokens, allowed tokens) exclude every token that the grammar allows")

// A Guide is the state of one constrained output.
type Guide struct {
	ready  atomic.Bool
	entry  *entry
	src    grammar.Source
	output []int32 // of earlier attempts, until they are accepted
	n      int     // tokens accepted, those of earlier attempts included

	// places has the state after the output, with its mask, and those after each draft. Of them
	// the first certain+1 follow each other by tokens that are certain.
	places  []place
	certain int
	spare   []place // memory for Advance
	next    int32   // token to accept first; -1: none
	steps   int     // counted steps of the last computation
	err     error

	// Guarded by Masks.mu.
	working bool // queued, parked, or with a worker
	slow    bool // of the queue slow
	closed  bool
}

// place is a state and its mask.
type place struct {
	m     grammar.Matcher
	mask  []uint64
	token int32 // the only one of the mask; -1: several
}

// Start returns the Guide of a request whose earlier attempts have sampled output. It is not ready.
func (m *Masks) Start(src grammar.Source, output []int32) *Guide {
	k := keyOf(&src)
	m.mu.Lock()
	g := &Guide{entry: m.open(k), src: src, output: output, next: -1}
	m.mu.Unlock()
	m.enqueue(g, true)
	return g
}

// Close ends the Guide.
func (g *Guide) Close(m *Masks) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if g.closed {
		return
	}
	if g.closed = true; !g.working {
		m.release(g)
	}
}

// Ready reports whether Err and Mask may be called.
func (g *Guide) Ready() bool { return g.ready.Load() }

// Err returns why the output cannot continue, or nil. The Guide is ready.
func (g *Guide) Err() error { return g.err }

// Mask returns the mask after the output and n drafts of Drafts. The Guide is ready.
func (g *Guide) Mask(n int) []uint64 { return g.places[n].mask }

// Allows returns an error if the token sampled after n drafts is not in its mask, or excluded by
// other rules of the request: these left none of its tokens.
func (g *Guide) Allows(m *Masks, n int, token int32, excluded bool) error {
	if mask := g.places[n].mask; !excluded && token >= 0 && int(token)>>6 < len(mask) && mask[token>>6]>>(token&63)&1 != 0 {
		return nil
	}
	return m.end(g.n+n, errRules)
}

// Ends reports whether the token ends the output. The Guide is ready.
func (g *Guide) Ends(m *Masks, token int32) bool {
	v, err := m.vocab()
	return err == nil && v.Ends(token)
}

// Drafts appends to tokens, which end with the output, at most n drafts: tokens that are certain,
// and then at most guesses of those that guess appends, while their masks are cached. guess may be
// nil. The Guide is ready.
func (g *Guide) Drafts(tokens []int32, n, guesses int, guess func(tokens []int32, n int) []int32) []int32 {
	g.places = g.places[:g.certain+1]
	for i := range min(g.certain, n) {
		tokens = append(tokens, g.places[i].token)
	}
	guesses = min(guesses, n-g.certain)
	if guesses <= 0 || guess == nil || !g.entry.mu.TryLock() {
		return tokens
	}
	defer g.entry.mu.Unlock()
	known := len(tokens)
	tokens = guess(tokens, guesses)
	for i, token := range tokens[known:] {
		if !peek(&g.places, &g.places[len(g.places)-1].m, token) {
			return tokens[:known+i]
		}
	}
	return tokens
}

// peek appends to places the state after a token, with its mask. It appends none and returns false
// unless all of it is cached. The caller holds the lock of the Automaton.
func peek(places *[]place, from *grammar.Matcher, token int32) (ok bool) {
	m := *from
	p := extend(places)
	if p.m, p.token, ok = m.Peek(token, p.mask); !ok {
		*places = (*places)[:len(*places)-1]
	}
	return ok
}

// extend appends a place, whose memory is reused. The first one has a mask already.
func extend(places *[]place) *place {
	n := len(*places)
	if n < cap(*places) {
		*places = (*places)[:n+1]
	} else {
		*places = append(*places, place{})
	}
	p := &(*places)[n]
	if p.mask == nil && n > 0 {
		p.mask = make([]uint64, len((*places)[0].mask))
	}
	return p
}

// Advance accepts the tokens sampled in a step, of which all but the last are the first drafts. The
// Guide is not ready if a worker has to compute the next mask.
func (g *Guide) Advance(m *Masks, sampled int, last int32) {
	from := g.places[sampled-1].m
	g.n += sampled
	if g.entry.mu.TryLock() {
		ok := g.advance(m, &from, last)
		g.entry.mu.Unlock()
		if ok {
			m.cached.Add(1)
			return
		}
	}
	g.places, g.certain = g.places[:1], 0
	g.places[0].m, g.next = from, last
	m.enqueue(g, g.steps > slowSteps)
}

// advance accepts a token if all that the next mask needs is cached, and then the certain tokens
// after it that are cached too.
func (g *Guide) advance(m *Masks, from *grammar.Matcher, token int32) bool {
	next := g.spare[:0]
	if cap(next) == 0 {
		next = append(next, place{mask: make([]uint64, len(g.places[0].mask))})[:0]
	}
	if !peek(&next, from, token) {
		return false
	}
	for len(next) <= MaxCertain {
		last := &next[len(next)-1]
		if last.token < 0 || g.Ends(m, last.token) || !peek(&next, &last.m, last.token) {
			break
		}
	}
	g.places, g.spare, g.certain = next, g.places, len(next)-1
	return true
}

// compute is a worker's part: it accepts what is to be accepted and computes the masks.
func (g *Guide) compute(m *Masks) {
	g.entry.mu.Lock()
	defer g.entry.mu.Unlock()
	g.steps, g.certain = 0, 0
	a, err := m.compile(g.entry, &g.src)
	if err != nil {
		g.err = m.end(0, err)
		return
	}
	if len(g.places) == 0 {
		err = g.begin(m, a)
	}
	if g.next >= 0 && err == nil {
		err = g.places[0].m.Accept(g.next)
		g.steps += a.Steps()
		g.next = -1
	}
	if err == nil {
		err = g.fill(m, a)
	}
	m.steps.Add(uint64(g.steps))
	m.computed.Add(1)
	if err != nil {
		g.err = m.end(g.n, err)
	}
}

// begin accepts the output of earlier attempts.
func (g *Guide) begin(m *Masks, a *grammar.Automaton) error {
	v, err := m.vocab()
	if err != nil {
		return err
	}
	p := extend(&g.places)
	p.mask = make([]uint64, v.Words())
	if p.m, err = a.NewMatcher(); err != nil {
		return err
	}
	for _, t := range g.output {
		if err := p.m.Accept(t); err != nil {
			return err
		}
		g.n++
		g.steps += a.Steps()
	}
	g.output = nil
	return nil
}

// fill computes the mask after the output, and those after tokens that are certain.
func (g *Guide) fill(m *Masks, a *grammar.Automaton) error {
	g.places = g.places[:1]
	if err := g.mask(a); err != nil {
		return err
	}
	for len(g.places) <= MaxCertain {
		last := g.places[len(g.places)-1]
		if last.token < 0 || g.Ends(m, last.token) {
			break
		}
		p := extend(&g.places)
		p.m = last.m
		if p.m.Accept(last.token) != nil || g.mask(a) != nil { // the error comes when the output is there
			g.places = g.places[:len(g.places)-1]
			break
		}
		g.certain++
	}
	return nil
}

// mask computes the mask of the last place.
func (g *Guide) mask(a *grammar.Automaton) error {
	p := &g.places[len(g.places)-1]
	err := p.m.Mask(p.mask)
	g.steps += a.Steps()
	p.token = -1
	if token, ok := p.m.Certain(); err == nil && ok {
		p.token = token
	}
	return err
}
