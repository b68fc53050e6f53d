package model

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// stack is one tensor of the checkpoint that holds the weights of all experts of a layer, and
// their targets: each expert's rows of outputs are distributed over all targets. MXFP4 has two
// tensors, blocks and exponents.
type stack struct {
	names   []string
	tensors []safetensors.Tensor // found by match
	experts int
	out, in part // of an expert and a target; in is zero for vectors
	byInput bool // [experts, in, out] instead of [experts, out, in]
	deal    deal
	targets [][]backend.Weight // [targets][experts]

	from *stored // the first tensor, with its scales

	// rows, where set, returns the rows of a single matrix [out, in] that a target has of an
	// expert, or of a head of this rank, and whether they become columns.
	rows func(expert, target int) (rows []int, turned bool)
}

// deal is the assignment of rows of outputs to targets.
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

// fault describes what does not fit in the tensors that were found; empty: nothing.
func (s *stack) fault() string {
	var want [][]int
	in, out := s.in.of, len(s.targets)*s.out.of
	switch {
	case len(s.names) == 2:
		want = [][]int{{s.experts, out, in / 32, 16}, {s.experts, out, in / 32}}
	case s.rows != nil:
		want = [][]int{{s.out.of, in}}
	case in == 0:
		want = [][]int{{s.experts, out}}
	case s.byInput:
		want = [][]int{{s.experts, in, out}}
	default:
		want = [][]int{{s.experts, out, in}}
	}
	for i, t := range s.tensors {
		if !slices.Equal(t.Shape, want[i]) {
			return fmt.Sprintf("%s: want shape %v, got %v", t.Name, want[i], t.Shape)
		}
		if len(s.names) == 2 && t.DType != "U8" || len(s.names) == 1 && !readable(t.DType) {
			return fmt.Sprintf("%s: dtype %s; supported: F32, BF16, F16, F8_E4M3, and U8 of MXFP4", t.Name, t.DType)
		}
	}
	return ""
}

// load hands every expert's weights to the backend.
func (s *stack) load(b backend.Backend, o Options) error {
	q := o.Quantization
	if o.Late != nil && q == AsStored && len(s.names) == 1 && s.in.of > 0 && s.from.plain() {
		return s.later(o)
	}
	if len(s.names) == 1 && dtypes[s.from.DType] == 0 { // expanded for as long as it is cut up
		wide, small := s.from.whole(), s.tensors[0]
		if err := s.from.checkExponents(&wide); err != nil {
			return err
		}
		defer func() { s.tensors[0] = small }()
		s.tensors[0].Data, s.tensors[0].DType = wide.Data, "F32"
		if wide.DType == backend.BF16 {
			s.tensors[0].DType = "BF16"
		}
	}
	for e := range s.experts {
		for i := range s.targets {
			t := s.cut(e, i)
			if len(s.names) == 1 && s.in.of > 0 { // MXFP4 stays
				t.As = q.dtype()
			}
			if t.DType == backend.FP8 {
				t = s.from.widen(t)
			}
			if t.DType == backend.MXFP4 {
				if err := s.from.checkExponents(&t); err != nil {
					return err
				}
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

// later hands the matrices of all experts to Options.Late.
func (s *stack) later(o Options) error {
	c, half := *s, s.from.DType == "F16"
	if half { // moved as other numbers of two bytes are
		c.tensors = slices.Clone(s.tensors)
		c.tensors[0].DType = "BF16"
	}
	for e := range s.experts {
		for i := range s.targets {
			t := backend.Tensor{Name: fmt.Sprintf("%s[%d]", s.names[0], e), DType: cmp.Or(dtypes[s.from.DType], backend.F32), Shape: []int{s.out.n, s.in.n}}
			if s.rows != nil {
				rows, turned := s.rows(e, i)
				if t.Shape = []int{len(rows), s.in.n}; turned {
					t.Shape = []int{s.in.n, len(rows)}
				}
			}
			w, err := o.Late(t, func([]int) backend.Tensor {
				t := c.cut(e, i)
				if half {
					narrow := stored{Tensor: safetensors.Tensor{Name: t.Name, DType: "F16", Shape: t.Shape, Data: t.Data}}
					return narrow.whole()
				}
				return t
			})
			if err != nil {
				return fmt.Errorf("loading %s, expert %d: %w", s.names[0], e, err)
			}
			s.targets[i] = append(s.targets[i], w)
		}
	}
	return nil
}

// cut returns one expert's weights for one target: this rank's part of the target's rows and of
// their inputs.
func (s *stack) cut(expert, target int) backend.Tensor {
	if s.rows != nil {
		return s.pick(expert, target)
	}
	rows := make([]int, s.out.n)
	for i := range rows {
		rows[i] = target*s.out.of + s.out.from + i
		if s.deal == alternate {
			rows[i] = (s.out.from+i)*len(s.targets) + target
		}
	}
	in, all := s.in, len(s.targets)*s.out.of
	t := backend.Tensor{Name: fmt.Sprintf("%s[%d]", s.names[0], expert), Shape: []int{len(rows), in.n}}
	if len(s.names) == 2 {
		t.DType = backend.MXFP4
		for i, inputs := range []int{2, 32} { // of a byte: of blocks, of exponents
			row := in.of / inputs
			t.Data = appendRows(t.Data, s.tensors[i].Data[expert*all*row:], rows, row, in.from/inputs, in.n/inputs)
		}
		return t
	}
	t.DType = dtypes[s.tensors[0].DType]
	size := t.DType.Size()
	if in.of == 0 {
		in, t.Shape = whole(1), t.Shape[:1]
	}
	data := s.tensors[0].Data[expert*all*in.of*size : (expert+1)*all*in.of*size]
	switch {
	case s.byInput:
		t.Data = make([]byte, 0, len(rows)*in.n*size)
		for _, row := range rows {
			for i := range in.n {
				at := ((in.from+i)*all + row) * size
				t.Data = append(t.Data, data[at:at+size]...)
			}
		}
	case s.deal == halves && in.whole(): // a slice of the file, without a copy
		t.Data = data[rows[0]*in.n*size : (rows[0]+len(rows))*in.n*size]
	default:
		t.Data = appendRows(nil, data, rows, in.of*size, in.from*size, in.n*size)
	}
	return t
}

// appendRows appends bytes [from, from+n) of rows that have size bytes each.
func appendRows(to, data []byte, rows []int, size, from, n int) []byte {
	to = slices.Grow(to, len(rows)*n)
	for _, row := range rows {
		to = append(to, data[row*size+from:][:n]...)
	}
	return to
}

// pick returns the rows of a matrix that rows selects.
func (s *stack) pick(expert, target int) backend.Tensor {
	rows, turned := s.rows(expert, target)
	t := backend.Tensor{Name: fmt.Sprintf("%s[%d]", s.names[0], expert), DType: dtypes[s.tensors[0].DType], Shape: []int{len(rows), s.in.n}}
	size, from := t.DType.Size(), s.tensors[0].Data
	t.Data = make([]byte, 0, len(rows)*s.in.n*size)
	if t.DType == backend.FP8 {
		t.Scales = s.from.pickScales(rows, turned)
	}
	if !turned {
		for _, row := range rows {
			t.Data = append(t.Data, from[row*s.in.n*size:(row+1)*s.in.n*size]...)
		}
		return t
	}
	t.Shape = []int{s.in.n, len(rows)}
	for i := range s.in.n {
		for _, row := range rows {
			t.Data = append(t.Data, from[(row*s.in.n+i)*size:(row*s.in.n+i+1)*size]...)
		}
	}
	return t
}
