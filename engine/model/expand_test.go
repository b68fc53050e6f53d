package model

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/safetensors"
)

// TestFP8Values: the table is torch's float8_e4m3fn.
func TestFP8Values(t *testing.T) {
	sum := 0.0
	for i := range 127 {
		sum += float64(fp8[i])
		if fp8[i|0x80] != -fp8[i] || i > 0 && fp8[i] <= fp8[i-1] {
			t.Errorf("%#x is %g, %#x is %g", i, fp8[i], i|0x80, fp8[i|0x80])
		}
	}
	if sum != 5407.875 || fp8[1] != 0.001953125 || fp8[8] != 0.015625 || fp8[126] != 448 || !math.Signbit(float64(fp8[0x80])) || fp8[0x7f] == fp8[0x7f] {
		t.Errorf("positive values sum to %g: %v", sum, fp8[:127])
	}
}

// nearestFP8 is the byte whose value is nearest to f.
func nearestFP8(f float64) byte {
	size := math.Abs(f)
	i, _ := slices.BinarySearch(fp8[:127], float32(size))
	if i > 0 && (i == 127 || size-float64(fp8[i-1]) < float64(fp8[i])-size) {
		i--
	}
	if f < 0 {
		i |= 0x80
	}
	return byte(i)
}

// halve stores a matrix's values in fp8, with a scale for each block of rows and
// columns in the given shape, and gives what they mean, rounded to bfloat16.
func halve(x safetensors.Tensor, rows, cols int, shape []int) (small, scales, means safetensors.Tensor) {
	out, in := x.Shape[0], x.Shape[1]
	small = safetensors.Tensor{DType: "F8_E4M3", Shape: x.Shape, Data: make([]byte, out*in)}
	scales = safetensors.Tensor{DType: "F32", Shape: shape}
	means = safetensors.Tensor{DType: "BF16", Shape: x.Shape, Data: make([]byte, 2*out*in)}
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
				v := math.Float32bits(float32(float64(fp8[small.Data[i]]) * float64(scale)))
				binary.LittleEndian.PutUint16(means.Data[2*i:], uint16((v+0x7fff+v>>16&1)>>16))
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
	for _, folder := range []string{"qwen3", "qwen3-moe", "deepseek"} {
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
				stored, err := tryLoad(t, memoryCopy(t, folder, map[string]any{"quantization_config": l.config, "dtype": "bfloat16"}, change(false)), Options{})
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
				prompt := readGoldens(t, folder).Cases[1].Prompt
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
						data = binary.LittleEndian.AppendUint32(data, math.Float32bits(half(h)))
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
		"fmt":         {map[string]any{"quant_method": "fp8", "fmt": "e5m2"}, nil, "quantization_config.fmt is e5m2"},
		"blocks":      {map[string]any{"quant_method": "fp8", "weight_block_size": []int{0}}, nil, "blocks of [0]"},
		"4 bits":      {group(map[string]any{"num_bits": 4, "type": "int", "strategy": "group"}), nil, "int of 4 bits per group"},
		"no groups":   {map[string]any{"quant_method": "compressed-tensors"}, nil, "without config_groups"},
		"KV":          {map[string]any{"quant_method": "fp8", "kv_cache_scheme": map[string]any{"num_bits": 8}}, nil, "kv_cache_scheme"},
		"AWQ":         {map[string]any{"quant_method": "awq"}, nil, "quantization_config is awq"},
		"GPTQ":        {map[string]any{"quant_method": "gptq"}, nil, "quantization_config is gptq"},
		"no scale":    {fp8, nil, name + ": no " + name + "_scale_inv"},
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
