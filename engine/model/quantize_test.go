package model

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
)

// roundedLoad gives a backend float32 matrices that hold what they would mean in 8
// or 4 bits, made here from the definition, and notes what was asked for.
type roundedLoad struct {
	backend.Backend
	asked map[string]backend.DType
}

func (r *roundedLoad) Load(t backend.Tensor) (backend.Weight, error) {
	r.asked[t.Name] = t.As
	if t.As == 0 {
		return r.Backend.Load(t)
	}
	values := floatsOf(t)
	for row := range slices.Chunk(values, t.Shape[1]) {
		for group := range slices.Chunk(row, 32) {
			roundGroup(group, t.As)
		}
	}
	return r.Backend.Load(backend.Tensor{Name: t.Name, DType: backend.F32, Shape: t.Shape, Data: bytesOf(values)})
}

// roundGroup has 127 steps to the largest number in int8, and 8 to one end in int4.
func roundGroup(w []float32, as backend.DType) {
	largest := float64(0)
	for _, v := range w {
		if math.Abs(float64(v)) > math.Abs(largest) {
			largest = float64(v)
		}
	}
	step := math.Abs(largest) / 127
	least, most := -127.0, 127.0
	if as == backend.INT4 {
		// As it is stored, or numbers in the middle of two, as fp8 has many, go the other way.
		u := math.Float32bits(float32(-largest / 8))
		step, least, most = float64(math.Float32frombits((u+0x7fff+u>>16&1)&^0xffff)), -8, 7
	}
	for i, v := range w {
		if step != 0 {
			w[i] = float32(step * min(max(math.RoundToEven(float64(v)/step), least), most))
		}
	}
}

// loadQuantized is load with a quantization.
func loadQuantized(t *testing.T, src *Source, kernels string, q Quantization, wrap func(backend.Backend) backend.Backend) *Model {
	t.Helper()
	dev, err := cpu.New(cpu.Options{Threads: 1, Limits: testLimits, Kernels: kernels, Mapped: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dev.Close() })
	m, err := Load(src, wrap(dev), testLimits, Options{Quantization: q})
	if err != nil {
		t.Fatal(err)
	}
	if err := dev.AllocKV(testKV(&m.config)); err != nil {
		t.Fatal(err)
	}
	return m
}

// Every architecture in 8 and 4 bits is what it is with the rounded weights in
// float32, but for the rounding of activations.
func TestQuantizedModels(t *testing.T) {
	for _, name := range checkpoints {
		src, want := openCheckpoint(t, name), readGoldens(t, name)
		for q, bound := range map[Quantization]float64{INT8: 0.08, INT4: 0.08} {
			t.Run(fmt.Sprintf("%s/%s", name, q), func(t *testing.T) {
				reference := &roundedLoad{asked: map[string]backend.DType{}}
				exact := loadQuantized(t, src, cpu.Variants()[0], q, func(b backend.Backend) backend.Backend {
					reference.Backend = b
					return reference
				})
				rounded := loadQuantized(t, src, cpu.Variants()[0], q, func(b backend.Backend) backend.Backend { return b })
				var shares []float64
				for i := range want.Cases {
					g := &want.Cases[i]
					n := len(g.Prompt)
					a, _ := newSequence(exact, g.Prompt, 1).step(t, n, []int{n - 1})
					b, _ := newSequence(rounded, g.Prompt, 1).step(t, n, []int{n - 1})
					var off, all float64
					for j, v := range a[0] {
						off += (float64(v) - float64(b[0][j])) * (float64(v) - float64(b[0][j]))
						all += float64(v) * float64(v)
					}
					shares = append(shares, math.Sqrt(off/all))
				}
				// Where experts lie close to each other a rounding may choose others.
				slices.Sort(shares)
				if share := shares[len(shares)/2]; !(share <= bound) {
					t.Errorf("logits are off by %.4f of their size, want at most %.4f", share, bound)
				}
				checkAsked(t, q, reference.asked)
			})
		}
	}
}

// checkAsked: all matrices are made smaller but routers, and those that the words
// go through have 8 bits.
func checkAsked(t *testing.T, q Quantization, asked map[string]backend.DType) {
	t.Helper()
	smaller := 0
	for name, as := range asked {
		switch {
		case strings.Contains(name, "router"), strings.HasSuffix(name, "mlp.gate.weight"), strings.Contains(name, "norm"), strings.Contains(name, "bias"):
			if as != 0 {
				t.Errorf("%s is %s", name, as)
			}
		case strings.Contains(name, "embed_tokens"), name == "lm_head.weight":
			if as != backend.INT8 {
				t.Errorf("%s is %s, want 8 bits", name, as)
			}
		case strings.Contains(name, "proj"):
			if mxfp4 := strings.Contains(name, "blocks"); mxfp4 != (as == 0) || as != 0 && as != q.dtype() {
				t.Errorf("%s is %s", name, as)
			}
			smaller++
		}
	}
	if smaller < 4 {
		t.Errorf("only %d matrices: %v", smaller, asked)
	}
}

// What a config says of weights is what loading them takes.
func TestWeightBytes(t *testing.T) {
	for _, name := range checkpoints {
		src := openCheckpoint(t, name)
		for _, q := range []Quantization{AsStored, INT8, INT4} {
			held := &weighing{}
			loadQuantized(t, src, cpu.Variants()[0], q, func(b backend.Backend) backend.Backend {
				held.Backend = b
				return held
			})
			got, err := src.WeightBytes(q)
			if err != nil {
				t.Fatal(err)
			}
			// The config knows one type for all that is not quantized, and not that
			// DeepSeek's matrices per head, narrow in these folders, are filled up.
			most := 0.1
			if strings.HasPrefix(name, "deepseek") {
				most = 0.3
			}
			if d := math.Abs(float64(got-held.bytes)) / float64(held.bytes); d > most {
				t.Errorf("%s as %s takes %d bytes, said %d", name, q, held.bytes, got)
			}
		}
	}
}

// weighing adds up what is loaded.
type weighing struct {
	backend.Backend
	bytes int64
	types map[backend.DType]int
}

func (w *weighing) Load(t backend.Tensor) (backend.Weight, error) {
	as, in := t.DType, 1
	if t.As != 0 {
		as = t.As
	}
	if len(t.Shape) == 2 {
		in = t.Shape[1]
	}
	if t.Grid != nil {
		w.bytes += int64(t.Grid.MatrixBytes(t.Shape[0], in))
	} else {
		w.bytes += int64(as.MatrixBytes(t.Shape[0], in))
	}
	if t.Scales != nil {
		w.bytes += int64(4 * len(t.Scales.Values))
	}
	if w.types == nil {
		w.types = map[backend.DType]int{}
	}
	w.types[as]++
	return w.Backend.Load(t)
}

// floatsOf are the elements of a tensor of float32 or bfloat16.
func floatsOf(t backend.Tensor) []float32 {
	out := make([]float32, len(t.Data)/t.DType.Size())
	for i := range out {
		if t.DType == backend.BF16 {
			out[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(t.Data[2*i:])) << 16)
		} else {
			out[i] = math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*i:]))
		}
	}
	return out
}

func bytesOf(values []float32) (data []byte) {
	for _, v := range values {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
	}
	return data
}

// The largest matrix is of what every token goes through: no vocabulary, no experts.
func TestLargestMatrix(t *testing.T) {
	for dir, want := range map[string]int64{"gqa-tied": 256 * 128, "qwen3-moe": 112 * 64} { // an MLP's, of a layer without experts
		src, err := OpenDir("testdata/" + dir)
		if err != nil {
			t.Fatal(err)
		}
		if got := src.Config.LargestMatrix(); got != want {
			t.Errorf("%s: %d numbers, want %d", dir, got, want)
		}
		src.Close()
	}
}
