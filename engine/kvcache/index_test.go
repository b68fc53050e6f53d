package kvcache

import (
	"math/rand/v2"
	"testing"
)

// An index has the blocks that were added and not removed, also where many tags share a home and
// where the slots in use pass the end.
func TestIndex(t *testing.T) {
	for seed := range uint64(200) {
		draw := rand.New(rand.NewPCG(seed, 5))
		const blocks = 16
		x, tags := newIndex(blocks), map[BlockID]uint32{}
		homes := 1 + draw.IntN(40)
		for range 300 {
			id := BlockID(draw.IntN(blocks))
			if tag, ok := tags[id]; ok {
				x.remove(tag, id)
				delete(tags, id)
			} else {
				tags[id] = 28 + uint32(draw.IntN(homes)) + 32*draw.Uint32N(3)
				x.add(tags[id], id)
			}
			used := 0
			for _, s := range x.slots {
				if s.block != 0 {
					used++
				}
			}
			if used != len(tags) {
				t.Fatalf("seed %d: %d slots are in use, want %d", seed, used, len(tags))
			}
			for id, tag := range tags {
				at := x.home(tag)
				for x.slots[at].block != 0 && x.slots[at].block != id+1 {
					at = x.after(at)
				}
				if s := x.slots[at]; s.block != id+1 || s.tag != tag {
					t.Fatalf("seed %d: block %d of tag %d is not found: %v", seed, id, tag, x.slots)
				}
			}
		}
	}
}
