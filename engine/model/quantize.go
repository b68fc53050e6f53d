package model

import (
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
)

// Quantization is what a checkpoint's matrices are turned into as they are loaded.
// Vectors stay as they are, and so do routers, which choose between experts whose
// scores may lie close, and MXFP4 experts, which are small already.
type Quantization uint8

// Quantizations. INT4 keeps the embedding and the output projection in 8 bits: they
// are a small part of the weights, and every word goes through them.
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

// dtype is what most matrices become, 0 for what they are.
func (q Quantization) dtype() backend.DType {
	switch q {
	case INT8:
		return backend.INT8
	case INT4:
		return backend.INT4
	}
	return 0
}

// of is what a weight becomes, 0 for what it is.
func (q Quantization) of(b *binding) backend.DType {
	switch {
	case q == AsStored || len(b.shape) != 2 || b.out == "experts":
		return 0
	case b.out == "vocab" || strings.Contains(b.name, "embed_tokens"):
		return backend.INT8
	}
	return q.dtype()
}

// WeightBytes is the memory of the weights in the type that the config says they
// have, or of what they are turned into.
func (c *Config) WeightBytes(q Quantization) (n int64) {
	stored := backend.BF16
	if c.DType == "float32" || c.DType == "float16" { // which is expanded
		stored = backend.F32
	}
	size := func(as backend.DType, out, in int) int64 {
		if as == 0 {
			as = stored
		}
		return int64(as.MatrixBytes(out, in))
	}
	net := architectures[c.Architecture].network(c)
	for _, b := range net.weights() {
		n += size(q.of(&b), b.parts[0].n, b.in().n)
	}
	if s, ok := net.(stacker); ok {
		for _, st := range s.stacks() {
			as := q.dtype()
			switch {
			case len(st.names) == 2:
				as = backend.MXFP4
			case st.in.of == 0:
				as = 0
			}
			each := len(st.targets) // of as many rows
			if st.rows != nil {     // a matrix that experts, or heads, share out
				st.experts, each = 1, 1
			}
			n += int64(st.experts*each) * size(as, st.out.n, max(st.in.n, 1))
		}
	}
	return n
}
