package tokenizer

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// tearsBytes reports whether a Stream returns the characters of byte tokens before their run has
// ended.
func (t *Tokenizer) tearsBytes() bool { return t.fallback != nil && !t.fallback.literal }

// naiveUnigram is Unigram as its definition says, over all substrings: the largest sum, of equal
// ones that whose last piece is found first from the left.
func naiveUnigram(tok *Tokenizer, word string) []int32 {
	u := tok.unigram
	type best struct {
		sum  float64
		from int
		unk  bool
	}
	all := make([]best, len(word)+1)
	for i := range all[1:] {
		all[i+1].sum = math.Inf(-1)
	}
	for at := 0; at < len(word); {
		_, width := utf8.DecodeRuneInString(word[at:])
		single := false
		for end := at + 1; end <= len(word); end++ {
			if id, ok := u.id(word[at:end]); ok {
				single = single || end == at+width
				if sum := all[at].sum + u.scores[id]; sum > all[end].sum {
					all[end] = best{sum, at, id == u.unk}
				}
			}
		}
		if sum := all[at].sum + u.least; !single && sum > all[at+width].sum {
			all[at+width] = best{sum, at, true}
		}
		at += width
	}
	var pieces []string
	for end, unk := len(word), false; end > 0; end = all[end].from {
		piece := word[all[end].from:end]
		if unk && all[end].unk {
			pieces[0] = piece + pieces[0]
		} else {
			pieces = slices.Insert(pieces, 0, piece)
		}
		unk = all[end].unk
	}
	var ids []int32
	for _, p := range pieces {
		if id, ok := u.id(p); ok {
			ids = append(ids, id)
		} else if u.fallback {
			for _, c := range []byte(p) {
				ids = append(ids, tok.bpe.byteID[c])
			}
		} else {
			ids = append(ids, u.unk)
		}
	}
	return ids
}

const smallUnigram = `{"model":{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0],["a",-1],["ab",-1.5],["▁",-2]]},` +
	`"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},` +
	`"decoder":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}}`

// Files that contradict themselves or need what is not computed are refused by name.
func TestUnigramRefuses(t *testing.T) {
	tok, err := Load([]byte(smallUnigram))
	if err != nil {
		t.Fatal(err)
	}
	if ids := tok.Encode("aba bb", false); !slices.Equal(ids, []int32{3, 2, 1, 3, 0}) {
		t.Errorf("%v", ids)
	}
	for _, c := range []struct {
		old, changed string
		want         error
		text         string
	}{
		{`"unk_id":0`, `"unk_id":null`, ErrUnsupported, "unk_id"},
		{`"unk_id":0`, `"unk_id":4`, ErrInvalid, "unk_id 4"},
		{`"unk_id":0`, `"unk_id":-1`, ErrInvalid, "unk_id -1"},
		{`"unk_id":0`, `"unk_id":0,"byte_fallback":true`, ErrUnsupported, "<0x00>"},
		{`["a",-1]`, `["ab",-1]`, ErrInvalid, "twice"},
		{`["a",-1]`, `["a"]`, ErrInvalid, "1 parts"},
		{`["a",-1]`, `["a",-1,0]`, ErrInvalid, "3 parts"},
		{`["a",-1]`, `[1,-1]`, ErrInvalid, "vocab"},
		{`["a",-1]`, `["` + strings.Repeat("a", 1025) + `",-1]`, ErrUnsupported, "token 1 of 1025 bytes"},
		{`["a",-1]`, `["a",1e999]`, ErrInvalid, "vocab"},
		{`"vocab":[`, `"vocab":{}, "x":[`, ErrInvalid, "vocab"},
		{`"decoder":{"type":"Metaspace"`, `"decoder":{"type":"WordPiece"`, ErrUnsupported, "WordPiece"},
		{`"decoder":{"type":"Metaspace","replacement":"▁"`, `"decoder":{"type":"Metaspace","replacement":"▁▁"`, ErrInvalid, "one character"},
		{`"pre_tokenizer":{"type":"Metaspace"`, `"normalizer":{"type":"Precompiled","precompiled_charsmap":""},"pre_tokenizer":{"type":"Metaspace"`, ErrInvalid, "Precompiled: a table of 0 bytes"},
		{`"pre_tokenizer":{"type":"Metaspace"`, `"normalizer":{"type":"Precompiled","precompiled_charsmap":"CAAAAAAAAAA="},"pre_tokenizer":{"type":"Metaspace"`, ErrInvalid, "an array of 8 bytes in a table of 8"},
		{`"pre_tokenizer":{"type":"Metaspace"`, `"normalizer":{"type":"Replace","pattern":{"Regex":"a+"},"content":""},"pre_tokenizer":{"type":"Metaspace"`, ErrUnsupported, "normalizer.pattern"},
		{`"pre_tokenizer":{"type":"Metaspace"`, `"pre_tokenizer":{"type":"WhitespaceSplit"`, ErrUnsupported, "WhitespaceSplit"},
	} {
		text := strings.Replace(smallUnigram, c.old, c.changed, 1)
		if _, err := Load([]byte(text)); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", c.changed, err)
		}
	}
}

// A long text without a space takes time in proportion to its length, and its memory is counted.
func TestUnigramOfLongTexts(t *testing.T) {
	tok, err := Load([]byte(smallUnigram))
	if err != nil {
		t.Fatal(err)
	}
	long := `["` + strings.Repeat("a", maxPiece) + `",-9000],["a",-1]`
	slow, err := Load([]byte(strings.Replace(smallUnigram, `["a",-1]`, long, 1)))
	if err != nil {
		t.Fatal(err)
	}
	if start := time.Now(); len(slow.Encode(strings.Repeat("a", 1<<14), false)) != 1+1<<14 || time.Since(start) > 3*time.Minute {
		t.Errorf("the longest token takes %v", time.Since(start))
	}
	for _, text := range []string{strings.Repeat("a", 1<<20), strings.Repeat("x", 1<<20), strings.Repeat("ab", 1<<19)} {
		start, taken := time.Now(), 0
		ids, ok := tok.appendWithin(nil, text, false, true, func(n int) bool { taken += n; return true })
		if !ok || len(ids) == 0 || time.Since(start) > 3*time.Minute || taken < wordBytes*len(text) {
			t.Errorf("%d ids in %v, %d bytes counted", len(ids), time.Since(start), taken)
		}
	}
}

// A table whose places lead out of it replaces nothing, and one with a long replacement is refused.
func TestPrecompiledOfHostileTables(t *testing.T) {
	for seed := range 200 {
		r := rand.New(rand.NewPCG(uint64(seed), 7))
		data := binary.LittleEndian.AppendUint32(nil, 1024)
		for range 256 + 64 {
			data = binary.LittleEndian.AppendUint32(data, r.Uint32()>>r.IntN(32))
		}
		p, err := readPrecompiled(data)
		if err != nil {
			t.Fatal(err)
		}
		for range 100 {
			text := make([]byte, r.IntN(20))
			for i := range text {
				text[i] = byte(r.Uint32())
			}
			if got := p.apply(string(text)); len(got) > len(text)*max(1, p.longest()) {
				t.Fatalf("seed %d: %d bytes of %d", seed, len(got), len(text))
			}
		}
	}
	long := append(binary.LittleEndian.AppendUint32(nil, 4), "\x00\x00\x00\x00"+strings.Repeat("x", 300)+"\x00"...)
	text := strings.Replace(smallUnigram, `"pre_tokenizer"`, `"normalizer":{"type":"Precompiled","precompiled_charsmap":"`+base64.StdEncoding.EncodeToString(long)+`"},"pre_tokenizer"`, 1)
	if _, err := Load([]byte(text)); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "Precompiled number 1") {
		t.Errorf("err = %v", err)
	}
}
