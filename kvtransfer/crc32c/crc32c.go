// Package crc32c computes CRC32C (Castagnoli) of pages that are not in any cache, and does so while it copies them.
//
// hash/crc32 is bound by the instruction's latency and hides it by walking three parts of its input at a time, which on cold pages
// costs more in missed prefetches than the arithmetic does. Where the processor multiplies carry-less in 512 bits, fold (fold_amd64.s)
// walks one stream: it keeps the input's remainder in four registers of 64 bytes, folds 256 bytes a step into them, and prefetches.
// What is left of the registers is a block of 64 bytes with the same CRC as all that was folded, and hash/crc32 does that and the tail.
// Copy stores what it folds past the caches.
//
// Invariant: the results are hash/crc32's, whichever way they were computed. The package knows no other polynomial.
package crc32c

import (
	"hash/crc32"
)

var table = crc32.MakeTable(crc32.Castagnoli)

const (
	stepBytes = 256 // what fold takes at a time
	foldLeast = 4 * stepBytes
	// chunkBytes is what Copy without fold copies before it sums it: it is still in the first cache then.
	chunkBytes = 4096
)

// constants are what fold multiplies by: x^(d+32) and x^(d−32) modulo the polynomial for d bits, reflected, for steps of 256 bytes and of 64.
var constants = [4]uint64{power(2048 + 32), power(2048 - 32), power(512 + 32), power(512 - 32)}

// power is x^n modulo the polynomial, reflected and shifted to where a product of reflected numbers wants it.
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

// Copy copies src to dst, which must not overlap it, as many bytes as the shorter one has, and adds them to a CRC.
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

// Name says which way is taken here.
func Name() string {
	if folds {
		return "vpclmulqdq"
	}
	return "portable"
}
