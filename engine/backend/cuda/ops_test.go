//go:build cgo && linux

package cuda

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
)

// bench is a backend for some operations, the same on every backend: weights and
// inputs come from a seed.
type bench struct {
	backend.Backend
	rng     *rand.Rand
	rows    int
	vocab   int // of logits
	results []backend.Buf
	inputs  []func()
	logits  backend.Buf // of a case that draws
}

func (b *bench) must(err error) {
	if err != nil {
		panic(err)
	}
}

func (b *bench) buf(cols int) backend.Buf {
	id, err := b.Alloc(backend.TokenRows, cols)
	b.must(err)
	return id
}

func (b *bench) weight(dt backend.DType, dev float64, dims ...int) backend.Weight {
	n := 1
	for _, d := range dims {
		n *= d
	}
	var data []byte
	if dt == backend.FP8 {
		return b.fp8(backend.Scales{Rows: 16, Cols: 32}, dev, dims...)
	}
	t := backend.Tensor{Name: fmt.Sprint("random", dims), DType: dt, Shape: dims}
	if dt.Quantized() {
		t.DType, t.As = backend.BF16, dt
	}
	if dt == backend.MXFP4 {
		for range dims[0] * dims[1] / 2 {
			data = append(data, byte(b.rng.IntN(256)))
		}
		for range dims[0] * dims[1] / 32 {
			data = append(data, byte(120+b.rng.IntN(8)))
		}
	} else {
		for range n {
			bits := math.Float32bits(float32(b.rng.NormFloat64() * dev))
			if t.DType == backend.BF16 {
				data = binary.LittleEndian.AppendUint16(data, uint16(bits>>16))
			} else {
				data = binary.LittleEndian.AppendUint32(data, bits)
			}
		}
	}
	t.Data = data
	w, err := b.Load(t)
	b.must(err)
	return w
}

// fp8 is a matrix whose blocks are s's, with scales of any size.
func (b *bench) fp8(s backend.Scales, dev float64, dims ...int) backend.Weight {
	t := backend.Tensor{Name: "fp8", DType: backend.FP8, Shape: dims, Scales: &s}
	for range dims[0] * dims[1] {
		t.Data = append(t.Data, byte(b.rng.IntN(2)<<7|b.rng.IntN(80)))
	}
	for range ((s.Row+dims[0]-1)/s.Rows + 1) * s.Across(dims[1]) {
		s.Values = append(s.Values, float32(dev*(0.2+b.rng.Float64())))
	}
	w, err := b.Load(t)
	b.must(err)
	return w
}

// width is how many inputs a random matrix of a type has.
func (b *bench) width(dt backend.DType) int {
	n := 32 * (1 + b.rng.IntN(20))
	if dt == backend.FP8 || dt.Quantized() {
		n -= 4 * b.rng.IntN(8) // rows are filled up, and end within what a lane reads
	}
	return n
}

// input is a buffer that begins with random numbers: rows of a table, which the
// step's tokens name.
func (b *bench) input(cols int, dev float64) backend.Buf {
	x, table := b.buf(cols), b.weight(backend.F32, dev, b.rows, cols)
	b.inputs = append(b.inputs, func() { b.Embed(x, table) })
	return x
}

// output is a buffer that is compared.
func (b *bench) output(cols int) backend.Buf {
	y := b.buf(cols)
	b.results = append(b.results, y)
	return y
}

// kernelCase makes buffers and returns what to record.
type kernelCase struct {
	name    string
	rows    int
	vocab   int // of a case that draws
	kv      func(rng *rand.Rand) backend.KVSpec
	make    func(b *bench) func()
	draws   bool    // each row is an output; see drawAll
	rules   bool    // and each output has rules, in two steps; see ruleAll
	masks   bool    // and most of them have masks; see maskAll
	form    int32   // of draws: drawsSlices or drawsAlone
	single  bool    // plans are no graphs: steps launch as many rows as they have
	blas    bool    // with cuBLASLt
	bucket  int     // rows of the plan, if more than those of steps
	adapted bool    // the sequences of each step go through adapters, or none
	near    float64 // how far results may be from the CPU's; 0: near
	chunks  float64 // the same of the rows of chunks, if their kernel is less exact; else 0
}

// linearCases are the types of matrices and, each with as many rows as choose another
// kernel for it, how many.
func linearCases(few, more []int, f func(dt backend.DType, rows int)) {
	for _, dt := range []backend.DType{backend.F32, backend.BF16, backend.MXFP4, backend.FP8, backend.INT8, backend.INT4} {
		for _, rows := range few {
			f(dt, rows)
		}
		for i, rows := range more {
			if dt == backend.BF16 || dt != backend.F32 && i == int(dt)%len(more) {
				f(dt, rows)
			}
		}
	}
}

// kernelCases are all operations, in the shapes that choose different kernels.
func kernelCases() (all []kernelCase) {
	add := func(name string, rows int, make func(b *bench) func()) {
		all = append(all, kernelCase{name: name, rows: rows, make: make})
	}
	linearCases([]int{1, 3}, []int{7, 33, 70}, func(dt backend.DType, rows int) {
		add(fmt.Sprintf("linear/%s/%d", dt, rows), rows, func(b *bench) func() {
			in, out := b.width(dt), 1+b.rng.IntN(150)
			x, y, w, bias := b.input(in, 1), b.output(out), b.weight(dt, 1/math.Sqrt(float64(in)), out, in), b.weight(backend.F32, 1, out)
			return func() { b.Linear(y, x, w, bias) }
		})
	})
	for _, rows := range []int{1, 2} { // the columns are not a multiple of what the warps read at once
		add(fmt.Sprintf("linear/mxfp4/%d/odd", rows), rows, func(b *bench) func() {
			x, wide := b.input(96, 1), b.input(32*23, 1)
			y, z, gated, up := b.output(70), b.output(33), b.output(50), b.buf(50)
			w, v, wg, wu := b.weight(backend.MXFP4, 0, 70, 96), b.weight(backend.MXFP4, 0, 33, 32*23), b.weight(backend.MXFP4, 0, 50, 96), b.weight(backend.MXFP4, 0, 50, 96)
			bias := b.weight(backend.F32, 1, 70)
			return func() {
				b.Linear(y, x, w, bias)
				b.Linear(z, wide, v, backend.NoWeight)
				b.Linear(gated, x, wg, backend.NoWeight)
				b.Linear(up, x, wu, backend.NoWeight)
				b.GatedAct(gated, gated, up, backend.Act(2))
			}
		})
	}
	for _, rows := range []int{1, 2, 5} { // several blocks have parts of the columns of one matrix; many rows are copied in two pieces
		add(fmt.Sprintf("linear/int4/%d/parts", rows), rows, func(b *bench) func() {
			const in, wide = 76, 2084
			x, long := b.input(in, 1), b.input(wide, 1)
			y, z, joined, gated, up := b.output(70), b.output(33), b.output(20), b.output(50), b.buf(50)
			weight := func(out, in int) backend.Weight { return b.weight(backend.INT4, 1/math.Sqrt(float64(in)), out, in) }
			w, v, j, wg, wu := weight(70, in), weight(33, wide), weight(20, wide), weight(50, wide), weight(50, wide)
			bias := b.weight(backend.F32, 1, 70)
			return func() {
				b.Linear(y, x, w, bias)
				b.Linear(z, long, v, backend.NoWeight)
				b.Linear(joined, long, j, backend.NoWeight)
				b.Linear(gated, long, wg, backend.NoWeight)
				b.Linear(up, long, wu, backend.NoWeight)
				b.GatedAct(gated, gated, up, backend.Act(2))
			}
		})
	}
	for _, rows := range []int{1, 2} { // more columns than few_mxfp4 has memory for
		add(fmt.Sprintf("linear/mxfp4/%d/wide", rows), rows, func(b *bench) func() {
			x, y, gated, up := b.input(4128, 1), b.output(5), b.output(6), b.buf(6)
			w, wg, wu := b.weight(backend.MXFP4, 0, 5, 4128), b.weight(backend.MXFP4, 0, 6, 4128), b.weight(backend.MXFP4, 0, 6, 4128)
			return func() {
				b.Linear(y, x, w, backend.NoWeight)
				b.Linear(gated, x, wg, backend.NoWeight)
				b.Linear(up, x, wu, backend.NoWeight)
				b.GatedAct(gated, gated, up, backend.Act(1))
			}
		})
	}
	for _, rows := range []int{1, 3} { // columns that few_int4 does not divide
		add(fmt.Sprintf("linear/int4/%d/uneven", rows), rows, func(b *bench) func() {
			x, y, gated, up := b.input(77, 1), b.output(50), b.output(20), b.buf(20)
			w, wg, wu := b.weight(backend.INT4, 0.1, 50, 77), b.weight(backend.INT4, 0.1, 20, 77), b.weight(backend.INT4, 0.1, 20, 77)
			return func() {
				b.Linear(y, x, w, backend.NoWeight)
				b.Linear(gated, x, wg, backend.NoWeight)
				b.Linear(up, x, wu, backend.NoWeight)
				b.GatedAct(gated, gated, up, backend.Act(0))
			}
		})
	}
	add("linear/odd", 9, func(b *bench) func() {
		x, y, w := b.input(77, 1), b.output(50), b.weight(backend.BF16, 0.1, 50, 77)
		return func() { b.Linear(y, x, w, backend.NoWeight) }
	})
	add("linear/blocks", 9, func(b *bench) func() { // of a row, of all, cut out, as DeepSeek's
		x, table := b.input(272, 1), []backend.DType{backend.FP8, backend.INT8, backend.INT4}
		var into, words []backend.Buf
		var w, tables []backend.Weight
		for _, s := range []backend.Scales{{Rows: 1, Cols: 272}, {Rows: 60, Cols: 300}, {Rows: 20, Cols: 48, Row: 12, Col: 32}, {Rows: 128, Cols: 128, Col: 64}} {
			into, w = append(into, b.output(50)), append(w, b.fp8(s, 0.1, 50, 272))
		}
		for _, dt := range table {
			words, tables = append(words, b.output(70)), append(tables, b.weight(dt, 1, 9, 70))
		}
		odd, odds := b.input(77, 1), b.output(20)
		uneven := b.weight(backend.INT4, 0.1, 20, 77)
		return func() {
			for i, y := range into {
				b.Linear(y, x, w[i], backend.NoWeight)
			}
			for i, y := range words {
				b.Embed(y, tables[i])
			}
			b.Linear(odds, odd, uneven, backend.NoWeight)
		}
	})
	add("linear/narrow", 9, func(b *bench) func() { // blocks that become bf16
		t := backend.Tensor{Name: "fp8", DType: backend.FP8, Shape: []int{50, 96}, Scales: &backend.Scales{Rows: 16, Cols: 40, Row: 3, Col: 8}}
		for range 50 * 96 {
			t.Data = append(t.Data, byte(b.rng.IntN(2)<<7|b.rng.IntN(127)))
		}
		for range 4 * 3 { // powers of two, so that bf16 holds what they make
			t.Scales.Values = append(t.Scales.Values, float32(math.Ldexp(1, -8-b.rng.IntN(4))))
		}
		w, err := b.Load(t)
		b.must(err)
		x, y := b.input(96, 1), b.output(50)
		return func() { b.Linear(y, x, w, backend.NoWeight) }
	})
	add("norms", 5, func(b *bench) func() {
		x, add, y, z, w, hw := b.input(300, 2), b.input(300, 1), b.output(300), b.output(300), b.weight(backend.BF16, 1, 300), b.weight(backend.F32, 1, 60)
		sum := b.output(300)
		return func() {
			b.AddRMSNorm(y, x, add, w, 1e-5)
			b.HeadNorm(z, y, 5, 60, hw, 1e-6)
			b.RMSNorm(sum, x, backend.NoWeight, 1e-5)
		}
	})
	for _, cols := range []int{300, 2052, 4100, 8196, 301, 16_388} { // one to eight fours a thread, and what has no such kernel
		add(fmt.Sprintf("norms/%d", cols), 2, func(b *bench) func() {
			x, more, y, z, sum, w := b.input(cols, 2), b.input(cols, 1), b.output(cols), b.output(cols), b.output(cols), b.weight(backend.BF16, 1, cols)
			return func() {
				b.AddRMSNorm(y, x, more, w, 1e-5)
				b.RMSNorm(z, y, backend.NoWeight, 1e-5)
				b.Columns(sum, x, 0)
			}
		})
	}
	fusedLayer := func(hidden, inner int, b *bench) func() { // as a layer of Llama, of one row
		x, normed, delta, q, k := b.input(hidden, 2), b.buf(hidden), b.buf(hidden), b.output(72), b.output(24)
		gate, up, y, sum, last := b.buf(inner), b.buf(inner), b.output(hidden), b.output(hidden), b.output(40)
		weight := func(out, in int) backend.Weight { return b.weight(backend.INT4, 1/math.Sqrt(float64(in)), out, in) }
		wq, wk, wo, wg, wu, wd, wl := weight(72, hidden), weight(24, hidden), weight(hidden, 72), weight(inner, hidden), weight(inner, hidden), weight(hidden, inner), weight(40, hidden)
		n, bias := b.weight(backend.BF16, 1, hidden), b.weight(backend.F32, 1, hidden)
		return func() {
			b.RMSNorm(normed, x, n, 1e-5)
			b.Linear(q, normed, wq, backend.NoWeight)
			b.Linear(k, normed, wk, backend.NoWeight)
			b.Linear(delta, q, wo, bias)
			b.AddRMSNorm(normed, x, delta, n, 1e-5)
			b.Linear(gate, normed, wg, backend.NoWeight)
			b.Linear(up, normed, wu, backend.NoWeight)
			b.GatedAct(gate, gate, up, backend.Act(0))
			b.Linear(delta, gate, wd, backend.NoWeight)
			b.AddRMSNorm(normed, x, delta, n, 1e-6)
			b.Linear(last, normed, wl, backend.NoWeight)
			b.RMSNorm(y, x, n, 1e-5) // read by nothing that could norm it
			b.Columns(sum, x, 0)
		}
	}
	add("norms/fused", 1, func(b *bench) func() { return fusedLayer(1604, 76, b) })
	add("activations", 6, func(b *bench) func() {
		g, u, half := b.input(90, 3), b.input(90, 3), b.output(40)
		outs := []backend.Buf{b.output(90), b.output(90), b.output(90)}
		return func() {
			for act, y := range outs {
				b.GatedAct(y, g, u, backend.Act(act))
			}
			b.Scale(outs[0], 3)
			b.Add(outs[1], outs[0], backend.NoWeight)
			b.Softcap(outs[2], 5)
			b.Columns(half, outs[2], 17)
		}
	})
	add("gates", 6, func(b *bench) func() {
		x, each, wide := b.input(90, 3), b.input(90, 3), b.input(6, 3)
		y, z := b.output(90), b.output(90)
		return func() {
			b.Gate(y, each, x)
			b.Gate(z, wide, x)
			b.Gate(z, each, z)
		}
	})
	add("rope", 8, func(b *bench) func() {
		x, y := b.input(3*48, 1), b.output(3*48)
		r, more := &backend.Rope{InvFreq: []float32{1, 0.3, 0.1, 0.01}, Scale: 1.2}, &backend.Rope{InvFreq: []float32{0.2, 0.5}, Scale: 1}
		return func() {
			b.Rope(x, 3, 48, r)
			b.Rope(x, 3, 48, more)
			b.Columns(y, x, 0)
		}
	})
	add("linear/blas", 70, func(b *bench) func() {
		x, y, z, last := b.input(64, 1), b.output(48), b.output(32), b.output(32)
		w, narrow, v, bias := b.weight(backend.BF16, 0.1, 48, 64), b.weight(backend.INT8, 0.1, 32, 64), b.weight(backend.BF16, 0.1, 32, 48), b.weight(backend.F32, 1, 48)
		return func() {
			b.Linear(y, x, w, bias)
			b.Linear(last, y, v, backend.NoWeight) // whose first kernel must not overlap with the product
			b.Linear(z, x, narrow, backend.NoWeight)
		}
	})
	all[len(all)-1].blas, all[len(all)-1].near = true, 1e-2 // activations are rounded to bf16
	linearCases([]int{1, 3}, []int{30, 70}, func(dt backend.DType, rows int) {
		add(fmt.Sprintf("joined/%s/%d", dt, rows), rows, func(b *bench) func() {
			in := b.width(dt)
			x := b.input(in, 1)
			var into []backend.Buf
			var w, bias []backend.Weight
			for i := range 5 { // three and two
				out := 1 + b.rng.IntN(150)
				into, w, bias = append(into, b.output(out)), append(w, b.weight(dt, 1/math.Sqrt(float64(in)), out, in)), append(bias, backend.NoWeight)
				if i%2 == 1 {
					bias[i] = b.weight(backend.F32, 1, out)
				}
			}
			return func() {
				for i, y := range into {
					b.Linear(y, x, w[i], bias[i])
				}
			}
		})
	})
	linearCases([]int{1, 3}, []int{30, 70}, func(dt backend.DType, rows int) {
		add(fmt.Sprintf("gated/%s/%d", dt, rows), rows, func(b *bench) func() {
			in, out := b.width(dt), 1+b.rng.IntN(150)
			x, y, up, bias := b.input(in, 1), b.output(out), b.buf(out), b.weight(backend.F32, 1, out)
			wg, wu := b.weight(dt, 1/math.Sqrt(float64(in)), out, in), b.weight(dt, 1/math.Sqrt(float64(in)), out, in)
			return func() {
				b.Linear(y, x, wg, backend.NoWeight)
				b.Linear(up, x, wu, bias)
				b.GatedAct(y, y, up, backend.Act(rows%3))
			}
		})
	})
	for _, c := range []struct {
		name              string
		rows, experts, k  int
		dt                backend.DType
		sigmoid, normalze bool
	}{{"few", 2, 9, 3, backend.BF16, false, true}, {"many", 60, 4, 2, backend.FP8, false, false}, {"int8", 3, 7, 2, backend.INT8, false, true}, {"int4", 20, 3, 2, backend.INT4, false, true}, {"mxfp4", 40, 5, 2, backend.MXFP4, false, true}, {"mxfp4 of few rows", 10, 20, 2, backend.MXFP4, false, true},
		{"one int4", 1, 7, 3, backend.INT4, false, true}, {"uneven int4", 5, 5, 2, backend.INT4, false, true},
		{"one mxfp4 in a layer", 1, 7, 3, backend.MXFP4, false, true}, {"uneven mxfp4 in a layer", 5, 5, 2, backend.MXFP4, false, false}, {"uneven mxfp4", 5, 5, 2, backend.MXFP4, false, true},
		{"few in a layer", 8, 9, 3, backend.BF16, false, true}, {"groups in a layer", 7, 12, 3, backend.F32, true, true}, {"groups", 20, 12, 3, backend.F32, true, true}, {"groups of softmax", 20, 12, 3, backend.F32, true, false}} {
		add("moe/"+c.name, c.rows, func(b *bench) func() {
			const hidden, inner = 64, 96
			x, y, router := b.input(hidden, 1), b.output(hidden), b.input(c.experts, 2)
			spec := backend.MoESpec{TopK: c.k, Normalize: c.normalze, Hidden: b.buf(c.k * hidden), Inner: b.buf(c.k * inner), InnerUp: b.buf(c.k * inner)}
			for range c.experts {
				spec.Gate, spec.Up = append(spec.Gate, b.weight(c.dt, 0.1, inner, hidden)), append(spec.Up, b.weight(c.dt, 0.1, inner, hidden))
				spec.Down = append(spec.Down, b.weight(c.dt, 0.1, hidden, inner))
				spec.DownBias = append(spec.DownBias, b.weight(backend.F32, 1, hidden))
			}
			if c.sigmoid {
				spec.Sigmoid = &backend.SigmoidRouter{Bias: b.weight(backend.F32, 0.1, c.experts), Groups: 4, Keep: 2, Factor: 2.5}
				if !c.normalze {
					spec.Sigmoid.Softmax, spec.Sigmoid.Bias = true, backend.NoWeight
				}
			}
			if !strings.HasSuffix(c.name, "in a layer") {
				return func() { b.MoE(y, x, router, spec) }
			}
			stream, z, w := b.input(hidden, 1), b.output(hidden), b.weight(backend.BF16, 1, hidden)
			b.results = append(b.results, stream)
			return func() {
				b.MoE(y, x, router, spec)
				b.AddRMSNorm(z, stream, y, w, 1e-5)
				b.MoE(y, z, router, spec)
			}
		})
	}
	add("heads", 70, func(b *bench) func() {
		x, y := b.input(3*40, 1), b.output(3*24)
		spec := backend.HeadSpec{In: b.buf(3 * 32), Out: b.buf(3 * 16)}
		for range 3 {
			spec.Weights = append(spec.Weights, b.weight(backend.BF16, 0.2, 16, 32))
		}
		return func() { b.HeadLinear(y, x, spec) }
	})
	return append(append(all, deltaCases()...), attentionCases()...)
}

// attentionCases store and read KV: first some chunks, then a row or a few of each
// sequence behind them.
func attentionCases() (all []kernelCase) {
	for _, c := range []struct {
		heads, kvHeads, dim, latent, blockTokens, window int
		dt                                               backend.DType
		sinks                                            bool
		softcap                                          float32
	}{
		{4, 2, 64, 0, 16, 0, backend.F32, false, 0}, {8, 2, 64, 0, 16, 0, backend.BF16, false, 0}, {5, 1, 128, 0, 16, 40, backend.BF16, true, 0},
		{3, 1, 256, 0, 16, 0, backend.BF16, true, 0}, {2, 1, 512, 0, 16, 0, backend.BF16, false, 0}, {4, 1, 80, 64, 16, 0, backend.BF16, false, 0},
		{6, 2, 40, 0, 16, 20, backend.BF16, false, 0}, {3, 1, 128, 0, 32, 0, backend.BF16, false, 0},
		{4, 2, 256, 0, 16, 30, backend.BF16, false, 1.5}, {2, 1, 24, 0, 16, 0, backend.F32, false, 0.7},
		{3, 1, 64, 0, 8, 30, backend.BF16, true, 0}, {6, 2, 64, 0, 16, 20, backend.FP8, true, 1.5}, {4, 1, 80, 64, 16, 0, backend.FP8, false, 0},
	} {
		add := func(single bool) {
			c := c
			name := fmt.Sprintf("attention/%d-%d-%d/%s/%g", c.heads, c.kvHeads, c.dim, c.dt, c.softcap)
			if c.blockTokens == 8 {
				name += "/blocks of 8"
			}
			chunks := 0.0
			if c.dt == backend.BF16 && c.softcap == 0 && c.latent == 0 && c.dim%64 == 0 && c.blockTokens%16 == 0 {
				chunks = 1e-2 // each query and weight is rounded to bf16
			}
			if single {
				name += "/single"
			}
			spec := func(*rand.Rand) backend.KVSpec {
				s := backend.UniformKV(1, 120, c.blockTokens, c.kvHeads, c.dim, c.dt)
				s.Groups[0].Latent, s.Groups[0].Window = c.latent, c.window
				return s
			}
			all = append(all, kernelCase{name: name, rows: 90, single: single, chunks: chunks, kv: spec, make: func(b *bench) func() {
				wide, second := c.dim, c.kvHeads*c.dim
				first := second
				if c.latent > 0 {
					wide, first, second = c.latent, c.latent, c.dim-c.latent
				}
				q, k, v, y := b.input(c.heads*c.dim, 1), b.input(first, 1), b.input(second, 1), b.output(c.heads*wide)
				a := backend.AttentionSpec{Heads: c.heads, KVHeads: c.kvHeads, HeadDim: c.dim, Scale: 0.3, Softcap: c.softcap, Window: c.window}
				if c.sinks {
					w := b.weight(backend.F32, 2, c.heads)
					a.Sinks = &w
				}
				if c.dt == backend.FP8 {
					b.must(b.ScaleKV(0, []float32{0.02, 0.01}[:c.kvHeads], []float32{1. / 64, 0.5}[:c.kvHeads]))
				}
				return func() {
					b.StoreKV(0, k, v)
					b.Attention(y, q, a)
				}
			}})
		}
		add(false)
		if c.dt == backend.BF16 && c.dim == 64 && c.blockTokens == 16 {
			add(true)
		}
	}
	return append(append(all, placeCase(backend.F32, false), placeCase(backend.F32, true), placeCase(backend.FP8, true), adaptCase(), drawCase(false, false), drawCase(true, false), drawCase(true, true)), sliceCases()...)
}

// placeCase norms and turns queries and keys, stores these with values and reads them.
func placeCase(dt backend.DType, norms bool) kernelCase {
	const heads, kvHeads, dim = 6, 2, 40
	spec := func(*rand.Rand) backend.KVSpec { return backend.UniformKV(1, 120, 16, kvHeads, dim, dt) }
	return kernelCase{name: fmt.Sprintf("place/%s/norms=%v", dt, norms), rows: 90, kv: spec, make: func(b *bench) func() {
		x, q, k, v, y := b.input(64, 1), b.output(heads*dim), b.output(kvHeads*dim), b.output(kvHeads*dim), b.output(heads*dim)
		w := []backend.Weight{b.weight(backend.BF16, 0.1, heads*dim, 64), b.weight(backend.BF16, 0.1, kvHeads*dim, 64), b.weight(backend.BF16, 0.1, kvHeads*dim, 64)}
		wq, wk := b.weight(backend.F32, 1, dim), b.weight(backend.F32, 1, dim)
		r := &backend.Rope{InvFreq: []float32{1, 0.3, 0.1, 0.01, 0.001}, Scale: 1.2}
		return func() {
			for i, to := range []backend.Buf{q, k, v} {
				b.Linear(to, x, w[i], backend.NoWeight)
			}
			if norms {
				b.HeadNorm(q, q, heads, dim, wq, 1e-6)
				b.HeadNorm(k, k, kvHeads, dim, wk, 1e-6)
			}
			b.Rope(q, heads, dim, r)
			b.Rope(k, kvHeads, dim, r)
			b.StoreKV(0, k, v)
			b.Attention(y, q, backend.AttentionSpec{Heads: heads, KVHeads: kvHeads, HeadDim: dim, Scale: 0.3})
		}
	}}
}

// benchLimits fit every case.
var benchLimits = backend.Limits{Tokens: 90, Outputs: 12, Seqs: 4, Blocks: 30}

// wrong returns how far results are from the CPU's, and whether that is too far.
func (c *kernelCase) wrong(got, want [][]float32) (d float64, wrong bool) {
	for i := range want {
		most := cmp.Or(c.near, near)
		if i%2 == 0 {
			most = cmp.Or(c.chunks, most) // see byChunks
		}
		now := off(got[i:i+1], want[i:i+1])
		d, wrong = max(d, now), wrong || now > most
	}
	return d, wrong
}

// byChunks returns the numbers of a step's rows that are in chunks, and those of the others.
func byChunks(s *backend.Step, all []float32) (in, others []float32) {
	rowSpan := make([]int32, len(s.Tokens))
	for i := range s.Spans {
		if first := s.Spans[i].Row; len(s.Tokens) > fewRows {
			markChunks(rowSpan[:first+s.Spans[i].Tokens], int(first))
		}
	}
	cols := len(all) / len(rowSpan)
	for i, span := range rowSpan {
		if row := all[i*cols : (i+1)*cols]; span&inChunk != 0 {
			in = append(in, row...)
		} else {
			others = append(others, row...)
		}
	}
	return in, others
}

// run plays a case on a backend and returns what its outputs held, step by step.
func (c *kernelCase) run(dev backend.Backend, seed uint64) (results [][]float32, err error) {
	defer func() {
		if r := recover(); r != nil {
			e, ok := r.(error)
			if !ok {
				panic(r)
			}
			err = e
		}
	}()
	b := &bench{Backend: dev, rng: rand.New(rand.NewPCG(seed, 9)), rows: c.rows, vocab: c.vocab}
	steps := []*backend.Step{plainStep(b.rng, c.rows)}
	if c.kv != nil {
		spec := c.kv(b.rng)
		b.must(dev.AllocKV(spec))
		steps = kvSteps(b.rng, c.rows, spec)
	}
	for i := range steps {
		for j := range steps[i].Spans {
			if c.adapted {
				steps[i].Spans[j].Adapter = int32((i + j) % 3)
			}
		}
	}
	outputs := 0
	if c.draws {
		outputs = c.rows
		drawAll(b.rng, steps[0])
		if c.masks {
			maskAll(b.rng, steps[0], c.vocab)
		}
	}
	body := c.make(b)
	record := func() {
		for _, f := range b.inputs {
			f()
		}
		body()
	}
	key := backend.Key{Tokens: max(c.rows, c.bucket), Outputs: outputs}
	if c.rules {
		ruleAll(b.rng, steps[0])
		second := plainStep(b.rng, c.rows)
		drawAll(b.rng, second)
		if err := c.follow(dev, key, steps[0], second, record); err != nil {
			return nil, err
		}
		return append(drawn(dev, b.logits, c.vocab, second), numbers(steps[0].Sampled)), nil
	}
	for _, s := range steps {
		if err := dev.Replay(key, s, record, nil); err != nil {
			return nil, err
		}
		for _, y := range b.results {
			all := dev.Download(nil, y)
			if c.chunks > 0 {
				in, others := byChunks(s, all)
				results = append(results, in, others)
				continue
			}
			results = append(results, all)
		}
		if c.draws {
			results = append(results, drawn(dev, b.logits, c.vocab, s)...)
		}
	}
	return results, nil
}

// open opens a device for the case. Plans are graphs of kernels that overlap, except with Eager and
// with single.
func (c *kernelCase) open(o Options) (*CUDA, error) {
	o.Library, o.graphs, o.draws = libraryPath, !o.Eager && !c.single, c.form
	if c.blas {
		o.BLAS = blasPath
	}
	return New(o)
}

// plainStep has rows of no sequence.
func plainStep(rng *rand.Rand, rows int) *backend.Step {
	s := &backend.Step{}
	for i := range rows {
		s.Tokens, s.Positions = append(s.Tokens, int32(i)), append(s.Positions, rng.Int32N(5000))
	}
	return s
}

// kvSteps are chunks of three sequences, then a few rows of each.
func kvSteps(rng *rand.Rand, rows int, spec backend.KVSpec) (all []*backend.Step) {
	perm, done := rng.Perm(spec.Blocks), []int{0, 0, 0}
	bt := spec.Groups[0].BlockTokens
	tables := make([][]int32, len(done))
	for i := range tables {
		for _, p := range perm[i*30 : (i+1)*30] {
			tables[i] = append(tables[i], int32(p))
		}
	}
	turns, long := [][]int{{20, 30, 1}, {60, 20, 10}}, 150
	if bt > 16 {
		long = 560 // more than one part
	}
	if spec.Groups[0].HeadDim > 128 {
		long = 0 // they take their time
	}
	for n := 80; n < long; n += 85 {
		turns = append(turns, []int{85, 1, 4})
	}
	for _, counts := range append(turns, []int{1, 1, 1}, []int{12, 3, 1}) {
		s := &backend.Step{}
		for i, n := range counts {
			span := backend.Span{Row: int32(len(s.Tokens)), Tokens: int32(n), Start: int32(done[i]), Tables: [][]int32{tables[i][:(done[i]+n+bt-1)/bt]}}
			for p := range n {
				s.Tokens, s.Positions = append(s.Tokens, rng.Int32N(int32(rows))), append(s.Positions, int32(done[i]+p))
			}
			done[i] += n
			s.Spans = append(s.Spans, span)
		}
		all = append(all, s)
	}
	return all
}

// off is how far results are from what they should be, by the size of those.
func off(got, want [][]float32) float64 {
	worst := 0.0
	for i := range want {
		if len(got[i]) != len(want[i]) {
			return math.Inf(1)
		}
		scale := 0.0
		for _, v := range want[i] {
			scale = max(scale, math.Abs(float64(v)))
		}
		for j, v := range want[i] {
			d := math.Abs(float64(got[i][j]-v)) / scale
			if !(d <= worst) {
				worst = d
			}
			if d != d {
				return math.Inf(1)
			}
		}
	}
	return worst
}

// near is how far a kernel's results may be from the CPU's, of the largest.
const near = 3e-5

func onCPU(t *testing.T, c *kernelCase, seed uint64) [][]float32 {
	t.Helper()
	host, err := cpu.New(cpu.Options{Limits: benchLimits, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	want, err := c.run(widened{host}, seed)
	if err != nil {
		t.Fatal(err)
	}
	return want
}

// sitesOf are the barriers and waits that each case has reached in TestKernels, with the first seed.
var sitesOf = map[string]string{}

// Every kernel gives the CPU's results, in any order of threads and whenever copies
// land.
func TestKernels(t *testing.T) {
	lib := openTwin(t)
	for _, c := range kernelCases() {
		t.Run(c.name, func(t *testing.T) {
			n := seeds
			if c.kv != nil {
				n = (seeds + 1) / 2
			}
			for seed := range n {
				want := onCPU(t, &c, seed)
				lib.twin(seed+1, seed%2 == 0, "")
				dev, err := c.open(Options{Limits: benchLimits, Eager: seed%2 == 1})
				if err != nil {
					t.Fatal(err)
				}
				got, err := c.run(dev, seed)
				if err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				if seed == 0 {
					sitesOf[c.name] = lib.sites()
				}
				if d, wrong := c.wrong(got, want); wrong {
					t.Errorf("seed %d: off by %.2g", seed, d)
				}
				dev.Close()
			}
		})
	}
}

func openTwin(t *testing.T) *library {
	t.Helper()
	lib, err := openLibrary(libraryPath)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lib.twin(1, true, "") })
	return lib
}

// The twin reports faults of a kernel that are more than a wrong result.
func TestTwinSeesFaults(t *testing.T) {
	lib := openTwin(t)
	for kind, want := range []string{"different masks", "a mask without its caller", "deadlock", "at different barriers", "at different operations", "read before it landed",
		"not the result of kernels one after the other", "not the result of kernels one after the other", "without a wait for the previous kernel"} {
		for _, deferred := range []bool{true, false} {
			got, ok := lib.fault(kind, deferred)
			switch {
			case !ok && kind == 0:
				t.Log("a GPU has no kernels with faults")
				return
			case kind == 5 && !deferred: // a copy that lands at once hides it: so both are run
				want = ""
			}
			if !ok || want == "" && got != "" || !strings.Contains(got, want) {
				t.Errorf("kind %d, deferred %v: noticed %q, want %q", kind, deferred, got, want)
			}
		}
	}
}

// play runs a case on the twin with one barrier left out, or none, and returns its results.
func (c *kernelCase) play(lib *library, seed uint64, skip string) ([][]float32, error) {
	lib.twin(seed, seed%2 == 1, skip)
	dev, err := c.open(Options{Limits: benchLimits})
	if err != nil {
		return nil, err
	}
	defer dev.Close()
	return c.run(dev, 0)
}

// A barrier, or a wait for copies, that is left out is noticed: by a wrong result, by
// the twin, or because the process does not survive it. So each is left out in a
// process of its own; see mutant.
func TestBarriersAreNeeded(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: starts a process for each barrier")
	}
	lib, dev := openTwin(t), openGPU(t, Options{Limits: benchLimits})
	twin := dev.info.twin != 0
	dev.Close()
	if !twin {
		t.Log("a GPU has no barriers that can be left out")
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	unnoticed := map[string]bool{}
	for i, c := range kernelCases() {
		if _, known := sitesOf[c.name]; !known { // TestKernels compares the results of the same run
			if _, err := c.play(lib, 1, ""); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			sitesOf[c.name] = lib.sites()
		}
		for site := range strings.Lines(sitesOf[c.name]) {
			site = strings.TrimSpace(site)
			if quiet, tried := unnoticed[site]; tried && !quiet {
				continue
			}
			cmd := exec.Command(exe)
			cmd.Env = append(os.Environ(), "TANDEM_CUDA_LIBRARY="+libraryPath, "TANDEM_CUDA_BLAS="+blasPath, fmt.Sprintf("TANDEM_CUDA_MUTANT=%d %s", i, site))
			err := cmd.Run()
			if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() == mutantBroken {
				t.Fatalf("%s, %s: the process did not run the case: %v", c.name, site, err)
			}
			unnoticed[site] = err == nil
		}
	}
	for site, quiet := range unnoticed {
		if quiet {
			t.Errorf("%s is left out unnoticed", site)
		}
	}
	for _, site := range waitSites(t) {
		if _, met := unnoticed[site]; !met {
			t.Errorf("%s: no graph of a case has this kernel behind another one", site)
		}
	}
	t.Logf("%d barriers and waits, each of them missed when left out", len(unnoticed))
}

// waitSites returns the places in kernels of the waits for the previous kernel.
func waitSites(t *testing.T) (all []string) {
	files, err := filepath.Glob("../../../cuda/kernels/*.cuh")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			if strings.Contains(line, "wait_previous();") {
				all = append(all, fmt.Sprintf("%s:%d", filepath.Base(f), i+1))
			}
		}
	}
	if len(all) < 30 {
		t.Fatalf("%d kernels wait for the previous one", len(all))
	}
	return all
}

// mutantBroken is the status of a mutant that did not run its case.
const mutantBroken = 125

// mutant runs a case without a barrier, in a few orders of threads, and returns the process's
// status: 0 if the fault was not detected.
func mutant(what string) int {
	var at int
	var site string
	if _, err := fmt.Sscan(what, &at, &site); err != nil {
		return mutantBroken
	}
	c := kernelCases()[at]
	lib, err := openLibrary(libraryPath)
	if err != nil {
		return mutantBroken
	}
	host, err := cpu.New(cpu.Options{Limits: benchLimits, Threads: 1})
	if err != nil {
		return mutantBroken
	}
	var want [][]float32 // not needed for an error of the twin
	for seed := range uint64(3) {
		got, err := c.play(lib, seed+1, site)
		if err != nil {
			return 1
		}
		if want == nil {
			if want, err = c.run(widened{host}, 0); err != nil {
				return mutantBroken
			}
		}
		if _, wrong := c.wrong(got, want); wrong {
			return 1
		}
	}
	return 0
}
