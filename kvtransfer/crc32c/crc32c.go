// Package crc32c computes CRC32C (Castagnoli) of pages that are in no cache, also while copying
// them.
//
// hash/crc32 is bound by the latency of the CRC instruction. It hides the latency by processing
// three parts of its input in parallel, which on uncached pages costs more in missed prefetches
// than it saves. Where the processor has carry-less multiplication of 512 bits, fold (fold_amd64.s)
// reads one stream: it keeps the input's remainder in four registers of 64 bytes, folds 256 bytes a
// step into them, and prefetches. The registers are then reduced to a block of 64 bytes that has
// the same CRC as the folded input. hash/crc32 computes the CRC of that block and of the tail. Copy
// stores the folded bytes with non-temporal stores.
//
// Invariant: the results equal hash/crc32's. The package has no other polynomial.
package crc32c

import (
	"hash/crc32"
)

var table = crc32.MakeTable(crc32.Castagnoli)

const (
	stepBytes = 256 // bytes of a step of fold
	foldLeast = 4 * stepBytes
	// chunkBytes is the size that Copy without fold copies before the checksum: it is still in L1
	// then.
	chunkBytes = 4096
)

// constants are the multipliers of fold: x^(d+32) and x^(d−32) modulo the polynomial, reflected,
// for distances d of 256 and 64 bytes in bits.
var constants = [4]uint64{power(2048 + 32), power(2048 - 32), power(512 + 32), power(512 - 32)}

// power returns x^n modulo the polynomial, reflected and shifted as a product of reflected numbers
// requires.
func power(n int) uint64 {
	r := uint32(1) << 31 // x^0, reflected: the highest power in the lowest bit
	for range n {
		r = r>>1 ^ crc32.Castagnoli&-(r&1)
	}
	return uint64(r) << 1
}

// Update adds p to a CRC.
func Update(crc uint32, p []byte) uint32 {
	if !folds || len(p) < foldLeast {
		return crc32.Update(crc, table, p)
	}
	n := len(p) &^ (stepBytes - 1)
	var rest [64]byte
	fold(&rest, &p[0], n, ^crc, &constants)
	return crc32.Update(crc32.Update(^uint32(0), table, rest[:]), table, p[n:])
}

// Copy copies min(len(dst), len(src)) bytes of src to dst, which must not overlap, and adds them to
// a CRC.
func Copy(crc uint32, dst, src []byte) uint32 {
	n := min(len(dst), len(src))
	dst, src = dst[:n], src[:n]
	if folds && n >= foldLeast && aligned(dst) {
		n &^= stepBytes - 1
		var rest [64]byte
		foldCopy(&rest, &dst[0], &src[0], n, ^crc, &constants)
		crc = crc32.Update(^uint32(0), table, rest[:])
		dst, src = dst[n:], src[n:]
	}
	for len(src) > 0 {
		n := copy(dst[:min(chunkBytes, len(dst))], src)
		crc = crc32.Update(crc, table, dst[:n])
		dst, src = dst[n:], src[n:]
	}
	return crc
}

// Name returns the name of the implementation in use.
func Name() string {
	if folds {
		return "vpclmulqdq"
	}
	return "portable"
}
