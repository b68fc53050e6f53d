package decode

import "github.com/tandem-serving/tandem/engine/kvcache"

// maxRecent is how many short prompts are remembered: minutes of them on a busy
// node, in 8 KB.
const maxRecent = 1024

// recent remembers prompts too short to leave a block in the cache whose KV has
// been moved here. Their next occurrence is computed instead: it is less than a
// block, and moving it would come to the same every time. It keeps the last
// maxRecent and is guarded by Node.mu.
type recent struct {
	set  map[kvcache.Hash]struct{}
	ring []kvcache.Hash
	next int
}

func newRecent() recent { return recent{set: make(map[kvcache.Hash]struct{}, maxRecent)} }

// key names a prompt: the hash of a block that holds just its tokens.
func (r *recent) key(root kvcache.Hash, tokens []int32) kvcache.Hash {
	var one [1]kvcache.Hash
	return kvcache.AppendHashes(one[:0], root, tokens, len(tokens))[0]
}

func (r *recent) has(k kvcache.Hash) bool {
	_, ok := r.set[k]
	return ok
}

// add remembers a prompt in place of the oldest.
func (r *recent) add(k kvcache.Hash) {
	if r.has(k) {
		return
	}
	if len(r.ring) < maxRecent {
		r.ring = append(r.ring, k)
	} else {
		delete(r.set, r.ring[r.next])
		r.ring[r.next] = k
		r.next = (r.next + 1) % maxRecent
	}
	r.set[k] = struct{}{}
}
