package kvcache

import (
	"encoding/binary"

	"github.com/cespare/xxhash/v2"
)

// Hash names the content of one full block and of everything before it: the
// xxhash64 of the block's tokens, seeded with the hash of the block before
// (or with a root). It is a name, not a proof: see Pool.Match.
type Hash uint64

// DefaultBlockTokens is the number of tokens per block: small enough that
// little of a shared prefix is lost to rounding, large enough that block tables
// and transfer headers stay short. Gateways and nodes have to agree on it.
const DefaultBlockTokens = 16

// Root is where the chain of block hashes starts. Requests share cached blocks
// only when model, adapter and salt are all equal.
func Root(model, adapter, salt string) Hash {
	var d xxhash.Digest
	d.Reset()
	for _, field := range [...]string{model, adapter, salt} {
		// The length in front keeps ("ab", "c") and ("a", "bc") apart.
		var n [8]byte
		binary.LittleEndian.PutUint64(n[:], uint64(len(field)))
		d.Write(n[:])
		d.WriteString(field)
	}
	return Hash(d.Sum64())
}

// AppendHashes appends the hashes of tokens' full blocks to dst; tokens after
// the last full block have none. It allocates only when dst has no room.
func AppendHashes(dst []Hash, root Hash, tokens []int32, blockTokens int) []Hash {
	parent := root
	for ; len(tokens) >= blockTokens; tokens = tokens[blockTokens:] {
		parent = chain(parent, tokens[:blockTokens])
		dst = append(dst, parent)
	}
	return dst
}

// chain hashes one block's tokens (little-endian int32) onto its parent.
func chain(parent Hash, tokens []int32) Hash {
	var d xxhash.Digest
	d.ResetWithSeed(uint64(parent))
	var buf [256]byte
	for len(tokens) > 0 {
		n := min(len(tokens), len(buf)/4)
		for i, t := range tokens[:n] {
			binary.LittleEndian.PutUint32(buf[4*i:], uint32(t))
		}
		d.Write(buf[:4*n])
		tokens = tokens[n:]
	}
	return Hash(d.Sum64())
}

// In is what a hash is called outside of the node where groups share names: the
// first group's as it is, another one's apart.
func (h Hash) In(group int) Hash { return h + Hash(group)*0x9e3779b97f4a7c15 }
