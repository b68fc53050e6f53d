package tokenizer

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"unicode/utf8"
)

// unigram cuts a word into the tokens with the largest sum of scores, as the reference does: from
// the left, the first of equal sums, a character without a token as the unknown one.
type unigram struct {
	next   pairTable // node and byte → node, behind the first bytes of tokens
	ids    []int32   // by node: the token that ends there, or -1
	scores []float64 // by token
	unk    int32
	least  float64 // score of a character without a token

	fallback bool // an unknown piece becomes the tokens of its bytes
}

// maxPiece bounds the bytes of a token, because the time for a byte of text grows with the longest
// token that begins there. Trainers write tokens of at most a few dozen characters.
const maxPiece = 1 << 10

// unknownPenalty is how much less than the lowest score an unknown character has.
const unknownPenalty = 10

// loadUnigram prepares cutting words.
func (t *Tokenizer) loadUnigram(m *modelJSON) error {
	u := &unigram{scores: m.scores, unk: *m.UnkID, least: math.Inf(1), fallback: m.ByteFallback}
	if u.fallback {
		for i := range t.bpe.byteID {
			id, ok := m.Vocab[byteToken(i)]
			if !ok {
				return &UnsupportedError{"model.byte_fallback without the token of a byte", byteToken(i)}
			}
			t.bpe.byteID[i] = id
		}
	}
	size := 0
	for token, id := range m.Vocab {
		if len(token) > maxPiece {
			return &UnsupportedError{"model.vocab", fmt.Sprintf("token %d of %d bytes, more than %d", id, len(token), maxPiece)}
		}
		size += len(token)
	}
	u.next = newPairTable(size)
	u.ids = []int32{-1}
	for token, id := range m.Vocab {
		u.least = min(u.least, u.scores[id])
		if token != "" {
			u.add(token, id)
		}
	}
	u.least -= unknownPenalty
	t.unigram = u
	return nil
}

// add puts a token into the table of prefixes.
func (u *unigram) add(token string, id int32) {
	node := int32(0)
	for i := range len(token) {
		child := u.next.get(node, int32(token[i]))
		if child == noMerge {
			child = uint64(len(u.ids))
			u.ids = append(u.ids, -1)
			u.next.set(node, int32(token[i]), child)
		}
		node = int32(child)
	}
	u.ids[node] = id
}

// id returns the token that is a text; ok is false if there is none.
func (u *unigram) id(text string) (id int32, ok bool) {
	node := int32(0)
	for i := range len(text) {
		child := u.next.get(node, int32(text[i]))
		if child == noMerge {
			return 0, false
		}
		node = int32(child)
	}
	return u.ids[node], u.ids[node] >= 0
}

// ending is the best way to cut a word up to some byte. Its last piece is a token.
type ending struct {
	sum  float64
	from int32 // where the piece begins; -1: no piece ends here
	id   int32
}

// cut appends the tokens of word.
func (u *unigram) cut(dst []int32, word string, w *scratch, byteID *[256]int32) []int32 {
	w.ends = slices.Grow(w.ends[:0], len(word)+1)[:len(word)+1]
	for i := range w.ends {
		w.ends[i] = ending{from: -1}
	}
	for at := 0; at < len(word); {
		_, width := utf8.DecodeRuneInString(word[at:])
		sum, single := w.ends[at].sum, false
		for node, i := int32(0), at; i < len(word); i++ {
			child := u.next.get(node, int32(word[i]))
			if child == noMerge {
				break
			}
			node = int32(child)
			if id := u.ids[node]; id >= 0 {
				w.end(i+1, ending{sum + u.scores[id], int32(at), id})
				single = single || i+1 == at+width
			}
		}
		if !single {
			w.end(at+width, ending{sum + u.least, int32(at), u.unk})
		}
		at += width
	}
	first := len(dst)
	for end := int32(len(word)); end > 0; {
		e := w.ends[end]
		from := e.from
		for e.id == u.unk && from > 0 && w.ends[from].id == u.unk { // neighbouring unknown pieces are one
			from = w.ends[from].from
		}
		dst = u.appendPiece(dst, word[from:end], e.id, byteID)
		end = from
	}
	slices.Reverse(dst[first:])
	return dst
}

// end keeps e for a place if it is the best so far.
func (w *scratch) end(at int, e ending) {
	if best := &w.ends[at]; best.from < 0 || e.sum > best.sum {
		*best = e
	}
}

// appendPiece appends the tokens of a piece, the last one first.
func (u *unigram) appendPiece(dst []int32, piece string, id int32, byteID *[256]int32) []int32 {
	if id != u.unk {
		return append(dst, id)
	}
	if whole, ok := u.id(piece); ok {
		return append(dst, whole)
	}
	if !u.fallback {
		return append(dst, u.unk)
	}
	for i := len(piece) - 1; i >= 0; i-- {
		dst = append(dst, byteID[piece[i]])
	}
	return dst
}

// readUnigram takes the vocabulary of a Unigram model: a list of tokens with their scores, by id.
func (m *modelJSON) readUnigram() error {
	var list []unigramPiece
	if err := json.Unmarshal(m.Tokens, &list); err != nil {
		return invalid("model.vocab: %v", err)
	}
	if len(list) > maxTokenID {
		return invalid("model.vocab has more than %d tokens", maxTokenID)
	}
	if m.UnkID == nil {
		return &UnsupportedError{"model.unk_id", "null"}
	}
	if *m.UnkID < 0 || int(*m.UnkID) >= len(list) {
		return invalid("model.unk_id %d of %d tokens", *m.UnkID, len(list))
	}
	m.Vocab, m.scores = make(map[string]int32, len(list)), make([]float64, len(list))
	for i, p := range list {
		if _, twice := m.Vocab[p.text]; twice {
			return invalid("token %q is in the vocabulary twice", p.text)
		}
		m.Vocab[p.text], m.scores[i] = int32(i), p.score
	}
	return nil
}

// unigramPiece is a token with its score, written as a list of the two.
type unigramPiece struct {
	text  string
	score float64
}

// UnmarshalJSON implements json.Unmarshaler.
func (p *unigramPiece) UnmarshalJSON(data []byte) error {
	pair := []any{&p.text, &p.score}
	if err := json.Unmarshal(data, &pair); err != nil {
		return err
	}
	if len(pair) != 2 {
		return invalid("a token has %d parts, want 2", len(pair))
	}
	return nil
}

// MarshalJSON implements json.Marshaler.
func (p unigramPiece) MarshalJSON() ([]byte, error) { return json.Marshal([]any{p.text, p.score}) }

// loadCharacterDecoder reads Metaspace, or what loadFallbackDecoder does.
func (t *Tokenizer) loadCharacterDecoder(raw json.RawMessage) error {
	var c component
	if isNull(raw) {
		return &UnsupportedError{"decoder", "null"}
	}
	if err := decodePart(raw, "decoder", &c); err != nil {
		return err
	}
	if c.Type != "Metaspace" {
		return t.loadFallbackDecoder(raw)
	}
	if r, width := utf8.DecodeRuneInString(c.Replacement); width != len(c.Replacement) || r == utf8.RuneError {
		return invalid("decoder Metaspace: replacement %q is not one character", c.Replacement)
	}
	f := t.fallback
	f.old, f.new, f.literal = c.Replacement, " ", true
	f.bareFirst = c.PrependScheme != "never" && (c.PrependScheme != "" || c.AddPrefixSpace == nil || *c.AddPrefixSpace)
	return nil
}
