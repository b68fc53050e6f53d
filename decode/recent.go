package decode

import (
	"slices"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// maxRecent is how many short prompts are remembered: minutes of them on a busy node, in 8 KB.
const maxRecent = 1024

// recent has prompts that are too short to leave a block in the cache and whose KV was transferred
// to this node. Such a prompt is computed the next time, because it is less than a block and would
// be transferred each time. It keeps the last maxRecent and is guarded by Node.mu.
type recent struct {
	ring [maxRecent]kvcache.Hash // in order of add, from next on; 0: none
	next int
}

// key returns the key of a prompt: the hash of a block with just its tokens.
func (r *recent) key(root kvcache.Hash, tokens []int32) kvcache.Hash {
	var one [1]kvcache.Hash
	return kvcache.AppendHashes(one[:0], root, tokens, len(tokens))[0]
}

func (r *recent) has(k kvcache.Hash) bool { return slices.Contains(r.ring[:], k) }

// add adds a prompt in place of the oldest.
func (r *recent) add(k kvcache.Hash) {
	if !r.has(k) {
		r.ring[r.next] = k
		r.next = (r.next + 1) % maxRecent
	}
}
