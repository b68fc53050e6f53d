package scheduler

import (
	"fmt"
	"math/bits"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// cell is the fake device's KV of one position: the token itself, where it
// stands, and a hash of everything up to it, as a model's KV depends on it.
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

// sample is what the model says after reading cells: it depends on all of them.
func sample(cells []cell) (token int32, stop bool) {
	var h uint64
	for _, c := range cells {
		h = mix(h, c.ctx^uint64(uint32(c.token))<<7^uint64(uint32(c.pos))<<40)
	}
	return int32(h >> 20 % vocabulary), h>>40%19 == 0
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
// all memory there is.
func sequential(root kvcache.Hash, prompt []int32, maxNew, maxModelLen int) (output []int32) {
	tokens := append([]int32(nil), prompt...)
	for {
		token, stop := sample(trueCells(root, tokens))
		tokens = append(tokens, token)
		output = append(output, token)
		if stop || len(output) == maxNew || len(tokens) >= maxModelLen {
			return output
		}
	}
}

// device is paged memory and nothing else.
type device struct {
	blockTokens int
	mem         []cell // [blocks, blockTokens]
}

func (d *device) at(table []kvcache.BlockID, pos int) *cell {
	return &d.mem[int(table[pos/d.blockTokens])*d.blockTokens+pos%d.blockTokens]
}

func (d *device) block(id kvcache.BlockID) []cell {
	return d.mem[int(id)*d.blockTokens:][:d.blockTokens]
}

// compute writes the sequence's cells, each from the one before as it is in
// memory, and reads back what attention would read.
func (d *device) compute(root kvcache.Hash, seq Seq) []cell {
	for i, token := range seq.Tokens {
		pos := seq.Start + i
		var prev cell
		if pos > 0 {
			prev = *d.at(seq.Blocks, pos-1)
		}
		*d.at(seq.Blocks, pos) = next(root, prev, pos, token)
	}
	return d.read(seq.Blocks, seq.Start+len(seq.Tokens))
}

func (d *device) read(table []kvcache.BlockID, nTokens int) []cell {
	cells := make([]cell, nTokens)
	for pos := range cells {
		cells[pos] = *d.at(table, pos)
	}
	return cells
}

// verify compares what a table holds with the truth.
func verify(what string, got, want []cell) error {
	for pos := range got {
		if got[pos] != want[pos] {
			return fmt.Errorf("%s reads %+v at position %d, want %+v", what, got[pos], pos, want[pos])
		}
	}
	return nil
}
