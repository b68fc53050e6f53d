package model

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// integerConfig is the layout of a checkpoint's matrices of integers: GPTQ, AWQ or
// compressed-tensors. A weight is (q - zero)·scale. Each group of inputs has a scale and a zero.
// Matrices of NVFP4 have floats of 4 bits instead: see fp4.go. Of several kinds in a checkpoint of
// compressed-tensors it is the one with the fewest bits.
type integerConfig struct {
	Method    string // quant_method, or nvFP4 for compressed-tensors with that
	Bits      int    // 4 or 8
	Group     int    // inputs of a group; 0: all
	V2        bool   // GPTQ stores zeros unchanged, instead of less 1
	Symmetric bool   // every zero is 1<<(Bits-1)

	Several bool `fingerprint:"new"` // kinds: a matrix's shapes decide its bits and groups
}

// expandedType is the type in safetensors.Tensor of a weight that stored.rows expands.
const expandedType = "expanded"

// integersOf reads quantization_config of quant_method gptq and awq. ordered reports whether inputs
// of a group are not neighbours (act-order).
func (r *rawConfig) integersOf(method string) (c *integerConfig, ordered bool, err error) {
	var q struct {
		Bits             int                        `json:"bits"`
		WBits            int                        `json:"w_bit"`
		Group            *int                       `json:"group_size"`
		QGroup           *int                       `json:"q_group_size"`
		Symmetric        *bool                      `json:"sym"`
		CheckpointFormat string                     `json:"checkpoint_format"`
		Format           string                     `json:"format"`
		Version          string                     `json:"version"`
		Dynamic          map[string]json.RawMessage `json:"dynamic"`
		ActOrder         bool                       `json:"desc_act"`
	}
	if err := json.Unmarshal(r.Quantization, &q); err != nil {
		return nil, false, fmt.Errorf("%w: config.json: quantization_config: %w", ErrConfig, err)
	}
	c = &integerConfig{Method: method, Bits: max(q.Bits, q.WBits), Group: or(q.Group, or(q.QGroup, -1))}
	if c.Bits != 4 && (c.Bits != 8 || method == "awq") {
		want := "4 and 8"
		if method == "awq" {
			want = "4"
		}
		return nil, false, refuse("quantization_config.bits", fmt.Sprintf("%d of %s", c.Bits, method), want)
	}
	if len(q.Dynamic) > 0 {
		return nil, false, refuse("quantization_config.dynamic", fmt.Sprintf("%d patterns", len(q.Dynamic)), "the same bits in all modules")
	}
	format, formats := strings.ToLower(q.CheckpointFormat), []string{"", "gptq", "gptq_v2"}
	if method == "gptq" {
		if format == "" {
			format = strings.ToLower(q.Format)
		}
		c.Symmetric, c.V2 = or(q.Symmetric, true), format == "gptq_v2"
	} else {
		format, formats = strings.ToLower(q.Version), []string{"", "gemm"}
	}
	if !slices.Contains(formats, format) {
		return nil, false, refuse("quantization_config's format", format, strings.Join(formats[1:], " and "))
	}
	return c, q.ActOrder, c.checkGroup()
}

// checkGroup bounds the size of groups, and replaces -1 by 0.
func (c *integerConfig) checkGroup() error {
	if c.Group == -1 {
		c.Group = 0
		return nil
	}
	if c.Group < 1 || c.Group > maxDim {
		return fmt.Errorf("%w: config.json: quantization_config: group_size is %d, neither -1 nor between 1 and %d", ErrConfig, c.Group, maxDim)
	}
	return nil
}

// codes are the integers of a matrix [out, in], as bits of little-endian words.
type codes struct {
	data     []byte
	bits     int
	word     int  // bytes of a word: 4, or 1 for numbers of 8 bits that have a sign
	byOutput bool // a word holds neighbouring outputs, instead of neighbouring inputs
	stride   [2]int
	order    *[8]int // the place in a word of each of 8 neighbours; nil: in order
}

// awqOrder is the place of each of 8 neighbouring outputs in a word of AWQ.
var awqOrder = [8]int{0, 4, 1, 5, 2, 6, 3, 7}

// at returns an integer, which is not negative: of numbers with a sign, 128 more.
func (c *codes) at(out, in int) int {
	per := 8 * c.word / c.bits
	place := in % per
	if c.byOutput {
		place = out % per
		out /= per
	} else {
		in /= per
	}
	if c.order != nil {
		place = c.order[place]
	}
	bit := place * c.bits
	b := c.data[(out*c.stride[0]+in*c.stride[1])*c.word+bit/8]
	if c.word == 1 {
		return int(b ^ 0x80)
	}
	return int(b>>(bit%8)) & (1<<c.bits - 1)
}

// readCodes writes the integers of an output to dst.
func readCodes[T uint8 | float32](c *codes, dst []T, out int) {
	if c.word == 1 {
		for in := range dst {
			dst[in] = T(c.at(out, in))
		}
		return
	}
	per, mask := 32/c.bits, uint32(1)<<c.bits-1
	if c.byOutput {
		place := out % per
		if c.order != nil {
			place = c.order[place]
		}
		from, shift := out/per*c.stride[0], place*c.bits
		for in := range dst {
			dst[in] = T(binary.LittleEndian.Uint32(c.data[(from+in*c.stride[1])*4:]) >> shift & mask)
		}
		return
	}
	for in := 0; in < len(dst); in += per {
		word := binary.LittleEndian.Uint32(c.data[(out*c.stride[0]+in/per*c.stride[1])*4:])
		for i := in; i < min(in+per, len(dst)); i++ {
			dst[i] = T(word & mask)
			word >>= c.bits
		}
	}
}

// integers is a matrix [out, in] of integers.
type integers struct {
	out, in, size int // size: inputs of a group
	weights       codes
	zeros         *codes // [out, groups]; nil: all are zero
	zero          int
	scales        safetensors.Tensor
	stride        [2]int  // of scales: between outputs, and between groups
	groups        []int32 // of each input; nil: neighbours share one
}

// row expands an output's weights. Each is rounded to the type of the scales, as the libraries
// that write such files do.
func (m *integers) row(dst []float32, out int) {
	last, zero, scale := -1, float32(m.zero), float32(0)
	readCodes(&m.weights, dst, out)
	next := 0 // the first input of the next group
	for in, q := range dst {
		g := last
		if m.groups != nil {
			g = int(m.groups[in])
		} else if in == next {
			g, next = last+1, next+m.size
		}
		if g != last {
			last, scale = g, number(m.scales.Data, out*m.stride[0]+g*m.stride[1], m.scales.DType)
			if m.zeros != nil {
				zero = float32(m.zeros.at(out, g))
			}
		}
		dst[in] = (q - zero) * scale
	}
	switch m.scales.DType {
	case "F16":
		for i, v := range dst {
			dst[i] = roundHalf(v)
		}
	case "BF16":
		for i, v := range dst {
			dst[i] = roundBFloat(v)
		}
	}
}

// order returns the inputs by group, those of one in their order. ok is false if groups are not of
// the same size.
func (m *integers) order() (inputs []int32, ok bool) {
	if m.groups == nil {
		return nil, true
	}
	inputs = make([]int32, m.in)
	for i := range inputs {
		inputs[i] = int32(i)
	}
	slices.SortStableFunc(inputs, func(a, b int32) int { return cmp.Compare(m.groups[a], m.groups[b]) })
	for i, input := range inputs {
		if int(m.groups[input]) != i/m.size {
			return nil, false
		}
	}
	return inputs, true
}

// grid returns the matrix as backends keep it; nil: they cannot, because groups differ in size or
// have another one, or scales are float32.
func (m *integers) grid() *backend.Grid {
	order, ok := m.order()
	g := &backend.Grid{Kind: backend.GridZeros, Bits: m.weights.bits, Group: m.size, BFloat: m.scales.DType == "BF16", Order: order}
	if m.size >= m.in { // one for all
		g.Group = (m.in + 63) / 64 * 64
	}
	if m.zeros == nil && g.Group == 32 {
		g.Kind = backend.GridPlain
	}
	g.Row = func(to *backend.GridRow, out int) {
		readCodes(&m.weights, to.Codes, out)
		if order != nil {
			codes := slices.Clone(to.Codes)
			for i, input := range order {
				to.Codes[i] = codes[input]
			}
		}
		for i := range to.Scales {
			to.Scales[i] = binary.LittleEndian.Uint16(m.scales.Data[2*(out*m.stride[0]+i*m.stride[1]):])
			to.SubMin[i] = uint8(m.zero)
			if m.zeros != nil {
				to.SubMin[i] = uint8(m.zeros.at(out, i))
			}
		}
	}
	if !ok || m.scales.DType == "F32" || !g.Fit(m.out, m.in) {
		return nil
	}
	return g
}

// grid returns the grid of matrices without their content, for plans.
func (c *integerConfig) grid() *backend.Grid {
	g := &backend.Grid{Kind: backend.GridZeros, Bits: c.Bits, Group: c.Group, Row: func(*backend.GridRow, int) {}}
	switch {
	case c.Method == nvFP4 || c.Method == modelOpt:
		return &floatGrid
	case c.Group == 0:
		g.Group = maxDim / 64 * 64
	case c.Symmetric && c.Group == 32:
		g.Kind = backend.GridPlain
	}
	return g
}

// roundBFloat rounds to a bfloat16, of two equally near ones to the even one.
func roundBFloat(v float32) float32 {
	b := math.Float32bits(v)
	return math.Float32frombits((b + 0x7fff + b>>16&1) &^ 0xffff)
}

// roundHalf rounds to a float16, of two equally near ones to the even one.
func roundHalf(v float32) float32 {
	const subnormal, largest = 1.0 / (1 << 14), 65504
	if v > -subnormal && v < subnormal {
		return float32(math.RoundToEven(float64(v)*(1<<24)) / (1 << 24))
	}
	b := math.Float32bits(v)
	v = math.Float32frombits((b + 0xfff + b>>13&1) &^ 0x1fff)
	if v > largest || v < -largest {
		return v * float32(math.Inf(1))
	}
	return v
}

// integerParts are the ends of the names of a matrix's tensors, in place of weight.
var integerParts = []string{
	"qweight", "qzeros", "scales", "g_idx",
	"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
}

// findIntegers returns a matrix of integers with its scales and zeros. ok is false if the files
// have none of this name.
func findIntegers(c *safetensors.Checkpoint, name string, q *integerConfig) (s stored, fault string, ok bool) {
	module, isWeight := strings.CutSuffix(name, ".weight")
	if q == nil || !isWeight {
		return s, "", false
	}
	f := finder{c: c, module: module, q: q}
	if q.Method == nvFP4 || q.Method == modelOpt {
		return f.fp4(name)
	}
	var m *integers
	switch _, signed := c.Tensor(name); {
	case q.Method != "compressed-tensors":
		if _, ok := c.Tensor(module + ".qweight"); !ok {
			return s, "", false
		}
		m = f.gptq()
	case signed:
		if t, _ := c.Tensor(name); t.DType != "I8" {
			return s, "", false
		}
		m = f.compressed("weight")
	default:
		if _, ok := c.Tensor(module + ".weight_packed"); !ok {
			return s, "", false
		}
		m = f.compressed("weight_packed")
	}
	if f.fault != "" {
		return s, f.fault, true
	}
	s.Tensor = safetensors.Tensor{Name: name, DType: expandedType, Shape: []int{m.out, m.in}, Data: m.weights.data}
	s.rows, s.made, s.grid, s.ordered = m.row, backend.F32, m.grid(), m.groups != nil
	if m.scales.DType == "BF16" {
		s.made = backend.BF16
	}
	return s, "", true
}

// finder looks up the tensors of one matrix, and keeps the first fault.
type finder struct {
	c      *safetensors.Checkpoint
	module string
	q      *integerConfig
	fault  string
}

// tensor returns a tensor of these types and this shape, of which -1 is any size.
func (f *finder) tensor(end string, shape []int, types ...string) safetensors.Tensor {
	name := f.module + "." + end
	t, ok := f.c.Tensor(name)
	fits := len(t.Shape) == len(shape)
	for i := range shape {
		fits = fits && (shape[i] == t.Shape[i] || shape[i] == -1 && t.Shape[i] > 0 && t.Shape[i] <= maxDim)
	}
	switch {
	case f.fault != "":
	case !ok:
		f.fault = name + " is missing"
	case !slices.Contains(types, t.DType):
		f.fault = fmt.Sprintf("%s: dtype %s; supported: %s", name, t.DType, strings.Join(types, ", "))
	case !fits:
		f.fault = fmt.Sprintf("%s: want shape %v, got %v", name, shape, t.Shape)
	}
	return t
}

// scaleTypes are the types of scales.
var scaleTypes = []string{"F16", "BF16", "F32"}

// gptq returns a matrix of GPTQ or AWQ.
func (f *finder) gptq() *integers {
	per := 32 / f.q.Bits
	m := &integers{weights: codes{bits: f.q.Bits, word: 4}}
	w := f.tensor("qweight", []int{-1, -1}, "I32")
	if f.fault != "" {
		return nil
	}
	rows, cols := w.Shape[0], w.Shape[1]
	m.weights.data, m.in, m.out = w.Data, rows*per, cols
	m.weights.stride = [2]int{1, cols}
	if f.q.Method == "awq" {
		m.in, m.out = rows, cols*per
		m.weights.byOutput, m.weights.order = true, &awqOrder
	}
	groups := f.groups(m)
	m.scales, m.stride = f.tensor("scales", []int{groups, m.out}, scaleTypes...), [2]int{1, m.out}
	across := (m.out-1)/per + 1
	z := f.tensor("qzeros", []int{groups, across}, "I32")
	m.groups = f.groupIndex("g_idx", m.in, groups, m.size)
	if f.fault != "" {
		return nil
	}
	m.zeros = &codes{data: z.Data, bits: f.q.Bits, word: 4, byOutput: true, stride: [2]int{1, across}, order: m.weights.order}
	if f.q.Method == "gptq" {
		f.gptqZeros(m, groups)
	}
	return m
}

// gptqZeros undoes the 1 by which version 1 stores zeros less. The zeros of symmetric matrices
// themselves name their version, because config.json often names it wrong.
func (f *finder) gptqZeros(m *integers, groups int) {
	if !f.q.Symmetric {
		if !f.q.V2 {
			step := uint32(math.MaxUint32) / (1<<f.q.Bits - 1)
			whole := make([]byte, len(m.zeros.data))
			for i := 0; i < len(whole); i += 4 {
				binary.LittleEndian.PutUint32(whole[i:], binary.LittleEndian.Uint32(m.zeros.data[i:])+step)
			}
			m.zeros.data = whole
		}
		return
	}
	m.zero = 1 << (f.q.Bits - 1)
	first := m.zeros.at(0, 0)
	for g := range groups {
		for out := range m.out {
			if z := m.zeros.at(out, g); z != first || z != m.zero && z != m.zero-1 {
				f.fault = fmt.Sprintf("%s.qzeros: a zero of %d in group %d of output %d; quantization_config.sym is true: want %d (version 1) or %d everywhere",
					f.module, z, g, out, m.zero-1, m.zero)
				return
			}
		}
	}
	m.zeros = nil
}

// compressed returns a matrix of compressed-tensors: packed, or of signed bytes.
func (f *finder) compressed(end string) *integers {
	m := &integers{weights: codes{bits: f.q.Bits, word: 4}, zero: 1 << (f.q.Bits - 1)}
	var w safetensors.Tensor
	if end == "weight" {
		m.weights.word, m.weights.bits, m.zero = 1, 8, 128
		w = f.tensor(end, []int{-1, -1}, "I8")
	} else {
		w = f.tensor(end, []int{-1, -1}, "I32")
	}
	if f.fault != "" {
		return nil
	}
	m.weights.data, m.weights.stride = w.Data, [2]int{w.Shape[1], 1}
	m.out, m.in = w.Shape[0], w.Shape[1]
	if end == "weight_packed" {
		m.in = f.inputs()
		if other := 12 - f.q.Bits; f.q.Several && m.in > 0 && m.in <= maxDim && (m.in-1)/(32/f.q.Bits)+1 != w.Shape[1] {
			m.weights.bits, m.zero = other, 1<<(other-1)
		}
		per := 32 / m.weights.bits
		if f.fault == "" && (m.in < 1 || (m.in-1)/per+1 != w.Shape[1]) {
			f.fault = fmt.Sprintf("%s.weight_packed: %d words of %d weights in a row, but weight_shape has %d inputs", f.module, w.Shape[1], per, m.in)
		}
	}
	if f.fault != "" {
		return nil
	}
	groups := f.groups(m)
	if t, _ := f.c.Tensor(f.module + ".weight_scale"); f.q.Several && len(t.Shape) == 2 && t.Shape[1] > 0 && m.in%t.Shape[1] == 0 {
		groups, m.size = t.Shape[1], m.in/t.Shape[1]
	}
	m.scales, m.stride = f.tensor("weight_scale", []int{m.out, groups}, scaleTypes...), [2]int{groups, 1}
	m.groups = f.groupIndex("weight_g_idx", m.in, groups, m.size)
	z, ok := f.c.Tensor(f.module + ".weight_zero_point")
	switch {
	case !ok && !f.q.Symmetric && !f.q.Several && f.fault == "":
		f.fault = f.module + ".weight_zero_point is missing, and quantization_config's symmetric is false"
		return nil
	case !ok || f.fault != "":
		return m
	case z.DType == "I8":
		z = f.tensor("weight_zero_point", []int{m.out, groups}, "I8")
		m.zeros = &codes{data: z.Data, bits: 8, word: 1, stride: [2]int{groups, 1}}
		if m.weights.word == 4 && m.weights.bits == 4 {
			f.fault = fmt.Sprintf("%s: dtype I8 of a matrix that is packed; supported: I32", z.Name)
		}
	default:
		per := 32 / m.weights.bits
		z = f.tensor("weight_zero_point", []int{(m.out-1)/per + 1, groups}, "I32", "I8")
		m.zeros = &codes{data: z.Data, bits: m.weights.bits, word: 4, byOutput: true, stride: [2]int{groups, 1}}
	}
	return m
}

// inputs returns the second number of weight_shape.
func (f *finder) inputs() int {
	t := f.tensor("weight_shape", []int{2}, "I64", "I32")
	if f.fault != "" {
		return 0
	}
	if t.DType == "I32" {
		return int(int32(binary.LittleEndian.Uint32(t.Data[4:])))
	}
	return int(binary.LittleEndian.Uint64(t.Data[8:]))
}

// groups returns the number of groups of the inputs, and sets their size.
func (f *finder) groups(m *integers) int {
	if m.size = f.q.Group; m.size == 0 {
		m.size = m.in
	}
	return (m.in-1)/m.size + 1
}

// groupIndex returns the group of each input; nil: the tensor is absent or unused (all are -1), or
// groups are of size neighbours.
func (f *finder) groupIndex(end string, inputs, groups, size int) []int32 {
	if _, ok := f.c.Tensor(f.module + "." + end); !ok {
		return nil
	}
	t := f.tensor(end, []int{inputs}, "I32")
	if f.fault != "" {
		return nil
	}
	index, neighbours := make([]int32, inputs), true
	for i := range index {
		index[i] = int32(binary.LittleEndian.Uint32(t.Data[4*i:]))
		neighbours = neighbours && int(index[i]) == i/size
	}
	if neighbours || !slices.ContainsFunc(index, func(g int32) bool { return g != -1 }) {
		return nil
	}
	for i, g := range index {
		if g < 0 || int(g) >= groups {
			f.fault = fmt.Sprintf("%s: group %d of input %d, the matrix has %d", t.Name, g, i, groups)
			return nil
		}
	}
	return index
}

// unusedBias reports whether a tensor is a bias of zeros, which GPTQ's tools write for every
// matrix.
func unusedBias(c *safetensors.Checkpoint, name string) bool {
	t, _ := c.Tensor(name)
	return strings.HasSuffix(name, ".bias") && !slices.ContainsFunc(t.Data, func(b byte) bool { return b != 0 })
}
