package cpu

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// TestMoESumsInRouterOrder: a row's experts are added up from the best to the last,
// each times its weight, in one chain. Neither the threads, nor the order of the rows,
// and so of the experts' slots, nor who shares the step changes a bit of it.
func TestMoESumsInRouterOrder(t *testing.T) {
	const rows, topK, experts = 24, 5, 9
	for _, kernels := range Variants() {
		t.Run(kernels, func(t *testing.T) {
			var first []float32
			for threads := range 4 {
				rng := rand.New(rand.NewPCG(7, 61))
				c, err := New(Options{Kernels: kernels, Threads: 1 + threads, Limits: backend.Limits{Tokens: rows, Outputs: rows, Seqs: rows, Blocks: 1}})
				if err != nil {
					t.Fatal(err)
				}
				b := &rig{CPU: c, t: t, rng: rng, rows: rows}
				m := &mixture{hidden: 70, inner: 40, experts: experts, spec: backend.MoESpec{TopK: topK, Normalize: true}}
				m.fill(b)
				b.once(nil, func() { b.MoE(m.y, m.x, m.router, m.spec) })
				if first == nil {
					first = slices.Clone(m.ys)
					m.checkOrder(b, kernels)
				} else if !slices.Equal(first, m.ys) {
					t.Errorf("%d threads give other bits than one", 1+threads)
				}
				m.shuffled(b, first)
				if err := b.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// fill loads experts and buffers of random values; the scores of rows differ.
func (m *mixture) fill(b *rig) {
	for range m.experts {
		for _, w := range []struct {
			ids     *[]backend.Weight
			out, in int
		}{{&m.spec.Gate, m.inner, m.hidden}, {&m.spec.Up, m.inner, m.hidden}, {&m.spec.Down, m.hidden, m.inner}} {
			id, _ := b.load(backend.BF16, w.out, w.in)
			*w.ids = append(*w.ids, id)
		}
	}
	m.x, m.xs = b.buf(backend.TokenRows, m.hidden, 1)
	m.y, m.ys = b.buf(backend.TokenRows, m.hidden, 1)
	m.router, m.scores = b.buf(backend.TokenRows, m.experts, 1)
	m.spec.Hidden, _ = b.buf(backend.TokenRows, m.spec.TopK*m.hidden, 1)
	m.spec.Inner, _ = b.buf(backend.TokenRows, m.spec.TopK*m.inner, 1)
	m.spec.InnerUp, _ = b.buf(backend.TokenRows, m.spec.TopK*m.inner, 1)
}

// checkOrder computes each expert by plain operations and adds up what they give as
// the router has them, and from the last to the best, which must be something else.
func (m *mixture) checkOrder(b *rig, kernels string) {
	b.t.Helper()
	ids, weights, sums := slices.Clone(b.routes[0].ids), slices.Clone(b.routes[0].weights), slices.Clone(m.ys)
	gate, _ := b.buf(backend.TokenRows, m.inner, 1)
	up, _ := b.buf(backend.TokenRows, m.inner, 1)
	outs := make([][]float32, m.experts)
	bufs := make([]backend.Buf, m.experts)
	for e := range outs {
		bufs[e], outs[e] = b.buf(backend.TokenRows, m.hidden, 1)
	}
	clear(b.plans)
	b.once(nil, func() {
		for e := range outs {
			b.Linear(gate, m.x, m.spec.Gate[e], backend.NoWeight)
			b.Linear(up, m.x, m.spec.Up[e], backend.NoWeight)
			b.GatedAct(gate, gate, up, m.spec.Act)
			b.Linear(bufs[e], gate, m.spec.Down[e], backend.NoWeight)
		}
	})
	clear(b.plans)
	other := 0
	for i, got := range sums {
		row, k := i/m.hidden, m.spec.TopK
		chain := func(at func(j int) int) float32 {
			sum := 0.0
			for j := range k {
				j = row*k + at(j)
				w, v := float64(weights[j]), float64(outs[ids[j]][i])
				switch kernels {
				case Portable: // rounds in the end
					sum += w * v
				case Generic: // rounds products too
					sum = float64(float32(sum + float64(float32(w*v))))
				default:
					sum = float64(float32(sum + w*v))
				}
			}
			return float32(sum)
		}
		if want := chain(func(j int) int { return j }); math.Float32bits(got) != math.Float32bits(want) {
			b.t.Fatalf("row %d [%d] is %g, in the router's order %g", row, i%m.hidden, got, want)
		}
		if chain(func(j int) int { return k - 1 - j }) != got {
			other++
		}
	}
	if other < len(sums)/10 && kernels != Portable {
		b.t.Errorf("only %d of %d sums depend on the order: the test would not notice another one", other, len(sums))
	}
}

// shuffled gives the rows in another order, all at once and some at a time.
func (m *mixture) shuffled(b *rig, want []float32) {
	b.t.Helper()
	xs, scores := slices.Clone(m.xs), slices.Clone(m.scores)
	order := rand.New(rand.NewPCG(3, 3)).Perm(b.rows)
	for _, n := range []int{b.rows, 5, 1} {
		for at := 0; at+n <= len(order); at += n {
			rows := order[at : at+n]
			for i, r := range rows {
				copy(m.xs[i*m.hidden:(i+1)*m.hidden], xs[r*m.hidden:])
				copy(m.scores[i*m.experts:(i+1)*m.experts], scores[r*m.experts:])
			}
			b.once(&backend.Step{Tokens: make([]int32, n), Positions: make([]int32, n)}, func() { b.MoE(m.y, m.x, m.router, m.spec) })
			for i, r := range rows {
				if got := m.ys[i*m.hidden : (i+1)*m.hidden]; !slices.Equal(got, want[r*m.hidden:(r+1)*m.hidden]) {
					b.t.Fatalf("row %d has other bits as number %d of %d", r, i, n)
				}
			}
		}
	}
}
