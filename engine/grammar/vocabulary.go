package grammar

import (
	"bytes"
	"slices"
	"unicode/utf8"
)

// A Vocabulary holds the tokens of a tokenizer as a trie. It is immutable, and all grammars of a
// model share it.
type Vocabulary struct {
	size      int
	words     int // of a mask
	eos       []int32
	special   map[string]int32
	sorted    []int32 // ids of the tokens with bytes, by their bytes
	tokens    [][]byte
	longest   int // bytes of the longest token
	all       trie
	marked    trie // tokens that are not plain text
	markedIDs []int32
	tails     trie        // the parts of such tokens from their first byte that is not plain
	tailIDs   [][]int32   // the tokens of a tail
	plain     [][]uint64  // [n] masks of the plain tokens of at most n characters
	byChars   []charCount // plain tokens, those with most characters first
	from      []int32     // [rank] offset from which a token is plain to its end
}

type charCount struct {
	id    int32
	chars int32
}

// plainMasks is the number of masks of plain tokens that are kept, one for each length.
const plainMasks = 24

// longestToken is the number of bytes beyond which a token is never allowed.
const longestToken = 1000

// A trie is stored in preorder.
type trie struct {
	char  []byte
	depth []uint16 // bytes of the node
	end   []int32  // the node after the subtree
	token []int32  // the first rank at the node, or of its subtree
	last  []int32  // the rank after those of the subtree
	own   []int32  // the rank after those that end at the node
	below []uint16 // bytes of the longest token below the node, counted from it
	plain []bool   // all tokens of the subtree are plain from the node on
	whole []bool   // the node's bytes are whole plain characters
	kinds []uint64 // of the characters below the node
}

// Kinds of characters for trie.kinds and Automaton.loops. The other bits are ASCII characters that
// are neither letters nor digits, in order.
const (
	kindLower = 1 << iota
	kindUpper
	kindDigit
	kindWide  // beyond ASCII, without kindSpace
	kindSpace // beyond ASCII, what patterns may take for whitespace
	kindOther // controls, and bytes that are no character
	firstKind = 6
)

var asciiKinds = func() (kinds [128]uint64) {
	next := firstKind
	for c := range kinds {
		switch {
		case 'a' <= c && c <= 'z':
			kinds[c] = kindLower
		case 'A' <= c && c <= 'Z':
			kinds[c] = kindUpper
		case '0' <= c && c <= '9':
			kinds[c] = kindDigit
		case c < 0x20 || c == 0x7F:
			kinds[c] = kindOther
		default:
			kinds[c] = 1 << next
			next++
		}
	}
	return kinds
}()

// kindOfRune returns the kind of a character, n bytes long.
func kindOfRune(r rune, n int) uint64 {
	switch {
	case r == utf8.RuneError && n <= 1:
		return kindOther
	case r < 0x80:
		return asciiKinds[r]
	case contains(wideSpaces, r):
		return kindSpace
	}
	return kindWide
}

// wideSpaces are the characters of kindSpace.
var wideSpaces = minus(spaceChars, []runeRange{{0, 0x7F}})

// NewVocabulary returns the vocabulary of tokens. tokens holds, by id, the bytes by which each
// enters the text; a token without bytes is never allowed by bytes. special names the tokens that
// grammars can demand as one token, such as markers of tool calls: their ids are below len(tokens).
// A grammar that names such a token allows it nowhere else, even if it has bytes. eos are the ids
// that end an output. The caller does not change tokens and special afterwards.
func NewVocabulary(tokens [][]byte, special map[string]int32, eos []int32) *Vocabulary {
	v := &Vocabulary{size: len(tokens), words: (len(tokens) + 63) / 64, special: special, eos: slices.Clone(eos), tokens: tokens}
	for _, id := range eos {
		v.words = max(v.words, int(id)/64+1)
	}
	for id, t := range tokens {
		if len(t) > 0 && len(t) <= longestToken && !slices.Contains(eos, int32(id)) {
			v.sorted = append(v.sorted, int32(id))
			v.longest = max(v.longest, len(t))
		}
	}
	slices.SortFunc(v.sorted, func(x, y int32) int {
		if c := bytes.Compare(tokens[x], tokens[y]); c != 0 {
			return c
		}
		return int(x - y)
	})
	v.from = make([]int32, len(v.sorted))
	for rank, id := range v.sorted {
		v.from[rank] = int32(plainFrom(tokens[id]))
	}
	v.all = v.newTrie(v.sorted, func(rank int) int { return int(v.from[rank]) })
	v.addPlain()
	v.addTails()
	return v
}

// Ends reports whether a token ends an output.
func (v *Vocabulary) Ends(token int32) bool { return slices.Contains(v.eos, token) }

// Words returns the length of a mask in words of 64 tokens.
func (v *Vocabulary) Words() int { return v.words }

// newTrie returns the trie of sorted ids. from returns the offset from which the i-th is plain.
func (v *Vocabulary) newTrie(ids []int32, from func(int) int) trie {
	return buildTrie(len(ids), func(i int) []byte { return v.tokens[ids[i]] }, from)
}

func buildTrie(n int, text func(int) []byte, from func(int) int) trie {
	var t trie
	var path []int32
	var last []byte
	var kinds [longestToken + 1]uint64
	closeTo := func(depth, rank int) {
		for len(path) > depth {
			node := path[len(path)-1]
			path = path[:len(path)-1]
			t.end[node], t.last[node] = int32(len(t.char)), int32(rank)
		}
	}
	for i := range n {
		s := text(i)
		same := 0
		for same < len(last) && same < len(s) && last[same] == s[same] {
			same++
		}
		closeTo(same, i)
		suffixKinds(s, kinds[:])
		for d := same; d < len(s); d++ {
			path = append(path, int32(len(t.char)))
			t.char, t.depth = append(t.char, s[d]), append(t.depth, uint16(d+1))
			t.end, t.last, t.below = append(t.end, 0), append(t.last, 0), append(t.below, 0)
			t.token, t.own, t.plain = append(t.token, int32(i)), append(t.own, int32(i)), append(t.plain, true)
			t.whole, t.kinds = append(t.whole, wholePlain(s[:d+1])), append(t.kinds, 0)
		}
		for d, node := range path {
			t.below[node] = max(t.below[node], uint16(len(s)-d-1))
			t.plain[node] = t.plain[node] && from(i) <= d+1
			t.kinds[node] |= kinds[d+1]
		}
		t.own[path[len(path)-1]] = int32(i + 1)
		last = s
	}
	closeTo(0, n)
	return t
}

// suffixKinds fills kinds with the kinds of the characters of b from each offset on. Inside a
// character that is kindOther.
func suffixKinds(b []byte, kinds []uint64) {
	var starts [longestToken]uint16
	n := 0
	for at := 0; at < len(b); n++ {
		starts[n] = uint16(at)
		r, width := utf8.DecodeRune(b[at:])
		for i := 1; i < width; i++ {
			kinds[at+i] = kindOther
		}
		kinds[at] = kindOfRune(r, width)
		at += width
	}
	after := uint64(0)
	for n--; n >= 0; n-- {
		after |= kinds[starts[n]]
		kinds[starts[n]] = after
	}
	kinds[len(b)] = 0
}

// wholePlain reports whether b is whole plain characters.
func wholePlain(b []byte) bool { return plainFrom(b) == 0 }

// plainFrom returns the smallest offset from which b is whole plain characters; len(b) if its end
// is not plain.
func plainFrom(b []byte) int {
	at := len(b)
	for at > 0 {
		r, n := utf8.DecodeLastRune(b[:at])
		if r == utf8.RuneError && n <= 1 || !plainRune(r) {
			break
		}
		at -= n
	}
	return at
}

func plainRune(r rune) bool { return contains(plainChars, r) }

// addPlain fills the masks of plain tokens.
func (v *Vocabulary) addPlain() {
	for rank, id := range v.sorted {
		if v.from[rank] == 0 {
			v.byChars = append(v.byChars, charCount{id, int32(utf8.RuneCount(v.tokens[id]))})
		}
	}
	slices.SortStableFunc(v.byChars, func(x, y charCount) int { return int(y.chars - x.chars) })
	v.plain = make([][]uint64, plainMasks+1)
	mask := make([]uint64, v.words)
	n := int32(0)
	for i := len(v.byChars) - 1; i >= 0; i-- {
		for ; n < v.byChars[i].chars && n < plainMasks; n++ {
			v.plain[n] = slices.Clone(mask)
		}
		set(mask, v.byChars[i].id)
	}
	for ; n < plainMasks; n++ {
		v.plain[n] = mask
	}
	v.plain[plainMasks] = mask // all plain tokens
}

func set(mask []uint64, id int32) { mask[id>>6] |= 1 << (id & 63) }

// plainInto copies the mask of the plain tokens of at most n characters.
func (v *Vocabulary) plainInto(dst []uint64, n int32) {
	if n < plainMasks {
		copy(dst, v.plain[n])
		return
	}
	copy(dst, v.plain[plainMasks])
	for _, t := range v.byChars {
		if t.chars <= n {
			break
		}
		dst[t.id>>6] &^= 1 << (t.id & 63)
	}
}

// addTails fills the tries of tokens that are not plain.
func (v *Vocabulary) addTails() {
	type tail struct {
		text []byte
		id   int32
	}
	var ids []int32
	var tails []tail
	for rank, id := range v.sorted {
		if v.from[rank] == 0 {
			continue
		}
		ids = append(ids, id)
		b := v.tokens[id]
		at := 0
		for at < len(b) {
			r, n := utf8.DecodeRune(b[at:])
			if r == utf8.RuneError && n <= 1 || !plainRune(r) {
				break
			}
			at += n
		}
		tails = append(tails, tail{b[at:], id})
	}
	v.markedIDs = ids
	v.marked = v.newTrie(ids, func(int) int { return longestToken })
	slices.SortStableFunc(tails, func(x, y tail) int { return bytes.Compare(x.text, y.text) })
	var texts [][]byte
	for _, t := range tails {
		if n := len(texts); n == 0 || !bytes.Equal(texts[n-1], t.text) {
			texts = append(texts, t.text)
			v.tailIDs = append(v.tailIDs, nil)
		}
		last := &v.tailIDs[len(texts)-1]
		*last = append(*last, t.id)
	}
	v.tails = buildTrie(len(texts), func(i int) []byte { return texts[i] }, func(int) int { return longestToken })
}
