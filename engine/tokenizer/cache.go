package tokenizer

import "sync/atomic"

const (
	// cacheSlots bounds the number of cached words. Text of one language and
	// kind has a few ten thousand distinct words that are not one token.
	cacheSlots = 1 << 15
	// cacheWordBytes bounds the words that are cached: longer ones (base64,
	// rulers) hardly come back. With it the cache holds at most
	// cacheSlots × (cacheWordBytes × 5 + 48) bytes, about 12 MB.
	cacheWordBytes = 64
)

// cache remembers the tokens of recent words. It is direct-mapped: a word
// replaces whatever had its slot, so no lock and no eviction list is needed.
type cache struct {
	slots [cacheSlots]atomic.Pointer[cacheEntry]
}

// cacheEntry is immutable once stored.
type cacheEntry struct {
	word string
	ids  []int32
}

func (c *cache) get(word string, hash uint64) ([]int32, bool) {
	e := c.slots[hash%cacheSlots].Load()
	if e == nil || e.word != word {
		return nil, false
	}
	return e.ids, true
}

// put stores copies, because word is a slice of a request's text.
func (c *cache) put(word string, hash uint64, ids []int32) {
	if len(word) > cacheWordBytes {
		return
	}
	e := &cacheEntry{word: string([]byte(word)), ids: append([]int32(nil), ids...)}
	c.slots[hash%cacheSlots].Store(e)
}
