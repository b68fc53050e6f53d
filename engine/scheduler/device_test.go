package scheduler

import (
	"fmt"
	"math/bits"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// cell is the fake device's KV of one position: the token itself, its position, and a hash of
// everything up to it, as a model's KV depends on it.
type cell struct {
	token int32
	pos   int32
	ctx   uint64
}

var poison = cell{token: -1, pos: -1, ctx: 0xdead}

func mix(h, v uint64) uint64 {
	h = (h ^ v) * 0x9e3779b97f4a7c15
	return bits.RotateLeft64(h, 29) ^ h>>32
}

// next is the cell after prev (the root's when pos is 0).
func next(root kvcache.Hash, prev cell, pos int, token int32) cell {
	ctx := uint64(root)
	if pos > 0 {
		ctx = prev.ctx
	}
	return cell{token: token, pos: int32(pos), ctx: mix(mix(ctx, uint64(pos)), uint64(token))}
}

// of is the cell as a group of layers stores it: no two groups store the same.
func (c cell) of(group int) cell {
	c.ctx ^= uint64(group) * 0x9e3779b97f4a7c15
	return c
}

// sample returns what the model samples after n tokens. It depends on every cell that the
// last token attends to in some group's window.
func sample(groups []kvcache.Group, n int, at func(group, pos int) cell) (token int32, stop bool) {
	var h uint64
	for g, spec := range groups {
		for pos := seen(spec, n-1); pos < n; pos++ {
			c := at(g, pos)
			h = mix(h, c.ctx^uint64(uint32(c.token))<<7^uint64(uint32(c.pos))<<40)
		}
	}
	return int32(h >> 20 % vocabulary), h>>40%19 == 0
}

// seen is the first position that the token at pos sees.
func seen(g kvcache.Group, pos int) int {
	if g.Window == 0 {
		return 0
	}
	return max(0, pos-g.Window+1)
}

const vocabulary = 3 // small, so that unrelated requests meet in the prefix cache

// trueCells is the KV of tokens, computed without blocks.
func trueCells(root kvcache.Hash, tokens []int32) []cell {
	cells := make([]cell, 0, len(tokens))
	var prev cell
	for pos, token := range tokens {
		prev = next(root, prev, pos, token)
		cells = append(cells, prev)
	}
	return cells
}

// sequential is the whole output of a request, one token after the other with
// all memory there is; unending, the model does not end it.
func sequential(groups []kvcache.Group, root kvcache.Hash, prompt []int32, maxNew, maxModelLen int, unending bool) (output []int32) {
	tokens := append([]int32(nil), prompt...)
	for {
		cells := trueCells(root, tokens)
		token, stop := sample(groups, len(tokens), func(g, pos int) cell { return cells[pos].of(g) })
		tokens = append(tokens, token)
		output = append(output, token)
		if stop && !unending || len(output) == maxNew || len(tokens) >= maxModelLen {
			return output
		}
	}
}

// device is paged memory and nothing else. A block of any group is stride cells,
// of which the group uses its own number of tokens.
type device struct {
	groups []kvcache.Group
	stride int
	mem    []cell // [blocks, stride]
}

// at panics if a table has no block, because no token may read there.
func (d *device) at(g int, table []kvcache.BlockID, pos int) *cell {
	bt := d.groups[g].BlockTokens
	return &d.mem[int(table[pos/bt])*d.stride+pos%bt]
}

func (d *device) block(id kvcache.BlockID) []cell {
	return d.mem[int(id)*d.stride:][:d.stride]
}

// compute writes the sequence's cells in every group, each from the one before
// as it is in memory.
func (d *device) compute(root kvcache.Hash, seq Seq) {
	for g := range d.groups {
		for i, token := range seq.Tokens {
			pos := seq.Start + i
			var prev cell
			if pos > 0 {
				prev = d.at(g, seq.Tables[g], pos-1).of(g) // undoes of
			}
			*d.at(g, seq.Tables[g], pos) = next(root, prev, pos, token).of(g)
		}
	}
}

// verify compares what the tables hold of tokens [0, n), as far as computing
// the token at position from and those after it reads them, with the truth.
func (d *device) verify(what string, tables [][]kvcache.BlockID, from, n int, want []cell) error {
	for g, spec := range d.groups {
		for pos := seen(spec, from); pos < n; pos++ {
			if got := *d.at(g, tables[g], pos); got != want[pos].of(g) {
				return fmt.Errorf("%s reads %+v in group %d at position %d, want %+v", what, got, g, pos, want[pos].of(g))
			}
		}
	}
	return nil
}
