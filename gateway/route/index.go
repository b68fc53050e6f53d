package route

import (
	"slices"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// Index has the blocks that nodes reported to hold. A hash with one holder, as most have, needs one
// map entry; a hash with several holders has a list. An Index is not safe for concurrent use.
//
// Invariant: an entry has each of its holders once, and a list has at least two.
type Index struct {
	shards [IndexShards]map[kvcache.Hash]uint32 // a slot, or many|index into lists
	lists  [][]uint16                           // sorted slots
	free   []uint32                             // lists that are not in use
	counts []int                                // blocks by slot
}

// IndexShards is the number of parts in which a node is removed from an Index, so that no caller
// waits for all of them.
const IndexShards = 256

// MaxSlots bounds the nodes of an Index.
const MaxSlots = 1 << 14

const many = 1 << 31

// NewIndex returns an empty index.
func NewIndex() *Index {
	x := new(Index)
	for i := range x.shards {
		x.shards[i] = make(map[kvcache.Hash]uint32)
	}
	return x
}

// Grow adds slots up to n-1; n is at most MaxSlots.
func (x *Index) Grow(n int) {
	if n > len(x.counts) {
		x.counts = append(x.counts, make([]int, n-len(x.counts))...)
	}
}

// Slots returns the number of slots.
func (x *Index) Slots() int { return len(x.counts) }

// Count returns the number of blocks that a slot's node holds.
func (x *Index) Count(slot int) int { return x.counts[slot] }

func (x *Index) shard(h kvcache.Hash) map[kvcache.Hash]uint32 { return x.shards[h%IndexShards] }

// Add adds a block to a node.
func (x *Index) Add(slot int, h kvcache.Hash) {
	shard := x.shard(h)
	v, ok := shard[h]
	switch {
	case !ok:
		shard[h] = uint32(slot)
	case v&many == 0:
		if int(v) == slot {
			return
		}
		at := uint32(len(x.lists))
		if n := len(x.free); n > 0 {
			at, x.free = x.free[n-1], x.free[:n-1]
		} else {
			x.lists = append(x.lists, nil)
		}
		x.lists[at] = append(x.lists[at], uint16(min(int(v), slot)), uint16(max(int(v), slot)))
		shard[h] = many | at
	default:
		l := &x.lists[v&^many]
		i, there := slices.BinarySearch(*l, uint16(slot))
		if there {
			return
		}
		*l = slices.Insert(*l, i, uint16(slot))
	}
	x.counts[slot]++
}

// Remove removes a block from a node.
func (x *Index) Remove(slot int, h kvcache.Hash) {
	shard := x.shard(h)
	v, ok := shard[h]
	switch {
	case !ok:
	case v&many == 0:
		if int(v) == slot {
			delete(shard, h)
			x.counts[slot]--
		}
	default:
		l := &x.lists[v&^many]
		i, there := slices.BinarySearch(*l, uint16(slot))
		if !there {
			return
		}
		*l = slices.Delete(*l, i, i+1)
		x.counts[slot]--
		if len(*l) == 1 {
			shard[h] = uint32((*l)[0])
			*l = (*l)[:0]
			x.free = append(x.free, v&^many)
		}
	}
}

// Clear removes a node from one of the IndexShards parts.
func (x *Index) Clear(slot, shard int) {
	if x.counts[slot] == 0 {
		return
	}
	for h := range x.shards[shard] {
		x.Remove(slot, h)
	}
}

// holders returns how many nodes hold a block: the one, or the list of them.
func (x *Index) holders(h kvcache.Hash) (n int, one uint32, list []uint16) {
	v, ok := x.shard(h)[h]
	switch {
	case !ok:
		return 0, 0, nil
	case v&many == 0:
		return 1, v, nil
	}
	l := x.lists[v&^many]
	return len(l), 0, l
}

// maxStride is how many hashes of a prompt one block of a node may span: nodes with larger blocks
// report every second, third, … hash.
const maxStride = 16

// Holds reports whether a node holds a block.
func (x *Index) Holds(h kvcache.Hash) bool {
	_, ok := x.shard(h)[h]
	return ok
}

// Level is the nodes that hold a number of leading blocks of a prompt.
type Level struct {
	Blocks int32 // leading blocks
	N      int   // nodes that hold at least so many
	one    uint32
	list   []uint16 // of several nodes; else nil
}

// Write writes the number of blocks to dst, by slot.
func (l *Level) Write(dst []int32) {
	if l.list == nil {
		dst[l.one] = l.Blocks
	}
	for _, slot := range l.list {
		dst[slot] = l.Blocks
	}
}

// Slots appends the slots of the level's nodes to dst.
func (l *Level) Slots(dst []int32) []int32 {
	if l.list == nil {
		return append(dst, int32(l.one))
	}
	for _, slot := range l.list {
		dst = append(dst, int32(slot))
	}
	return dst
}

// mostHolders is the largest number of nodes that are compared one by one because they hold more of
// a prompt than others.
const mostHolders = 512

// Most returns the lowest of the levels with so few nodes that a decision compares them one by one,
// nil: none, and the number of blocks that no other node exceeds.
func Most(levels []Level) (most *Level, least int32) {
	for i := range levels {
		if levels[i].N <= mostHolders {
			return &levels[i], least
		}
		least = levels[i].Blocks
	}
	return nil, least
}

// Match writes to dst, by slot, how many leading blocks of a prompt each node holds. Slots without
// any are left as they are.
func (x *Index) Match(hashes []kvcache.Hash, dst []int32) {
	x.levels(hashes, func(l Level) { l.Write(dst) })
}

// Levels appends to dst the numbers of leading blocks of a prompt that nodes hold, from the lowest
// on. The nodes of each level are among those of the levels before. The levels are valid until the
// index changes.
func (x *Index) Levels(hashes []kvcache.Hash, dst []Level) []Level {
	x.levels(hashes, func(l Level) { dst = append(dst, l) })
	return dst
}

// levels calls each for the levels of a prompt. A cache has a block only with all blocks before it,
// so that the number of holders never grows along the prompt. levels searches only for where it
// falls, and takes equal numbers of holders for equal holders.
func (x *Index) levels(hashes []kvcache.Hash, each func(Level)) {
	stride := 1
	for ; ; stride++ {
		if stride > min(maxStride, len(hashes)) {
			return
		}
		if n, _, _ := x.holders(hashes[stride-1]); n > 0 {
			break
		}
	}
	hash := func(i int) kvcache.Hash { return hashes[(i+1)*stride-1] }
	for at, end := 0, len(hashes)/stride; at < end; {
		n, one, list := x.holders(hash(at))
		if n == 0 {
			return
		}
		// Find the last block that n nodes hold, by doubling strides and then by bisection.
		lo, hi, step := at, at+1, 1
		for hi < end {
			m, o, l := x.holders(hash(hi))
			if m != n {
				break
			}
			lo, one, list = hi, o, l
			hi += step
			step *= 2
		}
		for hi = min(hi, end); hi-lo > 1; {
			mid := (lo + hi) / 2
			if m, o, l := x.holders(hash(mid)); m == n {
				lo, one, list = mid, o, l
			} else {
				hi = mid
			}
		}
		each(Level{Blocks: int32((lo + 1) * stride), N: n, one: one, list: list})
		at = lo + 1
	}
}
