package gguf

import (
	"encoding/binary"
	"math"
)

// MXFP4 is the name of a type of floats of 4 bits. Each block is an exponent with a bias of 127,
// then 32 codes of backend.E2M1: the first 16 in the low halves of 16 bytes.
const MXFP4 = "MXFP4"

// NoExponent is the exponent that means that a block of MXFP4 is not a number.
const NoExponent = 255

const mxfp4Bytes = 17 // of a block

// doubled has the values of backend.E2M1 times two. Zero has no sign, as in the package gguf.
var doubled = [16]float32{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}

// expandMXFP4 converts blocks to float32, as many as fill dst.
func expandMXFP4(dst []float32, data []byte) {
	for i := range len(dst) / 32 {
		b, to := data[i*mxfp4Bytes:][:mxfp4Bytes], dst[i*32:(i+1)*32]
		half := uint32(0x00200000) << b[0] // 2^(exponent-128), a denormal
		if b[0] > 1 {
			half = uint32(b[0]-1) << 23
		}
		scale := math.Float32frombits(half)
		for j, two := range b[1:] {
			to[j], to[j+16] = scale*doubled[two&15], scale*doubled[two>>4]
		}
	}
}

// PackMXFP4 writes a row of blocks in the layout of backend.MXFP4: 16 bytes of each block to codes,
// with neighbouring codes in one byte, and its exponent to exponents.
func PackMXFP4(codes, exponents, blocks []byte) {
	for i := range exponents {
		b, to := blocks[i*mxfp4Bytes:][:mxfp4Bytes], codes[i*16:][:16]
		exponents[i] = b[0]
		for half := range 2 {
			eight := binary.LittleEndian.Uint64(b[1+half*8:])
			binary.LittleEndian.PutUint32(to[half*4:], lowHalves(eight))
			binary.LittleEndian.PutUint32(to[8+half*4:], lowHalves(eight>>4))
		}
	}
}

// lowHalves returns the low halves of eight bytes, two in each byte.
func lowHalves(eight uint64) uint32 {
	eight &= 0x0f0f0f0f0f0f0f0f
	eight = (eight | eight>>4) & 0x00ff00ff00ff00ff
	eight = (eight | eight>>8) & 0x0000ffff0000ffff
	return uint32(eight | eight>>16)
}
