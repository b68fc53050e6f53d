package tokenizer

import (
	"hash/maphash"
	"math/bits"
	"slices"
	"strings"
)

const (
	// noMerge is the rank of a pair that never merges.
	noMerge = ^uint64(0)
	// shortWord is the longest word in bytes that is merged by scanning an
	// array of ranks; a longer one uses a heap, so that a hostile run of one
	// character costs n log n.
	shortWord = 64
)

// bpe merges the symbols of a word: its bytes, or its characters. It is
// immutable once loaded.
type bpe struct {
	seed    maphash.Seed
	charID  map[rune]int32 // token of a single character; nil: symbols are bytes
	byteID  [256]int32     // token of a single byte, or unk, or -1: dropped
	unk     int32          // token for a byte that the vocabulary lacks, or -1
	fuseUnk bool           // neighbouring unknown bytes become one unk
	pairs   pairTable
	words   wordTable
}

// pairTable maps a pair of tokens to rank<<32 | merged token: open addressing
// with linear probing, at most two thirds full.
type pairTable struct {
	slots []pairSlot
	shift uint // of the 64-bit product that spreads a key
}

type pairSlot struct {
	key   uint64 // left<<32 | right, plus one: zero is empty
	value uint64
}

func newPairTable(n int) pairTable {
	size := uint(bits.Len(uint(n + n/2 + 1)))
	return pairTable{slots: make([]pairSlot, 1<<size), shift: 64 - size}
}

func pairKey(left, right int32) uint64 {
	return uint64(uint32(left))<<32 | uint64(uint32(right))
}

func (p *pairTable) home(key uint64) uint64 {
	return key * 0x9E3779B97F4A7C15 >> p.shift
}

// set stores a merge; a later one for the same pair wins.
func (p *pairTable) set(left, right int32, value uint64) {
	key := pairKey(left, right)
	for i := p.home(key); ; i = (i + 1) & uint64(len(p.slots)-1) {
		if s := &p.slots[i]; s.key == 0 || s.key == key+1 {
			*s = pairSlot{key + 1, value}
			return
		}
	}
}

func (p *pairTable) get(left, right int32) uint64 {
	key := pairKey(left, right)
	for i := p.home(key); ; i = (i + 1) & uint64(len(p.slots)-1) {
		switch s := &p.slots[i]; s.key {
		case key + 1:
			return s.value
		case 0:
			return noMerge
		}
	}
}

// wordTable finds the words that encode to exactly one token.
type wordTable struct {
	slots []uint64 // hash's upper half << 32 | id+1; zero is empty
	bytes *tokenBytes
}

func newWordTable(n int, bytes *tokenBytes) wordTable {
	return wordTable{slots: make([]uint64, 1<<bits.Len(uint(2*n))), bytes: bytes}
}

func (w *wordTable) set(id int32, hash uint64) {
	for i := hash; ; i++ {
		if s := &w.slots[i&uint64(len(w.slots)-1)]; *s == 0 {
			*s = hash>>32<<32 | uint64(id+1)
			return
		}
	}
}

func (w *wordTable) get(word string, hash uint64) (int32, bool) {
	for i := hash; ; i++ {
		s := w.slots[i&uint64(len(w.slots)-1)]
		if s == 0 {
			return 0, false
		}
		if s>>32 == hash>>32 {
			if id := int32(uint32(s)) - 1; w.bytes.at(id) == word {
				return id, true
			}
		}
	}
}

// scratch is what one Encode needs besides its output, reused between calls.
type scratch struct {
	ids   []int32  // symbols of the word
	ranks []uint64 // ranks[i] is the merge of symbols i and next(i), or noMerge
	next  []int32  // long words: index of the symbol to the right, -1 at the end
	prev  []int32  // long words: index of the symbol to the left, -1 at the start
	heap  []uint64 // long words: rank<<32 | left index; may hold stale entries
	ends  []ending // of Unigram, by byte
}

// merge appends the tokens of word, from its bytes and the merge ranks alone.
func (b *bpe) merge(dst []int32, word string, w *scratch) []int32 {
	w.ids = b.appendSymbols(slices.Grow(w.ids[:0], len(word)), word)
	n := len(w.ids)
	w.ranks = slices.Grow(w.ranks[:0], n)[:n]
	for i := range n - 1 {
		w.ranks[i] = b.pairs.get(w.ids[i], w.ids[i+1])
	}
	if n > shortWord {
		return b.mergeLong(dst, w)
	}
	ids, ranks := w.ids, w.ranks
	for len(ids) > 1 {
		best, at := noMerge, 0
		for i, r := range ranks[:len(ids)-1] {
			if r < best {
				best, at = r, i
			}
		}
		if best == noMerge {
			break
		}
		ids[at] = int32(uint32(best))
		copy(ids[at+1:], ids[at+2:])
		copy(ranks[at:], ranks[at+1:])
		ids = ids[:len(ids)-1]
		if at+1 < len(ids) {
			ranks[at] = b.pairs.get(ids[at], ids[at+1])
		}
		if at > 0 {
			ranks[at-1] = b.pairs.get(ids[at-1], ids[at])
		}
	}
	return append(dst, ids...)
}

func (b *bpe) appendSymbols(dst []int32, word string) []int32 {
	if b.charID != nil {
		return b.appendChars(dst, word)
	}
	for i := range len(word) {
		id := b.byteID[word[i]]
		fused := b.fuseUnk && id == b.unk && len(dst) > 0 && dst[len(dst)-1] == b.unk
		if id >= 0 && !fused {
			dst = append(dst, id)
		}
	}
	return dst
}

// mergeLong does what merge does, with the symbols as a linked list and their
// pairs in a heap. An entry whose rank is not its symbol's any more is stale.
func (b *bpe) mergeLong(dst []int32, w *scratch) []int32 {
	n := len(w.ids)
	w.next = slices.Grow(w.next[:0], n)[:n]
	w.prev = slices.Grow(w.prev[:0], n)[:n]
	w.heap = slices.Grow(w.heap[:0], 2*n) // each merge takes an entry and adds two
	for i := range n {
		w.next[i], w.prev[i] = int32(i+1), int32(i-1)
	}
	w.next[n-1] = -1
	w.ranks[n-1] = noMerge
	for i, r := range w.ranks {
		w.push(r, int32(i))
	}
	for len(w.heap) > 0 {
		top := w.pop()
		at := int32(uint32(top))
		rank := w.ranks[at]
		if rank == noMerge || rank>>32 != top>>32 {
			continue
		}
		gone := w.next[at]
		after := w.next[gone]
		w.ids[at] = int32(uint32(rank))
		w.next[at] = after
		w.ranks[gone] = noMerge
		w.ranks[at] = noMerge
		if after >= 0 {
			w.prev[after] = at
			w.ranks[at] = b.pairs.get(w.ids[at], w.ids[after])
			w.push(w.ranks[at], at)
		}
		if before := w.prev[at]; before >= 0 {
			w.ranks[before] = b.pairs.get(w.ids[before], w.ids[at])
			w.push(w.ranks[before], before)
		}
	}
	for i := int32(0); i >= 0; i = w.next[i] {
		dst = append(dst, w.ids[i])
	}
	return dst
}

func (w *scratch) push(rank uint64, at int32) {
	if rank == noMerge {
		return
	}
	w.heap = append(w.heap, rank>>32<<32|uint64(uint32(at)))
	h := w.heap
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if h[up] <= h[i] {
			return
		}
		h[up], h[i] = h[i], h[up]
		i = up
	}
}

func (w *scratch) pop() uint64 {
	h := w.heap
	top, n := h[0], len(h)-1
	h[0] = h[n]
	h = h[:n]
	w.heap = h
	for i := 0; ; {
		down := 2*i + 1
		if down >= n {
			return top
		}
		if down+1 < n && h[down+1] < h[down] {
			down++
		}
		if h[i] <= h[down] {
			return top
		}
		h[i], h[down] = h[down], h[i]
		i = down
	}
}

// byteAlphabet is the printable substitute of each byte in a byte-level
// vocabulary: itself where it is printable Latin-1, else 256 and up in order.
var byteAlphabet = func() (alphabet [256]rune) {
	next := rune(256)
	for b := range rune(256) {
		printable := b >= '!' && b <= '~' || b >= 0xA1 && b <= 0xAC || b >= 0xAE
		if alphabet[b] = b; !printable {
			alphabet[b] = next
			next++
		}
	}
	return alphabet
}()

// ByteLevel returns a token as byte-level vocabularies write its bytes.
func ByteLevel(raw string) string {
	var b strings.Builder
	for i := range len(raw) {
		b.WriteRune(byteAlphabet[raw[i]])
	}
	return b.String()
}

// alphabetByte is the inverse of byteAlphabet.
var alphabetByte = func() map[rune]byte {
	m := make(map[rune]byte, 256)
	for b, r := range byteAlphabet {
		m[r] = byte(b)
	}
	return m
}()

// rawBytes returns the bytes of a token of a byte-level vocabulary. A token with
// a character outside the alphabet, which only an added token has, is its own
// UTF-8; ok is false then.
func rawBytes(token string) (raw string, ok bool) {
	var b strings.Builder
	for _, r := range token {
		c, in := alphabetByte[r]
		if !in {
			return token, false
		}
		b.WriteByte(c)
	}
	return b.String(), true
}
