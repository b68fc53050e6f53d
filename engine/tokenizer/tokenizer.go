package tokenizer

import (
	"hash/maphash"
	"strings"
	"sync"
)

// Tokenizer is a loaded tokenizer.json. It is safe for concurrent use.
type Tokenizer struct {
	chars      *charTable
	raw        *matcher // added tokens looked for in the text as it came
	normalized *matcher // added tokens looked for in the normalized text
	stages     []stage
	bpe        bpe

	normalizers []func(string) string
	growth      int     // bytes of normalized text per byte of text, at most
	prefix      []int32 // before and after the text when special tokens are added
	suffix      []int32
	ids         map[string]int32 // token as written in the file → id
	bytes       tokenBytes
	special     []bool           // by id
	added       map[string]int32 // the added tokens' ids
	firstOnly   bool             // the beginning of a prompt is encoded otherwise than what follows
	fallback    *fallback        // nil: a byte-level vocabulary
	unigram     *unigram         // nil: words are merged
	cache       *cache
	scratch     sync.Pool // of *scratch
}

// VocabSize returns the highest token id plus one.
func (t *Tokenizer) VocabSize() int { return len(t.special) }

// ID returns the id of a token as the file writes it: for the tokens of a
// byte-level vocabulary in its alphabet, where a space is Ġ.
func (t *Tokenizer) ID(token string) (int32, bool) {
	id, ok := t.ids[token]
	return id, ok
}

// Added returns the id of the token that the file adds to the model's vocabulary for a text,
// special or not. ok is false if there is none.
func (t *Tokenizer) Added(text string) (id int32, ok bool) {
	id, ok = t.added[text]
	return id, ok
}

// IsSpecial reports whether id is an added token marked as special.
func (t *Tokenizer) IsSpecial(id int32) bool {
	return t.has(id) && t.special[id]
}

// TokenBytes returns a copy of the bytes of id, which need not be
// whole characters; nil for an id outside the vocabulary.
func (t *Tokenizer) TokenBytes(id int32) []byte {
	if !t.has(id) {
		return nil
	}
	return []byte(t.bytes.at(id))
}

// LongestToken returns the bytes of the longest token, so that a text of n times as
// many has at least n tokens unless it is normalized to less.
func (t *Tokenizer) LongestToken() int {
	longest := 0
	for id := range int32(len(t.special)) {
		longest = max(longest, len(t.bytes.at(id)))
	}
	return longest
}

// LeadingSpaces returns how many leading spaces of an output Decode drops.
func (t *Tokenizer) LeadingSpaces() int {
	switch {
	case t.fallback == nil || !t.fallback.bareFirst && t.fallback.strip != ' ':
		return 0
	case t.fallback.bareFirst: // the first token's
		return 1
	}
	return t.fallback.stripMax
}

// maxScratch is the symbols of the longest word whose buffers are kept.
const maxScratch = 16 << 10

func (t *Tokenizer) has(id int32) bool { return id >= 0 && int(id) < len(t.special) }

// Encode returns the token ids of text. Added tokens in the text, special ones
// included, become their ids. addSpecial adds what the file's post-processor
// adds, a beginning-of-text token for instance.
func (t *Tokenizer) Encode(text string, addSpecial bool) []int32 {
	return t.AppendEncode(nil, text, addSpecial)
}

// AppendEncode is Encode into dst, which it returns extended. With enough room
// in dst it does not allocate for words that were seen lately.
func (t *Tokenizer) AppendEncode(dst []int32, text string, addSpecial bool) []int32 {
	dst, _ = t.appendWithin(dst, text, addSpecial, true, nil)
	return dst
}

// wordBytes is what merging a long word takes, in bytes for each byte of it: symbols,
// ranks, links and a heap of up to two entries.
const wordBytes = 40

// appendWithin is AppendEncode for a caller that counts memory. take is called with
// bytes that are about to be allocated: for words longer than maxScratch, for longer
// normalized texts than that, and for ids beyond the capacity of dst. When it returns
// false the encoding ends, and ok is false. nil: no count. begins is whether a prompt
// begins with text, which is else the rest of one behind an added token.
func (t *Tokenizer) appendWithin(dst []int32, text string, addSpecial, begins bool, take func(bytes int) bool) (ids []int32, ok bool) {
	if addSpecial {
		dst = append(dst, t.prefix...)
	}
	w := t.scratch.Get().(*scratch)
	e := encoding{t: t, w: w, dst: dst, take: take, nIDs: max(cap(dst), maxScratch), begins: begins}
	t.raw.split(t.chars, text, e.gap, e.token)
	if cap(w.ids) <= maxScratch && cap(w.ends) <= maxScratch {
		t.scratch.Put(w)
	}
	if addSpecial {
		e.dst = append(e.dst, t.suffix...)
	}
	return e.dst, !e.full
}

// encoding is one call of AppendEncode.
type encoding struct {
	t    *Tokenizer
	w    *scratch
	dst  []int32
	take func(bytes int) bool // nil: no count
	full bool                 // take has returned false
	word int                  // bytes of the longest word that take has counted
	nIDs int                  // ids that there is room for

	begins bool // no piece and no added token of the prompt has been encoded
}

// room counts the memory that a word is about to take, and reports whether to continue.
func (e *encoding) room(s string) bool {
	if e.full || e.take == nil {
		return !e.full
	}
	if len(s) > maxScratch && len(s) > e.word {
		e.full = !e.take(wordBytes * (len(s) - e.word))
		e.word = len(s)
	}
	if n := len(e.dst) + len(s); n > e.nIDs && !e.full {
		e.nIDs = max(2*e.nIDs, n)
		e.full = !e.take(4 * e.nIDs)
	}
	return !e.full
}

func (e *encoding) token(a *addedToken) {
	e.dst = append(e.dst, e.t.ids[a.Content])
	e.begins = false
}

// gap encodes text between the added tokens that are looked for first.
func (e *encoding) gap(s string) {
	for _, f := range e.t.normalizers {
		if s = f(s); e.take != nil && len(s) > maxScratch && !e.full {
			e.full = !e.take(len(s))
		}
		if e.full {
			return
		}
	}
	e.t.normalized.split(e.t.chars, s, e.piece, e.token)
}

func (e *encoding) piece(s string) {
	e.split(s, 0)
	e.begins = false
}

// split cuts s by the stages from the given one on and encodes the words.
func (e *encoding) split(s string, at int) {
	if e.full {
		return
	}
	if at == len(e.t.stages) {
		e.words(s)
		return
	}
	st := e.t.stages[at]
	if st.meta != nil {
		if s = st.meta.apply(s, e.begins); e.take != nil && len(s) > maxScratch {
			e.full = !e.take(len(s))
		}
	}
	if st.prefixSpace && !strings.HasPrefix(s, " ") {
		s = " " + s
	}
	if st.scan == nil {
		e.split(s, at+1)
		return
	}
	last := at == len(e.t.stages)-1
	for i := 0; i < len(s); {
		end := st.scan(e.t.chars, s, i)
		if last {
			e.words(s[i:end])
		} else {
			e.split(s[i:end], at+1)
		}
		i = end
	}
}

// words encodes one pre-token. Of a vocabulary of characters it may be the
// whole text, and is cut where no merge can reach across.
func (e *encoding) words(s string) {
	if e.t.fallback == nil || e.t.unigram != nil {
		e.encodeWord(s)
		return
	}
	for i := 0; i < len(s); {
		end := e.t.fallback.joins.next(s, i)
		e.encodeWord(s[i:end])
		i = end
	}
}

// encodeWord encodes a pre-token, or a part of one that no merge leaves.
func (e *encoding) encodeWord(s string) {
	if !e.room(s) {
		return
	}
	b := &e.t.bpe
	hash := maphash.String(b.seed, s)
	if e.t.unigram == nil {
		if id, ok := b.words.get(s, hash); ok {
			e.dst = append(e.dst, id)
			return
		}
	}
	if ids, ok := e.t.cache.get(s, hash); ok {
		e.dst = append(e.dst, ids...)
		return
	}
	n := len(e.dst)
	if u := e.t.unigram; u != nil {
		e.dst = u.cut(e.dst, s, e.w, &b.byteID)
	} else {
		e.dst = b.merge(e.dst, s, e.w)
	}
	e.t.cache.put(s, hash, e.dst[n:])
}

func (t *Tokenizer) normalize(s string) string {
	for _, f := range t.normalizers {
		s = f(s)
	}
	return s
}
