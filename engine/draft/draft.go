// Package draft lets a small model draft the tokens that a large one is about to
// sample. The small model computes the same tokens in KV blocks of its own, and
// samples with the random numbers of the drafted position. If both models have the
// same distribution, they sample the same token, at any temperature.
//
// A sequence that is behind (its prompt is new, or the drafts of others had the
// room) catches up in chunks, in the same steps as the others. Then one step of the
// small model drafts the first token of all sequences, the next step the second one,
// and so on. KV of rejected drafts is overwritten. Complete blocks of certain tokens
// enter a prefix cache. The least recently used sequence gives its blocks to one
// that needs them.
//
// Invariant: positions from a sequence's certain tokens on are in blocks that it
// alone has and that are not in the prefix cache.
//
// The package does not decide which sequences get drafts or how many. It does not
// know whether a draft is accepted: the tokens of the next call show that.
package draft

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/sample"
)

// Errors of the package.
var (
	ErrConfig = errors.New("draft: bad config")
	ErrStep   = errors.New("draft: the draft model's step failed")
	ErrBroken = errors.New("draft: blocks are counted wrongly")
)

// Model is the draft model. *model.Model implements it.
type Model interface {
	Step(step *backend.Step, onMark func(layer int)) error
}

// Config sizes a Drafter.
type Config struct {
	Model       Model
	Pool        kvcache.Config // the blocks and groups of the model's KV
	MaxTokens   int            // of a step
	MaxOutputs  int            // rows of logits of a step
	MaxModelLen int            // context of the model in tokens, drafts included
}

// Request is a sequence that may get draft tokens.
type Request struct {
	ID        uint64        // of a sequence whose tokens only grow from call to call
	Root      kvcache.Hash  // sequences of different roots share no cached blocks
	Tokens    []int32       // all certain tokens; Draft appends draft tokens
	MaxDrafts int           // most draft tokens
	Sampling  sample.Params // how the target samples
}

// Drafter drafts for the sequences of a node. It is owned by one goroutine.
type Drafter struct {
	cfg    Config
	pool   *kvcache.Pool
	groups []kvcache.Group
	byID   map[uint64]*sequence
	turn   uint64 // calls of Draft

	turns  []drafting
	step   backend.Step
	tables [][]int32  // block tables of step, [spans × groups]
	inStep []drafting // the sequences of step, one per span
}

// sequence is the state of one sequence between calls.
type sequence struct {
	tokens  []int32 // tokens whose KV is in tables
	certain int     // leading tokens of these that the last call knew to be certain
	tables  []table // per group
	chain   kvcache.Chain
	turn    uint64 // call of Draft that used it last
}

// table is a sequence's blocks of one group, one reference each. The first gone
// places have fallen out of the group's window; the first hashed ones are gone or
// in the prefix cache.
type table struct {
	blocks       []kvcache.BlockID
	gone, hashed int
}

// drafting is a Request that Draft works on.
type drafting struct {
	*Request
	*sequence
	first int // certain tokens
}

func (a *drafting) missing() int    { return len(a.Request.Tokens) - len(a.sequence.tokens) }
func (a *drafting) drafts() []int32 { return a.Request.Tokens[a.first:] }

// New returns a Drafter with an empty pool.
func New(c Config) (*Drafter, error) {
	c.Pool.MaxEvents = 1 // events are not read
	pool, err := kvcache.NewPool(c.Pool)
	if err != nil {
		return nil, err
	}
	if c.Model == nil || c.MaxTokens < 1 || c.MaxOutputs < 1 || c.MaxModelLen < 2 {
		return nil, fmt.Errorf("%w: MaxTokens %d and MaxOutputs %d (at least 1), MaxModelLen %d (at least 2)", ErrConfig, c.MaxTokens, c.MaxOutputs, c.MaxModelLen)
	}
	if need := kvcache.Peak(pool.Groups(), c.MaxModelLen, c.MaxTokens); need > c.Pool.Blocks {
		return nil, fmt.Errorf("%w: a sequence of %d tokens needs %d blocks, the pool has %d", ErrConfig, c.MaxModelLen, need, c.Pool.Blocks)
	}
	return &Drafter{cfg: c, pool: pool, groups: pool.Groups(), byID: map[uint64]*sequence{}}, nil
}

// Draft appends draft tokens to the requests' tokens, up to MaxDrafts for each, as far as
// memory, the model's context and MaxTokens of catching up allow. After an error it
// drafts no more, keeps the drafts so far, and forgets the sequences of the failed
// step.
func (d *Drafter) Draft(requests []Request) error {
	d.turn++
	d.turns = d.turns[:0]
	for i := range requests {
		a := &requests[i]
		if len(a.Tokens) == 0 || a.MaxDrafts < 1 || len(a.Tokens) >= d.cfg.MaxModelLen {
			continue
		}
		d.turns = append(d.turns, drafting{a, d.prepare(a), len(a.Tokens)})
	}
	// The nearest to complete first, because they would have waited for nothing.
	slices.SortStableFunc(d.turns, func(a, b drafting) int { return cmp.Compare(a.missing(), b.missing()) })
	for round := 0; ; round++ {
		d.fill(round)
		if len(d.inStep) == 0 {
			return nil
		}
		if err := d.cfg.Model.Step(&d.step, nil); err != nil {
			for _, a := range d.inStep {
				d.Remove(a.ID)
			}
			return fmt.Errorf("%w: %d tokens of %d sequences: %w", ErrStep, len(d.step.Tokens), len(d.inStep), err)
		}
		d.appendSampled()
	}
}

// prepare brings a sequence's state in line with its tokens. Its last token is always
// recomputed, because the first draft is sampled from its logits.
func (d *Drafter) prepare(a *Request) *sequence {
	s, last := d.byID[a.ID], len(a.Tokens)-1
	if s == nil {
		s = &sequence{tables: make([]table, len(d.groups)), chain: d.pool.NewChain(a.Root, len(a.Tokens)+a.MaxDrafts)}
		d.byID[a.ID] = s
		d.attach(s, a.Tokens[:last])
	}
	n := min(s.certain, len(s.tokens))
	for n < min(last, len(s.tokens)) && s.tokens[n] == a.Tokens[n] {
		n++
	}
	s.tokens, s.certain, s.turn = s.tokens[:n], n, d.turn
	d.store(s)
	for g, spec := range d.groups {
		d.freeBefore(&s.tables[g], min(spec.First(n), len(s.tables[g].blocks)))
	}
	return s
}

// fill makes the step of a round. Round 0 computes what the sequences lack, as far as
// one step goes. Later rounds compute the last draft of each that may have another.
func (d *Drafter) fill(round int) {
	s := &d.step
	s.Tokens, s.Positions, s.Spans, s.Outputs = s.Tokens[:0], s.Positions[:0], s.Spans[:0], s.Outputs[:0]
	d.inStep = d.inStep[:0]
	d.tables = slices.Grow(d.tables[:0], len(d.turns)*len(d.groups)) // so that no append moves them
	for i := range d.turns {
		a := &d.turns[i]
		nDrafts := len(a.drafts())
		n := min(a.missing(), d.cfg.MaxTokens-len(s.Tokens))
		if n < 1 || nDrafts != round || nDrafts >= a.MaxDrafts || len(a.Request.Tokens) >= d.cfg.MaxModelLen ||
			len(s.Outputs) == d.cfg.MaxOutputs || !d.allocBlocks(a.sequence, len(a.sequence.tokens)+n) {
			continue
		}
		d.span(a, n)
	}
	if cap(s.Sampled) < len(s.Outputs) {
		s.Sampled = make([]int32, max(len(s.Outputs), min(d.cfg.MaxOutputs, 2*cap(s.Sampled))))
	}
	s.Sampled = s.Sampled[:len(s.Outputs)]
}

// span adds a sequence's next n tokens to the step.
func (d *Drafter) span(a *drafting, n int) {
	s, start := &d.step, len(a.sequence.tokens)
	row, at := len(s.Tokens), len(d.tables)
	for _, t := range a.Request.Tokens[start : start+n] {
		s.Positions = append(s.Positions, int32(start+len(s.Tokens)-row))
		s.Tokens = append(s.Tokens, t)
	}
	for g, spec := range d.groups {
		blocks := a.tables[g].blocks[:spec.End(start+n)]
		d.tables = append(d.tables, unsafe.Slice((*int32)(unsafe.Pointer(unsafe.SliceData(blocks))), len(blocks)))
	}
	s.Spans = append(s.Spans, backend.Span{Row: int32(row), Tokens: int32(n), Start: int32(start), Tables: d.tables[at:len(d.tables):len(d.tables)]})
	if start+n == len(a.Request.Tokens) {
		out := backend.Output{Row: int32(row + n - 1), Position: int32(start + n), Params: a.Sampling}
		if c := out.Params.Controls; c != nil {
			out.Params.Controls = c.After(a.drafts())
		}
		s.Outputs = append(s.Outputs, out)
	}
	d.inStep = append(d.inStep, *a)
}

// appendSampled adds the tokens of the last step to the sequences and appends the new drafts.
func (d *Drafter) appendSampled() {
	out := 0
	for i, a := range d.inStep {
		n := int(d.step.Spans[i].Tokens)
		start := len(a.sequence.tokens)
		a.sequence.tokens = append(a.sequence.tokens, a.Request.Tokens[start:start+n]...)
		if a.missing() == 0 {
			a.Request.Tokens = append(a.Request.Tokens, d.step.Sampled[out])
			out++
		}
	}
}

// Remove frees a sequence. Its cached blocks stay in the prefix cache until they are
// evicted.
func (d *Drafter) Remove(id uint64) {
	s := d.byID[id]
	if s == nil {
		return
	}
	delete(d.byID, id)
	for g := range s.tables {
		t := &s.tables[g]
		for place := len(t.blocks) - 1; place >= t.gone; place-- {
			d.pool.Unref(t.blocks[place])
		}
	}
}
