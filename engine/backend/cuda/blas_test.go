//go:build cgo && linux

package cuda

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	kernels "github.com/tandem-serving/tandem/cuda"
	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/model"
)

// stub returns the path of the emulation of cuBLASLt, which multiplies in the twin's memory.
func stub(t *testing.T) string {
	t.Helper()
	if os.Getenv("TANDEM_CUDA_LIBRARY") != "" {
		t.Skip("a GPU's memory is not the emulation's")
	}
	sanitizers := ""
	if os.Getenv("TANDEM_CUDA_SANITIZE") != "" {
		sanitizers = kernels.Sanitizers
	}
	path, err := kernels.BlasStub("../../..", sanitizers)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Products of many rows go to cuBLASLt where it is opened, with biases, from
// activations that are shared and from those that have changed since, as far as bf16
// carries; what it is not for stays as it was.
func TestBLAS(t *testing.T) {
	path := stub(t)
	for _, try := range []struct {
		rows, bucket int
	}{{3, 0}, {70, 0}, {90, 0}, {8, 90}, {9, 0}, {21, 90}, {80, 90}} {
		rows := try.rows
		c := kernelCase{rows: rows, bucket: try.bucket, single: try.bucket > 0, make: func(b *bench) func() {
			x, y, z, q := b.input(96, 1), b.output(64), b.output(40), b.output(72)
			w, v, u := b.weight(backend.BF16, 0.1, 64, 96), b.weight(backend.BF16, 0.1, 40, 96), b.weight(backend.BF16, 0.1, 72, 64)
			odd, fp32 := b.weight(backend.BF16, 0.1, 33, 96), b.weight(backend.F32, 0.1, 16, 96)
			s, i8, i4 := b.weight(backend.FP8, 0.02, 48, 72), b.weight(backend.INT8, 0.1, 40, 72), b.weight(backend.INT4, 0.1, 80, 96)
			e, g, h := b.output(48), b.output(40), b.output(80)
			o, f, again, bias := b.output(33), b.output(16), b.output(64), b.weight(backend.F32, 1, 64)
			return func() {
				b.Linear(y, x, w, bias)
				b.Linear(z, x, v, backend.NoWeight)
				b.Linear(q, y, u, backend.NoWeight)
				b.Linear(e, q, s, backend.NoWeight)
				b.Linear(g, q, i8, backend.NoWeight)
				b.Linear(h, x, i4, backend.NoWeight)
				b.Linear(o, x, odd, backend.NoWeight)
				b.Linear(f, x, fp32, backend.NoWeight)
				b.Scale(x, 2) // the narrowed rows are old now
				b.Linear(again, x, w, backend.NoWeight)
			}
		}}
		want := onCPU(t, &c, 1)
		for _, eager := range []bool{false, true} {
			dev, err := c.open(Options{Limits: benchLimits, Eager: eager, BLAS: path})
			if err != nil {
				t.Fatal(err)
			}
			if v, err := dev.BLAS(); v != 130002 || err != nil {
				t.Fatalf("version %d, %v", v, err)
			}
			got, err := c.run(dev, 1)
			if err != nil {
				t.Fatal(err)
			}
			d, most, least := off(got, want), near, 0.0
			if rows > 8 {
				most, least = 2e-2, 1e-4 // else it was not asked
			}
			if d > most || d < least {
				t.Errorf("%d rows: off by %.2g, want %.2g to %.2g", rows, d, least, most)
			}
			if !strings.Contains(dev.Variant(), "-lt130002-") {
				t.Errorf("variant %s", dev.Variant())
			}
			dev.Close()
		}
	}
}

// What is no cuBLASLt is refused where it was asked for by its path, and passed over
// where it was not; versions before 12 are none.
func TestBLASRefused(t *testing.T) {
	limits := backend.Limits{Tokens: 4, Outputs: 4, Seqs: 1, Blocks: 1}
	for _, path := range []string{"testdata/none.so", libraryPath} {
		if c, err := New(Options{Library: libraryPath, Limits: limits, BLAS: path}); !errors.Is(err, backend.ErrNoDevice) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, %v", path, c, err)
		}
	}
	if _, err := New(Options{Library: libraryPath, Limits: limits, BLAS: stub(t), Deterministic: true}); !errors.Is(err, backend.ErrShape) {
		t.Errorf("with one order: %v", err)
	}
	t.Setenv("TANDEM_STUB_LT_OLD", "1")
	if _, err := New(Options{Library: libraryPath, Limits: limits, BLAS: stub(t)}); !errors.Is(err, backend.ErrNoDevice) || !strings.Contains(err.Error(), "older than 12") {
		t.Errorf("an old version: %v", err)
	}
	dev := openGPU(t, Options{Limits: limits, BLAS: BLASAuto, Deterministic: true})
	defer dev.Close()
	if v, err := dev.BLAS(); v != 0 || err == nil || !strings.Contains(dev.Variant(), "one-order") {
		t.Errorf("version %d, %v; variant %s", v, err, dev.Variant())
	}
}

// With one order for all products the bits of a row's logits are the same alone, in a chunk,
// in other chunks, and with other rows.
func TestDeterministic(t *testing.T) {
	for _, dir := range []string{"gpt-oss-mxfp4", "qwen3.5-moe", "gqa-tied"}[:determined] {
		t.Run(dir, func(t *testing.T) {
			src, err := model.OpenDir("../../model/testdata/" + dir)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { src.Close() })
			m := sit(t, src, openGPU(t, Options{Limits: modelLimits, Deterministic: true}), backend.F32)
			spec := kvSpec(src, backend.F32)
			const total = 30
			span := func(s *backend.Step, who, start, end int) {
				sp := backend.Span{Row: int32(len(s.Tokens)), Tokens: int32(end - start), Start: int32(start)}
				for g, group := range spec.Groups {
					var table []int32
					for p := range (end + group.BlockTokens - 1) / group.BlockTokens {
						table = append(table, int32((g*modelLimits.Seqs+who)*modelLimits.Blocks+p))
					}
					sp.Tables = append(sp.Tables, table)
				}
				for p := start; p < end; p++ {
					s.Tokens, s.Positions = append(s.Tokens, int32((p*7+who*13)%90)), append(s.Positions, int32(p))
				}
				if s.Spans = append(s.Spans, sp); end == total {
					s.Outputs = append(s.Outputs, backend.Output{Row: int32(len(s.Tokens) - 1), Position: total})
				}
			}
			var want []float32
			for name, cuts := range map[string][]int{"whole": {total}, "one by one at the end": {27, 28, 29, total}, "chunks": {10, 13, 29, total}} {
				for _, crowd := range []bool{false, true} {
					start := 0
					for _, end := range cuts {
						s := &backend.Step{}
						if crowd {
							span(s, 1, 0, 17)
						}
						span(s, 0, start, end)
						if crowd {
							span(s, 2, 0, 3)
						}
						s.Sampled = make([]int32, len(s.Outputs))
						if err := m.Step(s, nil); err != nil {
							t.Fatal(err)
						}
						start = end
					}
					got := m.Download(nil, m.Logits())
					if want == nil {
						want = slices.Clone(got)
					}
					if !slices.EqualFunc(got, want, func(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) }) {
						t.Errorf("%s, beside others %v: logits have other bits: %s", name, crowd, fmt.Sprint(got[:3], want[:3]))
					}
				}
			}
		})
	}
}

// The same holds for attention on tensor cores, over the bf16 KV of a sequence. Without one order,
// attend_tiles gives the same bits in chunks of any length.
func TestDeterministicAttention(t *testing.T) {
	const total, heads, kvHeads = 44, 3, 1
	for _, c := range []struct {
		dim, window int
		chunks      bool
	}{{64, 0, false}, {128, 25, false}, {256, 0, false}, {64, 0, true}, {128, 25, true}, {256, 25, true}, {512, 0, true}} {
		t.Run(fmt.Sprintf("%d/chunks=%v", c.dim, c.chunks), func(t *testing.T) {
			var want []float32
			all := [][]int{{total}, {41, 42, 43, total}, {5, 35, 43, total}, {20, 22, total}}
			if c.chunks {
				all = [][]int{{total}, {17, total}, {27, total}}
			}
			for _, cuts := range all {
				dev := openGPU(t, Options{Limits: benchLimits, Deterministic: !c.chunks, Eager: true})
				b := &bench{Backend: dev, rng: rand.New(rand.NewPCG(1, 1)), rows: total}
				b.must(dev.AllocKV(backend.UniformKV(1, 8, 16, kvHeads, c.dim, backend.BF16)))
				q, k, v, y := b.input(heads*c.dim, 1), b.input(kvHeads*c.dim, 1), b.input(kvHeads*c.dim, 1), b.output(heads*c.dim)
				a := backend.AttentionSpec{Heads: heads, KVHeads: kvHeads, HeadDim: c.dim, Scale: 0.3, Window: c.window}
				var got []float32
				start := 0
				for _, end := range cuts {
					s := &backend.Step{Spans: []backend.Span{{Tokens: int32(end - start), Start: int32(start), Tables: [][]int32{{5, 2, 7}}}}}
					for p := start; p < end; p++ {
						s.Tokens, s.Positions = append(s.Tokens, int32(p)), append(s.Positions, int32(p))
					}
					b.must(dev.Replay(backend.Key{Tokens: total}, s, func() {
						for _, f := range b.inputs {
							f()
						}
						b.StoreKV(0, k, v)
						b.Attention(y, q, a)
					}, nil))
					got = append(got, dev.Download(nil, y)...)
					start = end
				}
				if err := dev.Close(); err != nil {
					t.Fatal(err)
				}
				if want == nil {
					want = got
				}
				for i := range want {
					if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
						t.Fatalf("cuts %v: number %d of row %d is %v, in one chunk %v", cuts, i%(heads*c.dim), i/(heads*c.dim), got[i], want[i])
					}
				}
			}
		})
	}
}
