package model

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// expandedSums are the SHA-256 of a checkpoint's matrices, in float32, as the reference library
// of its format expands them.
func expandedSums(t *testing.T, name string) map[string]string {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name, "goldens.json.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var g struct {
		SHA256 map[string]string `json:"sha256"`
	}
	if err := json.NewDecoder(z).Decode(&g); err != nil || len(g.SHA256) == 0 {
		t.Fatalf("%d sums, %v", len(g.SHA256), err)
	}
	return g.SHA256
}

// checkExpanded compares expanded weights with the reference library's, bit for bit.
func checkExpanded(t *testing.T, name string, src *Source) {
	t.Helper()
	c, err := src.weights()
	if err != nil {
		t.Fatal(err)
	}
	for tensor, want := range expandedSums(t, name) {
		s, fault := find(c, tensor, &src.Config)
		if fault != "" {
			t.Error(fault)
			continue
		}
		var whole backend.Tensor
		if s.DType == "F8_E4M3" { // one scale
			wide := backend.Tensor{DType: backend.FP8, Shape: s.Shape, Data: s.Data, Scales: &backend.Scales{Rows: s.block[0], Cols: s.block[1], Values: []float32{s.scale(0, 0)}}}
			whole = wide.Expand(backend.F32)
		} else {
			whole = s.whole()
		}
		sum := sha256.New()
		size := whole.DType.Size()
		for i := range len(whole.Data) / size {
			v := number(whole.Data, i, map[backend.DType]string{backend.F32: "F32", backend.BF16: "BF16"}[whole.DType])
			_ = binary.Write(sum, binary.LittleEndian, math.Float32bits(v)) // a hash takes every write
		}
		if got := hex.EncodeToString(sum.Sum(nil)); got != want {
			t.Errorf("%s: the expanded weights differ from the reference library's", tensor)
		}
	}
}

// Matrices of GPTQ, AWQ, compressed-tensors and the Model Optimizer expand to the bits of the formats' own libraries,
// and logits are those of transformers over these weights: on every kernel, on several ranks, with
// weights that are quantized again, and with the memory that WeightBytes names.
func TestIntegers(t *testing.T) {
	for _, name := range []string{"gptq-4", "gptq-4-zeros-8", "gptq-4-act-order", "gptq-8", "awq", "w4a16", "w4a16-act-order", "w8a8", "nvfp4", "modelopt-nvfp4", "modelopt-fp8"} {
		t.Run(name, func(t *testing.T) {
			name := "quantized/" + name
			src, g := openCheckpoint(t, name), readGoldensOf(t, name)
			checkExpanded(t, name, src)
			src.ExpandIntegers() // see TestGrids
			if worst := worstOf(t, loadFamily(t, src, cpu.Auto, Options{}, nil), g, familyLimits.Tokens); worst > tolerance {
				t.Errorf("a logit is off by %g, at most %g is allowed", worst, tolerance)
			}
			familyShards(t, src, g)
			familyQuantized(t, src, g)
			familyBytes(t, src)
		})
	}
}

// Older checkpoints of the Model Optimizer name their format in a file of its own.
func TestModelOptFile(t *testing.T) {
	config := func(name, own string, null bool) (Config, error) {
		text, err := os.ReadFile(filepath.Join("testdata/quantized", name, "config.json"))
		if err != nil {
			t.Fatal(err)
		}
		var keys map[string]any
		if err := json.Unmarshal(text, &keys); err != nil {
			t.Fatal(err)
		}
		if delete(keys, "quantization_config"); null {
			keys["quantization_config"] = nil
		}
		if text, err = json.Marshal(keys); err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		for name, data := range map[string][]byte{"config.json": text, modelOptFile: []byte(own)} {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return OpenConfig(dir)
	}
	fp4, err := config("modelopt-nvfp4", `{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}}`, true)
	if err != nil || fp4.Integers == nil || !fp4.StoredIn(modelOpt) || !fp4.StoredIn(modelOptFP4) {
		t.Errorf("%+v, %v", fp4.Integers, err)
	}
	fp8, err := config("modelopt-fp8", `{"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "model.vision*"]}}`, false)
	if err != nil || fp8.FP8 == nil || !fp8.FP8.kept("model.vision.0.weight") || !fp8.FP8.kept("lm_head.weight") || fp8.FP8.kept("model.layers.0.mlp.up_proj.weight") || !fp8.StoredIn(modelOpt) {
		t.Errorf("%+v, %v", fp8.FP8, err)
	}
	if plain, err := config("modelopt-fp8", `{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}`, true); err != nil || plain.FP8 != nil || plain.Integers != nil {
		t.Errorf("%+v, %v", plain, err)
	}
	if _, err := config("modelopt-fp8", `[]`, false); err == nil || !strings.Contains(err.Error(), modelOptFile) {
		t.Errorf("err = %v", err)
	}
}

// Files whose tensors do not fit each other are refused by the tensor's name and value.
func TestIntegersRefuses(t *testing.T) {
	const m = "model.layers.0.mlp.up_proj."
	set := func(end, dtype string, data []byte, shape ...int) func(map[string]safetensors.Tensor) {
		return func(all map[string]safetensors.Tensor) {
			all[m+end] = safetensors.Tensor{Name: m + end, DType: dtype, Shape: shape, Data: data}
		}
	}
	drop := func(end string) func(map[string]safetensors.Tensor) {
		return func(all map[string]safetensors.Tensor) { delete(all, m+end) }
	}
	config := func(keys map[string]any) map[string]any {
		for k, v := range map[string]any{"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true} {
			if _, ok := keys[k]; !ok {
				keys[k] = v
			}
		}
		return map[string]any{"quantization_config": keys}
	}
	for what, c := range map[string]struct {
		from   string
		keys   map[string]any
		change func(map[string]safetensors.Tensor)
		says   string
	}{
		"3 bits":         {"gptq-4", config(map[string]any{"bits": 3}), nil, "quantization_config.bits is 3 of gptq; supported: 4 and 8"},
		"8 bits of AWQ":  {"gptq-4", config(map[string]any{"bits": 8, "quant_method": "awq"}), nil, "quantization_config.bits is 8 of awq; supported: 4"},
		"GEMV":           {"awq", config(map[string]any{"quant_method": "awq", "version": "gemv"}), nil, "format is gemv; supported: gemm"},
		"Marlin":         {"gptq-4", config(map[string]any{"checkpoint_format": "marlin"}), nil, "format is marlin; supported: gptq and gptq_v2"},
		"bits by module": {"gptq-4", config(map[string]any{"dynamic": map[string]any{"down": map[string]any{"bits": 8}}}), nil, "quantization_config.dynamic is 1 patterns"},
		"groups of 0":    {"gptq-4", config(map[string]any{"group_size": 0}), nil, "group_size is 0"},
		"groups of 16":   {"gptq-4", config(map[string]any{"group_size": 16}), nil, m + "scales: want shape [4 96], got [2 96]"},
		"no scales":      {"gptq-4", nil, drop("scales"), m + "scales is missing"},
		"no zeros":       {"gptq-4", nil, drop("qzeros"), m + "qzeros is missing"},
		"floats":         {"gptq-4", nil, set("qweight", "F32", make([]byte, 8*96*4), 8, 96), m + "qweight: dtype F32; supported: I32"},
		"a vector":       {"gptq-4", nil, set("qweight", "I32", make([]byte, 96*4), 96), m + "qweight: want shape [-1 -1], got [96]"},
		"nothing":        {"gptq-4", nil, set("qweight", "I32", nil, 0, 96), m + "qweight: want shape [-1 -1], got [0 96]"},
		"other sizes": {"gptq-4", nil, func(all map[string]safetensors.Tensor) {
			all[m+"qweight"] = all["model.layers.0.mlp.down_proj.qweight"]
		}, m + "scales: want shape [3 64], got [2 96]"},
		"zeros of 0":       {"gptq-4", nil, set("qzeros", "I32", make([]byte, 2*12*4), 2, 12), m + "qzeros: a zero of 0 in group 0 of output 0"},
		"group 9":          {"gptq-4", nil, set("g_idx", "I32", append(make([]byte, 63*4), 9, 0, 0, 0), 64), m + "g_idx: group 9 of input 63, the matrix has 2"},
		"a bias":           {"gptq-4", nil, set("bias", "F16", append(make([]byte, 95*2), 1, 0), 96), m + "bias is unexpected"},
		"shape of a word":  {"w4a16", nil, set("weight_shape", "I64", append(make([]byte, 8), 0, 0, 0, 0, 0, 0, 0, 0x80), 2), m + "weight_packed: 8 words of 8 weights in a row"},
		"2 bits":           {"w4a16", map[string]any{"quantization_config": map[string]any{"quant_method": "compressed-tensors", "config_groups": map[string]any{"g": map[string]any{"weights": map[string]any{"num_bits": 2, "type": "int", "strategy": "group"}}}}}, nil, "int of 2 bits per group"},
		"zeros in bytes":   {"w4a16", nil, set("weight_zero_point", "I8", make([]byte, 96*2), 96, 2), m + "weight_zero_point: dtype I8"},
		"INT4 of modelopt": {"modelopt-fp8", map[string]any{"quantization_config": map[string]any{"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}}, nil, `quantization_config.quant_algo is "W4A16_AWQ"; supported: FP8, NVFP4`},
		"groups of 32":     {"modelopt-nvfp4", map[string]any{"quantization_config": map[string]any{"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}}, nil, "group_size is 32; supported: 16"},
		"two kinds": {"nvfp4", map[string]any{"quantization_config": map[string]any{"quant_method": "compressed-tensors", "config_groups": map[string]any{
			"a": map[string]any{"weights": map[string]any{"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}},
			"b": map[string]any{"weights": map[string]any{"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}}}, nil, "of several kinds"},
		"no global scale":  {"nvfp4", nil, drop("weight_global_scale"), m + "weight_global_scale is missing"},
		"global scale 0":   {"nvfp4", nil, set("weight_global_scale", "F32", make([]byte, 4), 1), m + "weight_global_scale is 0, want a positive number"},
		"global scales":    {"modelopt-nvfp4", nil, set("weight_scale_2", "F32", make([]byte, 8), 2), m + "weight_scale_2: F32 [2], want one number in F32"},
		"scales of 32":     {"nvfp4", nil, set("weight_scale", "F8_E4M3", make([]byte, 96*2), 96, 2), m + "weight_scale: want shape [96 4], got [96 2]"},
		"a scale of NaN":   {"nvfp4", nil, set("weight_scale", "F8_E4M3", append(make([]byte, 96*4-1), 0x7f), 96, 4), m + "weight_scale has a value that is not a number"},
		"rows of 8":        {"nvfp4", nil, set("weight_packed", "U8", make([]byte, 96*4), 96, 4), m + "weight_packed: rows of 8 weights, want a multiple of 16"},
		"no bytes":         {"nvfp4", nil, set("weight_packed", "I32", make([]byte, 96*32), 96, 8), m + "weight is missing"},
		"no zero points":   {"w8a8", nil, drop("weight_zero_point"), m + "weight_zero_point is missing"},
		"scales in fp8":    {"modelopt-fp8", nil, set("weight_scale", "F8_E4M3", make([]byte, 1)), m + "weight_scale: dtype F8_E4M3; supported: F32, BF16, F16"},
		"scales of a wide": {"w8a8", nil, set("weight_scale", "F64", make([]byte, 96*8), 96, 1), m + "weight_scale: dtype F64; supported: F16, BF16, F32"},
	} {
		t.Run(what, func(t *testing.T) {
			_, err := tryLoad(t, memoryCopy(t, "quantized/"+c.from, c.keys, func(all map[string]safetensors.Tensor) {
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

// Rounding is that of IEEE 754, also of subnormal and of too large numbers.
func TestRounding(t *testing.T) {
	for _, c := range [][2]float64{{1 + 1.0/2048, 1}, {1 + 3.0/2048, 1 + 1.0/512}, {65519, 65504}, {-65520, math.Inf(-1)}, {0x1p-25, 0}, {0x1.8p-24, 0x1p-23}, {-0x1.1p-25, -0x1p-24}} {
		if got := roundHalf(float32(c[0])); got != float32(c[1]) {
			t.Errorf("roundHalf(%v) = %v, want %v", c[0], got, c[1])
		}
	}
	if got := roundBFloat(1 + 1.0/256); got != 1 {
		t.Errorf("roundBFloat(1+1/256) = %v", got)
	}
}

// Matrices that are expanded at load take adapters, and give the bits of a checkpoint that holds
// the expanded values.
func TestIntegersAdapter(t *testing.T) {
	const name, rank = "quantized/gptq-4-act-order", 2
	src := openCheckpoint(t, name)
	c, err := src.weights()
	if err != nil {
		t.Fatal(err)
	}
	files := memoryCopy(t, name, map[string]any{"quantization_config": absent}, func(all map[string]safetensors.Tensor) {
		for part := range all {
			module, ok := strings.CutSuffix(part, ".qweight")
			if !ok {
				continue
			}
			s, fault := find(c, module+".weight", &src.Config)
			if fault != "" {
				t.Fatal(fault)
			}
			all[module+".weight"] = safetensors.Tensor{Name: module + ".weight", DType: "F32", Shape: s.Shape, Data: s.whole().Data}
			for _, end := range []string{"qweight", "qzeros", "scales", "g_idx", "bias"} {
				delete(all, module+"."+end)
			}
		}
	})
	wide, err := OpenFS(files, name)
	if err != nil {
		t.Fatal(err)
	}
	prompt := readGoldensOf(t, name).Cases[1].Prompt
	kept := openCheckpoint(t, name)
	src.ExpandIntegers()
	var logits [3][2][]float32 // of each checkpoint, without and with the adapter
	for i, s := range []*Source{src, wide, kept} {
		m := loadFamily(t, s, cpu.Auto, Options{}, nil)
		if _, err := m.Adapters(1, rank); err != nil {
			t.Fatal(err)
		}
		a := &Adapter{parts: map[string]*adapterPart{}}
		for tensor, b := range m.adapt {
			p := &adapterPart{rank: rank, out: b[0].shape[0], in: b[0].shape[1]}
			for k := range rank * p.in {
				p.a = append(p.a, float32(math.Sin(float64(k)))/10)
			}
			for k := range p.out * rank {
				p.b = append(p.b, float32(math.Cos(float64(k)))/10)
			}
			a.parts[tensor] = p
		}
		if err := m.LoadAdapter(1, a); err != nil || len(a.parts) < 7 {
			t.Fatalf("%d parts, %v", len(a.parts), err)
		}
		for place := range int32(2) {
			s := trim(newSequenceWithin(m, familyLimits, prompt, 1))
			logits[i][place] = slices.Clone(together(t, m, []*sequence{s}, []int32{place}, []int{len(prompt)})[0])
		}
	}
	if !slices.Equal(logits[0][0], logits[1][0]) || !slices.Equal(logits[0][1], logits[1][1]) {
		t.Error("expanded at load, the logits differ from those of the expanded checkpoint")
	}
	if slices.Equal(logits[0][0], logits[0][1]) {
		t.Error("the adapter changes nothing")
	}
	for place := range 2 { // whose inputs are not in the order of its grid
		if d := kullbackLeibler(logits[0][place], logits[2][place]); !(d <= 0.005) {
			t.Errorf("kept as integers, with adapter %d, the divergence is %g", place, d)
		}
	}
}
