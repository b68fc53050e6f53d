package cuda

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
)

// stepState is the state of the last step.
type stepState struct {
	tokens, outputs int
	number          int32 // of the last started step
	controlled      []int // outputs whose rules exceed the device's limit, which the host samples
}

// startedStep is a started step whose tokens have not been read.
type startedStep struct {
	number  int32
	outputs int
}

// filling returns which of the two step memories the next step uses.
func (s *stepState) filling() int { return int(s.number+1) & 1 }

// live returns the number of rows of a row set in the last step.
func (s *stepState) live(rows backend.Rows) int {
	if rows == backend.OutputRows {
		return s.outputs
	}
	return s.tokens
}

// graphTokens is the most tokens of a step that runs as a graph. In larger steps the
// computation hides the time to launch operations one by one. Graphs are for decode
// steps, in which every token has an output.
const graphTokens = 512

func graphed(k backend.Key) bool { return k.Tokens <= graphTokens && k.Tokens == k.Outputs }

// Capture records plans; see backend.Capturer.
func (c *CUDA) Capture(keys []backend.Key, record func()) (graphs int, err error) {
	for _, k := range keys {
		for _, adapted := range []bool{true, false} {
			if adapted && c.adapt.targets == nil {
				continue
			}
			p, err := c.planOf(k, record, adapted)
			if err != nil {
				return graphs, err
			}
			if p.whole != p.eager {
				graphs++
			}
		}
	}
	return graphs, nil
}

// Replay runs a step; see backend.Backend. The step is checked against the plan and
// copied before anything runs, so that a refused step changes nothing. With several
// workers any other failure ends all of them.
func (c *CUDA) Replay(key backend.Key, step *backend.Step, record func(), onMark func(layer int)) error {
	err := c.replay(key, step, record, onMark)
	if r := c.opts.Group; err != nil && r != nil && !errors.Is(err, backend.ErrShape) {
		c.dev.abortGroup()
		if lost := r.Err(); lost != nil {
			return lost
		}
		return fmt.Errorf("%w: rank %d of %d: %w", backend.ErrLost, r.Rank(), r.Size(), err)
	}
	return err
}

func (c *CUDA) replay(key backend.Key, step *backend.Step, record func(), onMark func(layer int)) error {
	if len(c.started) > 0 {
		return fmt.Errorf("%w: Replay while %d started steps are not finished", backend.ErrShape, len(c.started))
	}
	p, err := c.prepare(key, step, record, 0)
	if err != nil {
		return err
	}
	if r := c.opts.Group; r != nil && r.Rank() == 0 {
		if err := r.Begin(step); err != nil {
			return err
		}
	}
	which := int(c.step.number) & 1
	if onMark == nil {
		if !c.dev.run(p.whole, which, 0, len(p.ops)) {
			return c.failed("a step")
		}
	} else if err := c.runMarked(p, which, step, onMark); err != nil {
		return err
	}
	if err := c.finish(c.step.number); err != nil {
		return err
	}
	if p.logits == nil {
		return nil
	}
	copy(step.Sampled, c.memory[which].sampled[:c.step.outputs])
	c.keepLogprobs(which, c.step.outputs)
	for _, i := range c.step.controlled {
		if err := c.sampleOnHost(p.logits, step, i); err != nil {
			return err
		}
	}
	return nil
}

// Start queues a step on the device; see backend.Ahead.
func (c *CUDA) Start(key backend.Key, step *backend.Step, record func()) error {
	if len(c.started) == 2 {
		return fmt.Errorf("%w: a third step while two have not been finished", backend.ErrShape)
	}
	if len(c.started) == 1 && c.started[0].number != c.step.number {
		return fmt.Errorf("%w: a step after one that failed, while an earlier one has not been finished", backend.ErrShape)
	}
	for i := range step.Outputs {
		if k := step.Outputs[i].Params.Controls; !c.Rules(k, 0) {
			return fmt.Errorf("%w: output %d has rules of %d words, of which the device takes %d: such a step is not started ahead", backend.ErrShape, i, wordsOf(k), ruleWords)
		}
	}
	p, err := c.prepare(key, step, record, c.step.outputs)
	if err != nil {
		return err
	}
	if !c.dev.run(p.whole, int(c.step.number)&1, 0, len(p.ops)) {
		return c.failed("a step")
	}
	c.started = append(c.started, startedStep{c.step.number, c.step.outputs})
	return nil
}

// Finish waits for the oldest started step; see backend.Ahead.
func (c *CUDA) Finish(sampled []int32) error {
	if len(c.started) == 0 || len(sampled) != c.started[0].outputs {
		return fmt.Errorf("%w: the end of a step with %d outputs; started and not finished: %+v", backend.ErrShape, len(sampled), c.started)
	}
	f := c.started[0]
	c.started = append(c.started[:0], c.started[1:]...)
	if err := c.finish(f.number); err != nil {
		return err
	}
	copy(sampled, c.memory[f.number&1].sampled)
	c.keepLogprobs(int(f.number)&1, f.outputs)
	return nil
}

// MaxLogProbs returns 1 plus the number of best tokens that the device finds.
func (c *CUDA) MaxLogProbs() int { return 1 + topProbs }

// keepLogprobs stores the inputs of LogProbs: the memory of the finished step, which is not
// reused before the step after it has finished too.
func (c *CUDA) keepLogprobs(which, outputs int) {
	c.outputProbs, c.outputDraws = c.memory[which].probs[:outputs], c.memory[which].draws[:outputs]
}

// LogProbs returns the device's log-probabilities of an output; see backend.Scorer. ok is
// false for outputs that the host sampled, and if no logit is finite.
func (c *CUDA) LogProbs(output int, top []sample.Top) (own float32, rank int, all []sample.Top, ok bool) {
	if output >= len(c.outputProbs) || c.outputDraws[output].probs == 0 || c.outputProbs[output].rank < 1 {
		return 0, 0, top, false
	}
	p := &c.outputProbs[output]
	for i := range c.outputDraws[output].probs - 1 {
		top = append(top, sample.Top{Token: p.tokens[i], LogProb: p.top[i]})
	}
	return p.own, int(p.rank), top, true
}

// prepare returns the plan of a key and copies a step for it. Up to drawn outputs of the
// step before may be tokens of this one.
func (c *CUDA) prepare(key backend.Key, step *backend.Step, record func(), drawn int) (*plan, error) {
	adapted, err := c.adapt.used(step)
	if err != nil {
		return nil, err
	}
	p, err := c.planOf(key, record, adapted)
	if err != nil {
		return nil, err
	}
	return p, c.copyStep(p, key, step, drawn)
}

// finish waits until the device has written the number of a step, or of a later one.
func (c *CUDA) finish(number int32) error {
	return c.await("a step", func() bool { return int32(atomic.LoadUint32(c.memory[0].done))-number >= 0 })
}

// sampleOnHost samples on the host an output whose rules exceed the device's limit.
func (c *CUDA) sampleOnHost(logits *buffer, step *backend.Step, i int) error {
	if len(c.row) < logits.cols {
		c.row = make([]float32, logits.cols)
	}
	row := c.row[:logits.cols]
	if !c.dev.download(raw(row), logits.data+address(4*i*logits.cols)) {
		return c.failed("reading logits")
	}
	step.Sampled[i] = sample.Pick(row, &step.Outputs[i].Params, step.Outputs[i].Position, &c.scratch)
	return nil
}

// planOf returns the plan of a key, and records it if there is none.
func (c *CUDA) planOf(key backend.Key, record func(), adapted bool) (*plan, error) {
	plans := c.plans
	if adapted {
		plans = c.adapt.plans
	}
	if p := plans[key]; p != nil {
		return p, nil
	}
	p, err := c.capture(key, record, adapted)
	if err == nil {
		plans[key] = p
	}
	return p, err
}

// capture records a plan.
func (c *CUDA) capture(key backend.Key, record func(), adapted bool) (*plan, error) {
	l := c.opts.Limits
	if key.Tokens < 1 || key.Tokens > l.Tokens || key.Outputs < 0 || key.Outputs > l.Outputs {
		return nil, fmt.Errorf("%w: plan %+v beyond limits %+v", backend.ErrShape, key, l)
	}
	c.recording = &plan{turned: make(map[*backend.Rope]bool), adapts: adapted}
	defer func() { c.recording = nil }()
	record()
	p := c.recording
	if !c.opts.unfused {
		p.ops, p.marks = fuse(p.ops, p.marks)
		p.ops, p.marks = fuseMoE(p.ops, p.marks, key, !c.opts.Deterministic)
		if key.Tokens == 1 && !c.opts.Deterministic {
			p.ops, p.marks = fuseRow(p.ops, p.marks)
		}
		if !c.opts.wide {
			halve(p.ops, p.marks)
		}
	}
	var ok bool
	if p.eager, ok = c.dev.record(p.ops, key.Tokens, key.Outputs, false); !ok {
		return nil, c.failed(fmt.Sprintf("plan %+v", key))
	}
	p.whole = p.eager
	if c.opts.Eager || !graphed(key) && !c.opts.graphs {
		return p, nil
	}
	whole, ok := c.dev.record(p.ops, key.Tokens, key.Outputs, true)
	if !ok {
		return p, c.withoutGraph(c.failed(fmt.Sprintf("the graph of plan %+v", key)))
	}
	p.whole = whole
	return p, nil
}

// withoutGraph reports the first graph that was not made. It returns an error if the device has
// failed.
func (c *CUDA) withoutGraph(why error) error {
	if errors.Is(why, backend.ErrDevice) {
		return why
	}
	if c.noGraph == nil && c.opts.NoGraph != nil {
		c.opts.NoGraph(why)
	}
	c.noGraph = why
	return nil
}

// copyStep checks a step and copies it. A token of -1-i is output i of the step before, which
// has drawn outputs.
func (c *CUDA) copyStep(p *plan, key backend.Key, step *backend.Step, drawn int) error {
	s, l, to := &c.step, c.opts.Limits, &c.memory[c.step.filling()]
	n := len(step.Tokens)
	switch {
	case n < 1 || n > key.Tokens || len(step.Outputs) > key.Outputs || len(step.Spans) > l.Seqs:
		return fmt.Errorf("%w: step of %d tokens, %d outputs, %d spans for plan %+v and %d sequences",
			backend.ErrShape, n, len(step.Outputs), len(step.Spans), key, l.Seqs)
	case len(step.Positions) != n:
		return fmt.Errorf("%w: %d positions for %d tokens", backend.ErrShape, len(step.Positions), n)
	case len(step.Sampled) < len(step.Outputs):
		return fmt.Errorf("%w: room for %d samples, %d outputs", backend.ErrShape, len(step.Sampled), len(step.Outputs))
	}
	for i, id := range step.Tokens {
		if int(id) < -drawn || (p.vocab > 0 && int(id) >= p.vocab) || step.Positions[i] < 0 {
			return fmt.Errorf("%w: row %d has token %d of %d at position %d", backend.ErrShape, i, id, p.vocab, step.Positions[i])
		}
	}
	for i := range step.Outputs {
		if p := step.Outputs[i].LogProbs; p < 0 || p > c.MaxLogProbs() {
			return fmt.Errorf("%w: output %d wants %d best tokens, at most %d", backend.ErrShape, i, p-1, topProbs)
		}
		if r := step.Outputs[i].Row; r < 0 || int(r) >= n {
			return fmt.Errorf("%w: output %d reads row %d of %d", backend.ErrShape, i, r, n)
		}
	}
	if p.usesKV {
		if err := c.copySpans(step); err != nil {
			return err
		}
	}
	s.tokens, s.outputs, s.controlled = n, len(step.Outputs), s.controlled[:0]
	s.number++
	copy(to.counts, []int32{int32(n), int32(s.outputs), int32(len(step.Spans)), s.number, 0})
	copy(to.ids, step.Tokens)
	copy(to.positions, step.Positions)
	for i := range step.Outputs {
		o := &step.Outputs[i]
		to.outRows[i] = o.Row
		to.draws[i] = draw{
			seed: o.Params.Seed, choice: o.Params.Choice, position: o.Position, temperature: o.Params.Temperature,
			topP: o.Params.TopP, minP: o.Params.MinP, topK: o.Params.TopK, probs: int32(o.LogProbs),
		}
		switch k := o.Params.Controls; {
		case p.logits == nil:
		case !c.Rules(k, 0):
			s.controlled = append(s.controlled, i)
			to.draws[i] = draw{}
		default:
			if k != nil {
				to.draws[i].rules = to.putRules(step, o)
			}
			if bits := o.Params.Mask; bits != nil {
				p.sampling.putMask(int(s.number)&1, i, l.Outputs, bits)
				to.draws[i].mask = 1
			}
		}
	}
	return nil
}

// copySpans checks that the spans cover the rows in order and that each row's position
// follows from its span, and updates the block tables.
func (c *CUDA) copySpans(step *backend.Step) error {
	c.kv.follow = false
	next, rowSpan, adapters := 0, c.memory[c.step.filling()].rowSpan, c.memory[c.step.filling()].adapters
	for i := range step.Spans {
		sp := &step.Spans[i]
		if int(sp.Row) != next || sp.Tokens < 1 || int(sp.Tokens) > len(step.Tokens)-next || sp.Start < 0 {
			return fmt.Errorf("%w: span %d at row %d of %d tokens from position %d, next row is %d of %d",
				backend.ErrShape, i, sp.Row, sp.Tokens, sp.Start, next, len(step.Tokens))
		}
		if len(sp.Tables) != len(c.kv.spec.Groups) {
			return fmt.Errorf("%w: span %d has %d block tables, the KV has %d groups", backend.ErrShape, i, len(sp.Tables), len(c.kv.spec.Groups))
		}
		for g := range sp.Tables {
			if err := c.copyTable(i, sp, g); err != nil {
				return err
			}
		}
		for r := next; r < next+int(sp.Tokens); r++ {
			if pos := int(sp.Start) + r - next; int(step.Positions[r]) != pos {
				return fmt.Errorf("%w: row %d has position %d, its span has %d", backend.ErrShape, r, step.Positions[r], pos)
			}
			rowSpan[r], adapters[r] = int32(i), sp.Adapter
		}
		if len(step.Tokens) > fewRows && !c.opts.Deterministic { // a chunk's sums have another order
			markChunks(rowSpan[:next+int(sp.Tokens)], next)
		}
		next += int(sp.Tokens)
	}
	if next != len(step.Tokens) {
		return fmt.Errorf("%w: spans cover %d of %d rows", backend.ErrShape, next, len(step.Tokens))
	}
	if c.kv.follow && !c.dev.follow() {
		return c.failed("copies of KV")
	}
	return nil
}

// markChunks marks the rows from first on, all of one span, of which enough are
// neighbours for the kernels that process them together.
func markChunks(rowSpan []int32, first int) {
	for first < len(rowSpan) {
		end := min((first/chunkRows+1)*chunkRows, len(rowSpan))
		if end-first >= chunkLeast {
			for r := first; r < end; r++ {
				rowSpan[r] |= inChunk
			}
		}
		first = end
	}
}

// copyTable checks one span's block table of a group, sends the parts that the device
// does not have, and sets where the span's rows are stored. Entries before the window, which
// may hold no block, are neither checked nor sent: no kernel reads them.
func (c *CUDA) copyTable(span int, sp *backend.Span, group int) error {
	g, l, table := &c.kv.spec.Groups[group], c.opts.Limits, sp.Tables[group]
	bt, end := g.BlockTokens, int(sp.Start)+int(sp.Tokens)
	if len(table) > l.Blocks || len(table)*bt < end {
		return fmt.Errorf("%w: span %d has %d blocks of %d tokens for %d positions, at most %d blocks",
			backend.ErrShape, span, len(table), bt, end, l.Blocks)
	}
	first := 0
	if g.Window > 0 {
		first = max(0, int(sp.Start)-g.Window+1) / bt
	}
	// Pinned memory still holds what the device has of this row.
	to := &c.memory[c.step.filling()]
	have := to.tables[(group*l.Seqs+span)*l.Blocks:][:len(table)]
	lo, hi := len(table), 0
	arriving := !c.copied(c.kv.landed)
	for j := first; j < len(table); j++ {
		b := table[j]
		if b < 0 || int(b) >= c.kv.spec.Blocks {
			return fmt.Errorf("%w: span %d names block %d as its %dth, there are %d", backend.ErrShape, span, b, j, c.kv.spec.Blocks)
		}
		if arriving && !c.copied(c.kv.landing[b]) {
			c.kv.follow = true
		}
		if have[j] != b {
			lo, hi = min(lo, j), j+1
		}
	}
	if lo < hi {
		copy(have[lo:hi], table[lo:hi])
		if !c.dev.tables(c.step.filling(), group, span, lo, hi-lo) {
			for j := lo; j < hi; j++ {
				have[j] = unknownBlock
			}
			return c.failed("block tables")
		}
	}
	slots := to.slots[group*l.Tokens+int(sp.Row):]
	for i := range int(sp.Tokens) {
		pos := int(sp.Start) + i
		slots[i] = table[pos/bt]*int32(bt) + int32(pos%bt)
	}
	return nil
}
