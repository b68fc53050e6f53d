package sample

import "math/bits"

// Constants of Philox 4x32 with ten rounds: Salmon, Moraes, Dror and Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
const (
	philoxM0     = 0xD2511F53
	philoxM1     = 0xCD9E8D57
	philoxW0     = 0x9E3779B9 // the golden ratio
	philoxW1     = 0xBB67AE85 // sqrt(3) - 1
	philoxRounds = 10
)

// philox is the bijection of the paper: it maps a counter under a key to four random
// words. It has no state, so that any node can repeat any draw.
func philox(key [2]uint32, ctr [4]uint32) [4]uint32 {
	for range philoxRounds {
		hi0, lo0 := bits.Mul32(philoxM0, ctr[0])
		hi1, lo1 := bits.Mul32(philoxM1, ctr[2])
		ctr = [4]uint32{hi1 ^ ctr[1] ^ key[0], lo1, hi0 ^ ctr[3] ^ key[1], lo0}
		key[0] += philoxW0
		key[1] += philoxW1
	}
	return ctr
}

// uniform returns the number in [0, 1), a multiple of 2^-53, that decides the token of a
// choice at a position. The other two counter words stay zero; they are free for draws
// of another purpose.
func uniform(seed uint64, choice uint32, position int32) float64 {
	r := philox([2]uint32{uint32(seed), uint32(seed >> 32)}, [4]uint32{choice, uint32(position), 0, 0})
	n := uint64(r[0]>>5)<<26 | uint64(r[1]>>6)
	return float64(n) * 0x1p-53
}
