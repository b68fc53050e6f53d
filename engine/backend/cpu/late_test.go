package cpu

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// A matrix that is reserved gives the products of one that is loaded, each time its numbers come
// again, and buffers that no later operation reads can be dropped at any mark.
func TestLate(t *testing.T) {
	const in, wide, rows = 96, 40, 7
	for _, kernels := range Variants() {
		for _, dtype := range []backend.DType{backend.F32, backend.BF16} {
			r := rand.New(rand.NewPCG(1, 9))
			numbers := func(out, in int) backend.Tensor {
				data := make([]byte, dtype.MatrixBytes(out, in))
				for i := range data {
					if data[i] = byte(r.Uint32()); i%dtype.Size() == dtype.Size()-1 {
						data[i] = 0x3e | data[i]&0x80 // of about 1
					}
				}
				return backend.Tensor{Name: "matrix", DType: dtype, Shape: []int{out, in}, Data: data}
			}
			table, up, down := numbers(rows, in), numbers(wide, in), numbers(in, wide)
			var want []float32
			for _, late := range []bool{false, true} {
				c, err := New(Options{Threads: 2, Kernels: kernels, Limits: backend.Limits{Tokens: rows, Outputs: 1, Seqs: 1, Blocks: 1}})
				if err != nil {
					t.Fatal(err)
				}
				load := c.Load
				if late {
					load = func(t backend.Tensor) (backend.Weight, error) { t.Data = nil; return c.Reserve(t) }
				}
				ids, tensors := [3]backend.Weight{}, [3]backend.Tensor{table, up, down}
				for i, tn := range tensors {
					if ids[i], err = load(tn); err != nil {
						t.Fatal(err)
					}
				}
				x, y, z := alloc(t, c, in), alloc(t, c, wide), alloc(t, c, in)
				mark := func(i int) {
					if !late {
						return
					}
					if i > 0 {
						c.Unload(ids[i-1])
					}
					if i < 3 {
						if err := c.Reload(ids[i], tensors[i].Data); err != nil {
							t.Fatal(err)
						}
					}
					c.UnloadIdle()
				}
				step := &backend.Step{Tokens: []int32{3, 0, 1, 6, 2}, Positions: make([]int32, 5)}
				for range 2 {
					err := c.Replay(backend.Key{Tokens: rows}, step, func() {
						c.Mark(0)
						c.Embed(x, ids[0])
						c.Mark(1)
						c.Linear(y, x, ids[1], backend.NoWeight)
						c.Mark(2)
						c.Linear(z, y, ids[2], backend.NoWeight)
						c.Add(z, x, backend.NoWeight) // x stays until here
						c.Scale(z, 0.5)
					}, mark)
					if err != nil {
						t.Fatal(err)
					}
					got := slices.Clone(c.View(z))
					if want == nil {
						want = got
					}
					if !slices.Equal(got, want) {
						t.Errorf("%s %v: the results differ", kernels, dtype)
					}
				}
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			}
		}
	}
}

func alloc(t *testing.T, c *CPU, cols int) backend.Buf {
	t.Helper()
	b, err := c.Alloc(backend.TokenRows, cols)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Reserve takes matrices of F32 and BF16 without Data.
func TestReserveRefuses(t *testing.T) {
	c, err := New(Options{Threads: 1, Limits: backend.Limits{Tokens: 1, Outputs: 1, Seqs: 1, Blocks: 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, tn := range []backend.Tensor{
		{DType: backend.F32, Shape: []int{8}}, {DType: backend.MXFP4, Shape: []int{8, 32}}, {DType: backend.F32, Shape: []int{0, 8}},
		{DType: backend.F32, Shape: []int{1, 1}, Data: make([]byte, 4)}, {DType: backend.BF16, Shape: []int{8, 32}, As: backend.INT8},
		{DType: backend.BF16, Shape: []int{8, 32}, First: 0, Of: 16},
	} {
		if _, err := c.Reserve(tn); !errors.Is(err, backend.ErrShape) {
			t.Errorf("%+v: %v", tn, err)
		}
	}
}
