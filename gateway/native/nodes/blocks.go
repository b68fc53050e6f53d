package nodes

import (
	"sync"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// maxHeard bounds the block hashes that are remembered of one node: 16 million
// tokens of cache. What is beyond is taken for not cached.
const maxHeard = 1 << 20

// Blocks is what nodes have told of their prefix caches. It is a hint: a node
// that says nothing is taken to hold nothing, and one whose news has gaps is
// forgotten until it has told everything anew. It implements cluster.Subscriber.
type Blocks struct {
	mu    sync.RWMutex
	index *route.Index
	slots map[string]int // by member id
	free  []int          // slots whose nodes have left
	match sync.Pool      // of *[]int32, by slot
}

// NewBlocks knows nothing yet.
func NewBlocks() *Blocks {
	b := &Blocks{index: route.NewIndex(), slots: make(map[string]int)}
	b.match.New = func() any { return new([]int32) }
	return b
}

// slot is a node's place in the index; -1: there are too many. The caller holds mu.
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
	return at
}

// Blocks takes a node's next changes.
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
		if b.index.Count(at) >= maxHeard {
			return
		}
		b.index.Add(at, kvcache.Hash(s.Hash))
	}
}

// Forget drops a node whose news cannot be trusted any more.
func (b *Blocks) Forget(node, _ string) {
	b.mu.RLock()
	at, ok := b.slots[node]
	b.mu.RUnlock()
	for shard := 0; ok && shard < route.IndexShards; shard++ { // in between, others look
		b.mu.Lock()
		b.index.Clear(at, shard)
		b.mu.Unlock()
	}
}

// Leave forgets a node for good.
func (b *Blocks) Leave(node string) {
	b.Forget(node, "it has left")
	b.mu.Lock()
	defer b.mu.Unlock()
	if at, ok := b.slots[node]; ok && b.index.Count(at) == 0 { // else it has said something again
		delete(b.slots, node)
		b.free = append(b.free, at)
	}
}

// Held is how many leading blocks of a prompt, of so many tokens each, the node's
// cache is known to hold in all of its groups.
func (b *Blocks) Held(node string, hashes []kvcache.Hash, tokens int, groups []kvcache.Group) int {
	b.mu.RLock()
	defer b.mu.RUnlock()
	at, ok := b.slots[node]
	if !ok {
		return 0
	}
	held := b.look(hashes, tokens, groups)
	defer b.match.Put(held)
	return int((*held)[at])
}

// look is how many leading blocks each slot's node holds; the caller holds mu for
// reading and puts the result back.
func (b *Blocks) look(hashes []kvcache.Hash, tokens int, groups []kvcache.Group) *[]int32 {
	held := b.match.Get().(*[]int32)
	if n := b.index.Slots(); cap(*held) < n {
		*held = make([]int32, n)
	} else {
		*held = (*held)[:n]
		clear(*held)
	}
	b.index.Held(hashes, tokens, groups, *held)
	return held
}

// held is how many leading blocks of a prompt the node holds, of what look found;
// the caller holds mu.
func (b *Blocks) held(n *Node, found []int32) int {
	at := n.slot.Load()
	if at == noSlot {
		if s, ok := b.slots[n.Member().ID]; ok {
			at = int32(s) + 1
			n.slot.Store(at)
		}
	}
	if at == noSlot || int(at) > len(found) {
		return 0
	}
	return int(found[at-1])
}

// noSlot of Node.slot says that the node has told nothing yet; others are one
// above the place in the index.
const noSlot = 0

// Count is how many blocks are known of a node.
func (b *Blocks) Count(node string) int {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if at, ok := b.slots[node]; ok {
		return b.index.Count(at)
	}
	return 0
}
