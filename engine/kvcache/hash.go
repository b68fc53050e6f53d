package kvcache

import (
	"crypto/sha256"
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
	return Hash(xxhash.Sum64(rootFields(model, adapter, salt)))
}

// RootDigest is the first half of the SHA-256 of what Root hashes. Digests of blocks
// start from it, because clients choose the salt and can find salts whose Root is that
// of another model, adapter or salt.
type RootDigest [16]byte

// DigestRoot returns the RootDigest of model, adapter and salt.
func DigestRoot(model, adapter, salt string) RootDigest {
	sum := sha256.Sum256(rootFields(model, adapter, salt))
	return RootDigest(sum[:16])
}

// ParseRootDigest reads a digest that another process sent. No bytes are the zero
// digest; any number of them other than 0 and 16 is not ok.
func ParseRootDigest(b []byte) (d RootDigest, ok bool) {
	copy(d[:], b)
	return d, len(b) == 0 || len(b) == len(d)
}

// rootFields joins the fields, each with its length in front: so ("ab", "c") and
// ("a", "bc") stay apart.
func rootFields(fields ...string) (joined []byte) {
	for _, field := range fields {
		joined = binary.LittleEndian.AppendUint64(joined, uint64(len(field)))
		joined = append(joined, field...)
	}
	return joined
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
