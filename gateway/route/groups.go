package route

import "github.com/tandem-serving/tandem/engine/kvcache"

// Held writes how many leading blocks of a prompt nodes of a model with these KV
// groups will find to held, by slot: the largest number at which blocks of all
// groups end, for which groups without a window hold all before it and the others
// the last that their window reaches. Hashes are of unit tokens each, groups none for
// a single one without a window. held must be zeros.
func (x *Index) Held(hashes []kvcache.Hash, unit int, groups []kvcache.Group, held []int32) {
	rest := 0 // the first group that Match has not answered for
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
		for i := rest; i < len(groups); i++ {
			x.limit(hashes, unit, groups[i], i, n, align, held)
		}
	}
}

// limit lowers the nodes that hold n blocks in other groups and not in this one, the
// i-th.
func (x *Index) limit(hashes []kvcache.Hash, unit int, g kvcache.Group, i, n, align int, held []int32) {
	units := g.BlockTokens / unit
	for place := n/units - 1; place >= g.First(n*unit); place-- {
		if !x.lower(held, n, place*units/align*align, hashes[(place+1)*units-1].In(i)) {
			return
		}
	}
}

// lower sets the nodes that hold n blocks, but not the one called h, to fewer, and
// says whether any keep their n; h 0 is one that none holds.
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
