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
	by map[string]map[kvcache.Hash]struct{} // by member id
}

// NewBlocks knows nothing yet.
func NewBlocks() *Blocks { return &Blocks{by: make(map[string]map[kvcache.Hash]struct{})} }

// Blocks takes a node's next changes.
func (b *Blocks) Blocks(e cluster.BlockEvent) {
	b.mu.Lock()
	defer b.mu.Unlock()
	set := b.by[e.Node]
	if set == nil {
		set = make(map[kvcache.Hash]struct{})
		b.by[e.Node] = set
	}
	for _, h := range e.Removed {
		delete(set, kvcache.Hash(h))
	}
	for _, s := range e.Stored {
		if len(set) >= maxHeard {
			return
		}
		set[kvcache.Hash(s.Hash)] = struct{}{}
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
	for i, h := range hashes {
		if _, ok := set[h]; !ok {
			return i
		}
	}
	return len(hashes)
}

// Count is how many blocks are known of a node.
func (b *Blocks) Count(node string) int {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return len(b.by[node])
}
