package model

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// loadFP8KV loads a checkpoint with KV in FP8.
func loadFP8KV(t testing.TB, src *Source, kernels string) (*Model, error) {
	t.Helper()
	dev, err := cpu.New(cpu.Options{Threads: 1, Limits: testLimits, Kernels: kernels, Mapped: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dev.Close() })
	m, err := Load(src, dev, testLimits, Options{})
	if err != nil {
		return nil, err
	}
	kv := testKV(&m.config)
	kv.DType = backend.FP8
	if err := dev.AllocKV(kv); err != nil {
		t.Fatal(err)
	}
	return m, m.ScaleKV(src)
}

// vector returns numbers as an F32 tensor.
func vector(shape []int, values ...float32) safetensors.Tensor {
	t := safetensors.Tensor{DType: "F32", Shape: shape}
	for _, v := range values {
		t.Data = binary.LittleEndian.AppendUint32(t.Data, math.Float32bits(v))
	}
	return t
}

// withScales returns a checkpoint with scales of keys and values.
func withScales(t testing.TB, name string, scales map[string]safetensors.Tensor) *Source {
	t.Helper()
	src, err := OpenFS(memoryCopy(t, name, nil, func(all map[string]safetensors.Tensor) {
		for layer := range 8 {
			if _, ok := all[fmt.Sprintf("model.layers.%d.input_layernorm.weight", layer)]; !ok {
				break
			}
			for n, s := range scales {
				n = fmt.Sprintf("model.layers.%d.self_attn.%s", layer, n)
				s.Name = n
				all[n] = s
			}
		}
	}), name)
	if err != nil {
		t.Fatal(err)
	}
	return src
}

// errorOf returns the error of the logits of all goldens, the root of the mean square over that of
// the logits less their mean, and the digest of their bits.
func errorOf(t testing.TB, m *Model, g goldens, chunks func() int) (off float64, bits uint64) {
	t.Helper()
	sum, errors, size := xxhash.New(), 0.0, 0.0
	for i := range g.Cases {
		c := &g.Cases[i]
		s := newSequence(m, c.Prompt, uint64(i))
		s.sum = sum
		for s.done < len(c.Prompt) {
			first := slices.IndexFunc(c.Positions, func(p int) bool { return p >= s.done })
			logits, _ := s.step(t, min(chunks(), len(c.Prompt)-s.done), c.Positions)
			for r, row := range logits {
				mean := 0.0
				for _, v := range c.Logits[first+r] {
					mean += float64(v) / float64(len(row))
				}
				for j, v := range row {
					want := float64(c.Logits[first+r][j])
					errors, size = errors+(float64(v)-want)*(float64(v)-want), size+(want-mean)*(want-mean)
				}
			}
		}
	}
	return math.Sqrt(errors / size), sum.Sum64()
}

// KV in FP8 changes logits within a bound of each checkpoint, the same bits however prompts are cut,
// and nearly the same in every variant. E4M3 has steps of an eighth, so that a key or value is off
// by at most a sixteenth.
func TestKVInFP8(t *testing.T) {
	for name, most := range map[string]float64{"gqa-tied": 0.11, "mistral-window": 0.056, "gpt-oss-mxfp4": 0.062, "gemma4-ple": 0.15, "deepseek": 0.3} {
		t.Run(name, func(t *testing.T) {
			src, want := openCheckpoint(t, name), readGoldens(t, name)
			for _, kernels := range kernelsToTest() {
				m, err := loadFP8KV(t, src, kernels)
				if err != nil {
					t.Fatal(err)
				}
				all := map[uint64]bool{}
				for how, chunks := range chunkings(1) {
					if how == "blocks" || how == "single" && kernels != kernelsToTest()[0] {
						continue
					}
					off, bits := errorOf(t, m, want, chunks)
					if all[bits] = true; off > most || off < most/2 {
						t.Errorf("%s, %s: logits are off by %.4f, want at most %g", kernels, how, off, most)
					}
				}
				if len(all) > 1 {
					t.Errorf("%s: the bits of the logits depend on how prompts are cut", kernels)
				}
			}
		})
	}
}

// Scales of a checkpoint are read under each name, of all heads or of each, and used: with scales
// that suit its keys and values logits stay as close as without, and with those that do not they
// are far off.
func TestKVScales(t *testing.T) {
	const name, heads = "gqa-tied", 2
	want := readGoldens(t, name)
	errorWith := func(scales map[string]safetensors.Tensor) float64 {
		m, err := loadFP8KV(t, withScales(t, name, scales), cpu.Auto)
		if err != nil {
			t.Fatalf("%v: %v", scales, err)
		}
		off, _ := errorOf(t, m, want, chunkings(1)["whole"])
		return off
	}
	plain := errorWith(nil)
	for _, names := range [][2]string{{"k_scale", "v_scale"}, {"attn.k_scale", "attn.v_scale"}, {"k_proj.k_scale", "v_proj.v_scale"}, {"k_proj.output_scale", "v_proj.output_scale"}} {
		if off := errorWith(map[string]safetensors.Tensor{names[0]: vector([]int{1}, 0.25), names[1]: vector(nil, 0.125)}); off > 1.2*plain || off == plain {
			t.Errorf("%v: logits are off by %g, by %g without scales", names, off, plain)
		}
		for i, n := range names { // values beyond 448 times the scale are cut off
			if off := errorWith(map[string]safetensors.Tensor{n: vector([]int{heads, 1, 1}, 1, 1e-5)}); off < 3*plain {
				t.Errorf("%s: logits are off by %g, by %g without scales: scale %d is not used", n, off, plain, i)
			}
		}
	}
	perHead := map[string]safetensors.Tensor{"k_scale": vector([]int{heads}, 0.5, 0.25), "v_scale": vector([]int{heads, 1, 1}, 0.125, 0.25), "q_scale": vector(nil, 7), "prob_scale": vector(nil, 1)}
	if off := errorWith(perHead); off > 1.2*plain {
		t.Errorf("scales of each head: logits are off by %g, by %g without scales", off, plain)
	}
	if off := errorWith(map[string]safetensors.Tensor{"kv_scale": vector(nil, 1e-5)}); off < 3*plain {
		t.Errorf("kv_scale: logits are off by %g, by %g without scales", off, plain)
	}
	for what, scales := range map[string]map[string]safetensors.Tensor{
		"no scale of values": {"v_scale": vector([]int{0})},
		"heads":              {"k_scale": vector([]int{3}, 1, 1, 1)},
		"zero":               {"k_scale": vector(nil, 0)},
		"negative":           {"v_scale": vector([]int{heads}, 1, -1)},
		"NaN":                {"v_scale": vector(nil, float32(math.NaN()))},
		"type":               {"k_scale": {DType: "I32", Shape: []int{1}, Data: make([]byte, 4)}},
	} {
		if _, err := loadFP8KV(t, withScales(t, name, scales), cpu.Auto); !errors.Is(err, ErrWeights) || !strings.Contains(err.Error(), "_scale") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// The scale of a model with one KV head is a number without a shape.
func TestKVScaleOfOneHead(t *testing.T) {
	src := withScales(t, "gemma", map[string]safetensors.Tensor{"k_scale": vector(nil, 3), "v_scale": vector([]int{1}, 5)})
	if heads := src.Config.dims().kvHeads; heads.of != 1 {
		t.Fatalf("%d heads", heads.of)
	}
	checkpoint, err := src.weights()
	if err != nil {
		t.Fatal(err)
	}
	for want, names := range map[float32][]string{3: keyScales, 5: valueScales} {
		if got, _, err := src.Config.layerScales(checkpoint, 0, names); err != nil || !slices.Equal(got, []float32{want}) {
			t.Errorf("%v, %v, want %v", got, err, want)
		}
	}
}

// Each rank has the scales of its heads.
func TestKVScalesOfRanks(t *testing.T) {
	src := withScales(t, "gqa-tied", map[string]safetensors.Tensor{"k_scale": vector([]int{2}, 3, 5)})
	checkpoint, err := src.weights()
	if err != nil {
		t.Fatal(err)
	}
	for ranks, want := range map[int][]float32{1: {3, 5}, 2: {3, 5}, 4: {3, 3, 5, 5}} {
		var got []float32
		for r := range ranks {
			c, err := Shard{r, ranks}.Of(&src.Config)
			if err != nil {
				t.Fatal(err)
			}
			scales, _, err := c.layerScales(checkpoint, 1, keyScales)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, scales...)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%d ranks: %v, want %v", ranks, got, want)
		}
	}
}
