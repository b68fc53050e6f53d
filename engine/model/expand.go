package model

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// F16 is converted to float32, which holds its values exactly, as it is loaded. F8_E4M3 stays with
// its scales, unless it is quantized to 8 or 4 bits, from float32, or the backend has no FP8
// products: then it is converted to bfloat16. Integers stay with their scales, too, where a backend
// can keep them (stored.grid), and are expanded elsewhere: see integers.go and gguf.go.

// fp8Config is the layout of a checkpoint's scales of weights in FP8; nil: it has none.
type fp8Config struct {
	Block [2]int   // rows and columns of a block with one scale; 0: per row or per tensor
	Wide  bool     // they are expanded
	Kept  []string // modules that are not in 8 bits, or re: and a pattern of them; files decide
}

// kept reports whether the config excludes a weight from quantization.
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

// quantized reads quantization_config: quant_method fp8 as DeepSeek and Qwen have it, gptq, awq,
// modelopt with FP8 or NVFP4, and compressed-tensors with floats of 8 or 4 bits or integers. Scales
// of activations are of no use here, where activations are float32.
func (r *rawConfig) quantized(c *Config) (err error) {
	switch method := r.quantMethod(); method {
	case "gptq", "awq":
		c.Integers, c.Ordered, err = r.integersOf(method)
	case modelOpt, modelOptFP4:
		c.FP8, c.Integers, err = r.modelOptOf()
	default:
		c.FP8, c.Integers, err = r.fp8Of()
	}
	return err
}

// fp8Of reads the methods fp8 and compressed-tensors.
func (r *rawConfig) fp8Of() (*fp8Config, *integerConfig, error) {
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
		return nil, nil, fmt.Errorf("%w: config.json: quantization_config: %w", ErrConfig, err)
	}
	if !staticFP8(q.KV) {
		return nil, nil, refuse("quantization_config.kv_cache_scheme", string(q.KV), "null, or float of 8 bits per tensor or attn_head, symmetric and not dynamic")
	}
	switch {
	case q.Method == "fp8" && !slices.Contains([]string{"", "e4m3", "float8_e4m3fn"}, q.Format):
		return nil, nil, refuse("quantization_config.fmt", q.Format, "e4m3")
	case q.Method == "fp8":
		c, err := blocks(q.Block)
		if err == nil {
			c.Kept = q.Kept
		}
		return c, nil, err
	}
	c := &fp8Config{Kept: q.Ignore}
	var ints *integerConfig
	floats, several := false, false
	for name, text := range q.Groups {
		var group struct {
			Weights struct {
				Bits      int    `json:"num_bits"`
				Type      string `json:"type"`
				Strategy  string `json:"strategy"`
				Symmetric *bool  `json:"symmetric"`
				Block     []int  `json:"block_structure"`
				Group     *int   `json:"group_size"`
			} `json:"weights"`
		}
		if err := json.Unmarshal(text, &group); err != nil {
			return nil, nil, fmt.Errorf("%w: config.json: quantization_config.%s: %w", ErrConfig, name, err)
		}
		w := group.Weights
		if (w.Bits == 4 || w.Bits == 8) && w.Type == "int" && slices.Contains([]string{"group", "channel"}, w.Strategy) {
			i := &integerConfig{Method: q.Method, Bits: w.Bits, Group: or(w.Group, -1), Symmetric: or(w.Symmetric, true)}
			if err := i.checkGroup(); err != nil {
				return nil, nil, err
			}
			if ints != nil && ints.Method == nvFP4 {
				return nil, nil, refuse("quantization_config", "compressed-tensors with numbers of several kinds", "one kind of integers or of floats of 4 bits")
			}
			if ints != nil {
				several = several || *ints != *i
				if cmp.Or(cmp.Compare(ints.Bits, i.Bits), cmp.Compare(ints.Group, i.Group)) < 0 {
					continue
				}
			}
			ints = i
			continue
		}
		if w.Bits == 4 && w.Type == "float" && w.Strategy == "tensor_group" && or(w.Symmetric, true) && or(w.Group, fp4Group) == fp4Group {
			i := &integerConfig{Method: nvFP4, Bits: 4, Group: fp4Group}
			if ints != nil && *ints != *i {
				return nil, nil, refuse("quantization_config", "compressed-tensors with numbers of several kinds", "one kind of integers or of floats of 4 bits")
			}
			ints = i
			continue
		}
		floats = true
		if w.Bits != 8 || w.Type != "float" || !or(w.Symmetric, true) || !slices.Contains([]string{"channel", "tensor", "block"}, w.Strategy) {
			return nil, nil, refuse("quantization_config", fmt.Sprintf("compressed-tensors with %s of %d bits per %s", w.Type, w.Bits, w.Strategy), "float of 8 bits per channel, tensor or block, float of 4 bits per tensor_group of 16, int of 4 or 8 bits per group or channel")
		}
		if w.Strategy == "block" {
			b, err := blocks(w.Block)
			if err != nil || c.Block != [2]int{} && c.Block != b.Block {
				return nil, nil, refuse("quantization_config", "compressed-tensors with blocks of "+fmt.Sprint(w.Block), "one size, of two numbers")
			}
			c.Block = b.Block
		}
	}
	if len(q.Groups) == 0 {
		return nil, nil, refuse("quantization_config", "compressed-tensors without config_groups", "float and int of 4 or 8 bits")
	}
	if !floats {
		c = nil
	}
	if several {
		ints.Several = true
	}
	return c, ints, nil
}

// staticFP8 reports whether a scheme of KV is FP8 with the scales of the checkpoint, or none.
// --kv-cache-dtype decides whether it is used.
func staticFP8(scheme json.RawMessage) bool {
	if scheme == nil || string(scheme) == "null" {
		return true
	}
	var kv struct {
		Bits      int    `json:"num_bits"`
		Type      string `json:"type"`
		Strategy  string `json:"strategy"`
		Symmetric *bool  `json:"symmetric"`
		Dynamic   any    `json:"dynamic"`
	}
	return json.Unmarshal(scheme, &kv) == nil && kv.Bits == 8 && kv.Type == "float" && slices.Contains([]string{"", "tensor", "attn_head"}, kv.Strategy) &&
		or(kv.Symmetric, true) && (kv.Dynamic == nil || kv.Dynamic == false)
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

// stored is a weight in the files' layout.
type stored struct {
	safetensors.Tensor
	scales safetensors.Tensor // of F8_E4M3
	block  [2]int             // rows and columns that share a scale
	wide   bool               // F8_E4M3 is expanded

	// rows, where not nil, expands a row of the tensor to values that type made holds.
	rows func(dst []float32, row int)
	made backend.DType

	grid    *backend.Grid // what a backend keeps in place of rows; nil: nothing
	micro   *microscaled  // likewise, in MXFP4
	ordered bool          // the inputs of a group are not neighbours
}

// find returns a tensor with its scales, and a description of what does not fit; empty: all fits.
func find(c *safetensors.Checkpoint, name string, config *Config) (s stored, fault string) {
	if s, fault = look(c, name, config); config.Expand || config.Integers != nil && strings.Contains(name, "embed_tokens") {
		s.grid = nil
	}
	return s, fault
}

func look(c *safetensors.Checkpoint, name string, config *Config) (s stored, fault string) {
	q := config.FP8
	if s, fault, ok := findIntegers(c, name, config.Integers); ok {
		return s, fault
	}
	t, ok := c.Tensor(name)
	if !ok {
		return s, name + " is missing"
	}
	s.Tensor = t
	if s.readRows(config); s.rows != nil {
		return s, ""
	}
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
	if !slices.Contains(scaleTypes, s.scales.DType) {
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

// scaleOf reports whether a tensor is a part, such as the scales, of one that is expected.
func scaleOf(name string, expected map[string]bool) bool {
	for _, end := range []string{"_scale_inv", "_scale"} {
		if of, ok := strings.CutSuffix(name, end); ok && expected[of] {
			return true
		}
	}
	for _, end := range slices.Concat([]string{"input_scale", "input_zero_point"}, integerParts, fp4Parts) {
		if of, ok := strings.CutSuffix(name, "."+end); ok && expected[of+".weight"] {
			return true
		}
	}
	return false
}

// widths are the bytes of the types that are read; number reads all but the last.
var widths = map[string]int{"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}

// readable reports whether tensors of a type are read.
func readable(dtype string) bool { return widths[dtype] > 0 || dtype == expandedType }

// plain reports whether the tensor's numbers are F32, BF16 or F16, one behind the other.
func (s *stored) plain() bool { return s.rows == nil && s.grid == nil && widths[s.DType] > 1 }

// number returns element i of data.
func number(data []byte, i int, dtype string) float32 {
	switch dtype {
	case "F32":
		return math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	case "BF16":
		return math.Float32frombits(uint32(binary.LittleEndian.Uint16(data[2*i:])) << 16)
	}
	return backend.Half(binary.LittleEndian.Uint16(data[2*i:]))
}

// part returns a rank's part of the weight as a backend takes it. The data is a slice of the file
// where the part is contiguous, else a copy.
func (s *stored) part(b *binding, as backend.DType) backend.Tensor {
	rows, cols := b.parts[0], b.in()
	t := backend.Tensor{Name: s.Name, DType: dtypes[s.DType], As: as}
	for _, p := range b.parts {
		t.Shape = append(t.Shape, p.n)
	}
	if len(t.Shape) == 3 {
		t.Shape = []int{rows.n * cols.n}
	}
	if b.out == "vocab" || b.out == "plevocab" {
		t.First, t.Of = rows.from, rows.of
	}
	if t.DType == 0 || b.plus != 0 {
		list := b.rows
		if list == nil {
			list = span(rows.from, rows.n)
		}
		if as == 0 && s.keepsMXFP4(b) {
			t.DType, t.Data = backend.MXFP4, s.micro.pack(list, cols)
			return t
		}
		if as == 0 && !b.narrow() && s.keeps(cols) { // a router's rounding could choose other experts
			t.DType, t.Grid = backend.GRID, s.grid.Rows(list)
			if !cols.whole() {
				t.Grid = t.Grid.Columns(cols.of, cols.from, cols.n)
			}
			return t
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

// keeps reports whether a backend keeps these columns of a matrix as integers.
func (s *stored) keeps(cols part) bool {
	if s.grid == nil || s.ordered && !cols.whole() || !s.grid.Fit(1, cols.n) {
		return false // a part of the columns may have inputs of every group
	}
	unit := s.grid.Unit()
	return cols.from%unit == 0 || cols.from/unit == (cols.from+cols.n-1)/unit // or they are in one group
}

// scale returns the scale of a block.
func (s *stored) scale(down, across int) float32 {
	return number(s.scales.Data, down*((s.Shape[1]-1)/s.block[1]+1)+across, s.scales.DType)
}

// pickScales returns the scales of some rows of the matrix. Rows that become columns (turned) are
// neighbours where a block has several.
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

// widen converts FP8 where it does not stay.
func (s *stored) widen(t backend.Tensor) backend.Tensor {
	switch {
	case t.As != 0:
		return t.Expand(backend.F32)
	case s.wide:
		return t.Expand(backend.BF16)
	}
	return t
}

// whole returns all of a weight expanded, for types that backends do not take.
func (s *stored) whole() backend.Tensor {
	t := backend.Tensor{Name: s.Name, Shape: s.Shape}
	cols := s.Shape[len(s.Shape)-1]
	n := 1
	for _, d := range s.Shape {
		n *= d
	}
	s.expand(&t, span(0, n/cols), whole(cols), 0)
	return t
}

// expand fills a tensor with rows of a weight, and adds plus to each number. The type is float32,
// or a smaller one that holds all values.
func (s *stored) expand(t *backend.Tensor, rows []int, cols part, plus float32) {
	t.DType = backend.F32
	if s.rows != nil {
		s.expandRows(t, rows, cols, plus)
		return
	}
	t.Data = make([]byte, len(rows)*cols.n*t.DType.Size())
	for i := range len(rows) * cols.n {
		v := number(s.Data, rows[i/cols.n]*cols.of+cols.from+i%cols.n, s.DType)
		binary.LittleEndian.PutUint32(t.Data[4*i:], math.Float32bits(v+plus))
	}
}

// expandRows is expand for a weight whose rows are not numbers one behind the other. All processors
// share the rows.
func (s *stored) expandRows(t *backend.Tensor, rows []int, cols part, plus float32) {
	if plus == 0 {
		t.DType = s.made
	}
	size := cols.n * t.DType.Size() // of a row
	t.Data = make([]byte, len(rows)*size)
	var all sync.WaitGroup
	parts := min(runtime.GOMAXPROCS(0), len(rows))
	for p := range parts {
		from, to := len(rows)*p/parts, len(rows)*(p+1)/parts
		all.Go(func() {
			line := make([]float32, cols.of)
			for i := from; i < to; i++ {
				s.rows(line, rows[i])
				put(t.Data[i*size:(i+1)*size], line[cols.from:cols.from+cols.n], t.DType, plus)
			}
		})
	}
	all.Wait()
}

// put writes numbers as BF16, which must hold them, or as F32.
func put(dst []byte, numbers []float32, as backend.DType, plus float32) {
	for i, v := range numbers {
		if plus != 0 { // -0 stays
			v += plus
		}
		bits := math.Float32bits(v)
		if as == backend.BF16 {
			binary.LittleEndian.PutUint16(dst[2*i:], uint16(bits>>16))
		} else {
			binary.LittleEndian.PutUint32(dst[4*i:], bits)
		}
	}
}
