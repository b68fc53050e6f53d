package tokenizer

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// smallFallback is a vocabulary of characters: a, b, é, ▁, the bytes, and four
// merges.
func smallFallback(t testing.TB) string {
	vocab := map[string]int32{"<unk>": 0}
	for b := range 256 {
		vocab[byteToken(b)] = int32(len(vocab))
	}
	for _, token := range []string{"a", "b", "é", "▁", "ab", "▁ab", "▁▁", "bé"} {
		vocab[token] = int32(len(vocab))
	}
	file := object{
		"added_tokens": []object{special(len(vocab), "<s>")}, "normalizer": object{"type": "Replace", "pattern": object{"String": " "}, "content": "▁"},
		"pre_tokenizer": nil, "post_processor": nil,
		"decoder": object{"type": "Sequence", "decoders": []object{
			{"type": "Replace", "pattern": object{"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
			{"type": "Strip", "content": " ", "start": 1, "stop": 0}}},
		"model": object{"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
			"merges": []string{"a b", "▁ ab", "▁ ▁", "b é"}},
	}
	return string(marshal(t, file))
}

func loadSmallFallback(t testing.TB) *Tokenizer {
	tok, err := Load([]byte(smallFallback(t)))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// TestCutsLoseNoMerge: encoding part by part equals merging the whole text.
func TestCutsLoseNoMerge(t *testing.T) {
	alphabet := []string{"a", "b", "é", "▁", " ", "c", "漢", "ab", "\n", "\xff", "\xe6\xbc", "😀", "\ufffd"}
	tok := loadSmallFallback(t)
	cut := 0
	for seed := range uint64(4000) {
		rng := rand.New(rand.NewPCG(seed, 7))
		var b strings.Builder
		for range rng.IntN(60) {
			b.WriteString(alphabet[rng.IntN(len(alphabet))])
		}
		text := b.String()
		want := tok.bpe.merge(nil, tok.normalize(text), new(scratch))
		if got := tok.Encode(text, false); !slices.Equal(got, want) {
			t.Fatalf("seed %d: Encode(%q)\n got %v\nwant %v", seed, text, got, want)
		}
		if text != "" && tok.fallback.joins.next(text, 0) < len(text) {
			cut++
		}
		if got := strings.ReplaceAll(joinBytes(tok, want), "▁", " "); got != strings.ReplaceAll(text, "▁", " ") {
			t.Fatalf("seed %d: the tokens of %q have the bytes %q", seed, text, got)
		}
	}
	if cut < 1000 {
		t.Errorf("only %d texts were cut", cut)
	}
}

// naiveStream is what a Stream says of byte tokens: each character as soon as
// it is whole, and U+FFFD for every byte that is of none.
func naiveStream(tok *Tokenizer, ids []int32, skipSpecial bool) string {
	var out, run []byte
	end := func() {
		for len(run) > 0 {
			r, width := utf8.DecodeRune(run)
			out = utf8.AppendRune(out, r)
			run = run[width:]
		}
	}
	for _, id := range ids {
		if !tok.has(id) || skipSpecial && tok.special[id] {
			continue
		}
		if tok.fallback.isByte[id] {
			run = append(run, tok.TokenBytes(id)...)
			continue
		}
		end()
		out = append(out, tok.TokenBytes(id)...)
	}
	end()
	if tok.fallback.stripMax > 0 {
		return strings.TrimPrefix(string(out), " ")
	}
	return string(out)
}

// TestFallbackStream: a Stream gives whole characters only, equals the naive
// one, and Decode too where no run of byte tokens is torn.
func TestFallbackStream(t *testing.T) {
	tok := loadSmallFallback(t)
	torn := 0
	for seed := range uint64(6000) {
		rng := rand.New(rand.NewPCG(seed, 8))
		var ids []int32
		for range rng.IntN(20) {
			switch rng.IntN(4) {
			case 0:
				ids = append(ids, tok.bpe.byteID[rng.IntN(256)])
			case 1:
				for _, b := range []byte([]string{"漢", "\n", "😀", " ", "\xe6\xbc"}[rng.IntN(5)]) {
					ids = append(ids, tok.bpe.byteID[b])
				}
			default:
				ids = append(ids, int32(rng.IntN(tok.VocabSize()+2))-1)
			}
		}
		skip := rng.IntN(2) == 0
		got := streamAll(tok, ids, skip)
		if want := naiveStream(tok, ids, skip); got != want {
			t.Fatalf("seed %d: %v\n stream %q\n naive %q", seed, ids, got, want)
		}
		if decoded := tok.Decode(ids, skip); decoded != got {
			torn++
			if !strings.ContainsRune(decoded, utf8.RuneError) {
				t.Fatalf("seed %d: %v\n stream %q\n decode %q", seed, ids, got, decoded)
			}
		}
	}
	if torn < 100 || torn > 5000 {
		t.Errorf("%d of 6000 outputs were torn", torn)
	}
	s := tok.NewStream(true)
	id, _ := tok.ID("▁ab")
	if first, second := s.Next(id), s.Next(id); first != "ab" || second != " ab" {
		t.Errorf("▁ab twice gave %q and %q; only the first loses its space", first, second)
	}
	if n := testing.AllocsPerRun(50, func() { _ = s.Next(id) }); n != 0 {
		t.Errorf("Stream.Next of whole characters allocates %v times", n)
	}
}

func TestFallbackRefusesByName(t *testing.T) {
	file := smallFallback(t)
	for _, c := range []struct{ old, new, names string }{
		{`"pre_tokenizer":null`, `"pre_tokenizer":{"type":"ByteLevel"}`, "ByteLevel"},
		{`"pre_tokenizer":null`, `"pre_tokenizer":{"type":"Split","pattern":{"Regex":" "},"behavior":"MergedWithPrevious"}`, "Regex"},
		{`"pre_tokenizer":null`, `"pre_tokenizer":{"type":"Split","pattern":{"String":" "},"behavior":"Removed"}`, "Removed"},
		{`"pre_tokenizer":null`, `"pre_tokenizer":{"type":"Whitespace"}`, "Whitespace"},
		{`"pre_tokenizer":null`, `"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"last"}`, "last"},
		{`"String":" "`, `"Regex":" +"`, "Regex"},
		{`"String":" "`, `"String":""`, "String"},
		{`{"type":"ByteFallback"},`, ``, "Fuse"},
		{`"type":"Fuse"`, `"type":"WordPiece"`, "WordPiece"},
		{`"stop":0`, `"stop":1`, "stop 1"},
		{`"type":"Sequence"`, `"type":"ByteLevel"`, "ByteLevel"},
		{`0x7F\u003e`, `0x7f\u003e`, "<0x7F>"},
		{`"b é"`, `"<0x41> é"`, "é"},
		{`"fuse_unk":true`, `"ignore_merges":true`, "ignore_merges"},
	} {
		changed := strings.Replace(file, c.old, c.new, 1)
		if c.names == "é" {
			changed = strings.Replace(changed, `"bé"`, `"<0x41>é"`, 1)
		}
		if changed == file {
			t.Fatalf("case %q changes nothing", c.old)
		}
		_, err := Load([]byte(changed))
		var unsupported *UnsupportedError
		if !errors.As(err, &unsupported) || !strings.Contains(fmt.Sprint(err), c.names) {
			t.Errorf("%s → %s: error %v, want it refused by name of %q", c.old, c.new, err, c.names)
		}
	}
}
