package cpu

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
)

// BenchmarkLinear streams a matrix far larger than the last-level cache: GB/s of
// weights and GFLOP/s, by their type and rows in the batch.
func BenchmarkLinear(b *testing.B) {
	for _, kernels := range append(Variants(), AMX) {
		if !Has(kernels) {
			continue
		}
		for _, as := range []backend.DType{backend.BF16, backend.FP8, backend.INT8, backend.INT4} {
			for _, rows := range []int{1, 4, 8, 128} {
				if kernels == Portable && rows > 8 {
					continue // half a minute a step
				}
				b.Run(fmt.Sprintf("%s/%v/rows=%d", kernels, as, rows), func(b *testing.B) { benchLinear(b, kernels, as, rows, 65536, 0) })
			}
		}
	}
}

// BenchmarkGrids is BenchmarkLinear for the integers of checkpoints, as their formats have them, in
// matrices of 512 MiB: no cache holds a tenth of them. As many threads read the matrix between
// products. of-read is the ratio of the fastest product's GB/s to the fastest
// reading's, and median-of-read the median of that ratio over pairs of product and reading. With
// /L2 one thread has a matrix of 768 KiB, which the core's L2 cache holds: the bound of computing.
func BenchmarkGrids(b *testing.B) {
	for _, format := range []struct {
		name string
		grid backend.Grid
	}{
		{"Q4_0", backend.Grid{Kind: backend.GridPlain, Bits: 4, Group: 32}},
		{"Q5_0", backend.Grid{Kind: backend.GridPlain, Bits: 5, Group: 32}},
		{"Q8_0", backend.Grid{Kind: backend.GridPlain, Bits: 8, Group: 32}},
		{"AWQ-128", backend.Grid{Kind: backend.GridZeros, Bits: 4, Group: 128}},
		{"Q4_K", backend.Grid{Kind: backend.GridMins, Bits: 4, Group: 32}},
		{"Q5_K", backend.Grid{Kind: backend.GridMins, Bits: 5, Group: 32}},
		{"Q6_K", backend.Grid{Kind: backend.GridSigned, Bits: 6, Group: 16}},
		{"NVFP4", backend.Grid{Kind: backend.GridFloats, Bits: 4, Group: 16, Whole: 1. / 3000}},
	} {
		for _, kernels := range Variants() {
			for _, rows := range []int{1, 4, 8, 16, 128} {
				if kernels == Portable || kernels == Generic {
					continue // minutes
				}
				b.Run(fmt.Sprintf("%s/%s/rows=%d", format.name, kernels, rows), func(b *testing.B) {
					b.Run("memory", func(b *testing.B) { benchGrid(b, kernels, format.grid, rows, 512<<20, 0) })
					b.Run("L2", func(b *testing.B) { benchGrid(b, kernels, format.grid, rows, 768<<10, 1) })
				})
			}
		}
	}
}

// benchGrid times a matrix of so many bytes and of 2,048 inputs, whose rows are all equal; threads
// 0: as many as there are cores.
func benchGrid(b *testing.B, kernels string, grid backend.Grid, rows, bytes, threads int) {
	const in = 2048
	out := bytes / grid.MatrixBytes(gridTile, in) * gridTile
	c, err := New(Options{Threads: threads, Kernels: kernels, Limits: backend.Limits{Tokens: rows, Outputs: rows, Seqs: 1, Blocks: 1}})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	t := &rig{CPU: c, t: b, rng: rand.New(rand.NewPCG(1, 1)), rows: rows}
	x, _ := t.buf(backend.TokenRows, in, 1)
	y, _ := t.buf(backend.TokenRows, out, 1)
	tn, _ := gridTensor(t.rng.IntN, grid, 1, in)
	row := tn.Grid.Row
	tn.Grid.Row = func(to *backend.GridRow, _ int) { row(to, 0) }
	tn.Shape = []int{out, in}
	w, err := c.Load(tn)
	if err != nil {
		b.Fatal(err)
	}
	product := func() { c.Linear(y, x, w, backend.NoWeight) }
	t.once(nil, product)
	numbers, part := f32view(c.weights[w].matrix), 1<<12 // of what a thread reads at once
	read := func() {
		c.EachRow(len(numbers)/part, func(i int) { c.sampler.Count(numbers[i*part:(i+1)*part], 0) })
	}
	if len(numbers) > 1<<20 {
		part = 1 << 18
	}
	best, fastest := time.Hour, time.Hour
	var ratios []float64
	for b.Loop() {
		began := time.Now()
		t.once(nil, product)
		took := time.Since(began)
		began = time.Now()
		read()
		reading := time.Since(began)
		best, fastest = min(best, took), min(fastest, reading)
		ratios = append(ratios, reading.Seconds()/took.Seconds())
	}
	slices.Sort(ratios)
	size := float64(tn.Grid.MatrixBytes(out, in)) / 1e9
	b.ReportMetric(size/best.Seconds(), "best-GB/s")
	b.ReportMetric(2*in*float64(out*rows)/best.Seconds()/1e9, "best-GFLOP/s")
	if threads != 1 {
		b.ReportMetric(size/fastest.Seconds(), "read-GB/s")
		b.ReportMetric(fastest.Seconds()/best.Seconds(), "of-read")
		b.ReportMetric(ratios[len(ratios)/2], "median-of-read")
	}
}

// BenchmarkKept alternates products with a random matrix of 16,384 outputs and 4,096 inputs as its
// checkpoint has it, and expanded to the type of its weights. expanded-MiB and kept-MiB are the
// memory of both, faster is the ratio of the fastest expanded product's time to that of the fastest
// kept one, and median-faster the median of that ratio over pairs. The kept product includes the
// rounding of its rows.
func BenchmarkKept(b *testing.B) {
	const out, in = 16384, 4096
	order := permutation(rand.New(rand.NewPCG(1, 1)), in)
	for _, format := range []struct {
		name     string
		grid     backend.Grid
		expanded backend.DType
	}{
		{"GPTQ", backend.Grid{Kind: backend.GridZeros, Bits: 4, Group: 128}, backend.F32},
		{"GPTQ-act-order", backend.Grid{Kind: backend.GridZeros, Bits: 4, Group: 128, Order: order}, backend.F32},
		{"NVFP4", backend.Grid{Kind: backend.GridFloats, Bits: 4, Group: 16, Whole: 1. / 3000}, backend.BF16},
	} {
		for _, rows := range []int{1, 8, 128} {
			b.Run(fmt.Sprintf("%s/rows=%d", format.name, rows), func(b *testing.B) {
				c, err := New(Options{Limits: backend.Limits{Tokens: rows, Outputs: rows, Seqs: 1, Blocks: 1}})
				if err != nil {
					b.Fatal(err)
				}
				defer c.Close()
				t := &rig{CPU: c, t: b, rng: rand.New(rand.NewPCG(1, 1)), rows: rows}
				x, _ := t.buf(backend.TokenRows, in, 1)
				y, _ := t.buf(backend.TokenRows, out, 1)
				kept, weights := gridTensor(t.rng.IntN, format.grid, 1, in)
				row := kept.Grid.Row
				kept.Grid.Row = func(to *backend.GridRow, _ int) { row(to, 0) } // all are equal
				kept.Shape = []int{out, in}
				data := make([]byte, 0, in*format.expanded.Size())
				for _, w := range weights {
					if format.expanded == backend.F32 {
						data = binary.LittleEndian.AppendUint32(data, math.Float32bits(w))
					} else {
						data = binary.LittleEndian.AppendUint16(data, toBF16(w))
					}
				}
				wide := backend.Tensor{Name: "wide", DType: format.expanded, Shape: kept.Shape, Data: bytes.Repeat(data, out)}
				best := [2]time.Duration{time.Hour, time.Hour}
				var records [2]func()
				var sizes [2]int
				for i, tn := range []backend.Tensor{wide, kept} {
					w, err := c.Load(tn)
					if err != nil {
						b.Fatal(err)
					}
					sizes[i] = len(c.weights[w].matrix)
					records[i] = func() { c.Linear(y, x, w, backend.NoWeight) }
				}
				var ratios []float64
				for b.Loop() {
					var took [2]time.Duration
					for i, record := range records {
						clear(c.plans)
						t.once(nil, record) // records the plan
						began := time.Now()
						t.once(nil, record)
						took[i] = time.Since(began)
						best[i] = min(best[i], took[i])
					}
					ratios = append(ratios, took[0].Seconds()/took[1].Seconds())
				}
				slices.Sort(ratios)
				b.ReportMetric(ratios[len(ratios)/2], "median-faster")
				b.ReportMetric(float64(sizes[0])/(1<<20), "expanded-MiB")
				b.ReportMetric(float64(sizes[1])/(1<<20), "kept-MiB")
				b.ReportMetric(best[0].Seconds()/best[1].Seconds(), "faster")
			})
		}
	}
}

// BenchmarkOneRow is BenchmarkLinear of one row by one thread and by all. One matrix fits
// in a core's L2 cache (192 outputs, 0.2 to 0.8 MB), which shows the bound of computing, and
// one does not.
func BenchmarkOneRow(b *testing.B) {
	for _, kernels := range append(Variants(), AMX) {
		if !Has(kernels) || kernels == Portable {
			continue
		}
		for _, as := range []backend.DType{backend.BF16, backend.INT8, backend.INT4} {
			for _, out := range []int{192, 32768} {
				for _, threads := range []int{1, 0} {
					b.Run(fmt.Sprintf("%s/%v/outputs=%d/threads=%d", kernels, as, out, threads), func(b *testing.B) { benchLinear(b, kernels, as, 1, out, threads) })
				}
			}
		}
	}
}

// benchLinear times a matrix of 2,048 inputs; threads 0: as many as there are cores.
func benchLinear(b *testing.B, kernels string, as backend.DType, rows, out, threads int) {
	const in = 2048
	c, err := New(Options{Threads: threads, Kernels: kernels, Limits: backend.Limits{Tokens: rows, Outputs: rows, Seqs: 1, Blocks: 1}})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	t := &rig{CPU: c, t: b, rng: rand.New(rand.NewPCG(1, 1)), rows: rows}
	x, _ := t.buf(backend.TokenRows, in, 1)
	y, _ := t.buf(backend.TokenRows, out, 1)
	matrix := backend.Tensor{DType: backend.BF16, Shape: []int{out, in}, Data: make([]byte, in*out*2)}
	if as.Quantized() {
		matrix.As = as
	}
	if as == backend.FP8 {
		matrix = backend.Tensor{DType: as, Shape: matrix.Shape, Data: matrix.Data[:in*out],
			Scales: &backend.Scales{Values: make([]float32, in*out/128/128), Rows: 128, Cols: 128}}
	}
	w, err := c.Load(matrix)
	if err != nil {
		b.Fatal(err)
	}
	record := func() { c.Linear(y, x, w, backend.NoWeight) }
	t.once(nil, record)
	best := time.Hour
	for b.Loop() {
		began := time.Now()
		t.once(nil, record)
		best = min(best, time.Since(began))
	}
	s := best.Seconds()
	b.ReportMetric(float64(as.MatrixBytes(out, in))/s/1e9, "best-GB/s")
	b.ReportMetric(2*in*float64(out*rows)/s/1e9, "best-GFLOP/s")
}

// BenchmarkDecodeStep is a decode step of a small model, by sequences in the
// batch, 256 positions each.
func BenchmarkDecodeStep(b *testing.B) {
	for _, kernels := range Variants() {
		for _, batch := range []int{1, 8} {
			b.Run(fmt.Sprintf("%s/seqs=%d", kernels, batch), func(b *testing.B) {
				decodeSteps(b, Options{Kernels: kernels}, batch)
			})
		}
	}
}

// BenchmarkThreadsUnderLoad is that step with as many threads as there are cores, and with
// half of them, on an idle machine and with one core kept busy. More threads must be faster
// in both cases.
func BenchmarkThreadsUnderLoad(b *testing.B) {
	cores := runtime.NumCPU()
	for _, busy := range []int{0, 1} {
		for _, threads := range []int{max(1, cores/2), cores} {
			b.Run(fmt.Sprintf("busy=%d/threads=%d", busy, threads), func(b *testing.B) {
				var end atomic.Bool
				var others sync.WaitGroup
				for range busy {
					others.Go(func() {
						runtime.LockOSThread()
						for !end.Load() {
						}
					})
				}
				decodeSteps(b, Options{Kernels: Variants()[0], Threads: threads}, 8)
				end.Store(true)
				others.Wait()
			})
		}
	}
}

// decodeSteps repeats a decode step.
func decodeSteps(b *testing.B, o Options, batch int) {
	s := shape{vocab: 4096, hidden: 512, inner: 1536, layers: 8, heads: 8, kvHeads: 2, dim: 64, blocks: 200, blockTokens: 16,
		dtype: backend.BF16, kvType: backend.BF16, maxTokens: 256, maxSeqs: 8, maxBlocks: 17}
	n := newNet(b, s, o, 1)
	seqs := sequences(s, rand.New(rand.NewPCG(2, 2)), make([]int, batch)...)
	perm := rand.New(rand.NewPCG(2, 2)).Perm(s.blocks)
	var chunks []chunk
	for _, q := range seqs {
		q.tokens = make([]int32, 257)
		for range s.maxBlocks {
			q.blocks, perm = append(q.blocks, int32(perm[0])), perm[1:]
		}
		n.forward(b, []chunk{{q, 256}}, nil)
		chunks = append(chunks, chunk{q, 1})
	}
	st := n.stepOf(chunks)
	key := backend.Key{Tokens: batch, Outputs: batch}
	for b.Loop() {
		if err := n.Replay(key, st, n.record, nil); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N*batch)/b.Elapsed().Seconds(), "tokens/s")
}

// drawings are ways to sample a step, and how many best tokens' log-probabilities are
// computed for each row behind it.
var drawings = []struct {
	name string
	p    sample.Params
	top  int
}{
	{"greedy", sample.Params{}, 0},
	{"temperature", sample.Params{Temperature: 1}, 0},
	{"top_k", sample.Params{Temperature: 1, TopK: 40}, 0},
	{"top_p", sample.Params{Temperature: 0.7, TopP: 0.9}, 0},
	{"greedy+logprobs", sample.Params{}, 5},
}

// BenchmarkSampledStep is a decode step of 32 streams of a model of one layer with the
// vocabulary of Qwen models, by how it is sampled: best-ms is the fastest step, and
// of-greedy the ratio of that to the fastest greedy one.
func BenchmarkSampledStep(b *testing.B) {
	const batch = 32
	s := shape{vocab: 151_936, hidden: 64, inner: 128, layers: 1, heads: 4, kvHeads: 2, dim: 16, blocks: batch + 1, blockTokens: 16,
		dtype: backend.BF16, kvType: backend.BF16, maxTokens: batch, maxSeqs: batch, maxBlocks: 1}
	for _, kernels := range Variants() {
		b.Run(kernels, func(b *testing.B) { sampledSteps(b, s, kernels) })
	}
}

func sampledSteps(b *testing.B, s shape, kernels string) {
	n := newNet(b, s, Options{Kernels: kernels}, 1)
	var chunks []chunk
	for i, q := range sequences(s, rand.New(rand.NewPCG(2, 2)), make([]int, s.maxSeqs)...) {
		q.tokens, q.blocks = []int32{int32(i), int32(i)}, []int32{int32(i)}
		n.forward(b, []chunk{{q, 1}}, nil)
		chunks = append(chunks, chunk{q, 1})
	}
	st, greedy := n.stepOf(chunks), 0.0
	for _, how := range drawings {
		b.Run(how.name, func(b *testing.B) {
			for i := range st.Outputs {
				st.Outputs[i].Params = how.p
			}
			best := math.Inf(1)
			for b.Loop() {
				began := time.Now()
				if err := n.Replay(backend.Key{Tokens: s.maxSeqs, Outputs: s.maxSeqs}, st, n.record, nil); err != nil {
					b.Fatal(err)
				}
				if how.top > 0 {
					rows := n.View(n.logits)
					n.EachRow(s.maxSeqs, func(i int) {
						sample.LogProbs(n.Kernels(), rows[i*s.vocab:(i+1)*s.vocab], st.Sampled[i], how.top, nil, nil)
					})
				}
				best = min(best, time.Since(began).Seconds()*1e3)
			}
			if how.name == "greedy" {
				greedy = best
			}
			b.ReportMetric(best, "best-ms")
			b.ReportMetric(best/greedy, "of-greedy")
		})
	}
}

// BenchmarkDraws is what sampling adds to a step of 32 streams at the vocabulary of
// Qwen models.
func BenchmarkDraws(b *testing.B) {
	const rows, vocab = 32, 151_936
	for _, spread := range []float64{1, 3} {
		r := rand.New(rand.NewPCG(1, 2))
		logits := make([]float32, rows*vocab)
		for i := range logits {
			logits[i] = float32(r.NormFloat64() * spread)
		}
		for _, kernels := range Variants() {
			c := &CPU{rows: newPool(runtime.GOMAXPROCS(0)), scratch: make([]sample.Scratch, runtime.GOMAXPROCS(0)), sampler: newSampler(kernels)}
			for i := range c.scratch {
				c.scratch[i].Kernels = c.sampler
			}
			sampled := make([]int32, rows)
			for _, how := range drawings {
				b.Run(fmt.Sprintf("spread=%v/%s/%s", spread, kernels, how.name), func(b *testing.B) {
					c.step.draws = c.step.draws[:0]
					for i := range rows {
						c.step.draws = append(c.step.draws, backend.Output{Position: int32(i), Params: how.p})
					}
					best := math.Inf(1)
					for b.Loop() {
						began := time.Now()
						c.draw(draws{c, logits, vocab, sampled})
						if how.top > 0 {
							c.EachRow(rows, func(i int) {
								sample.LogProbs(c.sampler, logits[i*vocab:(i+1)*vocab], sampled[i], how.top, nil, nil)
							})
						}
						best = min(best, time.Since(began).Seconds()*1e3)
					}
					b.ReportMetric(best, "best-ms")
				})
			}
			c.rows.close()
		}
	}
}
