package kvcache

// index has the hashed blocks by group and hash. It is a hash table with linear probing, of which
// at most half is in use. A look-up of content that is not cached reads one place of memory: the
// slots have a part of each hash, so that no block is read.
//
// Invariant: no slot between the home of a block and its slot is empty.
type index struct {
	slots []slot
	mask  uint32 // a power of two, minus one
}

// slot is a place of an index.
type slot struct {
	tag   uint32  // of the block's group and hash
	block BlockID // plus one; 0: empty
}

// newIndex returns an empty index for so many blocks.
func newIndex(blocks int) index {
	n := 1
	for n < 2*blocks {
		n *= 2
	}
	return index{slots: make([]slot, n), mask: uint32(n - 1)}
}

// tagOf returns the tag of a group and a hash.
func tagOf(group int, hash Hash) uint32 { return uint32(hash.In(group)) }

// home returns the slot at which the search for a tag begins.
func (x *index) home(tag uint32) uint32 { return tag & x.mask }

// after returns the slot after another one.
func (x *index) after(at uint32) uint32 { return (at + 1) & x.mask }

// add adds a block, which the index does not have.
func (x *index) add(tag uint32, id BlockID) {
	at := x.home(tag)
	for x.slots[at].block != 0 {
		at = x.after(at)
	}
	x.slots[at] = slot{tag, id + 1}
}

// find returns the slot of a block, which the index has.
func (x *index) find(tag uint32, id BlockID) uint32 {
	at := x.home(tag)
	for x.slots[at].block != id+1 {
		at = x.after(at)
	}
	return at
}

// remove removes a block, which the index has. Blocks after it move to the empty slot unless their
// home is after it.
func (x *index) remove(tag uint32, id BlockID) {
	hole := x.find(tag, id)
	for at := x.after(hole); x.slots[at].block != 0; at = x.after(at) {
		if s := x.slots[at]; (at-x.home(s.tag))&x.mask >= (at-hole)&x.mask {
			x.slots[hole] = s
			hole = at
		}
	}
	x.slots[hole] = slot{}
}
