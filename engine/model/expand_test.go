package model

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// TestFP8Values: the table is torch's float8_e4m3fn.
func TestFP8Values(t *testing.T) {
	sum := 0.0
	for i := range 127 {
		sum += float64(backend.E4M3[i])
		if backend.E4M3[i|0x80] != -backend.E4M3[i] || i > 0 && backend.E4M3[i] <= backend.E4M3[i-1] {
			t.Errorf("%#x is %g, %#x is %g", i, backend.E4M3[i], i|0x80, backend.E4M3[i|0x80])
		}
	}
	if sum != 5407.875 || backend.E4M3[1] != 0.001953125 || backend.E4M3[8] != 0.015625 || backend.E4M3[126] != 448 || !math.Signbit(float64(backend.E4M3[0x80])) || backend.E4M3[0x7f] == backend.E4M3[0x7f] {
		t.Errorf("positive values sum to %g: %v", sum, backend.E4M3[:127])
	}
}

// nearestFP8 is the byte whose value is nearest to f.
func nearestFP8(f float64) byte {
	size := math.Abs(f)
	i, _ := slices.BinarySearch(backend.E4M3[:127], float32(size))
	if i > 0 && (i == 127 || size-float64(backend.E4M3[i-1]) < float64(backend.E4M3[i])-size) {
		i--
	}
	if f < 0 {
		i |= 0x80
	}
	return byte(i)
}

// halve stores a matrix's values in fp8, with a scale for each block of rows and
// columns in the given shape, and gives what they mean.
func halve(x safetensors.Tensor, rows, cols int, shape []int) (small, scales, means safetensors.Tensor) {
	out, in := x.Shape[0], x.Shape[1]
	small = safetensors.Tensor{DType: "F8_E4M3", Shape: x.Shape, Data: make([]byte, out*in)}
	scales = safetensors.Tensor{DType: "F32", Shape: shape}
	means = safetensors.Tensor{DType: "F32", Shape: x.Shape, Data: make([]byte, 4*out*in)}
	for r := 0; r < out; r += rows {
		for c := 0; c < in; c += cols {
			var at []int
			most := 0.0
			for i := r; i < min(r+rows, out); i++ {
				for j := c; j < min(c+cols, in); j++ {
					at = append(at, i*in+j)
					most = max(most, math.Abs(float64(number(x.Data, i*in+j, x.DType))))
				}
			}
			scale := float32(most / 448)
			scales.Data = binary.LittleEndian.AppendUint32(scales.Data, math.Float32bits(scale))
			for _, i := range at {
				small.Data[i] = nearestFP8(float64(number(x.Data, i, x.DType)) / float64(scale))
				binary.LittleEndian.PutUint32(means.Data[4*i:], math.Float32bits(backend.E4M3[small.Data[i]]*scale))
			}
		}
	}
	return small, scales, means
}

// fp8Layouts are the checkpoints in the field: their config, what their scales
// are called, and which rows and columns share one.
var fp8Layouts = map[string]struct {
	config     map[string]any
	name       string
	rows, cols int // 0: all
	shape      func(out, in int) []int
}{
	"DeepSeek and Qwen": {map[string]any{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": []int{48, 24}},
		"weight_scale_inv", 48, 24, func(out, in int) []int { return []int{(out + 47) / 48, (in + 23) / 24} }},
	"per tensor": {map[string]any{"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", 0, 0, func(int, int) []int { return []int{} }},
	"compressed-tensors, per channel": {map[string]any{"quant_method": "compressed-tensors", "format": "float-quantized", "kv_cache_scheme": nil, "ignore": []string{"lm_head"},
		"config_groups": map[string]any{"group_0": map[string]any{"targets": []string{"Linear"}, "weights": map[string]any{"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true}}}},
		"weight_scale", 1, 0, func(out, _ int) []int { return []int{out, 1} }},
}

// A checkpoint in fp8 computes what one does that holds the values it means.
func TestFP8(t *testing.T) {
	for _, folder := range []string{"qwen3", "qwen3-moe", "deepseek", "glm4-moe", "glm4", "phi3"} { // the last three have rows in another order, or fused
		for what, l := range fp8Layouts {
			t.Run(folder+"/"+what, func(t *testing.T) {
				n := 0
				change := func(means bool) func(map[string]safetensors.Tensor) {
					return func(all map[string]safetensors.Tensor) {
						for _, name := range slices.Collect(maps.Keys(all)) {
							x := all[name]
							if !strings.HasSuffix(name, "_proj.weight") && !strings.HasSuffix(name, "_proj_with_mqa.weight") {
								continue
							}
							rows, cols := l.rows, l.cols
							if rows == 0 {
								rows = x.Shape[0]
							}
							if cols == 0 {
								cols = x.Shape[1]
							}
							small, scales, whole := halve(x, rows, cols, l.shape(x.Shape[0], x.Shape[1]))
							small.Name, whole.Name = name, name
							if means {
								all[name] = whole
								continue
							}
							n++
							all[name], all[strings.TrimSuffix(name, "weight")+l.name] = small, scales
							all[strings.TrimSuffix(name, "weight")+"input_scale"] = scales
						}
					}
				}
				files := memoryCopy(t, folder, map[string]any{"quantization_config": l.config, "dtype": "bfloat16"}, change(false))
				checkFP8Bytes(t, files)
				stored, err := tryLoad(t, files, Options{})
				if err != nil {
					t.Fatal(err)
				}
				meant, err := tryLoad(t, memoryCopy(t, folder, nil, change(true)), Options{})
				if err != nil {
					t.Fatal(err)
				}
				if n < 10 {
					t.Errorf("only %d matrices are in fp8", n)
				}
				prompt := readGoldensOf(t, folder).Cases[1].Prompt
				logits := map[*Model][]float32{}
				for _, m := range []*Model{stored, meant} {
					if err := m.backend.AllocKV(testKV(&m.config)); err != nil {
						t.Fatal(err)
					}
					rows, _ := newSequence(m, prompt, 1).step(t, len(prompt), []int{len(prompt) - 1})
					logits[m] = rows[0]
				}
				if !slices.Equal(logits[stored], logits[meant]) {
					t.Error("the logits differ from those of the values")
				}
			})
		}
	}
}

// checkFP8Bytes: what a checkpoint takes is a byte a value and its scales, or two
// where they are expanded; its config says about as much, before there are files.
func checkFP8Bytes(t *testing.T, files fstest.MapFS) {
	t.Helper()
	for _, expand := range []bool{false, true} {
		src, err := OpenFS(files, "fp8")
		if err != nil {
			t.Fatal(err)
		}
		if expand {
			src.ExpandFP8()
		}
		held := &weighing{}
		loadQuantized(t, src, cpu.Variants()[0], AsStored, func(b backend.Backend) backend.Backend {
			held.Backend = b
			return held
		})
		got, err := src.WeightBytes(AsStored)
		if err != nil {
			t.Fatal(err)
		}
		if d := math.Abs(float64(got-held.bytes)) / float64(held.bytes); d > 0.02 { // heads cut blocks
			t.Errorf("expanded %t: said to take %d bytes, takes %d", expand, got, held.bytes)
		}
		if plan := src.Config.WeightBytes(AsStored); math.Abs(float64(plan-got))/float64(got) > 0.1 {
			t.Errorf("expanded %t: the config says %d bytes, the files %d", expand, plan, got)
		}
		if eight := held.types[backend.FP8] > 0; eight == expand {
			t.Errorf("expanded %t: loaded as %v", expand, held.types)
		}
	}
}

// A part of a matrix in FP8, and rows of it, also as columns, mean what they mean in
// the whole, wherever blocks are cut.
func TestFP8Parts(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	const out, in = 41, 53
	for range 300 {
		block := [2]int{1 + rng.IntN(out), 1 + rng.IntN(in)}
		s := stored{Tensor: safetensors.Tensor{Name: "w", DType: "F8_E4M3", Shape: []int{out, in}, Data: make([]byte, out*in)},
			scales: safetensors.Tensor{DType: "F32"}, block: block}
		for i := range s.Data {
			s.Data[i] = byte(rng.IntN(127))
		}
		for range ((out-1)/block[0] + 1) * ((in-1)/block[1] + 1) {
			s.scales.Data = binary.LittleEndian.AppendUint32(s.scales.Data, math.Float32bits(rng.Float32()))
		}
		all := s.part(&binding{parts: []part{whole(out), whole(in)}}, 0)
		want := floatsOf(all.Expand(backend.F32))
		same := func(what string, got backend.Tensor, at func(row, col int) (r, c int)) {
			t.Helper()
			if !got.Scales.Fit(got.Shape[0], got.Shape[1]) {
				t.Fatalf("%s, blocks of %v: scales %+v of %v", what, block, got.Scales, got.Shape)
			}
			for i, v := range floatsOf(got.Expand(backend.F32)) {
				if r, c := at(i/got.Shape[1], i%got.Shape[1]); v != want[r*in+c] {
					t.Fatalf("%s, blocks of %v: [%d] is %g, want %g", what, block, i, v, want[r*in+c])
				}
			}
		}
		rows, cols := part{of: out, from: rng.IntN(out)}, part{of: in, from: rng.IntN(in)}
		rows.n, cols.n = 1+rng.IntN(out-rows.from), 1+rng.IntN(in-cols.from)
		same("part", s.part(&binding{parts: []part{rows, cols}}, 0), func(r, c int) (int, int) { return rows.from + r, cols.from + c })
		picked := span(rows.from, rows.n)
		stacked := stack{names: []string{"w"}, tensors: []safetensors.Tensor{s.Tensor}, in: whole(in), from: &s}
		stacked.rows = func(int, int) ([]int, bool) { return picked, true }
		same("turned", stacked.pick(0, 0), func(r, c int) (int, int) { return picked[c], r })
		rng.Shuffle(len(picked), func(i, j int) { picked[i], picked[j] = picked[j], picked[i] })
		stacked.rows = func(int, int) ([]int, bool) { return picked, false }
		same("rows", stacked.pick(0, 0), func(r, c int) (int, int) { return picked[r], c })
	}
}

// Half precision loads as what it is.
func TestF16(t *testing.T) {
	prompt := readGoldens(t, "mha").Cases[1].Prompt
	var logits [2][]float32
	for i, dtype := range []string{"F16", "F32"} {
		files := memoryCopy(t, "mha", map[string]any{"dtype": "float16"}, func(all map[string]safetensors.Tensor) {
			for name, x := range all {
				var data []byte
				for k := range len(x.Data) / widths[x.DType] {
					h := uint16(math.Float32bits(number(x.Data, k, x.DType))>>31<<15 | 0x2c00 + uint32(k*37%900)) // about 0.06
					if dtype == "F16" {
						data = binary.LittleEndian.AppendUint16(data, h)
					} else {
						data = binary.LittleEndian.AppendUint32(data, math.Float32bits(backend.Half(h)))
					}
				}
				x.DType, x.Data = dtype, data
				all[name] = x
			}
		})
		m, err := tryLoad(t, files, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if err := m.backend.AllocKV(testKV(&m.config)); err != nil {
			t.Fatal(err)
		}
		rows, _ := newSequence(m, prompt, 1).step(t, len(prompt), []int{len(prompt) - 1})
		logits[i] = rows[0]
	}
	if !slices.Equal(logits[0], logits[1]) {
		t.Error("the logits differ from those of float32")
	}
}

// What cannot be read is refused by name.
func TestFP8Refuses(t *testing.T) {
	fp8 := map[string]any{"quant_method": "fp8", "weight_block_size": []int{48, 24}}
	group := func(w map[string]any) map[string]any {
		return map[string]any{"quant_method": "compressed-tensors", "config_groups": map[string]any{"group_0": map[string]any{"weights": w}}}
	}
	const name = "model.layers.0.mlp.up_proj.weight"
	for what, c := range map[string]struct {
		config map[string]any
		change func(map[string]safetensors.Tensor)
		says   string
	}{
		"fmt":       {map[string]any{"quant_method": "fp8", "fmt": "e5m2"}, nil, "quantization_config.fmt is e5m2"},
		"blocks":    {map[string]any{"quant_method": "fp8", "weight_block_size": []int{0}}, nil, "blocks of [0]"},
		"6 bits":    {group(map[string]any{"num_bits": 6, "type": "int", "strategy": "group"}), nil, "int of 6 bits per group"},
		"no groups": {map[string]any{"quant_method": "compressed-tensors"}, nil, "without config_groups"},
		"KV":        {map[string]any{"quant_method": "fp8", "kv_cache_scheme": map[string]any{"num_bits": 8}}, nil, "kv_cache_scheme"},
		"AWQ":       {map[string]any{"quant_method": "awq"}, nil, "quantization_config.bits is 0 of awq"},
		"GPTQ":      {map[string]any{"quant_method": "gptq"}, nil, "quantization_config.bits is 0 of gptq"},
		"NF4":       {map[string]any{"quant_method": "bitsandbytes"}, nil, "quantization_config is bitsandbytes"},
		"no scale":  {fp8, nil, name + ": no " + name + "_scale_inv"},
		"no number": {fp8, func(all map[string]safetensors.Tensor) {
			x := all[name]
			x.Data = slices.Repeat([]byte{0x7f}, len(x.Data))
			all[name] = x
			all[name+"_scale_inv"] = safetensors.Tensor{DType: "F32", Shape: []int{1}, Data: []byte{0, 0, 128, 63}}
		}, name + ": fp8 with a value or a scale that is not finite"},
		"unexplained": {nil, nil, "which config.json's quantization_config does not explain"},
		"scale's shape": {fp8, func(all map[string]safetensors.Tensor) {
			all[name+"_scale_inv"] = safetensors.Tensor{DType: "F32", Shape: []int{2, 2}, Data: make([]byte, 16)}
		}, name + "_scale_inv: shape [2 2]"},
		"scale's type": {fp8, func(all map[string]safetensors.Tensor) {
			all[name+"_scale_inv"] = safetensors.Tensor{DType: "U8", Shape: []int{1}, Data: make([]byte, 1)}
		}, name + "_scale_inv: dtype U8"},
	} {
		t.Run(what, func(t *testing.T) {
			keys := map[string]any{}
			if c.config != nil {
				keys["quantization_config"] = c.config
			}
			_, err := tryLoad(t, memoryCopy(t, "mha", keys, func(all map[string]safetensors.Tensor) {
				x := all[name]
				x.DType, x.Data = "F8_E4M3", x.Data[:x.Shape[0]*x.Shape[1]]
				all[name] = x
				if c.change != nil {
					c.change(all)
				}
			}), Options{})
			if err == nil || !strings.Contains(fmt.Sprint(err), c.says) {
				t.Errorf("err = %v, want %q", err, c.says)
			}
		})
	}
}
