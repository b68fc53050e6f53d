package fleet

import (
	"cmp"
	"slices"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// filter is a set of block hashes. mayHave may be true for a hash that is not in the set. The zero
// filter has every hash.
type filter struct{ bits []uint64 }

// filterBits is the number of a filter's bits. It fits the cache of a processor core.
const filterBits = 1 << 20

func (s *filter) add(h kvcache.Hash) { s.bits[h%filterBits/64] |= 1 << (h % 64) }

func (s *filter) mayHave(h kvcache.Hash) bool {
	return s.bits == nil || s.bits[h%filterBits/64]>>(h%64)&1 != 0
}

// findCommon fills the filter with the blocks of prompts whose first block another prompt has, too.
// A gateway looks up the blocks of a request before a node has them, so that it finds only blocks
// that another prompt has. Only attempts after a failure look up the request's own blocks; where
// nodes may fail, the filter has every hash.
func (f *fleet) findCommon() {
	if len(f.o.Events) > 0 || f.o.Control != nil {
		return
	}
	type start struct {
		name    kvcache.Hash
		request int32
	}
	size := f.o.BlockTokens
	var starts []start
	for i := range f.result.Requests {
		if r := &f.result.Requests[i]; r.Prompt >= size {
			starts = append(starts, start{r.name(0, size), r.index})
		}
	}
	slices.SortFunc(starts, func(a, b start) int { return cmp.Compare(a.name, b.name) })
	f.common.bits = make([]uint64, filterBits/64)
	var hashes []kvcache.Hash
	for i, s := range starts {
		if i > 0 && starts[i-1].name == s.name || i+1 < len(starts) && starts[i+1].name == s.name {
			r := &f.result.Requests[s.request]
			hashes = kvcache.AppendNamed(hashes[:0], 0, f.nameBlocks(r, r.Prompt)...)
			for _, h := range hashes {
				f.common.add(h)
			}
		}
	}
}
