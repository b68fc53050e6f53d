package route

import "github.com/tandem-serving/tandem/engine/kvcache"

// Held writes to held, by slot, how many leading blocks of a prompt each node has for a model with
// these KV groups. That is the largest number at which blocks of all groups end, such that groups
// without a window have all blocks before it, and other groups those within their window. Each hash
// is of unit tokens. No groups means a single one without a window. held must be zero.
func (x *Index) Held(hashes []kvcache.Hash, unit int, groups []kvcache.Group, held []int32) {
	rest := 0 // the first group that Match did not cover
	if len(groups) == 0 || groups[0].Window == 0 {
		x.Match(hashes, held)
		rest = 1
	} else {
		for slot := range held {
			if x.counts[slot] > 0 {
				held[slot] = int32(len(hashes))
			}
		}
	}
	if rest >= len(groups) {
		return
	}
	align := 1 // in hashes
	for _, g := range groups {
		a, b := align, g.BlockTokens/unit
		for b > 0 {
			a, b = b, a%b
		}
		align *= g.BlockTokens / unit / a
	}
	// From the longest prefix down: a node that lacks a block is tried again with the prefix that ends
	// before that block.
	for done := len(hashes) + 1; ; {
		n := 0
		for _, h := range held {
			if int(h) < done {
				n = max(n, int(h))
			}
		}
		if n == 0 {
			return
		}
		done = n
		if end := n / align * align; end < n {
			x.lower(held, n, end, 0)
			continue
		}
		for i := rest; i < len(groups); i++ {
			x.limit(hashes, unit, groups[i], i, n, align, held)
		}
	}
}

// limit lowers the nodes that have n blocks in other groups but not in the i-th group, g.
func (x *Index) limit(hashes []kvcache.Hash, unit int, g kvcache.Group, i, n, align int, held []int32) {
	units := g.BlockTokens / unit
	for place := n/units - 1; place >= g.First(n*unit); place-- {
		if !x.lower(held, n, place*units/align*align, hashes[(place+1)*units-1].In(i)) {
			return
		}
	}
}

// lower sets the nodes that have n blocks, but not block h, to fewer, and reports whether any node
// keeps its n. No node has block 0.
func (x *Index) lower(held []int32, n, to int, h kvcache.Hash) (some bool) {
	var count int
	var one uint32
	var list []uint16
	if h != 0 {
		count, one, list = x.holders(h)
	}
	for slot, v := range held {
		for len(list) > 0 && int(list[0]) < slot {
			list = list[1:]
		}
		has := len(list) > 0 && int(list[0]) == slot || count == 1 && int(one) == slot
		if int(v) != n {
			continue
		}
		if some = some || has; !has {
			held[slot] = int32(to)
		}
	}
	return some
}
