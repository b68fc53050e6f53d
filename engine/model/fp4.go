package model

import (
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// NVFP4 has floats of 4 bits (E2M1), two in a byte, the first in its low bits. Each 16 inputs of an
// output share a scale in F8_E4M3, and the matrix has a scale in F32 besides: compressed-tensors
// divides by it, and NVIDIA's Model Optimizer multiplies with it.

const (
	nvFP4       = "nvfp4"    // compressed-tensors, format nvfp4-pack-quantized
	modelOpt    = "modelopt" // quant_method of the Model Optimizer
	modelOptFP4 = "modelopt_fp4"
	fp4Group    = 16 // inputs that share a scale
)

// fp4Parts are the ends of the names of a matrix's further tensors. Those of activations
// are not used, and those of KV only by ScaleKV.
var fp4Parts = []string{"weight_global_scale", "weight_scale_2", "input_global_scale", "k_scale", "v_scale"}

// modelOptFile is the Model Optimizer's own file, which older checkpoints have instead of
// quantization_config.
const modelOptFile = "hf_quant_config.json"

// fromModelOpt returns modelOptFile's content as a quantization_config.
func fromModelOpt(text []byte) (json.RawMessage, error) {
	var file struct {
		Quantization map[string]any `json:"quantization"`
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrConfig, modelOptFile, err)
	}
	if file.Quantization["quant_algo"] == nil { // null: only KV is quantized
		return nil, nil
	}
	file.Quantization["quant_method"] = modelOpt
	return json.Marshal(file.Quantization)
}

// modelOptOf reads quantization_config of the Model Optimizer.
func (r *rawConfig) modelOptOf() (*fp8Config, *integerConfig, error) {
	var q struct {
		Algorithm string   `json:"quant_algo"`
		Group     *int     `json:"group_size"`
		Ignore    []string `json:"ignore"`
		Exclude   []string `json:"exclude_modules"`
	}
	if err := json.Unmarshal(r.Quantization, &q); err != nil {
		return nil, nil, fmt.Errorf("%w: config.json: quantization_config: %w", ErrConfig, err)
	}
	switch strings.ToUpper(q.Algorithm) {
	case "FP8":
		c := &fp8Config{}
		for _, module := range slices.Concat(q.Ignore, q.Exclude) {
			c.Kept = append(c.Kept, wildcard(module))
		}
		return c, nil, nil
	case "NVFP4":
		if size := or(q.Group, fp4Group); size != fp4Group {
			return nil, nil, refuse("quantization_config.group_size", size, fmt.Sprintf("%d for NVFP4", fp4Group))
		}
		return nil, &integerConfig{Method: modelOpt, Bits: 4, Group: fp4Group}, nil
	}
	return nil, nil, refuse("quantization_config.quant_algo", fmt.Sprintf("%.100q", q.Algorithm), "FP8, NVFP4")
}

// wildcard returns a pattern of module names, in which * is any text, as fp8Config.Kept has it.
func wildcard(pattern string) string {
	if !strings.Contains(pattern, "*") {
		return pattern
	}
	parts := strings.Split(pattern, "*")
	for i, p := range parts {
		parts[i] = regexp.QuoteMeta(p)
	}
	return "re:" + strings.Join(parts, ".*")
}

// fp4 is a matrix [out, in] of NVFP4.
type fp4 struct {
	in       int
	data     []byte // out·in/2
	scales   []byte // out·in/16
	whole    float32
	multiply bool // scales are multiplied with whole, instead of divided by it
}

// row expands an output's weights. Each is rounded to bfloat16, as compressed-tensors does.
func (m *fp4) row(dst []float32, out int) {
	data, scales := m.data[out*m.in/2:], m.scales[out*m.in/fp4Group:]
	for from := 0; from < len(dst); from += fp4Group {
		scale := backend.E4M3[scales[from/fp4Group]]
		if m.multiply {
			scale *= m.whole
		} else {
			scale /= m.whole
		}
		pairs := data[from/2 : from/2+fp4Group/2]
		for i, pair := range pairs {
			dst[from+2*i] = roundBFloat(backend.E2M1[pair&15] * scale)
			dst[from+2*i+1] = roundBFloat(backend.E2M1[pair>>4] * scale)
		}
	}
}

// grid returns the matrix as backends keep it. Their weights are not rounded.
func (m *fp4) grid() *backend.Grid {
	g := floatGrid
	g.Whole, g.Divide = m.whole, !m.multiply
	g.Row = func(to *backend.GridRow, out int) {
		for i, pair := range m.data[out*m.in/2 : (out+1)*m.in/2] {
			to.Codes[2*i], to.Codes[2*i+1] = pair&15, pair>>4
		}
		copy(to.Sub, m.scales[out*m.in/fp4Group:])
	}
	return &g
}

// floatGrid is the grid of NVFP4 without its content.
var floatGrid = backend.Grid{Kind: backend.GridFloats, Bits: 4, Group: fp4Group, Whole: 1, Row: func(*backend.GridRow, int) {}}

// fp4 returns a matrix of NVFP4 with its scales. ok is false if the files have none of this name.
func (f *finder) fp4(name string) (s stored, fault string, ok bool) {
	codes, whole := "weight_packed", "weight_global_scale"
	if f.q.Method == modelOpt {
		codes, whole = "weight", "weight_scale_2"
	}
	if t, ok := f.c.Tensor(f.module + "." + codes); !ok || t.DType != "U8" {
		return s, "", false
	}
	w := f.tensor(codes, []int{-1, -1}, "U8")
	if f.fault != "" {
		return s, f.fault, true
	}
	out, in := w.Shape[0], 2*w.Shape[1]
	if in%fp4Group != 0 || in > maxDim {
		return s, fmt.Sprintf("%s: rows of %d weights, want a multiple of %d, at most %d", w.Name, in, fp4Group, maxDim), true
	}
	scales := f.tensor("weight_scale", []int{out, in / fp4Group}, "F8_E4M3")
	g, given := f.c.Tensor(f.module + "." + whole)
	switch {
	case f.fault != "":
	case !given:
		f.fault = f.module + "." + whole + " is missing"
	case g.DType != "F32" || len(g.Data) != 4:
		f.fault = fmt.Sprintf("%s: %s %v, want one number in F32", g.Name, g.DType, g.Shape)
	}
	if f.fault != "" {
		return s, f.fault, true
	}
	m := &fp4{in: in, data: w.Data, scales: scales.Data, whole: number(g.Data, 0, "F32"), multiply: f.q.Method == modelOpt}
	if !(m.whole > 0) || math.IsInf(float64(m.whole), 1) {
		return s, fmt.Sprintf("%s is %g, want a positive number", g.Name, m.whole), true
	}
	if slices.ContainsFunc(m.scales, func(b byte) bool { return b&0x7f == 0x7f }) {
		return s, scales.Name + " has a value that is not a number", true
	}
	s.Tensor = safetensors.Tensor{Name: name, DType: expandedType, Shape: []int{out, in}, Data: w.Data}
	s.rows, s.made, s.grid = m.row, backend.BF16, m.grid()
	return s, "", true
}
