package cuda

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/backend"
)

// Adapters add low-rank products after the matrices that they may change. The kernels
// read each row's place from the step's memory, so that one plan serves every mix of
// adapters. Steps without adapters have plans of their own, so that loaded adapters cost
// them nothing. Both kinds of plans are captured.

// maxAdapters bounds the places.
const maxAdapters = maxExperts

// adapters is the set of places for adapters on the device.
type adapters struct {
	places, rank int
	targets      map[*weight]*adapted // nil: none
	loaded       []bool               // [places]
	low          address              // [3, lowRows, rank] between A and B
	lowRows      int
	plans        map[backend.Key]*plan
}

// adapted is the parts of all places for a matrix.
type adapted struct {
	a address // ranks [places] of int32, then from header on [places, rank, in]
	b address // [places, rank, out]
}

// header returns the size of adapt_header in the kernels.
func (t *adapters) header() int { return (4*t.places + 255) / 256 * 256 }

// AllocAdapters reserves memory for adapters; see backend.Adapters.
func (c *CUDA) AllocAdapters(places, rank int, targets []backend.Weight) error {
	if c.adapt.targets != nil || len(c.plans) > 0 || places < 1 || places > maxAdapters || rank < 1 || rank > maxCols {
		return fmt.Errorf("%w: %d adapters of rank %d, at most %d, once and before the first step", backend.ErrShape, places, rank, maxAdapters)
	}
	if r := c.opts.Group; r != nil {
		return fmt.Errorf("%w: adapters with %d GPUs", backend.ErrShape, r.Size())
	}
	t := adapters{
		places: places, rank: rank, targets: map[*weight]*adapted{}, loaded: make([]bool, places), plans: map[backend.Key]*plan{},
		lowRows: max(c.opts.Limits.Tokens, c.opts.Limits.Outputs),
	}
	var err error
	if t.low, err = c.reserve(3*t.lowRows*rank*4, "adapters"); err != nil {
		return err
	}
	for _, id := range targets {
		w := c.weight(id)
		if w.in == 0 {
			return fmt.Errorf("%w: %s is not a matrix that adapters can change", backend.ErrShape, w.name)
		}
		m := &adapted{}
		if m.a, err = c.reserve(t.header()+places*rank*w.in*4, "adapters of "+w.name); err != nil {
			return err
		}
		if m.b, err = c.reserve(places*rank*w.out*4, "adapters of "+w.name); err != nil {
			return err
		}
		if !c.dev.upload(m.a, make([]byte, t.header())) {
			return c.failed("adapters of " + w.name)
		}
		t.targets[w] = m
	}
	c.adapt = t
	return nil
}

// AdapterStepBytes returns the memory that adapters of a rank take in a step of such
// limits, in addition to their places.
func AdapterStepBytes(rank int, l backend.Limits) int64 {
	return 3 * 4 * int64(max(l.Tokens, l.Outputs)) * int64(rank)
}

// LoadAdapter fills a place; see backend.Adapters. The device runs it after the queued
// steps, none of which may use the place.
func (c *CUDA) LoadAdapter(place int, parts []backend.AdapterPart) error {
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
	t.loaded[place-1] = false // until all parts are uploaded
	for w, m := range t.targets {
		rank := []int32{0}
		ok := true
		if p := given[w]; p != nil {
			rank[0] = int32(p.Rank)
			b := make([]float32, len(p.B)) // [rank, out]: neighbouring threads read neighbouring columns
			for i, f := range p.B {
				b[i%p.Rank*w.out+i/p.Rank] = f
			}
			at := (place - 1) * t.rank * 4
			ok = c.dev.upload(m.a+address(t.header()+at*w.in), raw(p.A)) && c.dev.upload(m.b+address(at*w.out), raw(b))
		}
		if !ok || !c.dev.upload(m.a+address(4*(place-1)), raw(rank)) {
			return c.failed("an adapter of " + w.name)
		}
	}
	t.loaded[place-1] = true
	return nil
}

// adaptLinear records the adapters' products after a matrix product.
func (c *CUDA) adaptLinear(dst, x *buffer, w *weight) {
	t := &c.adapt
	m := t.targets[w]
	if m == nil || !c.recording.adapts {
		return
	}
	c.record(dst, op{
		kind: opAdapt, n: int32(w.out), k: int32(w.in), heads: int32(t.places), dim: int32(t.rank), from: int32(t.lowRows),
		dst: dst.data, a: x.data, w: m.a, bias: m.b, extra: t.low,
	})
}

// used reports whether rows of a step have adapters. It returns an error if one is not loaded.
func (t *adapters) used(step *backend.Step) (any bool, err error) {
	for i := range step.Spans {
		a := int(step.Spans[i].Adapter)
		if a < 0 || a > t.places || a > 0 && !t.loaded[a-1] {
			return false, fmt.Errorf("%w: span %d uses adapter %d, which is not loaded; there are %d places", backend.ErrShape, i, a, t.places)
		}
		any = any || a > 0
	}
	return any, nil
}
