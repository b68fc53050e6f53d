package cpu

import (
	"bytes"
	"fmt"
	"math"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
)

// stepData is the backend's copy of a step, in mapped memory that C reads. All values
// have been checked, because kernels index with them without checks.
type stepData struct {
	tokens, outputs, spans int

	ids        []int32 // [Limits.Tokens]
	positions  []int32 // [Limits.Tokens]
	rowSpan    []int32 // [Limits.Tokens] index of the row's span
	spanRows   []int32 // [Limits.Seqs + 1] first row of each span, and the row after the last one
	outputRows []int32 // [Limits.Outputs]
	draws      []backend.Output
}

func (s *stepData) alloc(m *memory, l backend.Limits) (err error) {
	for _, a := range []struct {
		dst *[]int32
		n   int
	}{
		{&s.ids, l.Tokens}, {&s.positions, l.Tokens}, {&s.rowSpan, l.Tokens},
		{&s.outputRows, l.Outputs}, {&s.spanRows, l.Seqs + 1},
	} {
		if *a.dst, err = m.ints(a.n); err != nil {
			return fmt.Errorf("step of limits %+v: %w", l, err)
		}
	}
	s.draws = make([]backend.Output, 0, l.Outputs)
	return nil
}

// live returns the number of rows of a row set in the last step.
func (s *stepData) live(rows backend.Rows) int {
	if rows == backend.OutputRows {
		return s.outputs
	}
	return s.tokens
}

// Replay runs a step; see backend.Backend. The step is checked against the
// plan and copied before anything runs; an error other than ErrLost means that
// nothing ran.
func (c *CPU) Replay(key backend.Key, step *backend.Step, record func(), onMark func(layer int)) error {
	p := c.plans[key]
	if p == nil {
		var err error
		if p, err = c.capture(key, record); err != nil {
			return err
		}
	}
	if err := c.copyStep(p, key, step); err != nil {
		return err
	}
	for _, t := range p.ropes {
		t.fill(c.step.positions[:c.step.tokens])
	}
	for _, r := range p.heads {
		r.selectAll(c.step.live(r.rows))
	}
	if c.opts.Group != nil && c.rank() == 0 {
		if err := c.opts.Group.Begin(step); err != nil {
			return err
		}
	}
	done := 0
	for i := range p.stops {
		s := &p.stops[i]
		if s.kind == stopMark && onMark == nil {
			continue
		}
		if s.at > done {
			c.kernels.run(c, p, done, s.at)
			done = s.at
		}
		if s.kind == stopMark {
			c.marked, c.markedAt = p, i
			onMark(s.layer)
		} else if err := c.runStop(s, step); err != nil {
			return err
		}
	}
	if len(p.ops) > done {
		c.kernels.run(c, p, done, len(p.ops))
	}
	return nil
}

// UnloadIdle frees the memory of the buffers whose content no operation of the step reads after the
// current mark. It is called by onMark. What such buffers hold after the step is lost.
func (c *CPU) UnloadIdle() {
	p, kept := c.marked, map[*buffer]bool{} // whether the first operation on a buffer reads it
	access := func(b *buffer, reads bool) {
		if _, ok := kept[b]; b != nil && !ok {
			kept[b] = reads
		}
	}
	stops := p.stops[c.markedAt+1:]
	for i := p.stops[c.markedAt].at; i <= len(p.ops); i++ {
		for ; len(stops) > 0 && stops[0].at == i; stops = stops[1:] {
			access(stops[0].buf, true)
			access(stops[0].part, true)
		}
		if i == len(p.ops) {
			break
		}
		o := &p.ops[i]
		access(o.a, true)
		access(o.b, true)
		if o.delta != nil {
			access(o.delta.alpha, true)
		}
		access(o.dst, o.kind == opAdapt)
	}
	for _, b := range c.buffers {
		if !kept[b] {
			dropBytes(raw(b.data))
		}
	}
}

// runStop runs the Go part of a stop.
func (c *CPU) runStop(s *stop, step *backend.Step) error {
	live := c.step.live(s.buf.rows)
	data := s.buf.data[:live*s.buf.cols]
	switch s.kind {
	case stopReduce:
		return c.opts.Group.AllReduce(data)
	case stopGather:
		return c.opts.Group.AllGather(data, s.part.data[:live*s.part.cols], live)
	}
	c.draw(draws{c, data, s.buf.cols, step.Sampled})
	return nil
}

// worthSharing is the number of logits from which a step's sampling is worth waking
// another thread: about 20 microseconds of the cheapest sampling.
const worthSharing = 1 << 16

// draws is the task that samples a step's outputs, one row per item. Rows are
// independent, so that the thread of a row does not matter.
type draws struct {
	c       *CPU
	logits  []float32 // [outputs, vocab]
	vocab   int
	sampled []int32 // [outputs]
}

func (d *draws) item(worker, row int) {
	out := &d.c.step.draws[row]
	d.sampled[row] = sample.Pick(d.logits[row*d.vocab:(row+1)*d.vocab], &out.Params, out.Position, &d.c.scratch[worker])
}

// draw samples all outputs of the step.
func (c *CPU) draw(d draws) {
	c.drawing = d
	n := len(c.step.draws)
	if len(d.logits) >= worthSharing {
		c.rows.run(&c.drawing, n)
		return
	}
	for row := range n {
		c.drawing.item(0, row)
	}
}

// capture records the plan of a key.
func (c *CPU) capture(key backend.Key, record func()) (*plan, error) {
	l := c.opts.Limits
	if key.Tokens < 1 || key.Tokens > l.Tokens || key.Outputs < 0 || key.Outputs > l.Outputs {
		return nil, fmt.Errorf("%w: plan %+v beyond limits %+v", backend.ErrShape, key, l)
	}
	c.recording = &plan{quantized: make(map[*buffer]quantForm)}
	defer func() { c.recording = nil }()
	record()
	p := c.recording
	need(len(p.marks) == 0, "no AllReduce behind the KV of layers %v", p.marks)
	var err error
	if p.native, err = c.kernels.compile(c, p); err != nil {
		return nil, fmt.Errorf("plan %+v: %w", key, err)
	}
	c.plans[key] = p
	return p, nil
}

// copyStep checks a step and copies it.
func (c *CPU) copyStep(p *plan, key backend.Key, step *backend.Step) error {
	s, l := &c.step, c.opts.Limits
	n := len(step.Tokens)
	if n < 1 || n > key.Tokens || len(step.Outputs) > key.Outputs || len(step.Spans) > l.Seqs {
		return fmt.Errorf("%w: step of %d tokens, %d outputs, %d spans for plan %+v and %d sequences",
			backend.ErrShape, n, len(step.Outputs), len(step.Spans), key, l.Seqs)
	}
	if len(step.Positions) != n {
		return fmt.Errorf("%w: %d positions for %d tokens", backend.ErrShape, len(step.Positions), n)
	}
	if len(step.Sampled) < len(step.Outputs) {
		return fmt.Errorf("%w: room for %d samples, %d outputs", backend.ErrShape, len(step.Sampled), len(step.Outputs))
	}
	for i, id := range step.Tokens {
		if id < 0 || (p.vocab > 0 && int(id) >= p.vocab) {
			return fmt.Errorf("%w: token id %d in row %d is outside the vocabulary of %d", backend.ErrShape, id, i, p.vocab)
		}
		if step.Positions[i] < 0 {
			return fmt.Errorf("%w: position %d in row %d", backend.ErrShape, step.Positions[i], i)
		}
	}
	for i := range step.Outputs {
		if r := step.Outputs[i].Row; r < 0 || int(r) >= n {
			return fmt.Errorf("%w: output %d reads row %d of %d", backend.ErrShape, i, r, n)
		}
	}
	if err := c.adapt.check(step); err != nil {
		return err
	}
	if p.usesKV {
		if err := c.copySpans(step); err != nil {
			return err
		}
	}
	s.tokens, s.outputs, s.spans = n, len(step.Outputs), len(step.Spans)
	copy(s.ids, step.Tokens)
	copy(s.positions, step.Positions)
	s.draws = append(s.draws[:0], step.Outputs...)
	for i := range step.Outputs {
		s.outputRows[i] = step.Outputs[i].Row
	}
	c.adapt.assign(step)
	return nil
}

// copySpans checks that the spans cover the rows in order and that each row's position
// follows from its span, and updates the block tables.
func (c *CPU) copySpans(step *backend.Step) error {
	s, next := &c.step, 0
	for i := range step.Spans {
		sp := &step.Spans[i]
		if int(sp.Row) != next || sp.Tokens < 1 || int(sp.Tokens) > len(step.Tokens)-next || sp.Start < 0 {
			return fmt.Errorf("%w: span %d at row %d of %d tokens from position %d, next row is %d of %d",
				backend.ErrShape, i, sp.Row, sp.Tokens, sp.Start, next, len(step.Tokens))
		}
		if len(sp.Tables) != len(c.kv.groups) {
			return fmt.Errorf("%w: span %d has %d block tables, the KV has %d groups", backend.ErrShape, i, len(sp.Tables), len(c.kv.groups))
		}
		for g := range c.kv.groups {
			if err := c.copyTable(i, sp, &c.kv.groups[g], sp.Tables[g]); err != nil {
				return err
			}
		}
		for r := next; r < next+int(sp.Tokens); r++ {
			if pos := int(sp.Start) + r - next; int(step.Positions[r]) != pos {
				return fmt.Errorf("%w: row %d has position %d, its span has %d", backend.ErrShape, r, step.Positions[r], pos)
			}
			s.rowSpan[r] = int32(i)
		}
		s.spanRows[i] = int32(next)
		next += int(sp.Tokens)
	}
	s.spanRows[len(step.Spans)] = int32(next)
	if next != len(step.Tokens) {
		return fmt.Errorf("%w: spans cover %d of %d rows", backend.ErrShape, next, len(step.Tokens))
	}
	return nil
}

// tablePart is the number of entries of a block table that are compared at once: one page of
// memory.
const tablePart = 1024

// copyTable checks one span's block table of a group. It copies the parts that differ
// from the table that the span's index had in the last step, and sets where the span's
// rows are stored. Entries before the window may be negative.
func (c *CPU) copyTable(span int, sp *backend.Span, g *kvGroup, table []int32) error {
	stride, bt, end := c.opts.Limits.Blocks, g.BlockTokens, int(sp.Start)+int(sp.Tokens)
	if len(table) > stride || len(table)*bt < end {
		return fmt.Errorf("%w: span %d has %d blocks of %d tokens for %d positions, at most %d blocks",
			backend.ErrShape, span, len(table), bt, end, stride)
	}
	first := 0
	if g.Window > 0 {
		first = max(0, int(sp.Start)-g.Window+1) / bt
	}
	kept := g.tables[span*stride:][:len(table)]
	for from := 0; from < len(table); from += tablePart {
		to := min(from+tablePart, len(table))
		// Kept entries were checked when they were copied. With a window there may be negative
		// ones among them, which were valid only for the sequence of that step.
		if (g.Window == 0 || to <= first) && bytes.Equal(raw(kept[from:to]), raw(table[from:to])) {
			continue
		}
		for i, b := range table[from:to] {
			if j := from + i; (b < 0 && j >= first) || int(b) >= c.kv.spec.Blocks {
				return fmt.Errorf("%w: span %d names block %d as its %dth, there are %d", backend.ErrShape, span, b, j, c.kv.spec.Blocks)
			}
		}
		copy(kept[from:to], table[from:to])
	}
	for i := range int(sp.Tokens) {
		pos := int(sp.Start) + i
		g.slots[int(sp.Row)+i] = table[pos/bt]*int32(bt) + int32(pos%bt)
	}
	return nil
}

// raw returns the bytes of s.
func raw[T int32 | float32](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(s[0])))
}

// fill computes cosines and sines once per step for all layers and variants. The angle
// is rounded to float32 as in the reference implementations.
func (t *ropeTable) fill(positions []int32) {
	for row, pos := range positions {
		cs := t.table[row*2*t.half : (row+1)*2*t.half]
		scale := t.rope.At(pos)
		for i, inv := range t.rope.InvFreq {
			sin, cos := math.Sincos(float64(float32(pos) * inv))
			cs[i] = float32(cos) * scale
			cs[t.half+i] = float32(sin) * scale
		}
	}
}
