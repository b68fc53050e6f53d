package tokenizer

import (
	"encoding/binary"
	"strings"
	"unicode/utf8"

	"github.com/clipperhouse/uax29/v2/graphemes"
)

// precompiled is SentencePiece's table of replacements: a double array, which leads from the bytes
// of a character to a place in replacements.
type precompiled struct {
	units        []uint32
	replacements string // each one ends in a zero byte
}

// maxCluster bounds the bytes of the characters that are looked up together, as the reference does.
const maxCluster = 6

// readPrecompiled reads a precompiled_charsmap.
func readPrecompiled(data []byte) (*precompiled, error) {
	if len(data) < 4 {
		return nil, invalid("normalizer Precompiled: a table of %d bytes", len(data))
	}
	size := binary.LittleEndian.Uint32(data)
	data = data[4:]
	if size == 0 || size%4 != 0 || uint64(size) > uint64(len(data)) {
		return nil, invalid("normalizer Precompiled: an array of %d bytes in a table of %d", size, len(data)+4)
	}
	p := &precompiled{units: make([]uint32, size/4), replacements: string(data[size:])}
	for i := range p.units {
		p.units[i] = binary.LittleEndian.Uint32(data[4*i:])
	}
	return p, nil
}

// longest returns the bytes of the longest replacement.
func (p *precompiled) longest() (n int) {
	for text := range strings.SplitSeq(p.replacements, "\x00") {
		n = max(n, len(text))
	}
	return n
}

// offset returns what a unit of the array adds, without carry, to a place.
func offset(unit uint32) uint32 { return unit >> 10 << (unit >> 6 & 8) }

// find returns the replacement of the shortest key that s begins with, as the reference does also
// where a longer one is in the table.
func (p *precompiled) find(s string) (string, bool) {
	at := offset(p.units[0])
	for i := range len(s) {
		c := uint32(s[i])
		if at ^= c; c == 0 || at >= uint32(len(p.units)) {
			return "", false
		}
		unit := p.units[at]
		if unit&(1<<31|0xff) != c {
			return "", false
		}
		if at ^= offset(unit); unit>>8&1 == 0 {
			continue
		}
		if at >= uint32(len(p.units)) {
			return "", false
		}
		from := p.units[at] &^ (1 << 31)
		if uint64(from) > uint64(len(p.replacements)) {
			return "", false
		}
		text, _, _ := strings.Cut(p.replacements[from:], "\x00")
		return text, true
	}
	return "", false
}

// apply replaces clusters of characters that are in the table, and else single characters.
func (p *precompiled) apply(s string) string {
	var out strings.Builder
	out.Grow(len(s))
	for clusters := graphemes.FromString(s); clusters.Next(); {
		cluster := clusters.Value()
		if len(cluster) < maxCluster {
			if text, ok := p.find(cluster); ok {
				out.WriteString(text)
				continue
			}
		}
		for len(cluster) > 0 {
			_, width := utf8.DecodeRuneInString(cluster)
			text, ok := p.find(cluster[:width])
			if !ok {
				text = cluster[:width]
			}
			out.WriteString(text)
			cluster = cluster[width:]
		}
	}
	return out.String()
}
