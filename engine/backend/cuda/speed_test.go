//go:build cgo && linux

package cuda

import (
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
)

// speedOf opens the device for a benchmark, and reports whether it is the twin, for which
// everything is small.
func speedOf(b *testing.B, l backend.Limits, mirror bool) (*CUDA, bool) {
	b.Helper()
	c := openGPU(b, Options{Limits: l, Mirror: mirror})
	b.Cleanup(func() { c.Close() })
	return c, c.info.twin != 0
}

// onTwin reports whether the library is the twin, before limits are known.
func onTwin(b *testing.B) bool {
	b.Helper()
	c, twin := speedOf(b, backend.Limits{Tokens: 1, Outputs: 1, Seqs: 1, Blocks: 1}, false)
	c.Close()
	return twin
}

// BenchmarkDecodeAttention is the share of a step that reads KV: 16 sequences of 4k
// tokens, 32 heads over 8 of 128 columns, many layers so that launches do not count.
func BenchmarkDecodeAttention(b *testing.B) {
	seqs, context, layers := 16, 4096, 16
	if onTwin(b) {
		seqs, context, layers = 2, 48, 1
	}
	const heads, kvHeads, dim = 32, 8, 128
	blocks := context/blockTokens + 1
	c, _ := speedOf(b, backend.Limits{Tokens: seqs, Outputs: 1, Seqs: seqs, Blocks: blocks}, false)
	spec := backend.UniformKV(layers, seqs*blocks, blockTokens, kvHeads, dim, backend.BF16)
	must := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	must(c.AllocKV(spec))
	buf := func(cols int) backend.Buf {
		x, err := c.Alloc(backend.TokenRows, cols)
		must(err)
		return x
	}
	q, k, out := buf(heads*dim), buf(kvHeads*dim), buf(heads*dim)
	zeros := make([]byte, spec.Blocks*spec.PageBytes)
	for _, r := range c.kv.regions {
		if !c.dev.upload(r, zeros) {
			b.Fatal(c.failed("KV"))
		}
	}
	for _, x := range []backend.Buf{q, k} {
		if !c.dev.upload(c.buffers[x].data, make([]byte, seqs*c.buffers[x].cols*4)) {
			b.Fatal(c.failed("rows"))
		}
	}
	record := func() {
		for l := range layers {
			c.StoreKV(l, k, k)
			c.Attention(out, q, backend.AttentionSpec{Layer: l, Heads: heads, KVHeads: kvHeads, HeadDim: dim, Scale: 0.1})
		}
	}
	s := &backend.Step{}
	for i := range seqs {
		table := make([]int32, blocks)
		for p := range table {
			table[p] = int32(i*blocks + p)
		}
		s.Tokens, s.Positions = append(s.Tokens, 0), append(s.Positions, int32(context))
		s.Spans = append(s.Spans, backend.Span{Row: int32(i), Tokens: 1, Start: int32(context), Tables: [][]int32{table}})
	}
	for b.Loop() {
		must(c.Replay(backend.Key{Tokens: seqs}, s, record, nil))
		if !c.dev.wait() {
			b.Fatal(c.failed("a step"))
		}
	}
	bytes := float64(layers) * float64(seqs) * float64(context) * 2 * kvHeads * dim * 2
	b.ReportMetric(bytes*float64(b.N)/b.Elapsed().Seconds()/1e9, "GB/s")
}

// BenchmarkPush measures how much longer a prompt's step takes if each layer's pages are
// copied to the host meanwhile, in percent: the part of the push that is not hidden.
func BenchmarkPush(b *testing.B) {
	tokens, hidden, layers := 2048, 4096, 8
	if onTwin(b) {
		tokens, hidden, layers = 48, 64, 2
	}
	const kvHeads, dim = 8, 128
	blocks := tokens / blockTokens
	c, _ := speedOf(b, backend.Limits{Tokens: tokens, Outputs: 1, Seqs: 1, Blocks: blocks}, true)
	must := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	must(c.AllocKV(backend.UniformKV(layers, blocks, blockTokens, kvHeads, dim, backend.BF16)))
	buf := func(cols int) backend.Buf {
		x, err := c.Alloc(backend.TokenRows, cols)
		must(err)
		return x
	}
	weight := func(out, in int) backend.Weight {
		w, err := c.Load(backend.Tensor{Name: "zeros", DType: backend.BF16, Shape: []int{out, in}, Data: make([]byte, 2*out*in)})
		must(err)
		return w
	}
	x, y, k := buf(hidden), buf(4*hidden), buf(kvHeads*dim)
	up, down, wk := weight(4*hidden, hidden), weight(hidden, 4*hidden), weight(kvHeads*dim, hidden)
	table := make([]int32, blocks)
	for i := range table {
		table[i] = int32(i)
	}
	s := &backend.Step{Tokens: make([]int32, tokens), Spans: []backend.Span{{Tokens: int32(tokens), Tables: [][]int32{table}}}}
	for i := range tokens {
		s.Positions = append(s.Positions, int32(i))
	}
	embed := weight(8, hidden)
	record := func() {
		c.Embed(x, embed)
		for l := range layers {
			c.Linear(k, x, wk, backend.NoWeight)
			c.StoreKV(l, k, k)
			c.Mark(l)
			c.Linear(y, x, up, backend.NoWeight)
			c.Linear(x, y, down, backend.NoWeight)
		}
	}
	var took [2]time.Duration // without and with copies
	run := func(with int) {
		s.Fetch = nil
		if with == 1 {
			s.Fetch = [][]int32{table}
		}
		began := time.Now()
		must(c.Replay(backend.Key{Tokens: tokens}, s, record, func(int) {}))
		if !c.dev.wait() {
			b.Fatal(c.failed("a step"))
		}
		took[with] += time.Since(began)
	}
	run(0)
	took = [2]time.Duration{}
	for b.Loop() {
		run(0)
		run(1)
	}
	b.ReportMetric(100*(took[1]-took[0]).Seconds()/took[0].Seconds(), "exposed-%")
}
