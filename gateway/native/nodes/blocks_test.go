package nodes

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
		if got := b.Held("d0", prompt, 16, nil); got != want {
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
	if b.Held("d1", prompt, 16, nil) != 0 {
		t.Error("another node holds them too")
	}
	b.Forget("d0", "gap")
	held(0)
	b.Blocks(cluster.BlockEvent{Node: "d0", Stored: stored(1)})
	held(1)
}

// Of a model with layers that see a window, a prefix counts as far as the window
// before its end is there, too.
func TestBlocksHeldInAllGroups(t *testing.T) {
	b, prompt := NewBlocks(), []kvcache.Hash{1, 2, 3, 4, 5, 6}
	groups := []kvcache.Group{{BlockTokens: 16}, {BlockTokens: 16, Window: 20}}
	var all []cluster.Stored
	for _, h := range prompt {
		all = append(all, cluster.Stored{Hash: uint64(h)}, cluster.Stored{Hash: uint64(h.In(1))})
	}
	b.Blocks(cluster.BlockEvent{Node: "d0", Stored: all})
	for _, step := range []struct {
		gone []kvcache.Hash // in the group with a window
		want int
	}{{nil, 6}, {[]kvcache.Hash{1, 2}, 6}, {[]kvcache.Hash{5}, 4}, {[]kvcache.Hash{3}, 0}} {
		var removed []uint64
		for _, h := range step.gone {
			removed = append(removed, uint64(h.In(1)))
		}
		b.Blocks(cluster.BlockEvent{Node: "d0", Removed: removed})
		if got := b.Held("d0", prompt, 16, groups); got != step.want {
			t.Errorf("without %v too: %d blocks, want %d", step.gone, got, step.want)
		}
		if got := b.Held("d0", prompt, 16, groups[:1]); got != 6 {
			t.Errorf("the first group alone: %d blocks, want 6", got)
		}
	}
}

func TestBlocksAreBounded(t *testing.T) {
	b := NewBlocks()
	e := cluster.BlockEvent{Node: "d0", Stored: make([]cluster.Stored, 1<<16)}
	for n := uint64(0); n < maxBlocks+1<<17; {
		for i := range e.Stored {
			e.Stored[i].Hash = n
			n++
		}
		b.Blocks(e)
	}
	if n := b.Count("d0"); n != maxBlocks {
		t.Errorf("%d blocks remembered, the bound is %d", n, maxBlocks)
	}
}
