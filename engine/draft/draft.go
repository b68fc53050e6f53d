// Package draft has a small model guess what a large one is about to draw. It
// computes the same tokens as the large one, in blocks of KV of its own, and draws
// with the draw of the position that is guessed: where both models see the
// distribution alike, they draw the same token, at any temperature.
//
// A sequence that is behind (its prompt is new, or others' guesses had the room)
// catches up in chunks beside those that are not; then all guess their first token
// in one step of the small model, their second in the next, and so on. KV of
// guesses that the large model refused is written over. Complete blocks of what is
// certain enter a prefix cache, and a sequence that was not asked for lately gives
// its blocks to one that is.
//
// Invariant: positions from a sequence's certain tokens on lie in blocks that it
// alone has and that are not in the prefix cache.
//
// The package does not decide who is guessed for or how far, and does not know
// whether a guess was right: that the tokens of the next call say.
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

// Model is what computes; *model.Model is one.
type Model interface {
	Step(step *backend.Step, onMark func(layer int)) error
}

// Config sizes a Drafter.
type Config struct {
	Model       Model
	Pool        kvcache.Config // the blocks and groups of the model's KV
	MaxTokens   int            // of a step
	MaxOutputs  int            // rows of logits of a step
	MaxModelLen int            // tokens that the model was made for, guesses included
}

// Ask is a sequence that may be guessed ahead.
type Ask struct {
	ID       uint64        // of a sequence whose tokens only grow from call to call
	Root     kvcache.Hash  // sequences of different roots share no cached blocks
	Tokens   []int32       // all that is certain; guesses are appended
	Most     int           // guesses, at most
	Sampling sample.Params // how what follows will be drawn
}

// Drafter is the small model's side of a node. One goroutine owns it.
type Drafter struct {
	cfg    Config
	pool   *kvcache.Pool
	groups []kvcache.Group
	byID   map[uint64]*sequence
	turn   uint64 // calls of Draft

	turns  []asked
	step   backend.Step
	tables [][]int32 // block tables of step, [spans × groups]
	taken  []asked   // in step, one per span
}

// sequence is what a Drafter keeps of one.
type sequence struct {
	tokens  []int32 // whose KV is in tables
	certain int     // of the tokens of the last call, how many are known to be among these
	tables  []table // per group
	chain   kvcache.Chain
	turn    uint64 // when it was last asked for
}

// table is a sequence's blocks of one group, one reference each. The first gone
// places have fallen out of the group's window; the first hashed ones are gone or
// in the prefix cache.
type table struct {
	blocks       []kvcache.BlockID
	gone, hashed int
}

// asked is an Ask in the making.
type asked struct {
	*Ask
	*sequence
	first int // tokens that were certain
}

func (a *asked) missing() int     { return len(a.Ask.Tokens) - len(a.sequence.tokens) }
func (a *asked) guesses() []int32 { return a.Ask.Tokens[a.first:] }

// New makes a Drafter with an empty pool.
func New(c Config) (*Drafter, error) {
	c.Pool.MaxEvents = 1 // nobody asks
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

// Draft appends guesses to the asks' tokens, to each as many as it may have and
// room, the model's context and MaxTokens of catching up allow. After an error no
// more are made, those that there are stand, and what the failed step computed is
// forgotten.
func (d *Drafter) Draft(asks []Ask) error {
	d.turn++
	d.turns = d.turns[:0]
	for i := range asks {
		a := &asks[i]
		if len(a.Tokens) == 0 || a.Most < 1 || len(a.Tokens) >= d.cfg.MaxModelLen {
			continue
		}
		d.turns = append(d.turns, asked{a, d.begin(a), len(a.Tokens)})
	}
	// Who is nearly there first: they would have waited for nothing.
	slices.SortStableFunc(d.turns, func(a, b asked) int { return cmp.Compare(a.missing(), b.missing()) })
	for round := 0; ; round++ {
		d.fill(round)
		if len(d.taken) == 0 {
			return nil
		}
		if err := d.cfg.Model.Step(&d.step, nil); err != nil {
			for _, a := range d.taken {
				d.Forget(a.ID)
			}
			return fmt.Errorf("%w: %d tokens of %d sequences: %w", ErrStep, len(d.step.Tokens), len(d.taken), err)
		}
		d.drawn()
	}
}

// begin brings what is kept of a sequence in line with its tokens: the last of them
// is computed in any case, since a guess is drawn behind it.
func (d *Drafter) begin(a *Ask) *sequence {
	s, last := d.byID[a.ID], len(a.Tokens)-1
	if s == nil {
		s = &sequence{tables: make([]table, len(d.groups)), chain: d.pool.NewChain(a.Root, len(a.Tokens)+a.Most)}
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
		d.drop(&s.tables[g], min(spec.First(n), len(s.tables[g].blocks)))
	}
	return s
}

// fill makes the step of a round: in the first one what the sequences lack, as far
// as a step goes, then the last guess of each that may have another.
func (d *Drafter) fill(round int) {
	s := &d.step
	s.Tokens, s.Positions, s.Spans, s.Outputs = s.Tokens[:0], s.Positions[:0], s.Spans[:0], s.Outputs[:0]
	d.taken = d.taken[:0]
	d.tables = slices.Grow(d.tables[:0], len(d.turns)*len(d.groups)) // so that no append moves them
	for i := range d.turns {
		a := &d.turns[i]
		guesses := len(a.guesses())
		n := min(a.missing(), d.cfg.MaxTokens-len(s.Tokens))
		if n < 1 || guesses != round || guesses >= a.Most || len(a.Ask.Tokens) >= d.cfg.MaxModelLen ||
			len(s.Outputs) == d.cfg.MaxOutputs || !d.lengthen(a.sequence, len(a.sequence.tokens)+n) {
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
func (d *Drafter) span(a *asked, n int) {
	s, start := &d.step, len(a.sequence.tokens)
	row, at := len(s.Tokens), len(d.tables)
	for _, t := range a.Ask.Tokens[start : start+n] {
		s.Positions = append(s.Positions, int32(start+len(s.Tokens)-row))
		s.Tokens = append(s.Tokens, t)
	}
	for g, spec := range d.groups {
		blocks := a.tables[g].blocks[:spec.End(start+n)]
		d.tables = append(d.tables, unsafe.Slice((*int32)(unsafe.Pointer(unsafe.SliceData(blocks))), len(blocks)))
	}
	s.Spans = append(s.Spans, backend.Span{Row: int32(row), Tokens: int32(n), Start: int32(start), Tables: d.tables[at:len(d.tables):len(d.tables)]})
	if start+n == len(a.Ask.Tokens) {
		out := backend.Output{Row: int32(row + n - 1), Position: int32(start + n), Params: a.Sampling}
		if c := out.Params.Controls; c != nil {
			out.Params.Controls = c.After(a.guesses())
		}
		s.Outputs = append(s.Outputs, out)
	}
	d.taken = append(d.taken, *a)
}

// drawn takes what a step computed.
func (d *Drafter) drawn() {
	out := 0
	for i, a := range d.taken {
		n := int(d.step.Spans[i].Tokens)
		start := len(a.sequence.tokens)
		a.sequence.tokens = append(a.sequence.tokens, a.Ask.Tokens[start:start+n]...)
		if a.missing() == 0 {
			a.Ask.Tokens = append(a.Ask.Tokens, d.step.Sampled[out])
			out++
		}
	}
}

// Forget lets go of a sequence. What of it is in the prefix cache stays there while
// there is room.
func (d *Drafter) Forget(id uint64) {
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
