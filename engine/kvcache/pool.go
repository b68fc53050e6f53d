// Package kvcache manages the blocks of KV memory. It allocates blocks of equal size,
// counts their references, finds cached prefixes and evicts the least recently used
// blocks that are not in use.
//
// Layers of one attention kind and KV shape form a group with block tables of its
// own. All groups share one pool, and any block can serve any group. A group with a
// window frees the blocks that no later token reads.
//
// A block has a reference count (block tables and reservations that contain it), a
// hashed flag (it can be found by its content) and transfer pins in two directions.
// Content is identified by a chained digest of every token from the root to the
// block's end, so that a hit has equal tokens after equal parents. The public hashes
// only select a place of the index. A block without references and pins is free if
// it is not hashed, and cached if it is.
//
// Cached blocks wait in two LRU lists until memory runs out. A block that was found
// again since it was stored is hot, and is evicted only when nothing else is left. So
// a prompt that comes once, however long, evicts no prefix that many requests share.
// Hot blocks are a bounded part of the pool: when another needs the place, the least
// recently used one becomes cold. (Segmented LRU: Karedla, Love, Wherry, 1994.)
//
// Invariant: a block is allocated only if it has no references and no pins. An
// incoming pin belongs to the network, and this package never removes it on its own.
//
// The package does not know requests, does not touch KV memory, and does not decide
// which request is preempted; the scheduler does.
package kvcache

import (
	"errors"
	"fmt"
)

// BlockID is a block's index in the pool: 0 ≤ id < Config.Blocks.
type BlockID int32

// NoBlock marks a place of a block table without a block, and a block that was not found.
const NoBlock BlockID = -1

// DefaultMaxEvents bounds the events kept for a reader that is slow or absent. 64 Ki
// events are 1.5 MiB and several seconds of prefill on any node measured so far. A
// reader that is later than that requests a snapshot anyway.
const DefaultMaxEvents = 1 << 16

// DefaultHotFraction leaves half the pool to new prefixes, so that they can become
// hot. It is the best value on the Mooncake trace for pools of every size
// (TestHotPrefixesOnTheMooncakeTrace).
const DefaultHotFraction = 0.5

// MaxGroups bounds the block tables of a sequence.
const MaxGroups = 64

// ErrConfig means that a Config cannot make a pool.
var ErrConfig = errors.New("kvcache: bad config")

// Config sizes a pool.
type Config struct {
	Blocks      int // number of blocks
	BlockTokens int // tokens per hash; 0 means DefaultBlockTokens
	MaxEvents   int // events kept until drained; 0 means DefaultMaxEvents

	// HotFraction is the part of the blocks that may be hot at once; 0 means
	// DefaultHotFraction. Less than a block means none: plain LRU.
	HotFraction float64

	// Groups share the blocks. Empty means one group without a window.
	Groups []Group

	// Hash replaces the chained xxhash64, so that tests can force collisions.
	// nil means the hashes of AppendHashes.
	Hash func(parent Hash, tokens []int32) Hash
}

// state is determined by a block's references, pins and hashed flag.
type state uint8

const (
	stateFree   state = iota // unused, its content is garbage
	stateCached              // unused, its content can be found
	stateHot                 // stateCached, and found since it was stored
	stateUsed                // referenced
	statePinned              // pinned by a transfer only
	nStates
)

// reusable reports whether blocks of a state can be allocated. Such blocks are in a list.
func (s state) reusable() bool { return s == stateFree || s == stateCached || s == stateHot }

type block struct {
	refs   int32 // block tables and reservations that contain it
	pinIn  int32 // transfers that may write it
	pinOut int32 // transfers that may read it
	state  state // determines its list and its counter

	hashed bool
	hot    bool  // found since it was stored
	group  uint8 // group of the content, if hashed

	prev, next BlockID // free or LRU list
}

// content identifies what a hashed block holds. Most operations need only the block, so that its
// content has another place.
type content struct {
	hash   Hash   // public
	parent Hash   // hash of the place before, or the root at the start of a chain
	digest digest // identifies the content and all before it
}

// list is a doubly linked list through blocks' prev and next.
type list struct{ head, tail BlockID }

// Pool is the state machine. It is not safe for concurrent use: the step goroutine of
// the engine owns it.
type Pool struct {
	blockTokens int
	groups      []Group
	align       int // tokens after which blocks of all groups end together
	blocks      []block
	contents    []content     // by block; zero: it is not hashed
	index       index         // of the hashed blocks
	fresh       BlockID       // it and later ones were never allocated, are free and are in no list
	lists       [nStates]list // only those of reusable states are used
	maxHot      int           // blocks in stateHot
	counts      [nStates]int  // blocks per state
	arriving    int           // blocks with an incoming pin
	leaving     int           // blocks with an outgoing pin
	events      eventRing
	hash        func(Hash, []int32) Hash
	fault       fault // rule that a test switches off; zero otherwise
}

// fault switches off one rule, so that tests can prove that they would notice.
type fault uint8

const (
	faultHitByHash   fault = iota + 1 // a hit does not compare digests
	faultPinsIgnored                  // a pinned block is reusable
)

// NewPool returns a pool whose blocks are all free. It writes no block, so that memory for blocks
// that are never used is never touched.
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
	p := &Pool{
		blockTokens: cfg.BlockTokens,
		groups:      groups,
		align:       align,
		blocks:      make([]block, cfg.Blocks),
		contents:    make([]content, cfg.Blocks),
		index:       newIndex(cfg.Blocks),
		events:      eventRing{most: cfg.MaxEvents},
		hash:        cfg.Hash,
		maxHot:      int(cfg.HotFraction * float64(cfg.Blocks)),
	}
	for i := range p.lists {
		p.lists[i] = list{NoBlock, NoBlock}
	}
	p.counts[stateFree] = cfg.Blocks
	return p, nil
}

// BlockTokens returns the number of tokens per hash.
func (p *Pool) BlockTokens() int { return p.blockTokens }

// Groups returns the groups, defaults filled in. They must not be changed.
func (p *Pool) Groups() []Group { return p.groups }

// Align returns the least number of tokens at which blocks of all groups end
// together. Prefix hits are multiples of it.
func (p *Pool) Align() int { return p.align }

// Available returns the number of blocks that Alloc can still allocate.
func (p *Pool) Available() int {
	return p.counts[stateFree] + p.counts[stateCached] + p.counts[stateHot]
}

// Alloc returns a block with one reference and unknown content: a free one, else the
// least recently used cached one, and a hot one only if all are hot. It returns false
// if every block is referenced or pinned.
func (p *Pool) Alloc() (BlockID, bool) {
	id := p.lists[stateFree].head
	if id == NoBlock && int(p.fresh) < len(p.blocks) {
		id = p.fresh
		p.fresh++
		p.pushFront(stateFree, id)
	}
	if id == NoBlock {
		if id = p.lists[stateCached].head; id == NoBlock {
			id = p.lists[stateHot].head
		}
		if id == NoBlock {
			return NoBlock, false
		}
		p.uncache(id)
	}
	p.blocks[id].refs++
	p.updateState(id)
	return id, true
}

// Ref adds a reference to a block that is referenced or hashed.
func (p *Pool) Ref(id BlockID) {
	b := &p.blocks[id]
	if b.refs == 0 && !b.hashed {
		panic(fmt.Sprintf("kvcache: Ref of block %d, which holds nothing", id))
	}
	b.refs++
	b.hot = b.hashed
	p.updateState(id)
}

// Unref releases a reference. Callers release a block table from its end, so that a
// block always comes before its parent in the LRU list.
func (p *Pool) Unref(id BlockID) {
	b := &p.blocks[id]
	if b.refs == 0 {
		panic(fmt.Sprintf("kvcache: Unref of block %d, which has no reference", id))
	}
	b.refs--
	p.updateState(id)
}

// PinIn marks the block as one that the network may write from now on.
func (p *Pool) PinIn(id BlockID) {
	b := &p.blocks[id]
	if b.refs == 0 || b.hashed {
		panic(fmt.Sprintf("kvcache: PinIn of block %d: references %d, hashed %v; only a private block can be written",
			id, b.refs, b.hashed))
	}
	if b.pinIn++; b.pinIn == 1 {
		p.arriving++
	}
	p.updateState(id)
}

// UnpinIn ends PinIn: this transfer never writes the block again.
func (p *Pool) UnpinIn(id BlockID) {
	b := &p.blocks[id]
	if b.pinIn == 0 {
		panic(fmt.Sprintf("kvcache: UnpinIn of block %d, which has no incoming pin", id))
	}
	if b.pinIn--; b.pinIn == 0 {
		p.arriving--
	}
	p.updateState(id)
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
	p.updateState(id)
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
	p.updateState(id)
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

// Info is one block's state, for checks and displays.
type Info struct {
	Refs, PinsIn, PinsOut int
	Hashed                bool
	Hash                  Hash // valid when Hashed
	Reusable              bool // Alloc may return it
}

// Info returns the state of one block.
func (p *Pool) Info(id BlockID) Info {
	b := &p.blocks[id]
	return Info{
		Refs: int(b.refs), PinsIn: int(b.pinIn), PinsOut: int(b.pinOut),
		Hashed: b.hashed, Hash: p.contents[id].hash,
		Reusable: b.state.reusable(),
	}
}

// updateState moves a block to the list of the state that its references, pins and flags determine.
func (p *Pool) updateState(id BlockID) {
	b := &p.blocks[id]
	to := stateUsed
	if b.refs == 0 {
		switch {
		case b.pinIn+b.pinOut > 0 && p.fault != faultPinsIgnored:
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
			p.updateState(coldest)
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
