package grammar

import (
	"math/rand/v2"
	"testing"
)

// A byteSet equals a naive set after random additions.
func TestByteSet(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 1))
	bounds := func() (lo, hi byte) {
		lo = byte(r.IntN(256))
		return lo, lo + byte(r.IntN(256-int(lo)))
	}
	for range 200 {
		var s byteSet
		var naive [256]bool
		for range r.IntN(4) {
			lo, hi := bounds()
			s.add(lo, hi)
			for c := int(lo); c <= int(hi); c++ {
				naive[c] = true
			}
		}
		lo, hi := bounds()
		overlaps := false
		for c := range naive {
			if s.has(byte(c)) != naive[c] {
				t.Fatalf("%x: byte %d is wrong", s, c)
			}
			overlaps = overlaps || naive[c] && int(lo) <= c && c <= int(hi)
		}
		if s.overlaps(lo, hi) != overlaps {
			t.Fatalf("%x overlaps %d to %d: %t", s, lo, hi, !overlaps)
		}
	}
}

// The edges of a set of characters read its characters and no others, whether its part beyond ASCII
// is shared or not.
func TestCharEdges(t *testing.T) {
	for _, ranges := range [][]runeRange{
		allChars, wideChars, {{'a', 'z'}}, {{0, 0x10FFFF}}, {{'"', 'é'}}, {{'x', 0xD7FF}, {0xE000, 0x10FFFF}}, {{'x', 0xD7FF}, {0xE001, 0x10FFFF}}, {{0x7F, 0x80}}, {{0x20AC, 0x20AC}},
	} {
		ranges = normalize(ranges)
		limits := DefaultLimits()
		g, err := determinize(charsOf(modeRaw, ranges), &limits)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []rune{0, '"', '\\', 'a', 'w', 'x', 'z', 0x7F, 0x80, 'é', 'ê', 0x7FF, 0x800, 0x20AC, 0xD7FF, 0xE000, 0xE001, 0xFFFF, 0x10000, 0x10FFFF} {
			if got, want := g.matches(string(c)), contains(ranges, c); got != want {
				t.Errorf("%x with character %x: %t, want %t", ranges, c, got, want)
			}
		}
	}
}
