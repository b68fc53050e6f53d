package upstream

import (
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/cluster"
)

func TestBlocksHeld(t *testing.T) {
	b := NewBlocks()
	prompt := []kvcache.Hash{1, 2, 3}
	stored := func(hs ...uint64) (s []cluster.Stored) {
		for _, h := range hs {
			s = append(s, cluster.Stored{Hash: h})
		}
		return s
	}
	held := func(want int) {
		t.Helper()
		if got := b.Held("d0", prompt); got != want {
			t.Errorf("held %d blocks, want %d", got, want)
		}
	}
	held(0)
	b.Blocks(cluster.BlockEvent{Node: "d0", Stored: stored(1, 2, 9)})
	held(2)
	b.Blocks(cluster.BlockEvent{Node: "d0", Stored: stored(3)})
	held(3)
	// A hole ends the prefix, and a message removes before it stores.
	b.Blocks(cluster.BlockEvent{Node: "d0", Removed: []uint64{2, 9}, Stored: stored(9)})
	held(1)
	if n := b.Count("d0"); n != 3 {
		t.Errorf("%d blocks known, want 1, 3 and 9", n)
	}
	if b.Held("d1", prompt) != 0 {
		t.Error("another node holds them too")
	}
	b.Forget("d0", "gap")
	held(0)
	b.Blocks(cluster.BlockEvent{Node: "d0", Stored: stored(1)})
	held(1)
}

func TestBlocksAreBounded(t *testing.T) {
	b := NewBlocks()
	e := cluster.BlockEvent{Node: "d0", Stored: make([]cluster.Stored, 1<<16)}
	for n := uint64(0); n < maxHeard+1<<17; {
		for i := range e.Stored {
			e.Stored[i].Hash = n
			n++
		}
		b.Blocks(e)
	}
	if n := b.Count("d0"); n != maxHeard {
		t.Errorf("%d blocks remembered, the bound is %d", n, maxHeard)
	}
}
