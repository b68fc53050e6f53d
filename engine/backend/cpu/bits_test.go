package cpu

import (
	"encoding/binary"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// plainBits are the low digits of a sequence in [-1, 1): every processor makes
// the same ones, as they need no rounding.
type plainBits uint32

func (p *plainBits) next() float32 {
	*p = *p*1664525 + 1013904223
	return float32(int32(*p)>>8) / (1 << 23)
}

func (p *plainBits) fill(data []float32) {
	for i := range data {
		data[i] = p.next()
	}
}

// TestSameBits: all kernels with a fused multiply-add give the very same bits,
// those written here; so AVX2, AVX-512 and NEON do, on whichever machine each
// is tested.
func TestSameBits(t *testing.T) {
	// They change only with KernelVersion.
	const want, wantFP8 = 0xf50c4f6d6f8a375a, 0xa7447f6e8f8300f4
	for _, kernels := range Variants() {
		if kernels == Portable || kernels == Generic {
			continue
		}
		if got := bitsOf(t, kernels, backend.BF16); got != want {
			t.Errorf("%s: the results hash to %#x, want %#x", kernels, got, uint64(want))
		}
		if got := bitsOf(t, kernels, backend.FP8); got != wantFP8 {
			t.Errorf("%s: with KV in fp8 the results hash to %#x, want %#x", kernels, got, uint64(wantFP8))
		}
	}
}

// bitsOf hashes results of the operations in which something is summed.
func bitsOf(t *testing.T, kernels string, kv backend.DType) uint64 {
	const rows, in, out, heads, kvHeads, dim, bt = 37, 1100, 150, 6, 2, 40, 8
	p := plainBits(1)
	b := newRig(t, kernels, rows, rand.New(rand.NewPCG(1, 1)))
	defer b.Close()
	buf := func(cols int) (backend.Buf, []float32) {
		id, data := b.buf(backend.TokenRows, cols, 1)
		p.fill(data)
		return id, data
	}
	load := func(dt backend.DType, dims ...int) backend.Weight {
		n := 1
		for _, d := range dims {
			n *= d
		}
		var data []byte
		for range n {
			if v := p.next(); dt == backend.BF16 {
				data = binary.LittleEndian.AppendUint16(data, toBF16(v))
			} else {
				data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
			}
		}
		w, err := b.Load(backend.Tensor{Name: "plain", DType: dt, Shape: dims, Data: data})
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	if err := b.AllocKV(backend.UniformKV(1, 8, bt, kvHeads, dim, kv)); err != nil {
		t.Fatal(err)
	}
	x, xs := buf(in)
	y, ys := buf(out)
	z, zs := buf(out)
	n, ns := buf(in)
	g, gs := buf(in)
	q, _ := buf(heads * dim)
	k, _ := buf(kvHeads * dim)
	v, _ := buf(kvHeads * dim)
	a, as := buf(heads * dim)
	single, half, norm := load(backend.F32, out, in), load(backend.BF16, out, in), load(backend.F32, in)
	st := &backend.Step{Tokens: make([]int32, rows), Spans: []backend.Span{{Tokens: rows, Tables: [][]int32{{3, 0, 5, 1, 7}}}}}
	for i := range int32(rows) {
		st.Positions = append(st.Positions, i)
	}
	b.once(st, func() {
		b.Linear(y, x, single, backend.NoWeight)
		b.Linear(z, x, half, backend.NoWeight)
		b.RMSNorm(n, x, norm, 1e-5)
		b.GatedAct(g, x, n, backend.SiLU)
		b.StoreKV(0, k, v)
		b.Attention(a, q, backend.AttentionSpec{Heads: heads, KVHeads: kvHeads, HeadDim: dim, Scale: 2.5, Window: 30})
	})
	h := fnv.New64a()
	for _, data := range [][]float32{xs, ys, zs, ns, gs, as} {
		for _, f := range data {
			h.Write(binary.LittleEndian.AppendUint32(nil, math.Float32bits(f)))
		}
	}
	return h.Sum64()
}
