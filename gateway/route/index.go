package route

import (
	"slices"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// Index says which nodes hold which blocks, as far as they have told. A hash
// that one node holds, as most are, costs one entry of a map; one that several
// hold has a list. It is not safe for use by several goroutines at once.
//
// Invariant: an entry names each of its holders once; a list has two at least.
type Index struct {
	shards [IndexShards]map[kvcache.Hash]uint32 // a slot, or many|index into lists
	lists  [][]uint16                           // sorted slots
	free   []uint32                             // lists that are not in use
	counts []int                                // blocks by slot
}

// IndexShards is in how many parts an Index can be cleared of a node, so that
// nobody waits for all of them.
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

// Grow makes room for slots 0 to n-1, n at most MaxSlots.
func (x *Index) Grow(n int) {
	if n > len(x.counts) {
		x.counts = append(x.counts, make([]int, n-len(x.counts))...)
	}
}

// Slots is how many there are.
func (x *Index) Slots() int { return len(x.counts) }

// Count is how many blocks a slot's node holds.
func (x *Index) Count(slot int) int { return x.counts[slot] }

func (x *Index) shard(h kvcache.Hash) map[kvcache.Hash]uint32 { return x.shards[h%IndexShards] }

// Add says that a node holds a block.
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
		at := x.newList()
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

func (x *Index) newList() uint32 {
	if n := len(x.free); n > 0 {
		at := x.free[n-1]
		x.free = x.free[:n-1]
		return at
	}
	x.lists = append(x.lists, nil)
	return uint32(len(x.lists) - 1)
}

// Remove says that a node does not hold a block any more.
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

// Clear takes a node out of one of IndexShards parts.
func (x *Index) Clear(slot, shard int) {
	if x.counts[slot] == 0 {
		return
	}
	for h := range x.shards[shard] {
		x.Remove(slot, h)
	}
}

// holders is how many nodes hold a block, and who.
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

// maxStride is how many hashes of a prompt one block of a node may span: nodes
// whose blocks hold more tokens tell of every second, third, … hash.
const maxStride = 16

// Match writes how many leading blocks of a prompt each node holds to dst, by
// slot; slots that hold none are left as they are. Caches hold a block only with
// those before it, so fewer nodes hold each next block: it looks only for where
// their number falls, and takes equal numbers for equal nodes.
func (x *Index) Match(hashes []kvcache.Hash, dst []int32) {
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
		// The last block that n nodes hold: in strides that double, then between.
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
		held := int32((lo + 1) * stride)
		if list == nil {
			dst[one] = held
		}
		for _, slot := range list {
			dst[slot] = held
		}
		at = lo + 1
	}
}
