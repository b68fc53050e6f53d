// Package masks computes the token masks of constrained requests next to a step loop that must not
// wait for them.
//
// # Algorithm
//
// A Guide is the state of one output. After each step the loop calls Advance with the sampled
// tokens. If all that the next mask needs is cached, Advance copies it at once. Otherwise a worker
// accepts the token and computes the mask, and the Guide is not ready until then. While a mask has
// one token, that token is certain: the worker continues after it, so that a step can compute a run
// of certain tokens. Requests with equal grammars share one Automaton.
//
// Guides whose last mask was expensive wait in a queue of their own, and never have all workers.
//
// A grammar has at most one worker. A Guide whose turn comes while a worker has its grammar is
// parked, so that the other workers continue with other grammars. When the grammar is free, its
// first parked Guide becomes the first of its queue.
//
// # Invariant
//
// Which token a mask allows, and at which token a Guide fails, depends on the grammar and the
// output alone, and not on time, other requests or what is cached. Time decides only in which step
// a Guide is ready.
//
// # Ownership
//
// One goroutine, the step loop, calls the methods of all Guides. A Guide belongs to a worker while
// it is not ready.
package masks

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tandem-serving/tandem/engine/grammar"
)

// Defaults of Options.
const (
	DefaultWorkers    = 2
	DefaultCacheBytes = 512 << 20
)

// MaxCertain bounds the certain tokens that follow one mask.
const MaxCertain = 16

// slowSteps is the number of counted steps from which a mask is expensive: a few milliseconds.
const slowSteps = 200_000

// ErrEnded means that a constrained request cannot continue. Its output so far is a beginning of an
// output that the grammar allows.
var ErrEnded = errors.New("masks: the request cannot continue under its grammar")

// Options configure Masks. Zero counts are the defaults.
type Options struct {
	// Vocabulary returns the tokens of the model. It is called once, by a worker, for the first
	// Guide.
	Vocabulary func() (Vocabulary, error)
	Limits     grammar.Limits
	Workers    int
	CacheBytes int // of the Automatons of all grammars; one has at most an eighth
	// Ready is called on a worker's goroutine when a Guide has become ready. It must not block.
	Ready func()
}

// Vocabulary is the tokens of a model.
type Vocabulary struct {
	*grammar.Vocabulary
	// Lead is the number of leading spaces that a decoder drops from each output.
	Lead int
}

// Stats are counts; those that are not gauges only grow.
type Stats struct {
	Cached, Computed uint64 // masks that Advance found in a cache, and that workers computed
	Steps            uint64 // counted steps of workers
	Ended            uint64 // Guides that failed
	Grammars         int    // gauge: compiled, in use or cached
	Bytes            int    // gauge: of their Automatons
	Waiting          int    // gauge: Guides that wait for a worker
}

// Masks has the workers and the caches.
type Masks struct {
	o     Options
	ready chan struct{} // capacity 1: a Guide has become ready
	vocab func() (Vocabulary, error)

	cached, computed, steps, ended atomic.Uint64

	mu      sync.Mutex
	work    sync.Cond // a Guide waits, or closed
	queue   []*Guide  // that wait for a worker
	slow    []*Guide  // likewise: new ones, and those whose last mask was expensive
	busy    int       // workers with a Guide of slow
	parked  int       // Guides of all entries that are parked
	entries map[key]*entry
	bytes   int    // of all entries
	uses    uint64 // calls of open so far
	started bool   // the workers run
	closed  bool
	workers sync.WaitGroup
}

// key identifies a grammar.
type key [sha256.Size]byte

// entry is a grammar that Guides share.
type entry struct {
	mu  sync.Mutex // guards what follows, and the Automaton with all its Matchers
	a   *grammar.Automaton
	err error // of the compilation
	// Guarded by Masks.mu.
	key    key
	refs   int    // Guides
	used   uint64 // Masks.uses at the last open
	bytes  int
	held   bool     // a worker has a Guide of it
	parked []*Guide // whose turn came while it was held
}

// New returns Masks. Its workers start with the first Guide.
func New(o Options) *Masks {
	if o.Workers == 0 {
		o.Workers = DefaultWorkers
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = DefaultCacheBytes
	}
	o.Limits.CacheBytes = o.CacheBytes / 8
	m := &Masks{o: o, ready: make(chan struct{}, 1), vocab: sync.OnceValues(o.Vocabulary), entries: map[key]*entry{}}
	m.work.L = &m.mu
	return m
}

// Close ends the workers. Guides that are not ready never become it.
func (m *Masks) Close() {
	m.mu.Lock()
	m.closed = true
	m.work.Broadcast()
	m.mu.Unlock()
	m.workers.Wait()
}

// Ready returns a channel that receives after a Guide has become ready. Several may be ready.
func (m *Masks) Ready() <-chan struct{} { return m.ready }

// Stats returns the current counts.
func (m *Masks) Stats() Stats {
	m.mu.Lock()
	defer m.mu.Unlock()
	return Stats{
		Cached: m.cached.Load(), Computed: m.computed.Load(), Steps: m.steps.Load(), Ended: m.ended.Load(),
		Grammars: len(m.entries), Bytes: m.bytes, Waiting: len(m.queue) + len(m.slow) + m.parked,
	}
}

// keyOf returns the key of a source.
func keyOf(src *grammar.Source) (k key) {
	h := sha256.New()
	part := func(b []byte) {
		h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(b))))
		h.Write(b)
	}
	compact := byte(0)
	if src.Compact {
		compact = 1
	}
	part(binary.LittleEndian.AppendUint64([]byte{byte(src.Kind), compact}, uint64(src.MaskSteps)))
	part(src.Text)
	part([]byte(src.After))
	for _, list := range [][]string{src.Choices, src.Special} {
		part(binary.LittleEndian.AppendUint64(nil, uint64(len(list))))
		for _, s := range list {
			part([]byte(s))
		}
	}
	h.Sum(k[:0])
	return k
}

// open returns the entry of a grammar, with one more reference. The caller holds mu.
func (m *Masks) open(k key) *entry {
	e := m.entries[k]
	if e == nil {
		e = &entry{key: k}
		m.entries[k] = e
	}
	m.uses++
	e.refs, e.used = e.refs+1, m.uses
	return e
}

// settle records the memory of an entry, and drops the least recently used idle ones while all have
// more than CacheBytes. It reports whether e has to drop its cache, because no other is idle. The
// caller holds mu.
func (m *Masks) settle(e *entry, bytes int) (drop bool) {
	if m.entries[e.key] == e { // it may have been dropped since its bytes were counted
		m.bytes += bytes - e.bytes
		e.bytes = bytes
	}
	for m.bytes > m.o.CacheBytes || len(m.entries) > maxGrammars {
		var oldest *entry
		for _, x := range m.entries {
			if x.refs == 0 && (oldest == nil || x.used < oldest.used) {
				oldest = x
			}
		}
		if oldest == nil {
			return m.bytes > m.o.CacheBytes
		}
		m.bytes -= oldest.bytes
		delete(m.entries, oldest.key)
	}
	return false
}

// maxGrammars bounds the grammars that stay compiled while no request uses them.
const maxGrammars = 1024

// run is a worker.
func (m *Masks) run() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		g := m.next()
		if g == nil {
			return
		}
		bytes := g.entry.bytes
		if !g.closed {
			m.mu.Unlock()
			g.compute(m)
			bytes = g.entry.size()
			m.mu.Lock()
		}
		if g.slow {
			m.busy--
			m.work.Signal() // a Guide of slow may have waited for this worker
		}
		drop := m.settle(g.entry, bytes)
		if g.working = false; g.closed {
			m.release(g)
		}
		if drop {
			m.mu.Unlock()
			bytes = g.entry.drop()
			m.mu.Lock()
			m.settle(g.entry, bytes)
		}
		m.free(g.entry)
		g.ready.Store(true)
		select {
		case m.ready <- struct{}{}:
		default:
		}
		m.o.Ready()
	}
}

// next waits for a Guide whose grammar is free, removes it from its queue and holds its grammar. It
// parks the Guides before it. nil: closed. The caller holds mu.
func (m *Masks) next() *Guide {
	for {
		var g *Guide
		switch {
		case m.closed:
			return nil
		case len(m.queue) > 0:
			g, m.queue = m.queue[0], m.queue[1:]
		case len(m.slow) > 0 && m.busy < max(1, m.o.Workers-1):
			g, m.slow = m.slow[0], m.slow[1:]
		default:
			m.work.Wait()
			continue
		}
		if e := g.entry; e.held {
			e.parked = append(e.parked, g)
			m.parked++
			continue
		}
		g.entry.held = true
		if g.slow {
			m.busy++
		}
		return g
	}
}

// free ends the hold of an entry. The first of its parked Guides becomes the first of its queue.
// The caller holds mu.
func (m *Masks) free(e *entry) {
	e.held = false
	if len(e.parked) == 0 {
		return
	}
	g := e.parked[0]
	e.parked = slices.Delete(e.parked, 0, 1)
	m.parked--
	if g.slow {
		m.slow = slices.Insert(m.slow, 0, g)
	} else {
		m.queue = slices.Insert(m.queue, 0, g)
	}
	m.work.Signal()
}

// enqueue has a worker compute g.
func (m *Masks) enqueue(g *Guide, slow bool) {
	g.ready.Store(false)
	m.mu.Lock()
	g.working, g.slow = true, slow
	if !m.started && !m.closed {
		m.started = true
		for range m.o.Workers {
			m.workers.Go(m.run)
		}
	}
	if slow {
		m.slow = append(m.slow, g)
	} else {
		m.queue = append(m.queue, g)
	}
	m.work.Signal()
	m.mu.Unlock()
}

// release gives up the reference of a Guide. The caller holds mu.
func (m *Masks) release(g *Guide) {
	g.entry.refs--
	m.settle(g.entry, g.entry.bytes)
}

// size returns the memory of an entry.
func (e *entry) size() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.a == nil {
		return 0
	}
	return e.a.Bytes()
}

// drop frees the caches of an entry, and returns what is left.
func (e *entry) drop() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.a == nil {
		return 0
	}
	e.a.Drop()
	return e.a.Bytes()
}

// compile returns the Automaton of an entry. The caller holds e.mu.
func (m *Masks) compile(e *entry, src *grammar.Source) (*grammar.Automaton, error) {
	if e.a == nil && e.err == nil {
		e.a, e.err = m.automaton(*src)
	}
	return e.a, e.err
}

func (m *Masks) automaton(src grammar.Source) (*grammar.Automaton, error) {
	v, err := m.vocab()
	if err != nil {
		return nil, err
	}
	src.Lead = v.Lead
	g, err := grammar.Compile(src, m.o.Limits)
	if err != nil {
		return nil, err
	}
	limits := m.o.Limits
	if src.MaskSteps > 0 {
		limits.MaskSteps = src.MaskSteps
	}
	return grammar.NewAutomaton(g, v.Vocabulary, limits)
}

// end returns the error by which a request ends that has n tokens.
func (m *Masks) end(n int, err error) error {
	m.ended.Add(1)
	return fmt.Errorf("%w: after %d tokens: %w", ErrEnded, n, err)
}
