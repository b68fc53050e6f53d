package cpu

import (
	"encoding/binary"

	"github.com/tandem-serving/tandem/engine/backend"
)

// gridTile is the outputs of a packed tile, TILE of kernels.h.
const gridTile = 16

// gridLayout is the sizes of grid.h's packed grids: 64-byte lines of a word for each output.
type gridLayout struct {
	pairs      int // of groups of 32, in a block
	head, pair int // bytes before a block's pairs, and of a pair
	tile       int
}

func gridLayoutOf(g *backend.Grid, in int) gridLayout {
	l := gridLayout{pairs: g.BlockPairs(), pair: g.PairLines() * 64, tile: g.MatrixBytes(gridTile, in)}
	if g.Kind != backend.GridPlain && g.Kind != backend.GridFloats {
		l.head = 64
		if g.Group == quantGroup && l.pairs == 1 {
			l.head = 128
		}
	}
	return l
}

// gridPacker packs a matrix [out, in], a tile per item.
type gridPacker struct {
	to      []byte
	grid    *backend.Grid
	layout  gridLayout
	out, in int
}

func (p *gridPacker) item(_, tile int) {
	row := p.grid.NewRow(p.in)
	to := p.to[tile*p.layout.tile : (tile+1)*p.layout.tile]
	for lane := range min(gridTile, p.out-tile*gridTile) {
		p.grid.Row(row, tile*gridTile+lane)
		p.row(to, row, lane)
	}
}

// row packs an output. Codes beyond the row are 0, and meet activations of 0.
func (p *gridPacker) row(tile []byte, r *backend.GridRow, lane int) {
	g, l := p.grid, &p.layout
	codes := g.Bits * 64 // bytes of a group's codes in a tile
	for k := 0; k < p.in; k += quantGroup {
		pair, half := k/quantPair, k/quantGroup%2
		block := tile[pair/l.pairs*(l.head+l.pairs*l.pair):]
		at := block[l.head+pair%l.pairs*l.pair:]
		packCodes(at[half*codes:], r.Codes[k:min(k+quantGroup, p.in)], g.Bits, lane)
		sub, group := at[2*codes:], k/g.Group
		switch g.Kind {
		case backend.GridPlain:
			binary.LittleEndian.PutUint16(sub[lane*4+half*2:], r.Scales[group])
		case backend.GridZeros, backend.GridOffsets:
			line := block[lane*4:]
			if l.head > 64 {
				line = line[half*64:]
			}
			second := uint16(r.SubMin[group])
			if g.Kind == backend.GridOffsets {
				second = r.Mins[group]
			}
			binary.LittleEndian.PutUint16(line, r.Scales[group])
			binary.LittleEndian.PutUint16(line[2:], second)
		case backend.GridMins:
			binary.LittleEndian.PutUint16(block[lane*4:], r.Scales[k/backend.GridBlock])
			binary.LittleEndian.PutUint16(block[lane*4+2:], r.Mins[k/backend.GridBlock])
			sub[lane*4+half*2], sub[lane*4+half*2+1] = r.Sub[group], r.SubMin[group]
		case backend.GridSigned:
			binary.LittleEndian.PutUint16(block[lane*4:], r.Scales[k/backend.GridBlock])
			sub[lane*4+half*2], sub[lane*4+half*2+1] = r.Sub[group], r.Sub[group+1]
		case backend.GridFloats:
			copy(sub[lane*4+half*2:][:2], r.Sub[group:])
		}
	}
}

// packCodes packs the codes of a group in lines of four for each output.
func packCodes(to, codes []byte, bits, lane int) {
	for k, code := range codes {
		i, at := k/4, lane*4+k%4
		if bits == 8 {
			to[i*64+at] = code
			continue
		}
		to[i%4*64+at] |= code & 15 << (i / 4 * 4)
		switch bits {
		case 5:
			to[4*64+at] |= code >> 4 << i
		case 6:
			to[(4+i/4)*64+at] |= code >> 4 << (i % 4 * 2)
		}
	}
}

// loadGrid keeps rows of a grid with a byte for each code.
func (p *portable) loadGrid(c *CPU, w *weight) error {
	m, err := c.mem.bytes(w.out*w.in, true)
	if err != nil {
		return err
	}
	w.matrix = m
	from, rows := w.grid, make([]*backend.GridRow, w.out)
	for n := range rows {
		rows[n] = from.NewRow(w.in)
		from.Row(rows[n], n)
		rows[n].Codes = m[n*w.in : n*w.in+copy(m[n*w.in:], rows[n].Codes)]
	}
	held := *from
	held.Row = func(to *backend.GridRow, row int) { *to = *rows[row] }
	w.grid = &held
	return nil
}

// linearGrid is linear for grids.
func (p *portable) linearGrid(m, bias *weight, first, live, lo int) {
	o, at, w := p.op, quantLayout(m.in), &backend.GridRow{}
	for n := lo; n < min(lo+linearRows, m.out); n++ {
		m.grid.Row(w, n)
		for r := first; r < first+live; r++ {
			x := o.a.q[r*at.size : (r+1)*at.size]
			half := m.in
			if p.c.opts.FaultBatchOrder && live > 1 {
				half = m.in / 2 / quantPair * quantPair
			}
			y := float32(dotGrid(m.grid, w, x, at, 0, half))
			if half < m.in {
				y += float32(dotGrid(m.grid, w, x, at, half, m.in))
			}
			if bias != nil {
				y += bias.vector[n]
			}
			o.dst.data[r*m.out+n] = y
		}
	}
}

// dotGrid multiplies inputs [from, to) of a row of weights with a quantized row. from is a multiple
// of quantGroup.
func dotGrid(g *backend.Grid, w *backend.GridRow, x []byte, at quantRow, from, to int) (sum float64) {
	xs, step := f32view(x[at.scale:at.less8]), min(g.Group, quantGroup)
	for ; from < to; from += step {
		factor, zero, least := g.Scale(w, from/g.Group)
		whole, plain := int32(0), int32(0)
		for k := from; k < min(from+step, to); k++ {
			v, code := int32(int8(x[k])), int32(w.Codes[k])-int32(zero)
			if g.Kind == backend.GridFloats { // twice its value, an integer
				code = int32(2 * backend.E2M1[w.Codes[k]])
			}
			whole += code * v
			plain += v
		}
		scale := xs[from/quantGroup]
		if g.Kind == backend.GridFloats {
			factor /= 2
		}
		sum += float64(whole)*float64(factor*scale) - float64(plain)*float64(scale)*float64(least)
	}
	return sum
}
