package model

import (
	"math"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// Quantization is the type that a checkpoint's matrices are converted to as they are loaded.
// Vectors and MXFP4 stay as they are. So do routers, because rounding could choose other
// experts where scores are close.
type Quantization uint8

// Quantizations. INT4 keeps the embedding and the output projection in 8 bits: they
// are a small part of the weights, and every token depends on them.
const (
	AsStored Quantization = iota
	INT8
	INT4
)

// String is the name used by flags, logs and numerics classes.
func (q Quantization) String() string {
	if q == AsStored {
		return "none"
	}
	return q.dtype().String()
}

// dtype returns the type of most matrices; 0: that of the files.
func (q Quantization) dtype() backend.DType {
	switch q {
	case INT8:
		return backend.INT8
	case INT4:
		return backend.INT4
	}
	return 0
}

// of returns the type of a weight; 0: that of the files.
func (q Quantization) of(b *binding) backend.DType {
	switch {
	case q == AsStored || len(b.shape) != 2 || b.narrow():
		return 0
	case b.ofVocabulary():
		return backend.INT8
	}
	return q.dtype()
}

// converted returns the type that a weight is converted to; 0: none. INT4 leaves integers as they
// are in a checkpoint whose matrices have 4 bits, and elsewhere those of 4 bits. MXFP4 stays.
func (q Quantization) converted(c *Config, s *stored, b *binding) backend.DType {
	if s.keepsMXFP4(b) {
		return 0
	}
	if q == INT4 && s.grid != nil && (s.grid.Bits == 4 || c.fourBits(q)) && b.plus == 0 && b.inner() && s.keeps(b.in()) {
		return 0
	}
	return q.of(b)
}

// fourBits reports whether q leaves all integers of a checkpoint as they are, because most have 4
// bits, and converts its matrices of the vocabulary to vocabularyGrid.
func (c *Config) fourBits(q Quantization) bool {
	return q == INT4 && c.Integers != nil && !c.Expand && c.Integers.Bits == 4
}

// vocabularyGrid is the form of matrices of the vocabulary next to integers of 4 bits.
var vocabularyGrid = backend.Grid{Kind: backend.GridPlain, Bits: 5, Group: backend.QuantGroup, BFloat: true}

// narrowVocabulary converts a matrix to vocabularyGrid.
func narrowVocabulary(t backend.Tensor) backend.Tensor {
	in, size, data, as := t.Shape[1], t.DType.Size(), t.Data, map[backend.DType]string{backend.F32: "F32", backend.BF16: "BF16"}[t.DType]
	g := vocabularyGrid
	g.Row = func(to *backend.GridRow, row int) {
		w := make([]float32, in)
		for i := range w {
			w[i] = number(data[row*in*size:], i, as)
		}
		for i := range to.Scales {
			from, end := i*g.Group, min((i+1)*g.Group, in)
			scale := backend.QuantizeTo(to.Codes[from:end], w[from:end], g.Bits)
			to.Scales[i] = uint16(math.Float32bits(scale) >> 16)
		}
	}
	t.DType, t.Data, t.As, t.Grid = backend.GRID, nil, 0, &g
	return t
}

// ofVocabulary reports whether a matrix is an embedding or an output projection.
func (b *binding) ofVocabulary() bool {
	return b.out == "vocab" || strings.Contains(b.name, "embed_tokens")
}

// inner reports whether a weight is a matrix that is neither of the vocabulary nor narrow.
func (b *binding) inner() bool { return len(b.shape) == 2 && !b.narrow() && !b.ofVocabulary() }

// Matrices returns the names of the tensors that INT4 converts to 4 bits, in the order of the
// model. Experts that share a tensor are left out. A tensor with several weights occurs for each.
func (s *Source) Matrices() (names []string) {
	for _, b := range s.Config.network().weights() {
		if b.inner() {
			names = append(names, b.name)
		}
	}
	return names
}

// narrow reports whether a matrix has so few outputs, each of which decides for many numbers, that
// it is never quantized: routers and gates.
func (b *binding) narrow() bool { return b.out == "experts" || b.out == "gates" || b.out == "one" }

// LargestMatrix returns the elements of the largest matrix that is neither of the vocabulary nor
// of experts.
func (c *Config) LargestMatrix() (n int64) {
	net := c.network()
	for _, b := range net.weights() {
		if b.inner() {
			n = max(n, int64(b.parts[0].n)*int64(b.in().n))
		}
	}
	return n
}

// WeightBytes returns the memory of the weights in the types of config.json, or in the types that
// they are converted to.
func (c *Config) WeightBytes(q Quantization) int64 {
	return c.weightBytes(q, func(name string, matrix bool) stored {
		s := stored{Tensor: safetensors.Tensor{DType: "BF16"}}
		switch {
		case c.FP8 != nil && matrix && !c.FP8.kept(name):
			s.DType, s.block, s.wide = "F8_E4M3", c.FP8.Block, c.FP8.Wide
		case c.Integers != nil && matrix && !c.Expand:
			s.DType, s.grid, s.ordered = "F32", c.Integers.grid(), c.Ordered
		case c.DType == "float32" || c.DType == "float16":
			s.DType = "F32"
		}
		return s
	})
}

// weightBytes adds up the memory of weights, which as returns in the files' types. Embeddings,
// output projections and routers are not matrices to as.
func (c *Config) weightBytes(q Quantization, as func(name string, matrix bool) stored) (n int64) {
	net := c.network()
	for _, b := range net.weights() {
		s := as(b.name, b.inner())
		if b.plus != 0 {
			s.DType = "F32"
		}
		if b.narrow() {
			s.grid = nil
		}
		if !s.keepsMXFP4(&b) {
			s.micro = nil
		}
		if b.rows != nil { // each with a copy of its scales
			s.block[0] = 1
		}
		if c.fourBits(q) && len(b.shape) == 2 && b.ofVocabulary() {
			n += int64(vocabularyGrid.MatrixBytes(b.parts[0].n, b.in().n))
			continue
		}
		n += s.memory(q.converted(c, &s, &b), b.parts[0].n, b.in())
	}
	if s, ok := net.(stacker); ok {
		for _, st := range s.stacks() {
			each := len(st.targets) // of as many rows
			if st.rows != nil {     // a matrix that experts, or heads, share out
				st.experts, each = 1, 1
			}
			in := max(st.in.n, 1)
			if len(st.names) == 2 {
				n += int64(st.experts*each) * int64(backend.MXFP4.MatrixBytes(st.out.n, in))
				continue
			}
			made := q.dtype()
			if st.in.of == 0 {
				made = 0
			}
			from := as(st.names[0], st.rows != nil)
			from.grid, from.micro = nil, nil
			n += int64(st.experts*each) * from.memory(made, st.out.n, whole(in))
		}
	}
	return n
}

// memory returns the bytes of a weight [out, cols] of type made; 0: of the files' type.
func (s *stored) memory(made backend.DType, out int, cols part) int64 {
	t, in := dtypes[s.DType], cols.n
	switch {
	case made == 0 && s.micro != nil:
		t = backend.MXFP4
	case made == 0 && s.keeps(cols):
		return int64(s.grid.MatrixBytes(out, in))
	case made != 0:
		t = made
	case s.made != 0:
		t = s.made
	case t == 0:
		t = backend.F32
	case t == backend.FP8 && s.wide:
		t = backend.BF16
	}
	n := int64(t.MatrixBytes(out, in))
	if t == backend.FP8 {
		rows, cols := max(s.block[0], 1), s.block[1] // the scale of a row, unless there are blocks
		if cols == 0 {
			cols = in
		}
		n += int64((out-1)/min(rows, fp8Rows)+1) * int64((in-1)/cols+1) * int64(backend.F32.Size())
	}
	return n
}

// fp8Rows are the rows that share a copy of a scale, if they share one.
const fp8Rows = 16
