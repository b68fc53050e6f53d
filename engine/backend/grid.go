package backend

import "math"

// GridKind is the form of the scales of a Grid. A weight is made of its code, an integer that is
// not negative, and of numbers of its group or block.
type GridKind int32

// Kinds of scales; kernels.h has the same numbers. Middle is half of the codes, 1<<(Bits-1).
const (
	GridPlain   GridKind = iota // scale·(code − middle), groups of 32
	GridZeros                   // scale·(code − zero)
	GridOffsets                 // scale·code + offset, groups of 32
	GridMins                    // (scale·sub)·code − min·subMin, groups of 32 in blocks of 256
	GridSigned                  // (scale·sub)·(code − middle), groups of 16 in blocks of 256; sub has a sign
	GridFloats                  // scale·E2M1[code], 4 bits, groups of 16; scale is sub, E4M3, times Whole
)

// GridBlock is the inputs of a block of GridMins and GridSigned, which share Scales and Mins.
const GridBlock = 256

// Grid is the content of a matrix of type GRID: integers with scales, as GPTQ, AWQ,
// compressed-tensors and GGUF store them.
type Grid struct {
	Kind   GridKind
	Bits   int  // of a code: 4, 5, 6 or 8; GridZeros 4 or 8, GridOffsets and GridMins 4 or 5, GridSigned 6
	Group  int  // inputs of a group; of GridZeros 32 or a multiple of 64
	BFloat bool // scales are bfloat16, else float16

	// Whole is the scale of a matrix of GridFloats, from 1e-36 to 1e36. It divides those of groups if
	// Divide is set.
	Whole  float32
	Divide bool

	// Order is the input that each code of a row belongs to, so that neighbouring codes are of one
	// group (act-order); empty: codes are in the order of inputs.
	Order []int32

	// Row reads a row of the matrix. Several goroutines may call it.
	Row func(to *GridRow, row int)
}

// GridRow is a row of a matrix of in inputs. Which fields are used depends on the kind.
type GridRow struct {
	Codes  []uint8  // [in]
	Scales []uint16 // of each group or, in blocks, of each block
	Mins   []uint16 // likewise: offsets of GridOffsets, mins of GridMins
	Sub    []uint8  // [groups] of GridMins, GridSigned and GridFloats
	SubMin []uint8  // [groups] of GridMins; zeros of GridZeros
}

// Fit reports whether a backend can keep a matrix [out, in] of the grid.
func (g *Grid) Fit(out, in int) bool {
	if g == nil || g.Row == nil || out < 1 || in < 1 || len(g.Order) > 0 && len(g.Order) != in {
		return false
	}
	for _, input := range g.Order {
		if input < 0 || int(input) >= in {
			return false
		}
	}
	bits := func(all ...int) bool {
		for _, b := range all {
			if g.Bits == b {
				return true
			}
		}
		return false
	}
	switch g.Kind {
	case GridPlain:
		return bits(4, 5, 8) && g.Group == 32
	case GridZeros:
		return bits(4, 8) && (g.Group == 32 || g.Group > 0 && g.Group%64 == 0)
	case GridOffsets:
		return bits(4, 5) && g.Group == 32
	case GridMins:
		return bits(4, 5) && g.Group == 32 && in%GridBlock == 0
	case GridSigned:
		return bits(6) && g.Group == 16 && in%GridBlock == 0
	case GridFloats:
		return bits(4) && g.Group == 16 && g.Whole > 1e-36 && g.Whole < 1e36
	}
	return false
}

// blocks reports whether groups share the scales of a block.
func (g *Grid) blocks() bool { return g.Kind == GridMins || g.Kind == GridSigned }

// Unit returns the inputs at whose multiples a matrix may be cut: those of a block or group.
func (g *Grid) Unit() int {
	if g.blocks() {
		return GridBlock
	}
	return g.Group
}

// NewRow returns memory for a row of in inputs.
func (g *Grid) NewRow(in int) *GridRow {
	groups, scales := (in-1)/g.Group+1, (in-1)/g.Unit()+1
	return &GridRow{
		Codes: make([]uint8, in), Scales: make([]uint16, scales), Mins: make([]uint16, scales),
		Sub: make([]uint8, groups), SubMin: make([]uint8, groups),
	}
}

// Columns returns the columns [from, from+n) of a matrix of in inputs. They begin where a Unit
// begins, or are within one. A grid with an Order has no such columns.
func (g *Grid) Columns(in, from, n int) *Grid {
	part := *g
	part.Row = func(to *GridRow, row int) {
		all := g.NewRow(in)
		g.Row(all, row)
		copy(to.Codes, all.Codes[from:from+n])
		copy(to.Scales, all.Scales[from/g.Unit():])
		copy(to.Mins, all.Mins[from/g.Unit():])
		copy(to.Sub, all.Sub[from/g.Group:])
		copy(to.SubMin, all.SubMin[from/g.Group:])
	}
	return &part
}

// Rows returns a matrix of some rows of this one.
func (g *Grid) Rows(rows []int) *Grid {
	part := *g
	part.Row = func(to *GridRow, row int) { g.Row(to, rows[row]) }
	return &part
}

// E2M1 has the values of floats of four bits: sign, two of exponent, one of mantissa.
var E2M1 = [16]float32{0, .5, 1, 1.5, 2, 3, 4, 6, float32(math.Copysign(0, -1)), -.5, -1, -1.5, -2, -3, -4, -6}

// Scale returns the factor and the minimum of a group of a row, and the code that means zero: a
// weight is factor·(code − zero) − least, or factor·E2M1[code] of GridFloats. Factor and least are
// exact, or of GridFloats rounded once.
func (g *Grid) Scale(r *GridRow, group int) (factor float32, zero int, least float32) {
	number := Half
	if g.BFloat {
		number = func(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }
	}
	middle := 1 << (g.Bits - 1)
	switch g.Kind {
	case GridZeros:
		return number(r.Scales[group]), int(r.SubMin[group]), 0
	case GridOffsets:
		return number(r.Scales[group]), 0, -number(r.Mins[group])
	case GridMins:
		block := group * g.Group / GridBlock
		return number(r.Scales[block]) * float32(r.Sub[group]), 0, number(r.Mins[block]) * float32(r.SubMin[group])
	case GridSigned:
		block := group * g.Group / GridBlock
		return number(r.Scales[block]) * float32(int8(r.Sub[group])), middle, 0
	case GridFloats:
		if g.Divide {
			return E4M3[r.Sub[group]] / g.Whole, 0, 0
		}
		return E4M3[r.Sub[group]] * g.Whole, 0, 0
	}
	return number(r.Scales[group]), middle, 0
}

// Weights writes the weights of a row by input, rounded as GGUF's are: each product, then each sum.
func (g *Grid) Weights(dst []float32, r *GridRow) {
	for from := 0; from < len(dst); from += g.Group {
		factor, zero, least := g.Scale(r, from/g.Group)
		for i := from; i < min(from+g.Group, len(dst)); i++ {
			input := i
			if len(g.Order) > 0 {
				input = int(g.Order[i])
			}
			value := float32(int(r.Codes[i]) - zero)
			if g.Kind == GridFloats {
				value = E2M1[r.Codes[i]]
			}
			dst[input] = float32(factor*value) - least
		}
	}
}

// MatrixBytes returns the memory of a matrix [out, in] as the kernels of processors have it.
func (g *Grid) MatrixBytes(out, in int) int {
	pairs := (in + 63) / 64
	n := pairs * g.PairLines()
	switch g.Kind {
	case GridZeros, GridOffsets:
		n += (pairs-1)/g.BlockPairs() + 1
		if g.Group == 32 {
			n += pairs
		}
	case GridMins, GridSigned:
		n += (in + GridBlock - 1) / GridBlock
	}
	return out * n * 4
}

// PairLines returns the words of 32 bits that 64 inputs of an output take: their codes, and the
// scales of GridPlain and GridFloats or the parts of scales in blocks.
func (g *Grid) PairLines() int {
	n := 2 * g.Bits
	if g.Kind == GridPlain || g.Kind == GridFloats || g.blocks() {
		n++
	}
	return n
}

// BlockPairs returns the pairs of 32 inputs that share a header.
func (g *Grid) BlockPairs() int {
	if g.blocks() {
		return GridBlock / 64
	}
	return max(1, g.Group/64)
}

// Half returns the value of a float16.
func Half(h uint16) float32 {
	sign, exponent, fraction := uint32(h>>15)<<31, uint32(h>>10)&31, uint32(h)&1023
	switch exponent {
	case 0:
		v := float32(fraction) / (1 << 24)
		return math.Float32frombits(math.Float32bits(v) | sign)
	case 31:
		return math.Float32frombits(sign | 0x7f800000 | fraction<<13)
	}
	return math.Float32frombits(sign | (exponent+112)<<23 | fraction<<13)
}
