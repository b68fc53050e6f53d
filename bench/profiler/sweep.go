package profiler

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/bench/sim/profile"
)

const (
	maxRounds = 16
	// leastSteps and mostSteps bound the tokens that sequences decode for one shape and round. The
	// first warmSteps do not count.
	leastSteps = 8
	mostSteps  = 48
	warmSteps  = 3
	// stepsTime is the time that the steps of one shape and round take where that is between the two
	// bounds.
	stepsTime = 40 * time.Millisecond
	// mostRepeats bounds the chunks that are computed for one shape and round. They take repeatsTime
	// where that allows more than one.
	mostRepeats = 4
	repeatsTime = time.Second
	// shapeShare is the part of the budget that one shape may take in a round. The first round ends
	// with decoding, prompts and other shapes after these parts of it.
	shapeShare   = 0.08
	decodeShare  = 0.3
	prefillShare = 0.45
	othersShare  = 0.65
	poolShare    = 0.85 // of KV blocks that sequences may take
	// fastest is the quantile of a round's steps that counts.
	fastest = 0.1
)

// shape is what a step is to compute, and the steps that did.
type shape struct {
	seqs, ctx    int  // requests that decode, and the tokens that each attends to on average
	uneven       bool // contexts from half to one and a half of ctx
	chunk, start int  // tokens of a prompt, and the tokens before them
	heldOut      bool // not fitted

	rounds   []timing
	lastTime time.Duration // of the last round, all in all
	left     bool          // too long, or too much memory
}

// timing is the steps of a shape in a round.
type timing struct {
	profile.TimedStep         // the mean shape, and the time of the fastest steps
	spread            float64 // interquartile range in seconds
}

// String describes the shape.
func (s *shape) String() string {
	uneven := ""
	if s.uneven {
		uneven = " on average"
	}
	switch {
	case s.chunk == 0:
		return fmt.Sprintf("%s of %s%s", counted(s.seqs, "sequence"), counted(s.ctx, "token"), uneven)
	case s.seqs == 0:
		return fmt.Sprintf("chunk of %s after %d", counted(s.chunk, "token"), s.start)
	}
	return fmt.Sprintf("chunk of %s after %d, and %s of %s%s", counted(s.chunk, "token"), s.start, counted(s.seqs, "sequence"), counted(s.ctx, "token"), uneven)
}

// counted returns a number with its noun, such as 1 token or 2 tokens.
func counted(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

// best returns the timing of the round in which the steps were fastest.
func (s *shape) best() timing {
	return slices.MinFunc(s.rounds, func(a, b timing) int { return cmp.Compare(a.Seconds, b.Seconds) })
}

// noise returns how much longer the shape took in the median round than in the best one, relative
// to that one.
func (s *shape) noise() float64 {
	var all []float64
	for _, t := range s.rounds {
		all = append(all, t.Seconds)
	}
	return quantile(all, 0.5)/s.best().Seconds - 1
}

// sweep measures shapes.
type sweep struct {
	b                       *bench
	budget                  time.Duration
	log                     io.Writer
	decode, prefill, others []*shape // others: mixed ones, and those that are not fitted
	began                   time.Time
	promptRate              float64 // tokens per second; 0 before the first
	between, emit           []float64
	rounds, mostRounds      int
}

// newSweep chooses the shapes that the node's limits allow.
func newSweep(b *bench, budget time.Duration, log io.Writer) *sweep {
	s := &sweep{b: b, budget: budget, log: log}
	c := &b.loaded.Scheduler
	longest := c.MaxModelLen - mostSteps - 1
	var contexts []int
	for n := 32; n < longest; n *= 2 {
		if n != 64 && n != 256 { // caches of processors bend the curve only where there is more
			contexts = append(contexts, n)
		}
	}
	if n := len(contexts); n == 0 || longest > contexts[n-1]*3/2 {
		contexts = append(contexts, max(1, longest))
	}
	for seqs := 1; seqs <= c.MaxSeqs && seqs <= 256; seqs *= 2 {
		for _, ctx := range contexts {
			s.decode = append(s.decode, &shape{seqs: seqs, ctx: ctx})
		}
	}
	align := b.eng.Align()
	starts := []int{0}
	for n := 256; n < c.MaxModelLen; n *= 4 {
		starts = append(starts, n/align*align)
	}
	var chunks []int
	for n := 16; n <= c.MaxBatchedTokens; n *= 2 {
		chunks = append(chunks, n)
	}
	if n := len(chunks); n > 0 && chunks[n-1] < c.MaxBatchedTokens {
		chunks = append(chunks, c.MaxBatchedTokens)
	}
	for _, n := range chunks {
		for _, start := range starts {
			if start+n < c.MaxModelLen {
				s.prefill = append(s.prefill, &shape{chunk: n, start: start})
			}
		}
	}
	s.addOthers(longest)
	return s
}

// addOthers adds mixed shapes, and shapes between the others that are not fitted.
func (s *sweep) addOthers(longest int) {
	c := &s.b.loaded.Scheduler
	align := s.b.eng.Align()
	mostChunk := func(n, seqs int) int { return max(1, min(n, c.MaxBatchedTokens-seqs)) }
	add := func(o shape) {
		if o.seqs <= c.MaxSeqs && (o.uneven && o.ctx*3/2 <= longest || o.ctx <= longest) && o.start+o.chunk < c.MaxModelLen {
			s.others = append(s.others, &o)
		}
	}
	for _, o := range []struct{ seqs, chunk int }{{2, 64}, {8, 64}, {8, 256}, {32, 256}, {32, 64}} {
		add(shape{seqs: o.seqs, ctx: min(256, longest), chunk: mostChunk(o.chunk, o.seqs)})
	}
	for _, o := range []shape{
		{seqs: 1, ctx: 300}, {seqs: 3, ctx: 200, uneven: true}, {seqs: 6, ctx: 900}, {seqs: 12, ctx: 80}, {seqs: 24, ctx: 400, uneven: true}, {seqs: 48, ctx: 250}, {seqs: 96, ctx: 150, uneven: true}, {seqs: 5, ctx: 5000, uneven: true},
		{chunk: 40}, {chunk: 100, start: 512}, {chunk: 200, start: 128}, {chunk: 384, start: 640}, {chunk: 1500, start: 2048}, {chunk: 6000, start: 1024},
		{seqs: 5, ctx: 350, chunk: 100, start: 128}, {seqs: 20, ctx: 150, uneven: true, chunk: 300},
	} {
		o.heldOut = true
		o.start = o.start / align * align
		if o.chunk <= c.MaxBatchedTokens-o.seqs {
			add(o)
		}
	}
}

// all returns all shapes in the order of a round.
func (s *sweep) all() (all []*shape) {
	all = append(all, s.decode...)
	all = append(all, s.prefill...)
	return append(all, s.others...)
}

// run measures all shapes in rounds until the budget is spent.
func (s *sweep) run(ctx context.Context) error {
	s.began = time.Now()
	all := s.all()
	for s.rounds = 0; s.rounds < s.mostRounds; s.rounds++ {
		for _, o := range all {
			if o.left {
				continue
			}
			if s.rounds > 1 && s.spent()+o.lastTime > s.budget {
				return nil
			}
			if err := s.measure(ctx, o); err != nil {
				return err
			}
		}
		if s.rounds == 0 {
			fmt.Fprintf(s.log, "First round over %d shapes: %v; more follow until %v have passed\n", len(all), s.spent().Round(time.Millisecond), s.budget)
		}
	}
	return nil
}

func (s *sweep) spent() time.Duration { return time.Since(s.began) }

// fits reports whether a shape's KV fits, and whether it can be computed within its part of the
// budget.
func (s *sweep) fits(o *shape) bool {
	c := &s.b.loaded.Scheduler
	longest := o.ctx
	if o.uneven {
		longest = o.ctx * 3 / 2
	}
	tokens := o.seqs*(longest+mostSteps) + o.start + o.chunk
	if float64(tokens) > poolShare*float64(c.Pool.Blocks*c.Pool.BlockTokens) || longest+mostSteps >= c.MaxModelLen {
		return false
	}
	share := othersShare
	switch {
	case o.heldOut:
	case o.chunk == 0:
		share = decodeShare
	case o.seqs == 0:
		share = prefillShare
	}
	left := min(shapeShare*s.budget.Seconds(), share*s.budget.Seconds()-s.spent().Seconds())
	if s.promptRate == 0 {
		return left > 0
	}
	work := s.repeats(o) * o.chunk
	for i := range max(o.seqs, 1) {
		n := 0
		if i == 0 {
			n = o.start
		}
		if i < o.seqs {
			n = max(n, o.context(i))
		}
		work += max(0, n-s.b.computed[i])
	}
	return float64(work)/s.promptRate < left
}

// context returns the context tokens of the i-th sequence.
func (s *shape) context(i int) int {
	if s.uneven && s.seqs > 1 {
		return max(1, s.ctx/2+s.ctx*i/(s.seqs-1))
	}
	return s.ctx
}

// repeats returns how many chunks are computed for a shape in a round.
func (s *sweep) repeats(o *shape) int {
	if o.chunk == 0 || s.promptRate == 0 {
		return 1
	}
	return max(1, min(mostRepeats, int(repeatsTime.Seconds()*s.promptRate)/o.chunk))
}

// measure runs a shape once and keeps its steps. A shape that does not fit is left out for good.
func (s *sweep) measure(ctx context.Context, o *shape) error {
	if len(o.rounds) == 0 && !s.fits(o) {
		o.left = true
		return nil
	}
	began := time.Now()
	prompts := make([][]int32, o.seqs)
	for i := range prompts {
		var err error
		if prompts[i], err = s.b.computeBase(ctx, i, o.context(i)); err != nil {
			return err
		}
	}
	if o.start > 0 {
		if _, err := s.b.computeBase(ctx, 0, o.start); err != nil {
			return err
		}
	}
	s.keepRate(s.b.take())
	chunks := func() error {
		for range s.repeats(o) {
			if err := s.b.compute(ctx, s.b.prompt(o.start, o.chunk)); err != nil {
				return err
			}
		}
		return nil
	}
	var err error
	switch {
	case o.seqs == 0:
		err = chunks()
	case o.chunk == 0:
		err = s.b.decode(ctx, prompts, s.tokens(o), nil)
	default:
		err = s.b.decode(ctx, prompts, mostSteps, chunks)
	}
	if err != nil {
		return err
	}
	s.keep(o, s.b.take())
	o.lastTime = time.Since(began)
	return nil
}

// tokens returns how many tokens the sequences of a shape decode.
func (s *sweep) tokens(o *shape) int {
	if len(o.rounds) == 0 {
		return leastSteps + warmSteps
	}
	return warmSteps + min(mostSteps-warmSteps, max(leastSteps, int(stepsTime.Seconds()/o.best().Seconds)))
}

// keep keeps the steps that have the shape.
func (s *sweep) keep(o *shape, steps []step) {
	s.keepRate(steps)
	warm := 0
	var took []float64
	var sum profile.Shape
	for i, x := range steps {
		h := x.shape
		if h.Streams != o.seqs || h.Chunk != o.chunk || o.chunk > 0 && h.Attended != float64(o.chunk)*(float64(o.start)+float64(o.chunk)/2) {
			continue
		}
		if warm++; o.chunk == 0 && warm <= warmSteps {
			continue
		}
		took = append(took, x.took.Seconds())
		sum.ContextSum += h.ContextSum
		sum.Attended += h.Attended
		if o.chunk == 0 && i > 0 {
			s.between = append(s.between, max(0, x.ended.Add(-x.took).Sub(steps[i-1].ended).Seconds()))
			if !x.emitted.IsZero() {
				s.emit = append(s.emit, x.emitted.Sub(x.ended).Seconds())
			}
		}
	}
	n := len(took)
	if n == 0 {
		return
	}
	t := timing{spread: quantile(took, 0.75) - quantile(took, 0.25)}
	t.Chunk, t.Attended, t.Streams, t.ContextSum = float64(o.chunk), sum.Attended/float64(n), float64(o.seqs), float64(sum.ContextSum/n)
	t.Seconds = quantile(took, fastest)
	o.rounds = append(o.rounds, t)
}

// keepRate keeps the speed of prompts, for estimates of what a shape costs.
func (s *sweep) keepRate(steps []step) {
	for _, x := range steps {
		if x.shape.Chunk >= 16 && x.shape.Streams == 0 && x.took > 0 {
			s.promptRate = max(s.promptRate*0.98, float64(x.shape.Chunk)/x.took.Seconds())
		}
	}
}
