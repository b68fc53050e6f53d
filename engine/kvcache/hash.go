package kvcache

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/cespare/xxhash/v2"
)

// Hash identifies the content of one full block and of everything before it. It is
// the xxhash64 of the block's tokens, seeded with the hash of the block before, or
// with a root. Different contents can share a hash: see Pool.Match.
type Hash uint64

// DefaultBlockTokens is the number of tokens per block. It is small enough that
// rounding loses little of a shared prefix, and large enough that block tables and
// transfer headers stay short. Gateways and nodes must agree on it.
const DefaultBlockTokens = 16

// Root returns the start of a chain of block hashes. Requests share cached blocks
// only if model, adapter and salt are all equal.
func Root(model, adapter, salt string) Hash {
	return Hash(xxhash.Sum64(rootFields(model, adapter, salt)))
}

// RootDigest is the first half of the SHA-256 of Root's input. Digests of blocks
// start from it, because clients choose the salt and can find salts whose Root equals
// that of another model, adapter or salt.
type RootDigest [16]byte

// DigestRoot returns the RootDigest of model, adapter and salt.
func DigestRoot(model, adapter, salt string) RootDigest {
	sum := sha256.Sum256(rootFields(model, adapter, salt))
	return RootDigest(sum[:16])
}

// ParseRootDigest reads a digest that another process sent. Zero bytes are the zero
// digest. ok is false if the length is neither 0 nor 16.
func ParseRootDigest(b []byte) (d RootDigest, ok bool) {
	copy(d[:], b)
	return d, len(b) == 0 || len(b) == len(d)
}

// rootFields joins the fields, each after its length, so that ("ab", "c") and
// ("a", "bc") differ.
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

// AppendNamed appends the hashes of the links that Chain.Name adds.
func AppendNamed(dst []Hash, root Hash, names ...Hash) []Hash {
	for _, name := range names {
		root = root.named(name)
		dst = append(dst, root)
	}
	return dst
}

// named chains the name of a unit onto its parent.
func (h Hash) named(name Hash) Hash { return Hash(spread(uint64(h)*0xd1342543de82ef95 + uint64(name))) }

// spread spreads the bits of a number (the finalizer of SplitMix64).
func spread(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// In returns the hash of a block of a group for use outside of the node, where all
// groups share one namespace. Hashes of group 0 are unchanged.
func (h Hash) In(group int) Hash { return h + Hash(group)*0x9e3779b97f4a7c15 }
