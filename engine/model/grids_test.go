package model

import (
	"math"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
)

// keptGrids are the matrices of checkpoints that stay as integers.
var keptGrids = map[string]int{
	"quantized/gptq-4": 14, "quantized/gptq-4-zeros-8": 0, "quantized/gptq-4-act-order": 14, "quantized/gptq-8": 14, "quantized/awq": 14,
	"quantized/w4a16": 14, "quantized/w4a16-act-order": 14, "quantized/w8a8": 14, "quantized/nvfp4": 14, "quantized/modelopt-nvfp4": 14, "quantized/modelopt-fp8": 0,
	"gguf/llama": 14, "gguf/qwen2": 12, "gguf/qwen3": 6, "gguf/qwen3moe": 32,
}

// openQuantized opens a checkpoint of testdata/quantized or a file of testdata/gguf.
func openQuantized(t testing.TB, name string) *Source {
	t.Helper()
	if filepath.Dir(name) == "gguf" {
		return openGGUFCheckpoint(t, filepath.Base(name))
	}
	return openCheckpoint(t, name)
}

// Matrices that stay as integers have the weights of those that are expanded, whole and in parts,
// and on every kernel and on two ranks they give nearly the logits of float32: the mean divergence
// over 600 positions is at most 0.005.
func TestGrids(t *testing.T) {
	for name, want := range keptGrids {
		t.Run(name, func(t *testing.T) {
			src, wide, g := openQuantized(t, name), openQuantized(t, name), readGoldensOf(t, name)
			wide.ExpandIntegers()
			if kept := checkGrids(t, src); kept != want || src.KeepsIntegers(AsStored) != (want > 0) || wide.KeepsIntegers(AsStored) {
				t.Fatalf("%d matrices are kept, want %d", kept, want)
			}
			if want == 0 {
				return
			}
			c := g.Cases[len(g.Cases)-1]
			if len(c.Prompt) < 600 {
				t.Fatalf("the longest prompt has %d tokens", len(c.Prompt))
			}
			if len(kernelsToTest()) == 1 && kernelsToTest()[0] == cpu.Portable {
				c.Prompt = c.Prompt[:100] // the others compute 600 in a fraction of the time
			}
			exact := eachLogit(t, loadFamily(t, wide, cpu.Auto, Options{}, nil), c.Prompt)
			m := loadFamily(t, src, cpu.Auto, Options{}, nil)
			models := map[string]*Model{"alone": m, "two ranks": loadShardedWithin(t, src, 2, cpu.Auto, AsStored, familyLimits).Model}
			for how, m := range models {
				sum := 0.0
				logits := eachLogit(t, m, c.Prompt)
				for i := range exact {
					sum += kullbackLeibler(exact[i], logits[i])
				}
				t.Logf("%s: divergence %.2g", how, sum/float64(len(exact)))
				if !(sum <= 0.005*float64(len(exact))) {
					t.Errorf("%s: the divergence from float32 is %.4f", how, sum/float64(len(exact)))
				}
			}
			few := eachLogit(t, m, c.Prompt[:16])
			for _, kernels := range kernelsToTest() {
				logits := eachLogit(t, loadFamily(t, src, kernels, Options{}, nil), c.Prompt[:16])
				for i := range few {
					if d := kullbackLeibler(few[i], logits[i]); !(d <= 1e-4) {
						t.Errorf("%s: the divergence from %s is %g at position %d", kernels, m.backend.Variant(), d, i)
					}
				}
			}
			familyBytes(t, src)
		})
	}
}

// INT4 keeps the integers of a checkpoint of 4 bits and converts its vocabulary to 5 bits, in the
// memory that WeightBytes returns, and every kernel computes with it. With expanded integers it
// converts all matrices.
func TestInt4KeepsGrids(t *testing.T) {
	for _, name := range []string{"quantized/gptq-4", "quantized/gptq-4-act-order", "quantized/awq", "quantized/w4a16", "quantized/nvfp4"} {
		src, wide := openQuantized(t, name), openQuantized(t, name)
		wide.ExpandIntegers()
		for s, want := range map[*Source]map[backend.DType]int{src: {backend.GRID: 16}, wide: {backend.INT4: 14, backend.INT8: 2}} {
			held := &weighing{}
			loadFamily(t, s, cpu.Auto, Options{Quantization: INT4}, func(b backend.Backend) backend.Backend { held.Backend = b; return held })
			for as, n := range want {
				if held.types[as] != n {
					t.Errorf("%s: %d matrices of %s, want %d", name, held.types[as], as, n)
				}
			}
			if got, err := s.WeightBytes(INT4); err != nil || math.Abs(float64(got-held.bytes)) > 0.02*float64(held.bytes) {
				t.Errorf("%s: %d bytes, WeightBytes returns %d, %v", name, held.bytes, got, err)
			}
		}
		if !src.KeepsIntegers(INT4) || wide.KeepsIntegers(INT4) || src.KeepsIntegers(INT8) {
			t.Errorf("%s: KeepsIntegers", name)
		}
		prompt := []int32{1, 7, 50, 3, 90, 12, 33, 64}
		exact := eachLogit(t, loadFamily(t, wide, cpu.Auto, Options{}, nil), prompt)
		for _, kernels := range kernelsToTest() {
			for i, row := range eachLogit(t, loadFamily(t, src, kernels, Options{Quantization: INT4}, nil), prompt) {
				if d := kullbackLeibler(exact[i], row); !(d <= 0.2) {
					t.Errorf("%s: %s: the divergence is %g at position %d", name, kernels, d, i)
				}
			}
		}
	}
}

// checkGrids compares matrices that stay as integers with their expanded weights, bit for bit, and
// returns how many there are.
func checkGrids(t *testing.T, src *Source) (kept int) {
	t.Helper()
	c, err := src.weights()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range src.Config.network().weights() {
		s, fault := find(c, b.name, &src.Config)
		if fault != "" {
			t.Fatal(fault)
		}
		if s.grid == nil {
			continue
		}
		kept++
		out, in := s.Shape[0], s.Shape[1]
		cols := part{of: in, from: in / 2 / s.grid.Unit() * s.grid.Unit()}
		cols.n = in - cols.from
		if !s.keeps(cols) {
			cols = whole(in)
		}
		rows := []int{out - 1, 0, out / 2}
		bind := binding{shape: s.Shape, parts: []part{whole(len(rows)), cols}, rows: rows}
		tn := s.part(&bind, 0)
		if tn.DType != backend.GRID || !slices.Equal(tn.Shape, []int{len(rows), cols.n}) {
			t.Fatalf("%s: a part is %s %v", b.name, tn.DType, tn.Shape)
		}
		want, got, row := make([]float32, in), make([]float32, cols.n), tn.Grid.NewRow(cols.n)
		for i, n := range rows {
			s.rows(want, n)
			tn.Grid.Row(row, i)
			tn.Grid.Weights(got, row)
			for j, v := range got {
				if src.Config.Integers != nil && s.made == backend.BF16 {
					v = roundBFloat(v)
				} else if src.Config.Integers != nil {
					v = roundHalf(v)
				}
				if w := want[cols.from+j]; v != w {
					t.Fatalf("%s: weight [%d, %d] is %g, expanded %g", b.name, n, cols.from+j, v, w)
				}
			}
		}
	}
	return kept
}

// eachLogit returns the logits of every position of a prompt.
func eachLogit(t testing.TB, m *Model, prompt []int32) (all [][]float32) {
	t.Helper()
	s := newSequenceWithin(m, familyLimits, prompt, 1)
	for s.done < len(prompt) {
		n := min(familyLimits.Outputs, len(prompt)-s.done)
		var want []int
		for i := range n {
			want = append(want, s.done+i)
		}
		logits, _ := s.step(t, n, want)
		all = append(all, logits...)
	}
	return all
}

// Routers and gates are expanded: a product with rounded activations could choose other experts, or
// change all numbers of a head.
func TestGatesExpand(t *testing.T) {
	g := &backend.Grid{Kind: backend.GridZeros, Bits: 4, Group: 64, Row: func(*backend.GridRow, int) {}}
	s := stored{rows: func([]float32, int) {}, made: backend.BF16, grid: g}
	for out, want := range map[string]backend.DType{"experts": backend.BF16, "gates": backend.BF16, "one": backend.BF16, "ffn": backend.GRID} {
		b := binding{out: out, shape: []int{2, 64}, parts: []part{whole(2), whole(64)}}
		if got := s.part(&b, 0).DType; got != want {
			t.Errorf("%s: %s, want %s", out, got, want)
		}
	}
}
