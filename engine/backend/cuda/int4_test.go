//go:build cgo && linux

package cuda

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// TestInt4Rows compares products by few_int4 with sums in fp64. The bits of a row are the same alone
// and with up to seven others, also where parts of a product are added, and with one order of all
// sums, which has other kernels.
func TestInt4Rows(t *testing.T) {
	const rows, out, in = 8, 70, 2100
	rng := rand.New(rand.NewPCG(7, 4))
	normal := func(n int, dev float64) (data []byte, values []float32) {
		for range n {
			v := float32(rng.NormFloat64() * dev)
			data, values = binary.LittleEndian.AppendUint32(data, math.Float32bits(v)), append(values, v)
		}
		return data, values
	}
	xData, x := normal(rows*in, 1)
	wData, w := normal(out*in, 0.1)
	codes := make([]byte, in)
	var want, squares [rows * out]float64
	for i := range out {
		for at := 0; at < in; at += backend.QuantGroup {
			to := min(at+backend.QuantGroup, in)
			scale := float64(backend.QuantizeGroup(codes[at:to], w[i*in+at:i*in+to], backend.INT4))
			for j := at; j < to; j++ {
				for r := range rows {
					v := scale * float64(int8(codes[j])) * float64(x[r*in+j])
					want[r*out+i] += v
					squares[r*out+i] += v * v
				}
			}
		}
	}
	for _, deterministic := range []bool{false, true} {
		dev := openGPU(t, Options{Limits: benchLimits, Deterministic: deterministic})
		if strings.Contains(dev.Variant(), "-one-order-") != deterministic {
			t.Errorf("variant %s", dev.Variant())
		}
		b := &bench{Backend: dev}
		table, err := b.Load(backend.Tensor{Name: "rows", DType: backend.F32, Shape: []int{rows, in}, Data: xData})
		b.must(err)
		weight, err := b.Load(backend.Tensor{Name: "weights", DType: backend.F32, Shape: []int{out, in}, Data: wData, As: backend.INT4})
		b.must(err)
		a, y := b.buf(in), b.buf(out)
		run := func(tokens ...int32) []float32 {
			s := &backend.Step{Tokens: tokens, Positions: make([]int32, len(tokens))}
			b.must(b.Replay(backend.Key{Tokens: len(tokens)}, s, func() {
				b.Embed(a, table)
				b.Linear(y, a, weight, backend.NoWeight)
			}, nil))
			return b.Download(nil, y)
		}
		all := run(0, 1, 2, 3, 4, 5, 6, 7)
		for i, v := range all {
			if d := math.Abs(float64(v)-want[i]) / math.Sqrt(squares[i]); !(d < 2e-6) {
				t.Errorf("deterministic %v: row %d, output %d is %g, want %g: off by %.2g of its numbers' norm", deterministic, i/out, i%out, v, want[i], d)
			}
		}
		for i := range int32(rows) {
			row := all[i*out : (i+1)*out]
			if got := run(i); !slices.Equal(got, row) {
				t.Errorf("deterministic %v: row %d has other bits alone", deterministic, i)
			}
			if got := run(7-i, i); !slices.Equal(got[out:], row) {
				t.Errorf("deterministic %v: row %d has other bits after row %d", deterministic, i, 7-i)
			}
		}
		dev.Close()
	}
}
