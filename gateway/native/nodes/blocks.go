package nodes

import (
	"slices"
	"sync"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// maxBlocks bounds the block hashes that are kept of one node: 16 million tokens of cache. Blocks
// beyond it count as not cached.
const maxBlocks = 1 << 20

// Blocks is what nodes have published of their prefix caches. It is a hint: a node without events
// counts as empty, and a node whose events have gaps is dropped until it has published all its
// blocks again. It implements cluster.Subscriber.
type Blocks struct {
	mu    sync.RWMutex
	index *route.Index
	slots map[string]int // by member id
	free  []int          // slots of nodes that have left
	match sync.Pool      // of *[]int32, by slot
	given uint64         // slots that were given to nodes so far
}

// NewBlocks returns Blocks without nodes.
func NewBlocks() *Blocks {
	b := &Blocks{index: route.NewIndex(), slots: make(map[string]int)}
	b.match.New = func() any { return new([]int32) }
	return b
}

// slot returns a node's place in the index; -1: there are too many. The caller holds mu.
func (b *Blocks) slot(node string) int {
	at, ok := b.slots[node]
	if ok {
		return at
	}
	switch n := len(b.free); {
	case n > 0:
		at, b.free = b.free[n-1], b.free[:n-1]
	case b.index.Slots() < route.MaxSlots:
		at = b.index.Slots()
		b.index.Grow(at + 1)
	default:
		return -1
	}
	b.slots[node] = at
	b.given++
	return at
}

// Blocks applies a node's next changes.
func (b *Blocks) Blocks(e cluster.BlockEvent) {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.slot(e.Node)
	if at < 0 {
		return
	}
	for _, h := range e.Removed {
		b.index.Remove(at, kvcache.Hash(h))
	}
	for _, s := range e.Stored {
		if b.index.Count(at) >= maxBlocks {
			return
		}
		b.index.Add(at, kvcache.Hash(s.Hash))
	}
}

// Forget drops the blocks of a node whose events have a gap.
func (b *Blocks) Forget(node, _ string) {
	b.mu.RLock()
	at, ok := b.slots[node]
	b.mu.RUnlock()
	for shard := 0; ok && shard < route.IndexShards; shard++ { // lookups run in between
		b.mu.Lock()
		b.index.Clear(at, shard)
		b.mu.Unlock()
	}
}

// Leave drops a node for good.
func (b *Blocks) Leave(node string) {
	b.Forget(node, "it has left")
	b.mu.Lock()
	defer b.mu.Unlock()
	if at, ok := b.slots[node]; ok && b.index.Count(at) == 0 { // else it has published again
		delete(b.slots, node)
		b.free = append(b.free, at)
	}
}

// Held returns how many leading blocks of a prompt, of so many tokens each, the node's cache has in
// all of its groups.
func (b *Blocks) Held(node string, hashes []kvcache.Hash, tokens int, groups []kvcache.Group) int {
	b.mu.RLock()
	defer b.mu.RUnlock()
	at, ok := b.slots[node]
	if !ok {
		return 0
	}
	held := b.match.Get().(*[]int32)
	defer b.match.Put(held)
	*held = b.look(*held, hashes, tokens, groups)
	return int((*held)[at])
}

// levels is look for one group of blocks without a window. It also appends the prompt's levels,
// which the caller uses while it holds mu for reading.
func (b *Blocks) levels(held []int32, levels []route.Level, hashes []kvcache.Hash) ([]int32, []route.Level) {
	held = slices.Grow(held[:0], b.index.Slots())[:b.index.Slots()]
	clear(held)
	levels = b.index.Levels(hashes, levels)
	for i := range levels {
		levels[i].Write(held)
	}
	return held, levels
}

// look returns how many leading blocks each slot's node has. It overwrites held, which may be nil.
// The caller holds mu for reading.
func (b *Blocks) look(held []int32, hashes []kvcache.Hash, tokens int, groups []kvcache.Group) []int32 {
	held = slices.Grow(held[:0], b.index.Slots())[:b.index.Slots()]
	clear(held)
	b.index.Held(hashes, tokens, groups, held)
	return held
}

// Count returns how many blocks of a node are known.
func (b *Blocks) Count(node string) int {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if at, ok := b.slots[node]; ok {
		return b.index.Count(at)
	}
	return 0
}
