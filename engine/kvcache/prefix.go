package kvcache

import (
	"fmt"
	"slices"
)

// Match returns the blocks of the longest cached prefix of tokens, walked from
// the root; its length in tokens is len(blocks) × BlockTokens. It takes no
// references and changes nothing: callers Ref what they keep before the next
// Alloc.
func (p *Pool) Match(root Hash, tokens []int32) []BlockID {
	return p.AppendMatch(nil, root, tokens)
}

// AppendMatch is Match, appended to dst.
func (p *Pool) AppendMatch(dst []BlockID, root Hash, tokens []int32) []BlockID {
	hash, link := root, uint64(0)
	for ; len(tokens) >= p.blockTokens; tokens = tokens[p.blockTokens:] {
		content := tokens[:p.blockTokens]
		parent := hash
		hash = p.hash(parent, content)
		id := p.find(hash, parent, link, content)
		if id == NoBlock {
			break
		}
		dst = append(dst, id)
		link = p.blocks[id].serial
	}
	return dst
}

// find looks for the hashed block with this content after this parent. Equal
// hashes are not enough: two blocks may share one, and so may their parents.
func (p *Pool) find(hash, parent Hash, link uint64, content []int32) BlockID {
	for id := p.buckets[p.bucket(hash)]; id != NoBlock; id = p.blocks[id].bucketNext {
		b := &p.blocks[id]
		if b.hash != hash {
			continue
		}
		if (b.link != link || b.parent != parent) && p.broken != faultHitWithoutParent {
			continue
		}
		if !slices.Equal(p.content(id), content) && p.broken != faultHitWithoutTokens {
			continue
		}
		return id
	}
	return NoBlock
}

// Store puts a complete, verified block into the prefix cache: id holds the KV
// of content, which continues the hashed block parent, or starts a chain at
// root when parent is NoBlock. The caller has a reference to both.
//
// When the same content is already there, nothing changes and the block that
// has it is returned: the caller takes a reference to that one, and puts it in
// its block table in place of its own. So a table's hashed blocks are the very
// chain that others find, and a referenced block's parent is referenced too.
func (p *Pool) Store(id, parent BlockID, root Hash, content []int32) BlockID {
	b := &p.blocks[id]
	if b.refs == 0 || b.pinIn > 0 || b.hashed || len(content) != p.blockTokens {
		panic(fmt.Sprintf("kvcache: Store of block %d: references %d, incoming pins %d, hashed %v, %d tokens of %d",
			id, b.refs, b.pinIn, b.hashed, len(content), p.blockTokens))
	}
	parentHash, link := root, uint64(0)
	if parent != NoBlock {
		pb := &p.blocks[parent]
		if !pb.hashed || pb.refs == 0 {
			panic(fmt.Sprintf("kvcache: Store of block %d after block %d, which is hashed %v with %d references",
				id, parent, pb.hashed, pb.refs))
		}
		parentHash, link = pb.hash, pb.serial
	}
	hash := p.hash(parentHash, content)
	if have := p.find(hash, parentHash, link, content); have != NoBlock {
		return have
	}
	known := p.hasHash(hash)
	p.serial++
	b.hashed, b.hash, b.parent, b.serial, b.link = true, hash, parentHash, p.serial, link
	copy(p.content(id), content)
	i := p.bucket(hash)
	b.bucketNext = p.buckets[i]
	p.buckets[i] = id
	if !known {
		p.events.push(Event{Kind: Stored, Hash: hash, Parent: parentHash})
	}
	return id
}

// forget takes a block out of the prefix cache; its children, if any are kept
// by pins, can no longer be reached, because no later block gets its serial.
func (p *Pool) forget(id BlockID) {
	b := &p.blocks[id]
	at := &p.buckets[p.bucket(b.hash)]
	for *at != id {
		at = &p.blocks[*at].bucketNext
	}
	*at = b.bucketNext
	hash, parent := b.hash, b.parent
	b.hashed, b.hash, b.parent, b.serial, b.link, b.bucketNext = false, 0, 0, 0, 0, NoBlock
	p.settle(id)
	if !p.hasHash(hash) {
		p.events.push(Event{Kind: Removed, Hash: hash, Parent: parent})
	}
}

// hasHash says whether any hashed block has this hash. Events name hashes, so
// only the first block that has one and the last that had it are news.
func (p *Pool) hasHash(hash Hash) bool {
	for id := p.buckets[p.bucket(hash)]; id != NoBlock; id = p.blocks[id].bucketNext {
		if p.blocks[id].hash == hash {
			return true
		}
	}
	return false
}

func (p *Pool) bucket(hash Hash) int { return int(hash & Hash(len(p.buckets)-1)) }

// content is the tokens of a block, [blockTokens], valid while it is hashed.
func (p *Pool) content(id BlockID) []int32 {
	at := int(id) * p.blockTokens
	return p.tokens[at : at+p.blockTokens]
}
