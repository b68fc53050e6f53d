package cpu

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/tandem-serving/tandem/engine/backend"
)

// maxAdapters bounds the places. Each has memory of its own.
const maxAdapters = maxExperts

// adapters is the set of places for adapters. Their products are recorded after each
// matrix that they may change, as those of experts: the adapter of a row is its
// expert. If no row has an adapter, nothing runs. Ranks are padded with zeros, which
// change no bit of any sum.
type adapters struct {
	places, rank int
	targets      map[*weight]*adapted
	loaded       []bool             // [places]
	routes       [3]*routing        // by row set
	low          [3]*buffer         // [rank], by row set
	wide         [3]map[int]*buffer // [out], by row set and out
}

// adapted is the parts of all places for a matrix.
type adapted struct {
	a, b []*weight // [places] of [rank, in] and [out, rank]
}

var _ backend.Adapters = (*CPU)(nil)

// AllocAdapters reserves memory for adapters; see backend.Adapters.
func (c *CPU) AllocAdapters(places, rank int, targets []backend.Weight) error {
	if c.adapt.targets != nil || len(c.plans) > 0 || places < 1 || places > maxAdapters || rank < 1 || rank > maxCols {
		return fmt.Errorf("%w: %d adapters of rank %d, at most %d, once and before the first step", backend.ErrShape, places, rank, maxAdapters)
	}
	t := adapters{places: places, rank: rank, targets: map[*weight]*adapted{}, loaded: make([]bool, places)}
	widest := 0
	for _, id := range targets {
		w := c.weight(id)
		if w.in == 0 {
			return fmt.Errorf("%w: %s is not a matrix that adapters can change", backend.ErrShape, w.name)
		}
		widest = max(widest, w.out)
		m := &adapted{}
		for range places {
			a := &weight{name: w.name + " A", dtype: backend.F32, out: rank, in: w.in, renewed: true}
			b := &weight{name: w.name + " B", dtype: backend.F32, out: w.out, in: rank, renewed: true}
			for _, part := range []*weight{a, b} {
				if err := c.kernels.load(c, part, make([]byte, 4*part.out*part.in)); err != nil {
					return fmt.Errorf("adapters of %s: %w", w.name, err)
				}
			}
			m.a, m.b = append(m.a, a), append(m.b, b)
		}
		t.targets[w] = m
	}
	for _, rows := range []backend.Rows{backend.TokenRows, backend.OutputRows} {
		low, err := c.Alloc(rows, rank)
		if err != nil {
			return err
		}
		wide, err := c.Alloc(rows, max(widest, 1))
		if err != nil {
			return err
		}
		t.low[rows] = c.buf(low)
		t.wide[rows] = map[int]*buffer{}
		for w := range t.targets {
			t.wide[rows][w.out] = &buffer{rows: rows, cols: w.out, data: c.buf(wide).data[:c.limit(rows)*w.out]}
		}
		t.routes[rows] = c.routing(rows, 1, places, byAdapter)
	}
	c.adapt = t
	return nil
}

// LoadAdapter fills a place; see backend.Adapters. No step may run.
func (c *CPU) LoadAdapter(place int, parts []backend.AdapterPart) error {
	t := &c.adapt
	if place < 1 || place > t.places {
		return fmt.Errorf("%w: place %d of %d for adapters", backend.ErrShape, place, t.places)
	}
	given := map[*weight]*backend.AdapterPart{}
	for i := range parts {
		p := &parts[i]
		w := c.weight(p.Target)
		if err := p.Check(w.name, w.out, w.in, t.rank, t.targets[w] != nil && given[w] == nil); err != nil {
			return err
		}
		given[w] = p
	}
	for w, m := range t.targets {
		a, b := make([]byte, 4*t.rank*w.in), make([]byte, 4*w.out*t.rank)
		if p := given[w]; p != nil {
			for i, f := range p.A {
				binary.LittleEndian.PutUint32(a[4*i:], math.Float32bits(f))
			}
			for i, f := range p.B {
				binary.LittleEndian.PutUint32(b[4*(i/p.Rank*t.rank+i%p.Rank):], math.Float32bits(f))
			}
		}
		for part, data := range map[*weight][]byte{m.a[place-1]: a, m.b[place-1]: b} {
			if err := c.kernels.load(c, part, data); err != nil {
				return err
			}
		}
	}
	t.loaded[place-1] = true
	return nil
}

// adaptLinear records the adapters' products after a matrix product.
func (c *CPU) adaptLinear(dst, x *buffer, w *weight) {
	t := &c.adapt
	m := t.targets[w]
	if m == nil {
		return
	}
	route, low, wide := t.routes[dst.rows], t.low[dst.rows], t.wide[dst.rows][w.out]
	c.record(op{kind: opExperts, rows: dst.rows, dst: low, a: x, route: route, experts: m.a})
	c.record(op{kind: opExperts, rows: dst.rows, dst: wide, a: low, route: route, experts: m.b})
	c.record(op{kind: opAdapt, rows: dst.rows, dst: dst, a: dst, b: wide, route: route, scale: 1})
}

// check returns an error for a step with an adapter that is not loaded.
func (t *adapters) check(step *backend.Step) error {
	for i := range step.Spans {
		if a := int(step.Spans[i].Adapter); a < 0 || a > t.places || a > 0 && !t.loaded[a-1] {
			return fmt.Errorf("%w: span %d uses adapter %d, which is not loaded; there are %d places", backend.ErrShape, i, a, t.places)
		}
	}
	return nil
}

// assign stores each row's adapter; the step has been checked.
func (t *adapters) assign(step *backend.Step) {
	if t.targets == nil {
		return
	}
	tokens, outputs := t.routes[backend.TokenRows], t.routes[backend.OutputRows]
	any := false
	for i := range step.Spans {
		s := &step.Spans[i]
		any = any || s.Adapter > 0
		for r := range int(s.Tokens) {
			tokens.ids[int(s.Row)+r] = s.Adapter - 1
		}
	}
	tokens.list[0], outputs.list[0] = 0, 0
	if !any {
		return
	}
	for i := range step.Outputs {
		outputs.ids[i] = tokens.ids[step.Outputs[i].Row]
	}
	tokens.runs(len(step.Tokens))
	outputs.runs(len(step.Outputs))
}

// runs lists neighbouring rows with the same adapter as spans.
func (r *routing) runs(rows int) {
	n := 0
	for at := 0; at < rows; {
		end := at + 1
		for end < rows && end-at < spanSlots && r.ids[end] == r.ids[at] {
			end++
		}
		if r.ids[at] >= 0 {
			copy(r.list[1+3*n:], []int32{r.ids[at], int32(at), int32(end - at)})
			n++
		}
		at = end
	}
	r.list[0] = int32(n)
}
