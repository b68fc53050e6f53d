package kvcache

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
)

// digest identifies every token from the root to the end of a block: chained SHA-256,
// of which half is kept. Finding two prefixes with the same digest is infeasible, so
// that equal digests are equal tokens after equal parents.
type digest [16]byte

// link is one unit of a chain.
type link struct {
	hash   Hash // public
	digest digest
}

// Chain holds the hashes and digests of a sequence's leading tokens, one link per
// Config.BlockTokens tokens. It grows with the sequence, so that no token is hashed
// twice. The zero Chain has no root; NewChain makes one.
type Chain struct {
	root  Hash
	start RootDigest // zero: made from root
	links []link
}

// NewChain returns a chain that starts at root, with room for nTokens.
func (p *Pool) NewChain(root Hash, nTokens int) Chain {
	return Chain{root: root, links: make([]link, 0, nTokens/p.blockTokens)}
}

// StartAt sets the digest that the links of an empty chain start from. The zero d
// keeps the one of NewChain, which is made from the 64-bit root.
func (c *Chain) StartAt(d RootDigest) { c.start = d }

// Extend adds the links that the chain lacks. tokens is the whole sequence so far;
// tokens after the last whole unit have no link.
func (p *Pool) Extend(c *Chain, tokens []int32) {
	last := link{hash: c.root}
	if n := len(c.links); n > 0 {
		last = c.links[n-1]
	} else if c.start != (RootDigest{}) {
		last.digest = digest(c.start)
	} else {
		binary.LittleEndian.PutUint64(last.digest[:], uint64(c.root))
	}
	for at := len(c.links) * p.blockTokens; at+p.blockTokens <= len(tokens); at += p.blockTokens {
		content := tokens[at : at+p.blockTokens]
		last = link{hash: p.hash(last.hash, content), digest: last.digest.next(content)}
		c.links = append(c.links, last)
	}
}

// Name adds links for the next units of the sequence, identified by names in place of tokens.
// Extend adds no link for a unit that has one. It is for simulations, which have no tokens. Names
// must not come from clients, because two sequences of names with one digest can be found.
func (c *Chain) Name(names ...Hash) {
	c.links = slices.Grow(c.links, len(names))
	last := link{hash: c.root}
	if n := len(c.links); n > 0 {
		last = c.links[n-1]
	}
	for _, name := range names {
		d := &last.digest
		low, high := binary.LittleEndian.Uint64(d[:8]), binary.LittleEndian.Uint64(d[8:])
		binary.LittleEndian.PutUint64(d[:8], spread(low+uint64(name)))
		binary.LittleEndian.PutUint64(d[8:], spread(high^uint64(name)*0x9e3779b97f4a7c15+1))
		last.hash = last.hash.named(name)
		c.links = append(c.links, last)
	}
}

// AppendHashes appends the hashes of the chain's first n links to dst. The chain must have as many.
func (c *Chain) AppendHashes(dst []Hash, n int) []Hash {
	for i := range c.links[:n] {
		dst = append(dst, c.links[i].hash)
	}
	return dst
}

// next chains one unit's tokens (little-endian int32) onto d.
func (d digest) next(tokens []int32) (out digest) {
	var buf [16 + 4*64]byte
	for {
		n := min(len(tokens), 64)
		copy(buf[:16], d[:])
		for i, t := range tokens[:n] {
			binary.LittleEndian.PutUint32(buf[16+4*i:], uint32(t))
		}
		sum := sha256.Sum256(buf[:16+4*n])
		copy(d[:], sum[:])
		if tokens = tokens[n:]; len(tokens) == 0 {
			return d
		}
	}
}

// linkAt returns the link at the end of a group's place, and the hash of the place before.
func (p *Pool) linkAt(group int, c *Chain, place int) (l *link, parent Hash) {
	units := p.groups[group].BlockTokens / p.blockTokens
	parent = c.root
	if place > 0 {
		parent = c.links[place*units-1].hash
	}
	return &c.links[(place+1)*units-1], parent
}

// Find returns the cached block for a group's place of a chain, or NoBlock. The chain
// must reach to the end of the place.
func (p *Pool) Find(group int, c *Chain, place int) BlockID {
	l, _ := p.linkAt(group, c, place)
	return p.find(group, l)
}

// Match returns the length of the longest cached prefix of a chain, at most limit
// tokens. That is the largest n at which blocks of all groups end and the cache has
// what a request at n reads: [0, n) for groups without a window, the last Window-1
// tokens before n for the others. It takes no references and changes nothing: callers
// Find and Ref what they keep before the next Alloc.
func (p *Pool) Match(c *Chain, limit int) (nTokens int) {
	n := min(limit, len(c.links)*p.blockTokens) / p.align * p.align
	for g, spec := range p.groups {
		if spec.Window > 0 {
			continue
		}
		place := 0
		for (place+1)*spec.BlockTokens <= n && p.Find(g, c, place) != NoBlock {
			place++
		}
		n = place * spec.BlockTokens / p.align * p.align
	}
	// From the right: a missing block moves the end to before it, because no n between
	// can be an end either.
	for moved := true; moved && n > 0; {
		moved = false
		for g, spec := range p.groups {
			if spec.Window == 0 {
				continue
			}
			for place := n/spec.BlockTokens - 1; place >= spec.First(n) && !moved; place-- {
				if p.Find(g, c, place) == NoBlock {
					n = place * spec.BlockTokens / p.align * p.align
					moved = true
				}
			}
			if moved {
				break
			}
		}
	}
	return n
}

// find returns the hashed block of a group with this content. It compares digests,
// because equal hashes are not enough.
func (p *Pool) find(group int, l *link) BlockID {
	tag := tagOf(group, l.hash)
	for at := p.index.home(tag); ; at = p.index.after(at) {
		s := p.index.slots[at]
		if s.block == 0 {
			return NoBlock
		}
		if s.tag != tag {
			continue
		}
		c := &p.contents[s.block-1]
		if c.hash == l.hash && int(p.blocks[s.block-1].group) == group && (c.digest == l.digest || p.fault == faultHitByHash) {
			return s.block - 1
		}
	}
}

// Store puts a complete, verified block into the prefix cache as a group's place of a
// chain. The caller has a reference to it.
//
// If the same content is already cached, nothing changes and that block is returned.
// The caller takes a reference to it and puts it into its block table in place of its
// own, so that each content is kept once.
func (p *Pool) Store(id BlockID, group int, c *Chain, place int) BlockID {
	b := &p.blocks[id]
	if b.refs == 0 || b.pinIn > 0 || b.hashed {
		panic(fmt.Sprintf("kvcache: Store of block %d: references %d, incoming pins %d, hashed %v",
			id, b.refs, b.pinIn, b.hashed))
	}
	l, parent := p.linkAt(group, c, place)
	if have := p.find(group, l); have != NoBlock {
		return have
	}
	known := p.hasHash(group, l.hash)
	b.hashed, b.group = true, uint8(group)
	p.contents[id] = content{l.hash, parent, l.digest}
	p.index.add(tagOf(group, l.hash), id)
	if !known {
		p.events.push(Event{Kind: Stored, Group: group, Hash: l.hash, Parent: parent})
	}
	return id
}

// uncache removes a block from the prefix cache.
func (p *Pool) uncache(id BlockID) {
	b, c := &p.blocks[id], &p.contents[id]
	group, hash, parent := int(b.group), c.hash, c.parent
	p.index.remove(tagOf(group, hash), id)
	b.hashed, b.hot, b.group, *c = false, false, 0, content{}
	p.updateState(id)
	if !p.hasHash(group, hash) {
		p.events.push(Event{Kind: Removed, Group: group, Hash: hash, Parent: parent})
	}
}

// hasHash reports whether any hashed block of a group has this hash. Events name
// hashes, so that only the first and the last block of a hash cause events.
func (p *Pool) hasHash(group int, hash Hash) bool {
	tag := tagOf(group, hash)
	for at := p.index.home(tag); ; at = p.index.after(at) {
		s := p.index.slots[at]
		if s.block == 0 {
			return false
		}
		if s.tag == tag && p.contents[s.block-1].hash == hash && int(p.blocks[s.block-1].group) == group {
			return true
		}
	}
}
