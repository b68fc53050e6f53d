package upstream

import (
	"sync"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// maxHeard bounds the block hashes that are remembered of one node: 16 million
// tokens of cache. What is beyond is taken for not cached.
const maxHeard = 1 << 20

// Blocks is what decode nodes have told of their prefix caches. It is a hint: a
// node that says nothing is taken to hold nothing, and one whose news has gaps
// is forgotten and begins anew. It implements cluster.Subscriber.
type Blocks struct {
	mu sync.RWMutex
	by map[string]map[kvcache.Hash]kvcache.Hash // by member id: block to the one before
}

// NewBlocks knows nothing yet.
func NewBlocks() *Blocks { return &Blocks{by: make(map[string]map[kvcache.Hash]kvcache.Hash)} }

// Blocks takes a node's next changes.
func (b *Blocks) Blocks(e cluster.BlockEvent) {
	b.mu.Lock()
	defer b.mu.Unlock()
	set := b.by[e.Node]
	if set == nil {
		set = make(map[kvcache.Hash]kvcache.Hash)
		b.by[e.Node] = set
	}
	for _, h := range e.Removed {
		delete(set, kvcache.Hash(h))
	}
	for _, s := range e.Stored {
		if len(set) >= maxHeard {
			return
		}
		set[kvcache.Hash(s.Hash)] = kvcache.Hash(s.Parent)
	}
}

// Forget drops a node whose news cannot be trusted any more.
func (b *Blocks) Forget(node, _ string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.by, node)
}

// Held is how many leading blocks of a prompt the node's cache is known to hold.
func (b *Blocks) Held(node string, hashes []kvcache.Hash) int {
	b.mu.RLock()
	defer b.mu.RUnlock()
	set := b.by[node]
	if set == nil {
		return 0
	}
	held := 0
	for i := 0; i < len(hashes) && i-held < maxStride; i++ {
		// A node whose blocks hold more tokens tells of every second, third, …
		// hash; each names the one before.
		if parent, ok := set[hashes[i]]; ok && (held == 0 || i == held || parent == hashes[held-1]) {
			held = i + 1
		}
	}
	return held
}

// maxStride is how many hashes a node's block may span.
const maxStride = 16

// Count is how many blocks are known of a node.
func (b *Blocks) Count(node string) int {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return len(b.by[node])
}
