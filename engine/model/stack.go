package model

import (
	"fmt"
	"slices"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// stack is one tensor of the checkpoint that holds the weights of all experts of
// a layer, and where they go: each expert's rows of outputs are dealt to as many
// targets as there are. MXFP4 comes as two tensors, blocks and exponents.
type stack struct {
	names   []string
	tensors []safetensors.Tensor // found by match
	experts int
	out, in int  // of an expert; in is 0 for vectors
	byInput bool // [experts, in, out] instead of [experts, out, in]
	deal    deal
	targets [][]backend.Weight // [targets][experts]

	whole func(as backend.DType) backend.Tensor // expands a type that backends do not take

	// rows, where set, says which rows of a single matrix [out, in] a target gets of
	// an expert, or of a head, and whether they become columns.
	rows func(expert, target int) (rows []int, turned bool)
}

// deal says which rows of outputs go to which target.
type deal uint8

const (
	halves    deal = iota // the first half to the first target, and so on
	alternate             // one to each in turn
)

// stacker is a network with stacked experts.
type stacker interface{ stacks() []stack }

func stackBytes(all []stack) (n int64) {
	for i := range all {
		n += all[i].bytes()
	}
	return n
}

func (s *stack) bytes() (n int64) {
	for _, t := range s.tensors {
		n += int64(len(t.Data))
	}
	return n
}

// fault says what is wrong with the tensors that were found, if anything.
func (s *stack) fault() string {
	var want [][]int
	switch {
	case len(s.names) == 2:
		want = [][]int{{s.experts, s.out, s.in / 32, 16}, {s.experts, s.out, s.in / 32}}
	case s.rows != nil:
		want = [][]int{{s.out, s.in}}
	case s.in == 0:
		want = [][]int{{s.experts, s.out}}
	case s.byInput:
		want = [][]int{{s.experts, s.in, s.out}}
	default:
		want = [][]int{{s.experts, s.out, s.in}}
	}
	for i, t := range s.tensors {
		if !slices.Equal(t.Shape, want[i]) {
			return fmt.Sprintf("%s: want shape %v, got %v", t.Name, want[i], t.Shape)
		}
		if len(s.names) == 2 && t.DType != "U8" || len(s.names) == 1 && widths[t.DType] == 0 {
			return fmt.Sprintf("%s: dtype %s; supported: F32, BF16, F16, F8_E4M3, and U8 of MXFP4", t.Name, t.DType)
		}
	}
	return ""
}

// load hands every expert's weights to the backend.
func (s *stack) load(b backend.Backend, q Quantization) error {
	if s.whole != nil { // for as long as it is cut up
		whole, small := s.whole(q.dtype()), s.tensors[0]
		defer func() { s.tensors[0] = small }()
		s.tensors[0].Data = whole.Data
		s.tensors[0].DType = map[backend.DType]string{backend.F32: "F32", backend.BF16: "BF16"}[whole.DType]
	}
	for e := range s.experts {
		for i := range s.targets {
			t := s.cut(e, i)
			if len(s.names) == 1 && s.in > 0 { // MXFP4 stays
				t.As = q.dtype()
			}
			w, err := b.Load(t)
			if err != nil {
				return fmt.Errorf("loading %s, expert %d: %w", s.names[0], e, err)
			}
			s.targets[i] = append(s.targets[i], w)
		}
	}
	return nil
}

// cut is one expert's weights for one target.
func (s *stack) cut(expert, target int) backend.Tensor {
	if s.rows != nil {
		return s.pick(expert, target)
	}
	rows := make([]int, 0, s.out/len(s.targets))
	for i := range cap(rows) {
		row := target*cap(rows) + i
		if s.deal == alternate {
			row = i*len(s.targets) + target
		}
		rows = append(rows, row)
	}
	t := backend.Tensor{Name: fmt.Sprintf("%s[%d]", s.names[0], expert), Shape: []int{len(rows), s.in}}
	if len(s.names) == 2 {
		t.DType = backend.MXFP4
		for i, bytes := range []int{s.in / 2, s.in / 32} { // blocks, exponents
			data := s.tensors[i].Data[expert*s.out*bytes:]
			for _, row := range rows {
				t.Data = append(t.Data, data[row*bytes:(row+1)*bytes]...)
			}
		}
		return t
	}
	t.DType = dtypes[s.tensors[0].DType]
	size, in := t.DType.Size(), max(s.in, 1)
	data := s.tensors[0].Data[expert*s.out*in*size : (expert+1)*s.out*in*size]
	if s.in == 0 {
		t.Shape = t.Shape[:1]
	}
	switch {
	case s.byInput:
		t.Data = make([]byte, 0, len(rows)*in*size)
		for _, row := range rows {
			for i := range in {
				at := (i*s.out + row) * size
				t.Data = append(t.Data, data[at:at+size]...)
			}
		}
	case s.deal == halves: // where they lie, so that they need not be copied
		t.Data = data[rows[0]*in*size : (rows[0]+len(rows))*in*size]
	default:
		for _, row := range rows {
			t.Data = append(t.Data, data[row*in*size:(row+1)*in*size]...)
		}
	}
	return t
}

// pick is the rows of a matrix that rows says.
func (s *stack) pick(expert, target int) backend.Tensor {
	rows, turned := s.rows(expert, target)
	t := backend.Tensor{Name: fmt.Sprintf("%s[%d]", s.names[0], expert), DType: dtypes[s.tensors[0].DType], Shape: []int{len(rows), s.in}}
	size, from := t.DType.Size(), s.tensors[0].Data
	t.Data = make([]byte, 0, len(rows)*s.in*size)
	if !turned {
		for _, row := range rows {
			t.Data = append(t.Data, from[row*s.in*size:(row+1)*s.in*size]...)
		}
		return t
	}
	t.Shape = []int{s.in, len(rows)}
	for i := range s.in {
		for _, row := range rows {
			t.Data = append(t.Data, from[(row*s.in+i)*size:(row*s.in+i+1)*size]...)
		}
	}
	return t
}
