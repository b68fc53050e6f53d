//go:build cgo && linux

package cuda

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/model"
)

// A result stays fp32 if anything but products reads it, if another product would need the place of
// such results before the last one reads it, or if the host may read it.
func TestHalve(t *testing.T) {
	linear := func(from, to address) op { return op{kind: opLinear, n: 8, k: 8, a: from, w: 2, dst: to} }
	norm := op{kind: opNorm, n: 8, dim: 8, a: 1, dst: 10}
	gated := op{kind: opLinear, act: 1, n: 8, k: 8, a: 1, dst: 10, more: [2]joined{{dst: 11, n: 8}}}
	joined := linear(10, 20)
	joined.more[0] = gated.more[0]
	for _, c := range []struct {
		name string
		ops  []op
		mark int // of the end of a part; 0: none
		want []int32
	}{
		{"a product", []op{norm, linear(10, 11), norm}, 0, []int32{1}},
		{"its last reader", []op{norm, linear(10, 11), linear(10, 12), {kind: opPlace, dst: 11, a: 12}, norm}, 0, []int32{2}},
		{"attention", []op{{kind: opAttention, dst: 10, a: 1}, linear(10, 11), {kind: opAttention, dst: 10, a: 1}}, 0, []int32{1}},
		{"an activation", []op{{kind: opGatedAct, dst: 10, a: 10, b: 11}, linear(10, 12), linear(1, 10)}, 0, []int32{1}},
		{"a gate", []op{gated, linear(10, 12), gated}, 0, []int32{1}},
		{"one after the other", []op{norm, {kind: opLinear, act: 1, a: 10, dst: 12}, linear(12, 13), linear(1, 12), norm}, 0, []int32{1, 1}},
		{"heads", []op{{kind: opNorm, n: 8, dim: 4, a: 10, dst: 10}, linear(10, 11), norm}, 0, []int32{0}},
		{"nothing", []op{norm, norm}, 0, []int32{0}},
		{"the host", []op{norm, linear(10, 11)}, 0, []int32{0}},
		{"experts", []op{norm, {kind: opScatter, a: 10, dst: 12}, linear(10, 11), norm}, 0, []int32{0}},
		{"experts' table", []op{norm, {kind: opLinear, table: 3, a: 10, dst: 11}, norm}, 0, []int32{0}},
		{"experts' gate", []op{{kind: opLinear, act: 1, table: 3, a: 1, dst: 10}, linear(10, 11), linear(1, 10)}, 0, []int32{0}},
		{"an adapter", []op{norm, linear(10, 11), {kind: opAdapt, a: 10, dst: 11}, norm}, 0, []int32{0}},
		{"an adapter's sum", []op{{kind: opGatedAct, dst: 10}, linear(10, 12), {kind: opAdapt, a: 1, dst: 12, more: gated.more}, {kind: opAdapt, a: 1, dst: 10}}, 0, []int32{0}},
		{"a residual", []op{norm, linear(10, 11), {kind: opAdd, a: 12, b: 10, dst: 12}, norm}, 0, []int32{0}},
		{"all ranks", []op{norm, linear(10, 11), {kind: opAllReduce, dst: 10}, norm}, 0, []int32{0}},
		{"a norm of itself", []op{{kind: opNorm, n: 8, dim: 8, a: 12, dst: 12}, linear(12, 11), {kind: opNorm, n: 8, dim: 8, a: 12, dst: 12}}, 0, []int32{0}},
		{"another product", []op{norm, linear(1, 11), linear(10, 12), norm}, 0, []int32{0}},
		{"another product behind", []op{norm, linear(10, 12), linear(1, 11), norm}, 0, []int32{1}},
		{"a joined matrix", []op{{kind: opGatedAct, dst: 11}, linear(11, 12), joined, linear(1, 11)}, 0, []int32{0}},
		{"a part's end", []op{norm, linear(10, 11), linear(10, 12), norm}, 2, []int32{0}},
		{"a part's end behind", []op{norm, linear(10, 11), linear(10, 12), norm}, 3, []int32{2}},
		{"a part's beginning", []op{linear(1, 12), norm, linear(10, 11), norm}, 1, []int32{0, 1}},
		{"the place is taken", []op{norm, linear(10, 11), gated, norm}, 0, []int32{1}},
		{"the place is not free", []op{{kind: opNorm, n: 8, dim: 8, a: 1, dst: 20}, {kind: opAttention, dst: 10}, linear(20, 21), linear(10, 11), {kind: opAttention, dst: 10}, {kind: opNorm, n: 8, dim: 8, dst: 20}}, 0, []int32{2, 0}},
	} {
		marks := []stop{}
		if c.mark > 0 {
			marks = append(marks, stop{at: c.mark})
		}
		halve(c.ops, marks)
		for i, o := range c.ops {
			want := int32(0)
			if i < len(c.want) {
				want = c.want[i]
			}
			if o.halves != want {
				t.Errorf("%s: operation %d has %d, want %d", c.name, i, o.halves, want)
			}
		}
	}
}

// lt returns the path of the cuBLASLt to open: the stub on the twin, because a GPU's memory is not
// the stub's.
func lt(t *testing.T) string {
	t.Helper()
	if os.Getenv("TANDEM_CUDA_LIBRARY") != "" {
		return BLASAuto
	}
	return stub(t)
}

// halvesCase is two layers, over bf16 KV or fp32 KV. Their buffers are the same, so that the first
// one's results are written again.
func halvesCase(name string, single bool, kv backend.DType, heads, kvHeads, dim int, types ...backend.DType) kernelCase {
	const hidden, inner = 128, 96
	spec := func(*rand.Rand) backend.KVSpec { return backend.UniformKV(1, 120, 16, kvHeads, dim, kv) }
	return kernelCase{name: name, rows: 90, single: single, kv: spec, make: func(b *bench) func() {
		x, normed, delta := b.input(hidden, 1), b.output(hidden), b.output(hidden)
		b.results = append(b.results, x)
		q, k, v, attn, gate, up := b.buf(heads*dim), b.buf(kvHeads*dim), b.buf(kvHeads*dim), b.output(heads*dim), b.output(inner), b.buf(inner)
		matrix := func(i, out, in int) backend.Weight {
			return b.weight(types[i%len(types)], 1/math.Sqrt(float64(in)), out, in)
		}
		n, bias := b.weight(backend.BF16, 1, hidden), b.weight(backend.F32, 1, hidden)
		wq, wk, wv, wo := matrix(0, heads*dim, hidden), matrix(0, kvHeads*dim, hidden), matrix(0, kvHeads*dim, hidden), matrix(1, hidden, heads*dim)
		wu, wg, wd := matrix(2, inner, hidden), matrix(2, inner, hidden), matrix(3, hidden, inner)
		r := &backend.Rope{InvFreq: []float32{1, 0.3, 0.1, 0.01}, Scale: 1.2}
		return func() {
			b.RMSNorm(normed, x, n, 1e-5)
			for range 2 {
				b.Linear(q, normed, wq, backend.NoWeight)
				b.Linear(k, normed, wk, backend.NoWeight)
				b.Linear(v, normed, wv, backend.NoWeight)
				b.Rope(q, heads, dim, r)
				b.Rope(k, kvHeads, dim, r)
				b.StoreKV(0, k, v)
				b.Attention(attn, q, backend.AttentionSpec{Heads: heads, KVHeads: kvHeads, HeadDim: dim, Scale: 0.3})
				b.Linear(delta, attn, wo, bias)
				b.AddRMSNorm(normed, x, delta, n, 1e-5)
				b.Linear(gate, normed, wg, backend.NoWeight)
				b.Linear(up, normed, wu, backend.NoWeight)
				b.GatedAct(gate, gate, up, backend.Act(kvHeads%3))
				b.Linear(delta, gate, wd, backend.NoWeight)
				b.AddRMSNorm(normed, x, delta, n, 1e-6)
			}
		}
	}}
}

// Results in bf16 give the bits of results that are converted to it, and cuBLASLt gives those of two
// products for a gate and the matrix that it gates (that of a GPU may not). With and without graphs,
// with matrices that are widened, in steps with prompts and of single rows.
func TestHalvesBits(t *testing.T) {
	path := lt(t)
	for _, c := range []kernelCase{
		halvesCase("graph", false, backend.BF16, 4, 2, 64, backend.BF16),
		halvesCase("widened", true, backend.BF16, 4, 1, 64, backend.INT8, backend.BF16, backend.BF16, backend.FP8),
		halvesCase("float32", true, backend.F32, 3, 3, 40, backend.BF16, backend.INT4, backend.INT4),
	} {
		t.Run(c.name, func(t *testing.T) {
			var results [2][][]float32
			for i, batch := range []string{singles, anyBatch} {
				t.Setenv("TANDEM_STUB_LT_BATCH", batch)
				dev, err := c.open(Options{Limits: benchLimits, BLAS: path, wide: i == 0})
				if err != nil {
					t.Fatal(err)
				}
				if results[i], err = c.run(dev, 4); err != nil {
					t.Fatal(err)
				}
				if i == 1 {
					unwritten(t, dev, backend.Key{Tokens: c.rows})
				}
				dev.Close()
			}
			sameBits(t, results[1], results[0])
		})
	}
}

// Values of TANDEM_STUB_LT_BATCH: for which numbers of products the stub of cuBLASLt has algorithms.
const anyBatch, singles, pairs = "0", "1", "2"

// sameBits compares results, which must all be numbers.
func sameBits(t *testing.T, got, want [][]float32) {
	t.Helper()
	for i := range want {
		if j := differ(got[i], want[i]); j >= 0 {
			t.Fatalf("number %d of result %d is %v, want %v", j, i, got[i][j], want[i][j])
		}
	}
}

// differ returns the first number that is none, or whose bits differ; -1: there is none.
func differ(got, want []float32) int {
	for i, v := range want {
		if v != v || math.Float32bits(got[i]) != math.Float32bits(v) {
			return i
		}
	}
	return -1
}

// unwritten runs a device's last step again, up to the product behind each result that may be bf16.
// Nothing is written where the result would have been, and the product's result is a number.
func unwritten(t *testing.T, dev *CUDA, key backend.Key) {
	t.Helper()
	var kinds []opKind
	p, which, rows := dev.plans[key], int(dev.step.number)&1, dev.step.tokens
	is := func(v float32) bool { return v == v }
	for i, o := range p.ops {
		if o.halves == 0 {
			continue
		}
		if kinds = append(kinds, o.kind); o.kind == opLinear { // the gate itself is written there
			continue
		}
		end := i + int(o.halves)
		reader := p.ops[end]
		result, product := make([]float32, rows*int(o.n)), make([]float32, rows*int(reader.n))
		for _, v := range [][]float32{result, product} {
			for j := range v {
				v[j] = float32(math.NaN())
			}
		}
		ok := dev.dev.run(p.eager, which, 0, i) && dev.dev.upload(o.dst, raw(result)) && dev.dev.upload(reader.dst, raw(product)) &&
			dev.dev.run(p.eager, which, i, end+1) && dev.dev.download(raw(result), o.dst) && dev.dev.download(raw(product), reader.dst)
		if !ok {
			t.Fatal(dev.failed("part of a plan"))
		}
		if slices.ContainsFunc(result, is) || !slices.ContainsFunc(product, is) || differ(product, product) >= 0 {
			t.Errorf("operation %d of kind %d was written, or the product that reads it was not", i, o.kind)
		}
	}
	if want := []opKind{opNorm, opAttention, opNorm, opLinear, opNorm, opNorm}; !slices.Equal(kinds, want) {
		t.Errorf("results of %v may be bf16, want %v", kinds, want)
	}
}

// One call of cuBLASLt computes a gate and the matrix that it gates, wherever both are, unless only
// one has a bias. What has no algorithm is computed otherwise. The plan is a graph.
func TestPairs(t *testing.T) {
	if os.Getenv("TANDEM_CUDA_LIBRARY") != "" {
		t.Log("needs the stub of cuBLASLt")
		return
	}
	const rows, in, inner, out = 12, 96, 72, 33 // the last product is none of cuBLASLt
	path := stub(t)
	for _, turned := range []bool{false, true} {
		for biases := range 3 {
			run := func(blas string, wide bool, batch string) [][]float32 {
				t.Setenv("TANDEM_STUB_LT_BATCH", batch)
				dev, err := (&kernelCase{}).open(Options{Limits: benchLimits, BLAS: blas, wide: wide})
				if err != nil {
					t.Fatal(err)
				}
				defer dev.Close()
				b := &bench{Backend: dev, rng: rand.New(rand.NewPCG(1, 9)), rows: rows}
				x, normed, gate, up, y := b.input(in, 1), b.buf(in), b.buf(inner), b.buf(inner), b.output(out)
				w, v, down := b.weight(backend.BF16, 0.1, inner, in), b.weight(backend.BF16, 0.1, inner, in), b.weight(backend.BF16, 0.1, out, inner)
				bias := []backend.Weight{backend.NoWeight, backend.NoWeight}
				for i := range biases {
					bias[i] = b.weight(backend.F32, 1, inner)
				}
				if turned {
					w, v = v, w
				}
				b.must(dev.Replay(backend.Key{Tokens: rows, Outputs: rows}, plainStep(b.rng, rows), func() {
					b.inputs[0]()
					for range 2 {
						b.RMSNorm(normed, x, backend.NoWeight, 1e-5)
						b.Linear(gate, normed, w, bias[0])
						b.Linear(up, normed, v, bias[1])
						b.GatedAct(gate, gate, up, backend.SiLU)
						b.Linear(y, gate, down, backend.NoWeight)
					}
				}, nil))
				return [][]float32{dev.Download(nil, y)}
			}
			apart, gemm := run(path, true, singles), run(BLASNone, true, anyBatch)
			if d := off(apart, gemm); d < 1e-4 {
				t.Fatalf("off by %.2g: cuBLASLt was not asked", d)
			}
			sameBits(t, run(path, false, singles), apart)
			sameBits(t, run(path, false, anyBatch), apart)
			if biases == 1 {
				apart = gemm
			}
			sameBits(t, run(path, false, pairs), apart)
		}
	}
}

// Every model draws the same tokens from the same bits over bf16 KV, whether results are in bf16 or
// are converted to it, and whatever shares a step.
func TestHalvesModels(t *testing.T) {
	folders, err := filepath.Glob("../../model/testdata/*/config.json")
	if err != nil || len(folders) < 10 {
		t.Fatal(folders, err)
	}
	path, halved := lt(t), 0
	for i, config := range folders {
		if testing.Short() && i%3 > 0 {
			continue
		}
		dir := filepath.Dir(config)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			src, err := model.OpenDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { src.Close() })
			var seats [2]*seat
			for i := range seats {
				seats[i] = sitAs(t, src, openGPU(t, Options{Limits: modelLimits, BLAS: path, Eager: true, wide: i == 0}), backend.BF16, model.Options{Quantization: made[filepath.Base(dir)]})
			}
			sameSteps(t, src, seats, 2)
			for _, p := range seats[1].Backend.(*CUDA).plans {
				for _, o := range p.ops {
					halved += min(1, int(o.halves))
				}
			}
		})
	}
	if halved < 100 {
		t.Errorf("only %d results of all models may be bf16", halved)
	}
}

// sameSteps compares the logits and draws of two models.
func sameSteps(t *testing.T, src *model.Source, seats [2]*seat, steps int) {
	t.Helper()
	rng, spec := rand.New(rand.NewPCG(2, uint64(src.Config.Layers))), kvSpec(src, backend.BF16)
	talks := newTalks(rng, seats[0].VocabSize(), spec)
	for _, k := range talks {
		k.tokens = k.tokens[:min(len(k.tokens), 10)]
	}
	for range steps {
		step, who := load(rng, talks, spec)
		if len(step.Tokens) == 0 {
			continue
		}
		var logits [2][]float32
		var sampled [2][]int32
		for i, m := range seats {
			if err := m.Step(step, nil); err != nil {
				t.Fatal(err)
			}
			logits[i], sampled[i] = m.Download(nil, m.Logits()), slices.Clone(step.Sampled)
		}
		if at := differ(logits[1], logits[0]); at >= 0 {
			t.Fatalf("logit %d of %d rows is %v, want %v", at, len(step.Tokens), logits[1][at], logits[0][at])
		}
		if !slices.Equal(sampled[0], sampled[1]) {
			t.Errorf("tokens %v are drawn, want %v", sampled[1], sampled[0])
		}
		for i, k := range who {
			if k.tokens = append(k.tokens, sampled[0][i]); k.params.Controls != nil {
				k.params.Controls.Add(sampled[0][i])
			}
		}
	}
}
