package tokenizer

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// fallback is the state of a vocabulary of characters. A character without a
// token becomes the tokens of its bytes, <0x00> to <0xFF>.
type fallback struct {
	joins    joins
	written  tokenBytes // tokens as the file writes them
	isByte   []bool     // by id: a byte to the decoder
	old, new string     // the decoder's Replace
	strip    byte       // leading bytes of decoded text that go
	stripMax int        // how many of them at most

	literal   bool // the tokens of bytes are text to the decoder, as to Metaspace
	bareFirst bool // the first token of a text loses its marks of spaces
}

// byteToken is how a vocabulary writes the token of a byte.
func byteToken(b int) string { return fmt.Sprintf("<0x%02X>", b) }

// asByte is the inverse of byteToken, as the reference's decoder reads it.
func asByte(token string) (byte, bool) {
	if len(token) != 6 || !strings.HasPrefix(token, "<0x") || token[5] != '>' {
		return 0, false
	}
	v, err := strconv.ParseUint(token[3:5], 16, 8)
	return byte(v), err == nil
}

// loadSplits reads the pre-tokenizers of a vocabulary of characters: none, cuts
// behind a literal text, or Metaspace.
func (t *Tokenizer) loadSplits(raw json.RawMessage) error {
	t.fallback = new(fallback)
	if isNull(raw) {
		return nil
	}
	var flat []component
	if err := flatten(raw, &flat); err != nil {
		return err
	}
	for _, c := range flat {
		if c.Type == "Metaspace" {
			if err := t.loadMetaspace(&c); err != nil {
				return err
			}
			continue
		}
		if c.Type != "Split" {
			return &UnsupportedError{"pre_tokenizer with model.byte_fallback", c.Type}
		}
		text, err := c.literal("pre_tokenizer.pattern")
		if err != nil {
			return err
		}
		switch {
		case c.Behavior == "MergedWithPrevious" && !c.Invert:
			t.stages = append(t.stages, stage{scan: scanBehind(text)})
		case c.Behavior == "Isolated" && !c.Invert:
			t.stages = append(t.stages, stage{scan: scanAround(text)})
		default:
			return &UnsupportedError{"pre_tokenizer.behavior with model.byte_fallback", c.Behavior}
		}
		if len(t.stages) > maxNormalizers {
			return invalid("pre_tokenizer: more than %d parts", maxNormalizers)
		}
	}
	return nil
}

// scanBehind cuts behind every occurrence of text.
func scanBehind(text string) scanner {
	return func(_ *charTable, s string, i int) int {
		k := strings.Index(s[i:], text)
		if k < 0 {
			return len(s)
		}
		return i + k + len(text)
	}
}

// scanAround cuts around every occurrence of text.
func scanAround(text string) scanner {
	return func(_ *charTable, s string, i int) int {
		if strings.HasPrefix(s[i:], text) {
			return i + len(text)
		}
		if k := strings.Index(s[i:], text); k >= 0 {
			return i + k
		}
		return len(s)
	}
}

// loadFallback prepares merging the characters of a word.
func (t *Tokenizer) loadFallback(m *modelJSON) error {
	b := &t.bpe
	if m.IgnoreMerges {
		return &UnsupportedError{"model.ignore_merges with byte_fallback", "true"}
	}
	isByte := map[int32]bool{}
	for i := range b.byteID {
		id, ok := m.Vocab[byteToken(i)]
		if !ok {
			return &UnsupportedError{"model.byte_fallback without the token of a byte", byteToken(i)}
		}
		b.byteID[i] = id
		isByte[id] = true
	}
	b.charID = map[rune]int32{}
	for token, id := range m.Vocab {
		if r, width := utf8.DecodeRuneInString(token); width > 0 && width == len(token) {
			b.charID[r] = id
		}
	}
	err := b.loadPairs(m, func(left, right string, leftID, rightID int32) error {
		if isByte[leftID] || isByte[rightID] {
			return &UnsupportedError{"model.merges of a byte token", left + " " + right}
		}
		last, _ := utf8.DecodeLastRuneInString(left)
		first, _ := utf8.DecodeRuneInString(right)
		t.fallback.joins.add(last, first)
		return nil
	})
	if err != nil {
		return err
	}
	b.loadWords(m, &t.fallback.written, func(token string) (string, bool) { return token, true })
	return nil
}

// appendChars appends the symbols of a word of characters. A byte that is no
// UTF-8 is the token of that byte.
func (b *bpe) appendChars(dst []int32, word string) []int32 {
	for i := 0; i < len(word); {
		r, width := utf8.DecodeRuneInString(word[i:])
		id, ok := b.charID[r]
		if ok && (r != utf8.RuneError || width > 1) {
			dst = append(dst, id)
		} else {
			for _, c := range []byte(word[i : i+width]) {
				dst = append(dst, b.byteID[c])
			}
		}
		i += width
	}
	return dst
}

const (
	joinBits = 1 << 21 // of the table of pairs that are not both ASCII
	noRune   = rune(-1)
)

// joins knows which two neighbouring characters some merge joins, as the end of
// its left and the beginning of its right token. Between two others no token
// ever forms, so that both sides are encoded by themselves. Of pairs outside
// ASCII it keeps one bit by hash: a pair that shares its bit with another is
// taken to join, and its word is merely longer.
type joins struct {
	ascii [utf8.RuneSelf][utf8.RuneSelf / 64]uint64
	other [joinBits / 64]uint64
}

func joinHash(a, b rune) uint64 {
	return (uint64(uint32(a))<<32 | uint64(uint32(b))) * 0x9E3779B97F4A7C15 >> 43
}

func (j *joins) add(a, b rune) {
	if uint32(a) < utf8.RuneSelf && uint32(b) < utf8.RuneSelf {
		j.ascii[a][b>>6] |= 1 << (b & 63)
		return
	}
	h := joinHash(a, b)
	j.other[h>>6] |= 1 << (h & 63)
}

func (j *joins) has(a, b rune) bool {
	if uint32(a) < utf8.RuneSelf && uint32(b) < utf8.RuneSelf {
		return j.ascii[a][b>>6]>>(b&63)&1 != 0
	}
	h := joinHash(a, b)
	return j.other[h>>6]>>(h&63)&1 != 0
}

// next returns the first place behind i, or the end of s, at which no merge
// joins the characters on both sides.
func (j *joins) next(s string, i int) int {
	before := noRune
	for i < len(s) {
		r, width := rune(s[i]), 1
		if r >= utf8.RuneSelf {
			if r, width = utf8.DecodeRuneInString(s[i:]); width == 1 {
				r = noRune // no UTF-8: joins with nothing
			}
		}
		if before != noRune && (r == noRune || !j.has(before, r)) {
			return i
		}
		if i += width; r == noRune {
			return i
		}
		before = r
	}
	return i
}

// loadFallbackDecoder reads Replace, ByteFallback, Fuse and perhaps Strip.
func (t *Tokenizer) loadFallbackDecoder(raw json.RawMessage) error {
	var c component
	if isNull(raw) {
		return &UnsupportedError{"decoder", "null"}
	}
	if err := decodePart(raw, "decoder", &c); err != nil {
		return err
	}
	if c.Type != "Sequence" {
		return &UnsupportedError{"decoder with model.byte_fallback", c.Type}
	}
	order := []string{"Replace", "ByteFallback", "Fuse", "Strip"}
	for i, part := range c.Decoders {
		var d component
		if err := decodePart(part, "decoder", &d); err != nil {
			return err
		}
		if i >= len(order) || d.Type != order[i] {
			return &UnsupportedError{"decoder (want Replace, ByteFallback, Fuse, Strip)", d.Type}
		}
		if err := t.fallback.decoder(&d); err != nil {
			return err
		}
	}
	if len(c.Decoders) < 3 {
		return &UnsupportedError{"decoder (want Replace, ByteFallback, Fuse, Strip)", "a shorter Sequence"}
	}
	return nil
}

func (f *fallback) decoder(d *component) (err error) {
	switch d.Type {
	case "Replace":
		f.old, err = d.literal("decoder.pattern")
		f.new = d.Content
	case "Strip":
		if len(d.Content) != 1 || d.Content[0] >= utf8.RuneSelf || d.Start < 0 || d.Stop != 0 {
			return &UnsupportedError{"decoder Strip", fmt.Sprintf("content %q, start %d, stop %d", d.Content, d.Start, d.Stop)}
		}
		f.strip, f.stripMax = d.Content[0], d.Start
	}
	return err
}

// fillFallback builds what every token decodes to, and how it is written.
func (t *Tokenizer) fillFallback(written []string) error {
	f := t.fallback
	if err := f.written.fill(written); err != nil {
		return err
	}
	decoded := make([]string, len(written))
	f.isByte = make([]bool, len(written))
	for id, token := range written {
		decoded[id] = strings.ReplaceAll(token, f.old, f.new)
		if b, ok := asByte(decoded[id]); ok && !f.literal {
			decoded[id] = string([]byte{b})
			f.isByte[id] = true
		}
	}
	return t.bytes.fill(decoded)
}
