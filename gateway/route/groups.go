package route

import "github.com/tandem-serving/tandem/engine/kvcache"

// Limit lowers what Match wrote to what nodes of a model with these KV groups will
// find: the largest number of blocks at which blocks of all groups end, for which
// groups without a window hold all before it and the others the last that their
// window reaches. Hashes are of unit tokens each; held is by slot. The first group,
// which sees farthest, is Match's: where it has a window too, prefixes whose first
// blocks are gone count for less than a node would find.
func (x *Index) Limit(hashes []kvcache.Hash, unit int, groups []kvcache.Group, held []int32) {
	if len(groups) < 2 {
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
	// From the longest prefix down: whoever lacks a block for it is looked at again
	// with one that ends before that block.
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
		for i, g := range groups[1:] {
			units := g.BlockTokens / unit
			for place := n/units - 1; place >= g.First(n*unit); place-- {
				x.lower(held, n, place*units/align*align, hashes[(place+1)*units-1].In(i+1))
			}
		}
	}
}

// lower sets the nodes that hold n blocks, but not the one called h, to fewer; h 0
// is one that none holds.
func (x *Index) lower(held []int32, n, to int, h kvcache.Hash) {
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
		if int(v) == n && !has {
			held[slot] = int32(to)
		}
	}
}
