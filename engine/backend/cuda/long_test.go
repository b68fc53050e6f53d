//go:build cgo && linux

package cuda

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// Attention over contexts of up to 128k positions, whose parts are longer than those of short ones,
// with and without one order of sums. The reference is computed here, in fp64.
func TestLongContexts(t *testing.T) {
	lib := openTwin(t)
	for _, c := range []struct {
		heads, kvHeads, dim, window int
		contexts                    []int
		sinks                       bool
	}{
		{1, 1, 64, 0, []int{longContext, 20_000, 37}, true},
		{9, 1, 64, 0, []int{700, 130}, false}, // more heads than a block has
		{4, 2, 128, 5_000, []int{40_001, 513}, false},
		{1, 1, 256, 0, []int{4_097}, false},
	} {
		for _, deterministic := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d of %d heads of %d/deterministic=%v", c.heads, c.kvHeads, c.dim, deterministic), func(t *testing.T) {
				lib.twin(3, deterministic, "")
				rng := rand.New(rand.NewPCG(uint64(c.dim), 5))
				const pages = 64 // the sequences share them, at random
				longest := 0
				for _, n := range c.contexts {
					longest = max(longest, n)
				}
				dev := openGPU(t, Options{Limits: backend.Limits{Tokens: len(c.contexts), Outputs: 1, Seqs: len(c.contexts), Blocks: longest/blockTokens + 1}, Deterministic: deterministic, Eager: true})
				defer dev.Close()
				spec := backend.UniformKV(1, pages+len(c.contexts), blockTokens, c.kvHeads, c.dim, backend.BF16)
				b := &bench{Backend: dev, rng: rng, rows: len(c.contexts)}
				b.must(dev.AllocKV(spec))
				kv := make([]byte, 0, spec.Blocks*spec.PageBytes)
				for range cap(kv) / 2 {
					kv = binary.LittleEndian.AppendUint16(kv, uint16(math.Float32bits(float32(rng.NormFloat64()))>>16))
				}
				if !dev.dev.upload(dev.kv.regions[0], kv) {
					t.Fatal(dev.failed("KV"))
				}
				q, k, v, y := b.input(c.heads*c.dim, 1), b.input(c.kvHeads*c.dim, 1), b.input(c.kvHeads*c.dim, 1), b.output(c.heads*c.dim)
				a := backend.AttentionSpec{Heads: c.heads, KVHeads: c.kvHeads, HeadDim: c.dim, Scale: 0.2, Window: c.window}
				var sinks []float32
				if c.sinks {
					data := make([]byte, 0, 4*c.heads)
					for range c.heads {
						sinks = append(sinks, float32(2+rng.Float64()))
					}
					w, err := dev.Load(backend.Tensor{Name: "sinks", DType: backend.F32, Shape: []int{c.heads}, Data: append(data, float32Bytes(sinks)...)})
					b.must(err)
					a.Sinks = &w
				}
				s := &backend.Step{}
				for i, n := range c.contexts {
					var table []int32
					for p := range (n + blockTokens - 1) / blockTokens {
						table = append(table, rng.Int32N(pages))
						if p == (n-1)/blockTokens {
							table[p] = int32(pages + i) // which the step writes
						}
					}
					s.Tokens, s.Positions = append(s.Tokens, int32(i)), append(s.Positions, int32(n-1))
					s.Spans = append(s.Spans, backend.Span{Row: int32(i), Tokens: 1, Start: int32(n - 1), Tables: [][]int32{table}})
				}
				b.must(dev.Replay(backend.Key{Tokens: len(c.contexts)}, s, func() {
					for _, f := range b.inputs {
						f()
					}
					b.StoreKV(0, k, v)
					b.Attention(y, q, a)
				}, nil))
				got, queries := dev.Download(nil, y), dev.Download(nil, q)
				if !dev.dev.download(kv, dev.kv.regions[0]) {
					t.Fatal(dev.failed("KV"))
				}
				worst := 0.0
				for i, n := range c.contexts {
					for h := range c.heads {
						at := (i*c.heads + h) * c.dim
						want := attend(kv, spec, s.Spans[i].Tables[0], queries[at:at+c.dim], h*c.kvHeads/c.heads, n, c.window, a.Scale, sinks, h)
						for d, x := range want {
							worst = max(worst, math.Abs(float64(got[at+d])-x))
							if got[at+d] != got[at+d] {
								t.Fatal("not a number")
							}
						}
					}
				}
				if worst > near {
					t.Errorf("off by %.2g", worst)
				}
			})
		}
	}
}

// attend returns one head's attention over the first n positions of a table's pages.
func attend(kv []byte, spec backend.KVSpec, table []int32, q []float32, kvHead, n, window int, scale float32, sinks []float32, head int) []float64 {
	dim := len(q)
	number := func(page, second, token, d int) float64 {
		at := page*spec.PageBytes + second*spec.PageBytes/2 + ((kvHead*blockTokens+token)*dim+d)*2
		return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(kv[at:])) << 16))
	}
	first := 0
	if window > 0 {
		first = max(0, n-window)
	}
	scores := make([]float64, n)
	best := math.Inf(-1)
	for t := first; t < n; t++ {
		for d := range dim {
			scores[t] += float64(q[d]) * number(int(table[t/blockTokens]), 0, t%blockTokens, d)
		}
		scores[t] *= float64(scale)
		best = max(best, scores[t])
	}
	total, out := 0.0, make([]float64, dim)
	if sinks != nil {
		best = max(best, float64(sinks[head]))
		total = math.Exp(float64(sinks[head]) - best)
	}
	for t := first; t < n; t++ {
		w := math.Exp(scores[t] - best)
		total += w
		for d := range dim {
			out[d] += w * number(int(table[t/blockTokens]), 1, t%blockTokens, d)
		}
	}
	for d := range out {
		out[d] /= total
	}
	return out
}
