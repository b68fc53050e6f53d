//go:build cgo && linux

package cuda

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// deltaCases store states at the end of each eight tokens, and every part in pages of its own. The
// keys of the second case are wider than those of published models.
func deltaCases() (all []kernelCase) {
	for _, s := range []backend.DeltaSpec{
		{Parts: 2, KeyHeads: 4, ValueHeads: 12, KeyDim: 12, ValueDim: 40}, {Parts: 1, KeyHeads: 1, ValueHeads: 2, KeyDim: 200, ValueDim: 9},
	} {
		spec := func(*rand.Rand) backend.KVSpec {
			g := backend.KVGroup{BlockTokens: 8, State: s.State(), Window: 2, Layers: s.Parts}
			kv := backend.KVSpec{Blocks: 90, Regions: s.Parts, PageBytes: g.PageBytes(backend.BF16) + 64, Groups: []backend.KVGroup{g}, DType: backend.BF16}
			for part := range s.Parts {
				kv.Layers = append(kv.Layers, backend.KVPlace{Region: part})
			}
			return kv
		}
		all = append(all, kernelCase{name: fmt.Sprintf("delta/%d", s.KeyDim), rows: 90, kv: spec, make: func(b *bench) func() {
			return b.deltaRule(s)
		}})
	}
	return all
}

// deltaRule returns a layer of the gated delta rule over random inputs and weights.
func (b *bench) deltaRule(s backend.DeltaSpec) func() {
	qkv, beta, alpha, y := b.input(s.Channels(), 1), b.input(s.ValueHeads, 2), b.input(s.ValueHeads, 3), b.output(s.ValueHeads*s.ValueDim)
	s.Conv, s.Bias, s.Decay = b.weight(backend.F32, 1, s.Channels()*backend.DeltaConv), b.weight(backend.BF16, 1, s.ValueHeads), b.weight(backend.F32, 1, s.ValueHeads)
	return func() { b.DeltaRule(y, qkv, beta, alpha, s) }
}

// deltaSequence is a sequence of one layer with states, in two groups next to one of keys and
// values.
type deltaSequence struct {
	tables [3][]int32
	done   int
}

const (
	deltaEvery = 7 // tokens of a place
	deltaTotal = 40
)

func (q *deltaSequence) span(s *backend.Step, n int) {
	span := backend.Span{Row: int32(len(s.Tokens)), Tokens: int32(n), Start: int32(q.done)}
	for g, table := range q.tables {
		bt := []int{16, deltaEvery, deltaEvery}[g]
		table = slices.Clone(table[:(q.done+n+bt-1)/bt])
		for place := range max(0, q.done-1) / bt {
			if g > 0 {
				table[place] = -1 // the states before the last token are gone
			}
		}
		span.Tables = append(span.Tables, table)
	}
	for range n {
		s.Tokens, s.Positions = append(s.Tokens, int32(q.done)), append(s.Positions, int32(q.done))
		q.done++
	}
	s.Spans = append(s.Spans, span)
}

// TestDeltaBits: chunks and sequences that share a step change no bit, nor does a state that moves
// on in its block, or a start from a kept state in other blocks. A kept state does not change, and
// no page is written that the step does not name.
func TestDeltaBits(t *testing.T) {
	spec := backend.DeltaSpec{Layer: 1, Parts: 2, KeyHeads: 2, ValueHeads: 4, KeyDim: 12, ValueDim: 10}
	group := backend.KVGroup{BlockTokens: deltaEvery, State: spec.State(), Window: 2, Layers: 1}
	kv := backend.KVSpec{Blocks: 100, Regions: 1, PageBytes: group.PageBytes(backend.FP8), DType: backend.FP8,
		Groups: []backend.KVGroup{{BlockTokens: 16, KVHeads: 1, HeadDim: 2, Layers: 1}, group, group}, Layers: []backend.KVPlace{{}, {Group: 1}, {Group: 2}}}
	dev := openGPU(t, Options{Limits: benchLimits})
	defer dev.Close()
	b := &bench{Backend: dev, rng: rand.New(rand.NewPCG(4, 4)), rows: deltaTotal}
	b.must(dev.AllocKV(kv))
	garbage := bytes.Repeat([]byte{0xff}, kv.PageBytes)
	for block := range kv.Blocks {
		dev.write(t, 0, block, garbage)
	}
	body := b.deltaRule(spec)
	y, cols := b.results[0], spec.ValueHeads*spec.ValueDim
	free := b.rng.Perm(kv.Blocks - 10)
	named := map[int32]bool{}
	sequence := func(from *deltaSequence, places ...int) *deltaSequence { // places: blocks of each place by number
		q, blocks := &deltaSequence{}, map[int]int32{}
		for g := range q.tables {
			clear(blocks)
			for i, p := range places {
				id, ok := blocks[p]
				switch {
				case ok:
				case from != nil && g > 0 && i < from.done/deltaEvery:
					id = from.tables[g][i]
				default:
					id, free = int32(free[0]), free[1:]
				}
				blocks[p] = id
				q.tables[g], named[id] = append(q.tables[g], id), true
			}
		}
		return q
	}
	run := func(q, other *deltaSequence, cuts ...int) (out []float32) {
		for _, end := range cuts {
			s := &backend.Step{}
			if other != nil {
				other.span(s, 1+other.done%3)
			}
			at := len(s.Tokens) * cols
			q.span(s, end-q.done)
			b.must(dev.Replay(backend.Key{Tokens: deltaTotal + 8}, s, func() {
				for _, f := range b.inputs {
					f()
				}
				body()
			}, nil))
			out = append(out, dev.Download(nil, y)[at:]...)
		}
		return out
	}
	same := func(what string, got, want []float32) {
		t.Helper()
		if !slices.EqualFunc(got, want, func(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) }) {
			t.Errorf("%s: outputs have other bits", what)
		}
	}
	want := run(sequence(nil, 0, 1, 2, 3, 4, 5), nil, deltaTotal)
	same("in chunks", run(sequence(nil, 0, 1, 2, 3, 4, 5), nil, 1, 2, 3, 11, 12, 14, 30, deltaTotal), want)
	same("next to another one", run(sequence(nil, 0, 1, 2, 3, 4, 5), sequence(nil, 0, 0, 0, 0, 0, 0), 5, 13, 14, deltaTotal), want)
	same("in few blocks", run(sequence(nil, 0, 0, 1, 1, 1, 2), nil, 6, 7, 8, 20, 33, deltaTotal), want)

	kept := sequence(nil, 0, 0, 1, 1, 1, 1)
	run(kept, nil, 10, 14)
	page := slices.Clone(dev.there(0, int(kept.tables[2][1])))
	again := sequence(kept, 0, 0, 1, 1, 1, 1)
	again.done = kept.done
	same("from a kept state", run(again, nil, 15, deltaTotal), want[14*cols:])
	if !bytes.Equal(page, dev.there(0, int(kept.tables[2][1]))) {
		t.Error("a kept state has changed")
	}
	for block := range kv.Blocks {
		if !named[int32(block)] && !bytes.Equal(dev.there(0, block), garbage) {
			t.Errorf("block %d has changed, which no table has", block)
		}
	}
}
