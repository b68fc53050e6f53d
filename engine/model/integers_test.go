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
		whole := s.whole()
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

// Matrices of GPTQ, AWQ and compressed-tensors expand to the bits of the formats' own libraries,
// and logits are those of transformers over these weights: on every kernel, on several ranks, with
// weights that are quantized again, and with the memory that WeightBytes names.
func TestIntegers(t *testing.T) {
	for _, name := range []string{"gptq-4", "gptq-4-zeros-8", "gptq-4-act-order", "gptq-8", "awq", "w4a16", "w4a16-act-order", "w8a8"} {
		t.Run(name, func(t *testing.T) {
			name := "quantized/" + name
			src, g := openCheckpoint(t, name), readGoldensOf(t, name)
			checkExpanded(t, name, src)
			if worst := worstOf(t, loadFamily(t, src, cpu.Auto, Options{}, nil), g, familyLimits.Tokens); worst > tolerance {
				t.Errorf("a logit is off by %g, at most %g is allowed", worst, tolerance)
			}
			familyShards(t, src, g)
			familyQuantized(t, src, g)
			familyBytes(t, src)
		})
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
	var logits [2][2][]float32 // of both checkpoints, without and with the adapter
	for i, s := range []*Source{src, wide} {
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
}
