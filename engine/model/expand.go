package model

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// F16 is expanded to float32, which holds its values exactly, as it is loaded.
// F8_E4M3 stays with its scales, unless it is turned into 8 or 4 bits, from float32,
// or the backend has no products with it: then it becomes bfloat16.

// fp8Config is how a checkpoint scales its weights in 8 bits; nil without any.
type fp8Config struct {
	Block [2]int   // rows and columns of a block with one scale; 0: per row or per tensor
	Wide  bool     // they are expanded
	Kept  []string // modules that are not in 8 bits, or re: and a pattern of them; files decide
}

// kept says whether the config leaves a weight out.
func (c *fp8Config) kept(name string) bool {
	module := strings.TrimSuffix(name, ".weight")
	for _, k := range c.Kept {
		if pattern, ok := strings.CutPrefix(k, "re:"); ok {
			if found, err := regexp.MatchString("^(?:"+pattern+")", module); err == nil && found {
				return true
			}
		} else if module == k || strings.HasPrefix(module, k+".") {
			return true
		}
	}
	return false
}

// fp8Of reads quantization_config: quant_method fp8 as DeepSeek and Qwen have it
// and compressed-tensors with floats of 8 bits. Scales of activations are of no
// use here, where activations are float32.
func (r *rawConfig) fp8Of() (*fp8Config, error) {
	var q struct {
		Method string                     `json:"quant_method"`
		Format string                     `json:"fmt"`
		Block  []int                      `json:"weight_block_size"`
		KV     json.RawMessage            `json:"kv_cache_scheme"`
		Groups map[string]json.RawMessage `json:"config_groups"`
		Kept   []string                   `json:"modules_to_not_convert"`
		Ignore []string                   `json:"ignore"`
	}
	if err := json.Unmarshal(r.Quantization, &q); err != nil {
		return nil, fmt.Errorf("%w: config.json: quantization_config: %w", ErrConfig, err)
	}
	if q.KV != nil && string(q.KV) != "null" {
		return nil, refuse("quantization_config.kv_cache_scheme", string(q.KV), "null")
	}
	switch {
	case q.Method == "fp8" && !slices.Contains([]string{"", "e4m3", "float8_e4m3fn"}, q.Format):
		return nil, refuse("quantization_config.fmt", q.Format, "e4m3")
	case q.Method == "fp8":
		c, err := blocks(q.Block)
		if err == nil {
			c.Kept = q.Kept
		}
		return c, err
	}
	c := &fp8Config{Kept: q.Ignore}
	for name, text := range q.Groups {
		var group struct {
			Weights struct {
				Bits      int    `json:"num_bits"`
				Type      string `json:"type"`
				Strategy  string `json:"strategy"`
				Symmetric *bool  `json:"symmetric"`
				Block     []int  `json:"block_structure"`
			} `json:"weights"`
		}
		if err := json.Unmarshal(text, &group); err != nil {
			return nil, fmt.Errorf("%w: config.json: quantization_config.%s: %w", ErrConfig, name, err)
		}
		w := group.Weights
		if w.Bits != 8 || w.Type != "float" || !or(w.Symmetric, true) || !slices.Contains([]string{"channel", "tensor", "block"}, w.Strategy) {
			return nil, refuse("quantization_config", fmt.Sprintf("compressed-tensors with %s of %d bits per %s", w.Type, w.Bits, w.Strategy), "float of 8 bits per channel, tensor or block")
		}
		if w.Strategy == "block" {
			b, err := blocks(w.Block)
			if err != nil || c.Block != [2]int{} && c.Block != b.Block {
				return nil, refuse("quantization_config", "compressed-tensors with blocks of "+fmt.Sprint(w.Block), "one size, of two numbers")
			}
			c.Block = b.Block
		}
	}
	if len(q.Groups) == 0 {
		return nil, refuse("quantization_config", "compressed-tensors without config_groups", "float of 8 bits")
	}
	return c, nil
}

func blocks(size []int) (*fp8Config, error) {
	if size == nil {
		return &fp8Config{}, nil
	}
	if len(size) != 2 || size[0] < 1 || size[1] < 1 || size[0] > maxDim || size[1] > maxDim {
		return nil, fmt.Errorf("%w: config.json: quantization_config: blocks of %v, want two sizes", ErrConfig, size)
	}
	return &fp8Config{Block: [2]int(size)}, nil
}

// stored is a weight as the files have it.
type stored struct {
	safetensors.Tensor
	scales safetensors.Tensor // of F8_E4M3
	block  [2]int             // rows and columns that share a scale
	wide   bool               // F8_E4M3 is expanded
}

// find is a tensor with the scales that belong to it, and what is wrong with them.
func find(c *safetensors.Checkpoint, name string, q *fp8Config) (s stored, fault string) {
	t, ok := c.Tensor(name)
	if !ok {
		return s, name + " is missing"
	}
	s.Tensor = t
	if t.DType != "F8_E4M3" {
		return s, ""
	}
	if q == nil || len(t.Shape) != 2 {
		return s, fmt.Sprintf("%s: F8_E4M3 %v, which config.json's quantization_config does not explain", name, t.Shape)
	}
	if s.scales, ok = c.Tensor(name + "_scale_inv"); !ok {
		if s.scales, ok = c.Tensor(name + "_scale"); !ok {
			return s, fmt.Sprintf("%s: no %[1]s_scale_inv and no %[1]s_scale", name)
		}
	}
	s.wide = q.Wide
	n := 1
	for _, d := range s.scales.Shape {
		n *= d
	}
	if _, ok := widths[s.scales.DType]; !ok {
		return s, fmt.Sprintf("%s: dtype %s; supported: F32, BF16, F16", s.scales.Name, s.scales.DType)
	}
	out, in := t.Shape[0], t.Shape[1]
	switch {
	case n == 1:
		s.block = [2]int{out, in}
	case q.Block == [2]int{} && n == out && s.scales.Shape[0] == out:
		s.block = [2]int{1, in}
	case q.Block != [2]int{} && slices.Equal(s.scales.Shape, []int{(out-1)/q.Block[0] + 1, (in-1)/q.Block[1] + 1}):
		s.block = q.Block
	default:
		return s, fmt.Sprintf("%s: shape %v for %v in blocks of %v", s.scales.Name, s.scales.Shape, t.Shape, q.Block)
	}
	return s, ""
}

// scaleOf says whether a tensor only belongs to one of those that are expected.
func scaleOf(name string, expected map[string]bool) bool {
	for _, end := range []string{"_scale_inv", "_scale"} {
		if of, ok := strings.CutSuffix(name, end); ok && expected[of] {
			return true
		}
	}
	of, ok := strings.CutSuffix(name, ".input_scale")
	return ok && expected[of+".weight"]
}

// widths are the bytes of the types that are read; number reads all but the last.
var widths = map[string]int{"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}

// number is element i of data.
func number(data []byte, i int, dtype string) float32 {
	switch dtype {
	case "F32":
		return math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	case "BF16":
		return math.Float32frombits(uint32(binary.LittleEndian.Uint16(data[2*i:])) << 16)
	}
	return half(binary.LittleEndian.Uint16(data[2*i:]))
}

// part is a rank's part of the weight, as a backend takes it: where it lies, if
// that is in one piece.
func (s *stored) part(b *binding, as backend.DType) backend.Tensor {
	rows, cols := b.parts[0], b.in()
	t := backend.Tensor{Name: s.Name, DType: dtypes[s.DType], As: as}
	for _, p := range b.parts {
		t.Shape = append(t.Shape, p.n)
	}
	if b.out == "vocab" || b.out == "plevocab" {
		t.First, t.Of = rows.from, rows.of
	}
	if t.DType == 0 || b.plus != 0 {
		list := b.rows
		if list == nil {
			list = span(rows.from, rows.n)
		}
		s.expand(&t, list, cols, b.plus)
		return t
	}
	row := cols.of * t.DType.Size()
	if b.rows != nil {
		t.Data = appendRows(nil, s.Data, b.rows, row, 0, row)
		if t.DType == backend.FP8 {
			t.Scales = s.pickScales(b.rows, false)
			return s.widen(t)
		}
		return t
	}
	t.Data = s.Data[rows.from*row : (rows.from+rows.n)*row]
	if !cols.whole() {
		t.Data = appendRows(nil, t.Data, span(0, rows.n), row, cols.from*t.DType.Size(), cols.n*t.DType.Size())
	}
	if t.DType != backend.FP8 {
		return t
	}
	t.Scales = &backend.Scales{Rows: s.block[0], Cols: s.block[1], Row: rows.from % s.block[0], Col: cols.from % s.block[1]}
	for i := rows.from / s.block[0]; i <= (rows.from+rows.n-1)/s.block[0]; i++ {
		for j := cols.from / s.block[1]; j <= (cols.from+cols.n-1)/s.block[1]; j++ {
			t.Scales.Values = append(t.Scales.Values, s.scale(i, j))
		}
	}
	return s.widen(t)
}

// scale is that of a block.
func (s *stored) scale(down, across int) float32 {
	return number(s.scales.Data, down*((s.Shape[1]-1)/s.block[1]+1)+across, s.scales.DType)
}

// pickScales are those of rows of the matrix, which turned become columns: then
// they are neighbours, as far as blocks have several.
func (s *stored) pickScales(rows []int, turned bool) *backend.Scales {
	p := &backend.Scales{Rows: 1, Cols: s.block[1]}
	across := (s.Shape[1]-1)/s.block[1] + 1
	if !turned {
		for _, row := range rows {
			for j := range across {
				p.Values = append(p.Values, s.scale(row/s.block[0], j))
			}
		}
		return p
	}
	p.Rows, p.Cols, p.Col = s.block[1], s.block[0], rows[0]%s.block[0]
	for j := range across {
		for i := rows[0] / p.Cols; i <= rows[len(rows)-1]/p.Cols; i++ {
			p.Values = append(p.Values, s.scale(i, j))
		}
	}
	return p
}

// widen expands FP8 where it does not stay.
func (s *stored) widen(t backend.Tensor) backend.Tensor {
	switch {
	case t.As != 0:
		return t.Expand(backend.F32)
	case s.wide:
		return t.Expand(backend.BF16)
	}
	return t
}

// whole is all of a weight of a type that backends do not take.
func (s *stored) whole() backend.Tensor {
	t := backend.Tensor{Name: s.Name, Shape: s.Shape}
	cols := s.Shape[len(s.Shape)-1]
	s.expand(&t, span(0, len(s.Data)/widths[s.DType]/cols), whole(cols), 0)
	return t
}

// expand fills a tensor with rows of a weight as float32, and adds plus to each number.
func (s *stored) expand(t *backend.Tensor, rows []int, cols part, plus float32) {
	t.DType = backend.F32
	t.Data = make([]byte, len(rows)*cols.n*t.DType.Size())
	for i := range len(rows) * cols.n {
		v := number(s.Data, rows[i/cols.n]*cols.of+cols.from+i%cols.n, s.DType)
		binary.LittleEndian.PutUint32(t.Data[4*i:], math.Float32bits(v+plus))
	}
}
