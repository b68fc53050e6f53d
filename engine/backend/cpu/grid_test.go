package cpu

import (
	"encoding/binary"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// grids are the forms of matrices of integers, as checkpoints have them.
var grids = []backend.Grid{
	{Kind: backend.GridPlain, Bits: 4, Group: 32}, // Q4_0
	{Kind: backend.GridPlain, Bits: 4, Group: 32, BFloat: true},
	{Kind: backend.GridPlain, Bits: 5, Group: 32}, // Q5_0
	{Kind: backend.GridPlain, Bits: 8, Group: 32}, // Q8_0
	{Kind: backend.GridZeros, Bits: 4, Group: 32}, // GPTQ, AWQ
	{Kind: backend.GridZeros, Bits: 4, Group: 64, BFloat: true},
	{Kind: backend.GridZeros, Bits: 4, Group: 128},
	{Kind: backend.GridZeros, Bits: 4, Group: 192},
	{Kind: backend.GridZeros, Bits: 8, Group: 4096, BFloat: true}, // of a whole row
	{Kind: backend.GridOffsets, Bits: 4, Group: 32},               // Q4_1
	{Kind: backend.GridOffsets, Bits: 5, Group: 32},               // Q5_1
	{Kind: backend.GridMins, Bits: 4, Group: 32},                  // Q4_K
	{Kind: backend.GridMins, Bits: 5, Group: 32},                  // Q5_K
	{Kind: backend.GridSigned, Bits: 6, Group: 16},                // Q6_K
	{Kind: backend.GridFloats, Bits: 4, Group: 16, Whole: 1. / 3000},
	{Kind: backend.GridFloats, Bits: 4, Group: 16, Whole: 3000, Divide: true},
}

// integerGrids is the number of grids whose codes are integers.
const integerGrids = 14

// gridTensor is a matrix of random codes and scales, and its weights as float32.
func gridTensor(random func(n int) int, g backend.Grid, out, in int) (backend.Tensor, []float32) {
	scale := func() uint16 { // of about 1/100
		if g.BFloat {
			return uint16(0x3c00 + random(0x80) + random(2)<<15)
		}
		return uint16(0x2000 + random(0x400) + random(2)<<15)
	}
	rows, values := make([]*backend.GridRow, out), make([]float32, out*in)
	for n := range rows {
		r := g.NewRow(in)
		for i := range r.Codes {
			r.Codes[i] = uint8(random(1 << g.Bits))
		}
		for i := range r.Scales {
			r.Scales[i], r.Mins[i] = scale(), scale()
		}
		for i := range r.Sub {
			r.Sub[i], r.SubMin[i] = uint8(random(64)), uint8(random(64))
			if g.Kind == backend.GridZeros {
				r.SubMin[i] = uint8(random(1 << g.Bits))
			} else if g.Kind == backend.GridSigned {
				r.Sub[i] = uint8(random(256))
			} else if g.Kind == backend.GridFloats {
				r.Sub[i] = uint8(random(0x7f) + random(2)<<7) // no NaN
			}
		}
		rows[n] = r
		g.Weights(values[n*in:(n+1)*in], r)
	}
	g.Row = func(to *backend.GridRow, row int) {
		from := rows[row]
		copy(to.Codes, from.Codes)
		copy(to.Scales, from.Scales)
		copy(to.Mins, from.Mins)
		copy(to.Sub, from.Sub)
		copy(to.SubMin, from.SubMin)
	}
	return backend.Tensor{Name: "grid", DType: backend.GRID, Shape: []int{out, in}, Grid: &g}, values
}

// TestGridLinear: products are those of the weights with rows rounded to 8 bits, a row has the same
// bits alone and in a batch, and every variant with fused multiply-adds has the same bits.
func TestGridLinear(t *testing.T) {
	for seed := range trials(3 * len(grids)) {
		var fused []float32
		for _, kernels := range Variants() {
			t.Run(kernels, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 61))
				g := grids[int(seed)%len(grids)]
				rows, in, out := 1+rng.IntN(20), 1+rng.IntN(400), 1+rng.IntN(150)
				if seed%4 == 0 {
					in += 2100 // more than one block of the reduction
				}
				if seed%11 == 0 {
					rows += 95
				}
				if g.Unit() == backend.GridBlock {
					in = (in + backend.GridBlock - 1) / backend.GridBlock * backend.GridBlock
				}
				b := newRig(t, kernels, rows, rng)
				defer b.Close()
				x, xs := b.buf(backend.TokenRows, in, 1)
				y, ys := b.buf(backend.TokenRows, out, 1)
				tn, ws := gridTensor(rng.IntN, g, out, in)
				w, err := b.Load(tn)
				if err != nil {
					t.Fatal(err)
				}
				bias, bs := b.load(backend.BF16, out)
				record := func() { b.Linear(y, x, w, bias) }
				b.once(nil, record)
				row := make([]float32, in)
				for n := 0; n < out && kernels == Portable; n++ {
					if b.weights[w].decodeRow(row, n); !slices.Equal(row, ws[n*in:(n+1)*in]) {
						t.Fatalf("seed %d: %+v: row %d is not what was loaded", seed, g, n)
					}
				}
				for r := range rows {
					row := rounded(xs[r*in : (r+1)*in])
					for n := range out {
						sum, size := float64(bs[n]), math.Abs(float64(bs[n]))
						for k, v := range row {
							sum += v * float64(ws[n*in+k])
							size += math.Abs(v) * (math.Abs(float64(ws[n*in+k])) + 0.5) // the parts of a weight
						}
						near(t, seed, "y", r*out+n, ys[r*out+n], sum, ulp*size*8)
					}
				}
				all := slices.Clone(ys)
				copy(xs, xs[(rows-1)*in:rows*in])
				b.once(&backend.Step{Tokens: make([]int32, 1), Positions: make([]int32, 1)}, record)
				if !slices.Equal(ys[:out], all[(rows-1)*out:]) {
					t.Errorf("seed %d: %+v: a row has other bits alone than among %d", seed, g, rows)
				}
				switch {
				case kernels == Portable || kernels == Generic:
				case fused == nil:
					fused = all
				case !slices.Equal(fused, all):
					t.Errorf("seed %d: %+v: the bits differ from those of %s", seed, g, Variants()[0])
				}
			})
		}
	}
}

// TestGridEmbed: a row of a table has the bits of its weights in every variant.
func TestGridEmbed(t *testing.T) {
	eachVariant(t, len(grids), func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		g := grids[int(seed)%len(grids)]
		rows, cols, vocab := 1+rng.IntN(20), 256*(1+rng.IntN(2)), 1+rng.IntN(70)
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		x, xs := b.buf(backend.TokenRows, cols, 1)
		tn, ws := gridTensor(rng.IntN, g, vocab, cols)
		w, err := b.Load(tn)
		if err != nil {
			t.Fatal(err)
		}
		ids := make([]int32, rows)
		for i := range ids {
			ids[i] = int32(rng.IntN(vocab))
		}
		b.once(&backend.Step{Tokens: ids}, func() { b.Embed(x, w) })
		for r, id := range ids {
			if !slices.Equal(xs[r*cols:(r+1)*cols], ws[int(id)*cols:(int(id)+1)*cols]) {
				t.Fatalf("%+v: row %d has other values", g, id)
			}
		}
	})
}

// TestGridMoE: experts in grids give about what their weights give in float32.
func TestGridMoE(t *testing.T) {
	eachVariant(t, len(grids), func(t *testing.T, kernels string, seed uint64, _ *rand.Rand) {
		var results [2][]float32
		for i := range results {
			rng := rand.New(rand.NewPCG(seed, 51))
			b := newRig(t, kernels, 2+rng.IntN(40), rng)
			m := newMixtureOf(b, backend.F32)
			matrices := func(ids []backend.Weight, out, in int) {
				for e := range ids {
					g := grids[(int(seed)+e)%len(grids)] // experts may differ
					if in%g.Unit() != 0 && g.Unit() == backend.GridBlock {
						g = grids[0]
					}
					if rng.IntN(2) == 0 {
						g.Order = permutation(rng, in)
					}
					tn, ws := gridTensor(rng.IntN, g, out, in)
					if i == 1 {
						var data []byte
						for _, w := range ws {
							data = binary.LittleEndian.AppendUint32(data, math.Float32bits(w))
						}
						tn = backend.Tensor{Name: "wide", DType: backend.F32, Shape: tn.Shape, Data: data}
					}
					var err error
					if ids[e], err = b.Load(tn); err != nil {
						t.Fatal(err)
					}
				}
			}
			matrices(m.spec.Gate, m.inner, m.hidden)
			matrices(m.spec.Up, m.inner, m.hidden)
			matrices(m.spec.Down, m.hidden, m.inner)
			b.once(nil, func() { b.MoE(m.y, m.x, m.router, m.spec) })
			results[i] = slices.Clone(m.ys)
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
		}
		var off, all float64
		for i, v := range results[1] {
			off += float64(v-results[0][i]) * float64(v-results[0][i])
			all += float64(v) * float64(v)
		}
		if !(off <= all*4e-4) { // 2 % of its size
			t.Errorf("seed %d: the outputs are off by %g of %g, in squares", seed, off, all)
		}
	})
}

// permutation returns an order of n inputs.
func permutation(rng *rand.Rand, n int) []int32 {
	order := make([]int32, n)
	for i, input := range rng.Perm(n) {
		order[i] = int32(input)
	}
	return order
}

// TestGridOrder: a product with an order of inputs has the bits of one whose row is in that order,
// and products with equal orders share the rounded row.
func TestGridOrder(t *testing.T) {
	eachVariant(t, len(grids), func(t *testing.T, kernels string, seed uint64, rng *rand.Rand) {
		g := grids[int(seed)%len(grids)]
		rows, in, out := 1+rng.IntN(9), 1+rng.IntN(300), 1+rng.IntN(40)
		if g.Unit() == backend.GridBlock {
			in = 2 * backend.GridBlock
		}
		b := newRig(t, kernels, rows, rng)
		defer b.Close()
		order := permutation(rng, in)
		x, xs := b.buf(backend.TokenRows, in, 1)
		sorted, ss := b.buf(backend.TokenRows, in, 1)
		for r := range rows {
			for i, input := range order {
				ss[r*in+i] = xs[r*in+int(input)]
			}
		}
		tn, _ := gridTensor(rng.IntN, g, out, in)
		plain, err := b.Load(tn)
		if err != nil {
			t.Fatal(err)
		}
		results := make([][]float32, 6)
		outputs := make([]backend.Buf, len(results))
		for i := range results {
			outputs[i], results[i] = b.buf(backend.TokenRows, out, 1)
		}
		with := func(order []int32) backend.Weight {
			ordered := *tn.Grid
			ordered.Order = order
			of := tn
			of.Grid = &ordered
			w, err := b.Load(of)
			if err != nil {
				t.Fatal(err)
			}
			return w
		}
		first, second, other := with(order), with(slices.Clone(order)), with(permutation(rng, in))
		b.once(nil, func() {
			for i, w := range []backend.Weight{first, second, other, first, plain} {
				b.Linear(outputs[i], x, w, backend.NoWeight)
			}
			b.Linear(outputs[5], sorted, plain, backend.NoWeight)
		})
		for _, i := range []int{0, 1, 3} {
			if !slices.Equal(results[i], results[5]) {
				t.Errorf("seed %d: %+v: product %d has other bits than with an ordered row", seed, g, i)
			}
		}
		conversions := 0
		for _, p := range b.plans {
			for _, o := range p.ops {
				if o.kind == opQuantize {
					conversions++
				}
			}
		}
		if want := 5; in > 20 && conversions != want { // two products share one
			t.Errorf("seed %d: %d rounded rows, want %d", seed, conversions, want)
		}
	})
}

// TestGridMemory: a packed matrix takes what the grid says, near the bits of its file.
func TestGridMemory(t *testing.T) {
	const out, in = 64, 4096
	for i, most := range []float64{4.5, 4.5, 5.5, 8.5, 5, 4.5, 4.25, 4.2, 8.01, 5, 6, 4.625, 5.625, 6.625, 4.5, 4.5} {
		b := newRig(t, Variants()[0], 1, rand.New(rand.NewPCG(1, 1)))
		tn, _ := gridTensor(b.rng.IntN, grids[i], out, in)
		w, err := b.Load(tn)
		if err != nil {
			t.Fatal(err)
		}
		n := len(b.weights[w].matrix)
		if said := tn.Grid.MatrixBytes(out, in); Variants()[0] != Portable && (n < said || n > said+64) {
			t.Errorf("%+v: %d bytes, the grid says %d", grids[i], n, said)
		}
		if bits := float64(8*tn.Grid.MatrixBytes(out, in)) / (out * in); bits > most {
			t.Errorf("%+v: %.3f bits for a weight, at most %.3f", grids[i], bits, most)
		}
		b.Close()
	}
}

// TestGridRefusals: grids that no kernel reads are refused.
func TestGridRefusals(t *testing.T) {
	b := newRig(t, Variants()[0], 1, rand.New(rand.NewPCG(1, 1)))
	defer b.Close()
	row := func(*backend.GridRow, int) {}
	for _, tn := range []backend.Tensor{
		{DType: backend.GRID, Shape: []int{1, 64}},
		{DType: backend.GRID, Shape: []int{64}, Grid: &backend.Grid{Bits: 4, Group: 32, Row: row}},
		{DType: backend.GRID, Shape: []int{1, 64}, Grid: &backend.Grid{Bits: 4, Group: 32}},
		{DType: backend.GRID, Shape: []int{1, 64}, Grid: &backend.Grid{Bits: 3, Group: 32, Row: row}},
		{DType: backend.GRID, Shape: []int{1, 64}, Grid: &backend.Grid{Bits: 4, Group: 64, Row: row}},
		{DType: backend.GRID, Shape: []int{1, 64}, Grid: &backend.Grid{Kind: backend.GridZeros, Bits: 4, Group: 96, Row: row}},
		{DType: backend.GRID, Shape: []int{1, 64}, Grid: &backend.Grid{Kind: backend.GridMins, Bits: 4, Group: 32, Row: row}},
		{DType: backend.GRID, Shape: []int{1, 256}, Grid: &backend.Grid{Kind: backend.GridSigned, Bits: 6, Group: 32, Row: row}},
		{DType: backend.GRID, Shape: []int{1, 64}, Grid: &backend.Grid{Kind: backend.GridFloats, Bits: 4, Group: 16, Row: row}},
		{DType: backend.GRID, Shape: []int{1, 64}, Grid: &backend.Grid{Kind: backend.GridFloats, Bits: 4, Group: 32, Whole: 1, Row: row}},
		{DType: backend.GRID, Shape: []int{1, 64}, Grid: &backend.Grid{Bits: 4, Group: 32, Row: row, Order: make([]int32, 63)}},
		{DType: backend.GRID, Shape: []int{1, 2}, Grid: &backend.Grid{Bits: 4, Group: 32, Row: row, Order: []int32{0, 2}}},
		{DType: backend.GRID, Shape: []int{1, 2}, Grid: &backend.Grid{Bits: 4, Group: 32, Row: row, Order: []int32{-1, 0}}},
		{DType: backend.GRID, Shape: []int{1, 64}, Data: make([]byte, 64), Grid: &backend.Grid{Bits: 4, Group: 32, Row: row}},
		{DType: backend.GRID, Shape: []int{1, 64}, As: backend.INT8, Grid: &backend.Grid{Bits: 4, Group: 32, Row: row}},
	} {
		if _, err := b.Load(tn); err == nil {
			t.Errorf("%v %+v was loaded", tn.Shape, tn.Grid)
		}
	}
}

// TestSameBitsGrid is TestSameBits for grids.
func TestSameBitsGrid(t *testing.T) {
	want := []uint64{0xcdd786de0dcfdcde, 0x50158580fa861840} // of integers and of floats; changes only with KernelVersion
	for _, kernels := range Variants() {
		if kernels == Portable || kernels == Generic {
			continue
		}
		t.Run(kernels, func(t *testing.T) {
			const rows, in, out = 13, 1280, 40
			p := plainBits(1)
			random := func(n int) int { p.next(); return int(uint32(p)>>8) % n }
			b := newRig(t, kernels, rows, rand.New(rand.NewPCG(1, 1)))
			defer b.Close()
			x, xs := b.buf(backend.TokenRows, in, 1)
			p.fill(xs)
			h, got := fnv.New64a(), []uint64{}
			for i, g := range grids {
				if i == integerGrids {
					got = append(got, h.Sum64())
					h.Reset()
				}
				y, ys := b.buf(backend.TokenRows, out, 1)
				tn, _ := gridTensor(random, g, out, in)
				w, err := b.Load(tn)
				if err != nil {
					t.Fatal(err)
				}
				clear(b.plans)
				b.once(nil, func() { b.Linear(y, x, w, backend.NoWeight) })
				for _, f := range ys {
					h.Write(binary.LittleEndian.AppendUint32(nil, math.Float32bits(f)))
				}
			}
			if got = append(got, h.Sum64()); !slices.Equal(got, want) {
				t.Errorf("the results hash to %#x, want %#x", got, want)
			}
		})
	}
}
