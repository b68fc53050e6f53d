// Package kvcache decides which block of KV memory holds what: it hands out
// equal-sized blocks, counts who uses them, finds cached prefixes and evicts
// the least recently used of what nobody needs.
//
// Layers of one attention kind and KV shape form a group with block tables of
// its own; all groups draw on one pool, and any block can serve any of them. A
// group with a window lets blocks go that no later token reads.
//
// A block has a reference count (block tables and reservations that contain
// it), a hashed flag (it can be found by its content) and transfer pins in two
// directions. Content is named by a chained digest of every token from the root
// to the block's end, so a hit has equal tokens after equal parents; the public
// hashes only say where to look. A block that nobody references or pins is free
// when it is not hashed and cached when it is; cached blocks wait in LRU lists until
// memory runs out. There are two: what was found again since it was stored is hot,
// and goes only when nothing else is left. So a prompt that comes once, however
// long, pushes out no prefix that many share. Hot blocks are a bounded part of the
// pool: the one that was used the longest ago cools down when another needs its
// place. (Segmented LRU: Karedla, Love, Wherry, 1994.)
//
// The invariant: a block is handed out only with no references and no pins.
// An incoming pin belongs to the network and is never removed by this package
// on its own.
//
// The package does not know requests, does not touch KV memory, and does not
// decide who has to give blocks back; that is the scheduler's.
package kvcache

import (
	"errors"
	"fmt"
)

// BlockID is a block's place in the pool: 0 ≤ id < Config.Blocks.
type BlockID int32

// NoBlock stands where a block table has none: before a window, or not found.
const NoBlock BlockID = -1

// DefaultMaxEvents bounds the events kept for a reader that is slow or absent.
// 64 Ki events are 1.5 MiB and several seconds of prefill on any node we know;
// a reader that is later than that asks for a snapshot anyway.
const DefaultMaxEvents = 1 << 16

// DefaultHotFraction leaves half the pool to prefixes that are new, so that they
// can become hot: the best on the Mooncake trace, for pools of every size
// (TestHotPrefixesOnTheMooncakeTrace).
const DefaultHotFraction = 0.5

// MaxGroups bounds the block tables of a sequence.
const MaxGroups = 64

// ErrConfig says that a Config cannot make a pool.
var ErrConfig = errors.New("kvcache: bad config")

// Config sizes a pool.
type Config struct {
	Blocks      int // number of blocks
	BlockTokens int // tokens that one hash names; 0 means DefaultBlockTokens
	MaxEvents   int // events kept until drained; 0 means DefaultMaxEvents

	// HotFraction is the part of the blocks that may be hot at once; 0 means
	// DefaultHotFraction, less than a block is none: plain LRU.
	HotFraction float64

	// Groups that share the blocks; none means one without a window.
	Groups []Group

	// Hash replaces the chained xxhash64, so that tests can force collisions.
	// nil, as everywhere else, means the hashes AppendHashes gives.
	Hash func(parent Hash, tokens []int32) Hash
}

// state is what references, pins and the hashed flag make of a block.
type state uint8

const (
	stateFree   state = iota // nobody needs it, its content is garbage
	stateCached              // nobody needs it, its content can be found
	stateHot                 // stateCached, and was found since it was stored
	stateUsed                // referenced
	statePinned              // only a transfer needs it
	nStates
)

// reusable says whether blocks of a state can be handed out; they are in a list.
func (s state) reusable() bool { return s == stateFree || s == stateCached || s == stateHot }

type block struct {
	refs   int32 // block tables and reservations that contain it
	pinIn  int32 // transfers that may write it
	pinOut int32 // transfers that may read it
	state  state // the list and the counter it is in

	hashed bool
	hot    bool   // found since it was stored
	group  uint8  // whose content it is, when hashed
	hash   Hash   // public name of the content
	parent Hash   // that of the place before, or the root at the start of a chain
	digest digest // proof of the content and of all before it

	prev, next BlockID // free or LRU list
	bucketNext BlockID // next block in the same hash bucket
}

// list is a doubly linked list through blocks' prev and next.
type list struct{ head, tail BlockID }

// Pool is the state machine. It is not safe for concurrent use: the engine's
// one goroutine owns it.
type Pool struct {
	blockTokens int
	groups      []Group
	align       int // tokens after which blocks of all groups end together
	blocks      []block
	buckets     []BlockID     // hash index: heads of the chains through bucketNext
	lists       [nStates]list // only those of blocks that can be handed out are used
	maxHot      int           // blocks in stateHot
	counts      [nStates]int  // blocks per state
	arriving    int           // blocks with an incoming pin
	leaving     int           // blocks with an outgoing pin
	events      eventRing
	hash        func(Hash, []int32) Hash
	broken      fault // which rule a test left out; zero otherwise
}

// fault leaves out one rule, so that tests can show that they would notice.
type fault uint8

const (
	faultHitByHash   fault = iota + 1 // a hit does not look at the digest
	faultPinsIgnored                  // a pinned block is reusable
)

// NewPool returns a pool whose blocks are all free.
func NewPool(cfg Config) (*Pool, error) {
	if cfg.BlockTokens == 0 {
		cfg.BlockTokens = DefaultBlockTokens
	}
	if cfg.MaxEvents == 0 {
		cfg.MaxEvents = DefaultMaxEvents
	}
	if cfg.Hash == nil {
		cfg.Hash = chain
	}
	if cfg.HotFraction == 0 {
		cfg.HotFraction = DefaultHotFraction
	}
	const maxBlocks = 1<<31 - 1
	if cfg.Blocks < 1 || cfg.Blocks > maxBlocks || cfg.BlockTokens < 1 || cfg.MaxEvents < 1 {
		return nil, fmt.Errorf("%w: Blocks %d (1 to %d), BlockTokens %d and MaxEvents %d (at least 1)",
			ErrConfig, cfg.Blocks, maxBlocks, cfg.BlockTokens, cfg.MaxEvents)
	}
	if !(cfg.HotFraction >= 0 && cfg.HotFraction <= 1) {
		return nil, fmt.Errorf("%w: HotFraction %v, want 0 to 1", ErrConfig, cfg.HotFraction)
	}
	if len(cfg.Groups) > MaxGroups {
		return nil, fmt.Errorf("%w: %d groups, at most %d", ErrConfig, len(cfg.Groups), MaxGroups)
	}
	groups, align, err := resolve(cfg.Groups, cfg.BlockTokens)
	if err != nil {
		return nil, err
	}
	nBuckets := 1
	for nBuckets < 2*cfg.Blocks {
		nBuckets *= 2
	}
	p := &Pool{
		blockTokens: cfg.BlockTokens,
		groups:      groups,
		align:       align,
		blocks:      make([]block, cfg.Blocks),
		buckets:     make([]BlockID, nBuckets),
		events:      eventRing{buf: make([]Event, cfg.MaxEvents)},
		hash:        cfg.Hash,
		maxHot:      int(cfg.HotFraction * float64(cfg.Blocks)),
	}
	for i := range p.buckets {
		p.buckets[i] = NoBlock
	}
	for i := range p.lists {
		p.lists[i] = list{NoBlock, NoBlock}
	}
	for id := range p.blocks {
		p.blocks[id].bucketNext = NoBlock
		p.pushBack(stateFree, BlockID(id))
	}
	p.counts[stateFree] = cfg.Blocks
	return p, nil
}

// BlockTokens is the number of tokens that one hash names.
func (p *Pool) BlockTokens() int { return p.blockTokens }

// Groups are those that share the blocks, defaults filled in; not to be changed.
func (p *Pool) Groups() []Group { return p.groups }

// Align is the least number of tokens at which blocks of all groups end
// together: prefix hits are multiples of it.
func (p *Pool) Align() int { return p.align }

// Available is the number of blocks that Alloc can still hand out.
func (p *Pool) Available() int {
	return p.counts[stateFree] + p.counts[stateCached] + p.counts[stateHot]
}

// Alloc hands out a block with one reference and unknown content: a free one,
// else the least recently used cached one, a hot one only when all are hot. False means that every block is
// referenced or pinned.
func (p *Pool) Alloc() (BlockID, bool) {
	id := p.lists[stateFree].head
	if id == NoBlock {
		if id = p.lists[stateCached].head; id == NoBlock {
			id = p.lists[stateHot].head
		}
		if id == NoBlock {
			return NoBlock, false
		}
		p.forget(id)
	}
	p.blocks[id].refs++
	p.settle(id)
	return id, true
}

// Ref adds a reference to a block that is referenced or hashed: it was found.
func (p *Pool) Ref(id BlockID) {
	b := &p.blocks[id]
	if b.refs == 0 && !b.hashed {
		panic(fmt.Sprintf("kvcache: Ref of block %d, which holds nothing", id))
	}
	b.refs++
	b.hot = b.hashed
	p.settle(id)
}

// Unref takes a reference back. Callers release a block table from its end,
// so that in the LRU list a block always comes before its parent.
func (p *Pool) Unref(id BlockID) {
	b := &p.blocks[id]
	if b.refs == 0 {
		panic(fmt.Sprintf("kvcache: Unref of block %d, which has no reference", id))
	}
	b.refs--
	p.settle(id)
}

// PinIn says that the network may write the block from now on.
func (p *Pool) PinIn(id BlockID) {
	b := &p.blocks[id]
	if b.refs == 0 || b.hashed {
		panic(fmt.Sprintf("kvcache: PinIn of block %d: references %d, hashed %v; only a private block can be written",
			id, b.refs, b.hashed))
	}
	if b.pinIn++; b.pinIn == 1 {
		p.arriving++
	}
	p.settle(id)
}

// UnpinIn says that this transfer will never write the block again.
func (p *Pool) UnpinIn(id BlockID) {
	b := &p.blocks[id]
	if b.pinIn == 0 {
		panic(fmt.Sprintf("kvcache: UnpinIn of block %d, which has no incoming pin", id))
	}
	if b.pinIn--; b.pinIn == 0 {
		p.arriving--
	}
	p.settle(id)
}

// PinOut keeps a block's content while a transfer reads it.
func (p *Pool) PinOut(id BlockID) {
	b := &p.blocks[id]
	if b.state == stateFree {
		panic(fmt.Sprintf("kvcache: PinOut of block %d, which is free", id))
	}
	if b.pinOut++; b.pinOut == 1 {
		p.leaving++
	}
	p.settle(id)
}

// UnpinOut ends PinOut.
func (p *Pool) UnpinOut(id BlockID) {
	b := &p.blocks[id]
	if b.pinOut == 0 {
		panic(fmt.Sprintf("kvcache: UnpinOut of block %d, which has no outgoing pin", id))
	}
	if b.pinOut--; b.pinOut == 0 {
		p.leaving--
	}
	p.settle(id)
}

// Usage counts blocks. Free + Cached + Used + Pinned = Blocks; Arriving and
// Leaving overlap with Used, Pinned and each other.
type Usage struct {
	Blocks   int
	Free     int // content is garbage, can be handed out
	Cached   int // found by content, can be handed out
	Used     int // referenced
	Pinned   int // not referenced, kept only by transfers
	Arriving int // with an incoming pin
	Leaving  int // with an outgoing pin
}

// Usage returns the current counts.
func (p *Pool) Usage() Usage {
	return Usage{
		Blocks:   len(p.blocks),
		Free:     p.counts[stateFree],
		Cached:   p.counts[stateCached] + p.counts[stateHot],
		Used:     p.counts[stateUsed],
		Pinned:   p.counts[statePinned],
		Arriving: p.arriving,
		Leaving:  p.leaving,
	}
}

// Info is one block's state, for those who verify or display the pool.
type Info struct {
	Refs, PinsIn, PinsOut int
	Hashed                bool
	Hash                  Hash // valid when Hashed
	Reusable              bool // Alloc may hand it out
}

// Info returns the state of one block.
func (p *Pool) Info(id BlockID) Info {
	b := &p.blocks[id]
	return Info{
		Refs: int(b.refs), PinsIn: int(b.pinIn), PinsOut: int(b.pinOut),
		Hashed: b.hashed, Hash: b.hash,
		Reusable: b.state.reusable(),
	}
}

// settle moves a block to the list that its references, pins and flag ask for.
func (p *Pool) settle(id BlockID) {
	b := &p.blocks[id]
	to := stateUsed
	if b.refs == 0 {
		switch {
		case b.pinIn+b.pinOut > 0 && p.broken != faultPinsIgnored:
			to = statePinned
		case b.hashed && b.hot && p.maxHot > 0:
			to = stateHot
		case b.hashed:
			to = stateCached
		default:
			to = stateFree
		}
	}
	if to == b.state {
		return
	}
	if b.state.reusable() {
		p.unlink(b.state, id)
	}
	p.counts[b.state]--
	b.state = to
	p.counts[to]++
	switch to {
	case stateFree:
		p.pushFront(to, id) // the last one freed is the likeliest to be in the CPU's caches
	case stateCached:
		p.pushBack(to, id)
	case stateHot:
		p.pushBack(to, id)
		if p.counts[stateHot] > p.maxHot {
			coldest := p.lists[stateHot].head
			p.blocks[coldest].hot = false
			p.settle(coldest)
		}
	}
}

func (p *Pool) pushBack(s state, id BlockID) {
	l, b := &p.lists[s], &p.blocks[id]
	b.prev, b.next = l.tail, NoBlock
	if l.tail == NoBlock {
		l.head = id
	} else {
		p.blocks[l.tail].next = id
	}
	l.tail = id
}

func (p *Pool) pushFront(s state, id BlockID) {
	l, b := &p.lists[s], &p.blocks[id]
	b.prev, b.next = NoBlock, l.head
	if l.head == NoBlock {
		l.tail = id
	} else {
		p.blocks[l.head].prev = id
	}
	l.head = id
}

func (p *Pool) unlink(s state, id BlockID) {
	l, b := &p.lists[s], &p.blocks[id]
	if b.prev == NoBlock {
		l.head = b.next
	} else {
		p.blocks[b.prev].next = b.next
	}
	if b.next == NoBlock {
		l.tail = b.prev
	} else {
		p.blocks[b.next].prev = b.prev
	}
}
