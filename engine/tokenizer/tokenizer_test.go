package tokenizer

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"
)

// odd is what random texts are made of, besides random bytes.
var odd = []string{" ", "  ", "\n", "\r\n", "\t", "\u00a0", "a", "The", " the", "'s", "'LL", "'ſ", "123", "٣", "é", "e\u0301", "\u0301\u0323",
	"漢字", "한", "\u1100\u1161\u11a8", "👩‍👩‍👧", "\x00", "<|endoftext|>", "<|im_start|>", "<|lr|>", "solo", "<s>", "<tool>", "!?", "...", "\u0915\u093c"}

func randomText(rng *rand.Rand, valid bool) string {
	var b strings.Builder
	for range rng.IntN(20) {
		switch {
		case !valid && rng.IntN(4) == 0:
			b.WriteByte(byte(rng.IntN(256)))
		case rng.IntN(3) == 0:
			b.WriteRune(rune(rng.IntN(0x3100)))
		case rng.IntN(10) == 0:
			b.WriteString(strings.Repeat(odd[rng.IntN(len(odd))], rng.IntN(80)))
		default:
			b.WriteString(odd[rng.IntN(len(odd))])
		}
	}
	return b.String()
}

func TestStreamEqualsDecode(t *testing.T) {
	eachGolden(t, func(t *testing.T, tok *Tokenizer, _ *golden) {
		for seed := range uint64(3000) {
			rng := rand.New(rand.NewPCG(seed, 1))
			ids := make([]int32, rng.IntN(30))
			for i := range ids {
				if ids[i] = int32(rng.IntN(tok.VocabSize())); rng.IntN(12) == 0 {
					ids[i] = int32(rng.Uint32()) // nearly always outside, often negative
				}
			}
			skip := rng.IntN(2) == 0
			s := tok.NewStream(skip)
			var out strings.Builder
			for _, id := range ids {
				piece := s.Next(id)
				if !utf8.ValidString(piece) {
					t.Fatalf("seed %d: Next(%d) gave %q, which is no UTF-8", seed, id, piece)
				}
				out.WriteString(piece)
			}
			out.WriteString(s.Flush())
			want := tok.Decode(ids, skip)
			if tok.tearsBytes() {
				want = naiveStream(tok, ids, skip)
			}
			if out.String() != want {
				t.Fatalf("seed %d: %v\n stream %q\n decode %q", seed, ids, out.String(), want)
			}
			if again := s.Flush(); again != "" {
				t.Fatalf("seed %d: second Flush gave %q", seed, again)
			}
		}
	})
}

// TestStreamHoldsBackHalfCharacters feeds texts byte by byte.
func TestStreamHoldsBackHalfCharacters(t *testing.T) {
	tok, _ := loadGolden(t, "testdata/gpt2.json.gz")
	s := tok.NewStream(false)
	var got []string
	for _, b := range []byte("a€😀\xe2\x82b\xf0\x9f") {
		got = append(got, s.Next(tok.bpe.byteID[b]))
	}
	want := []string{"a", "", "", "€", "", "", "", "😀", "", "", "\ufffdb", "", ""}
	if !slices.Equal(got, want) {
		t.Errorf("pieces\n got %q\nwant %q", got, want)
	}
	if got := s.Flush(); got != "\ufffd" {
		t.Errorf("Flush gave %q, want one U+FFFD", got)
	}
}

// TestEncodeKeepsBytes: where nothing is normalized and no added token takes
// white space away, the tokens' bytes are the text's, whatever its bytes are.
func TestEncodeKeepsBytes(t *testing.T) {
	for _, name := range []string{"gpt2", "llama3", "qwen2"} {
		tok, _ := loadGolden(t, filepath.Join("testdata", name+".json.gz"))
		for seed := range uint64(3000) {
			rng := rand.New(rand.NewPCG(seed, 2))
			text := randomText(rng, name == "qwen2")
			if want := tok.normalize(text); !strings.Contains(text, "<") && !strings.Contains(want, "éé") {
				if got := joinBytes(tok, tok.Encode(text, false)); got != want {
					t.Fatalf("%s, seed %d: bytes changed\n got %q\nwant %q", name, seed, got, want)
				}
			}
		}
	}
}

func joinBytes(tok *Tokenizer, ids []int32) string {
	var b strings.Builder
	for _, id := range ids {
		b.Write(tok.TokenBytes(id))
	}
	return b.String()
}

// TestNFCSegments: composing segment by segment equals composing the whole.
func TestNFCSegments(t *testing.T) {
	c := chars()
	changed := 0
	for seed := range uint64(6000) {
		rng := rand.New(rand.NewPCG(seed, 4))
		text := randomText(rng, false)
		var whole strings.Builder
		c.composeSegment(nil, text, &whole)
		got := c.nfc(text)
		if got != whole.String() {
			t.Fatalf("seed %d: nfc(%q)\n got %q\nwant %q", seed, text, got, whole.String())
		}
		if again := c.nfc(got); again != got {
			t.Fatalf("seed %d: nfc(nfc(%q)) is %q, was %q", seed, text, again, got)
		}
		if got != text {
			changed++
		}
	}
	if changed < 500 {
		t.Errorf("only %d texts were changed by NFC", changed)
	}
}

// TestScannersAdvance: a pre-token is never empty and never runs past the text.
func TestScannersAdvance(t *testing.T) {
	scanners := []scanner{scanDigits, scanEachDigit}
	for _, p := range patterns {
		scanners = append(scanners, p.scan)
	}
	for seed := range uint64(1500) {
		text := randomText(rand.New(rand.NewPCG(seed, 5)), false)
		for k, scan := range scanners {
			for i := 0; i < len(text); {
				end := scan(chars(), text, i)
				if end <= i || end > len(text) {
					t.Fatalf("seed %d, scanner %d: pre-token of %q at %d ends at %d", seed, k, text, i, end)
				}
				i = end
			}
		}
	}
}

func TestConcurrentUse(t *testing.T) {
	tok, g := loadGolden(t, "testdata/qwen2.json.gz")
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for i := range g.Encode {
				c := g.Encode[(i*(worker+1))%len(g.Encode)]
				if got := tok.Encode(c.text, true); !slices.Equal(got, c.ids) {
					t.Errorf("worker %d: Encode(%q) = %v, want %v", worker, c.text, got, c.ids)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestLookups(t *testing.T) {
	tok, _ := loadGolden(t, "testdata/llama3.json.gz")
	bos, ok := tok.ID("<|begin_of_text|>")
	if !ok || !tok.IsSpecial(bos) || string(tok.TokenBytes(bos)) != "<|begin_of_text|>" {
		t.Errorf("begin of text: id %d, ok %v, special %v, bytes %q", bos, ok, tok.IsSpecial(bos), tok.TokenBytes(bos))
	}
	tool, ok := tok.ID("<tool>")
	if !ok || tok.IsSpecial(tool) {
		t.Errorf("<tool>: id %d, ok %v, special %v; want an ordinary added token", tool, ok, tok.IsSpecial(tool))
	}
	if the, ok := tok.ID("Ġthe"); !ok || string(tok.TokenBytes(the)) != " the" {
		t.Errorf("Ġthe: id %d, ok %v, bytes %q", the, ok, tok.TokenBytes(the))
	}
	if _, ok := tok.ID("no such token"); ok {
		t.Error("ID found a token that is not there")
	}
	for _, id := range []int32{-1, int32(tok.VocabSize()), 1 << 30, -1 << 31} {
		if tok.IsSpecial(id) || tok.TokenBytes(id) != nil || tok.Decode([]int32{id}, false) != "" || tok.NewStream(false).Next(id) != "" {
			t.Errorf("id %d outside the vocabulary stands for something", id)
		}
	}
}

func TestNoAllocation(t *testing.T) {
	tok, _ := loadGolden(t, "testdata/gpt2.json.gz")
	text := strings.Repeat("The gateway renders the prompt, it's Größe 123 unseenword.\n", 20)
	dst := tok.AppendEncode(nil, text, true)
	if n := testing.AllocsPerRun(50, func() { dst = tok.AppendEncode(dst[:0], text, true) }); n != 0 {
		t.Errorf("a warm AppendEncode allocates %v times", n)
	}
	s := tok.NewStream(true)
	id, _ := tok.ID("Ġthe")
	if n := testing.AllocsPerRun(50, func() { _ = s.Next(id) }); n != 0 {
		t.Errorf("Stream.Next of whole characters allocates %v times", n)
	}
}

// small is a tokenizer.json with one thing to replace.
const small = `{"added_tokens":[{"id":3,"content":"<s>","special":true}],"normalizer":null,
"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true},"post_processor":null,
"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}`

func TestLoadRefusesByName(t *testing.T) {
	if _, err := Load([]byte(small)); err != nil {
		t.Fatalf("the file that the cases change: %v", err)
	}
	cases := []struct {
		old, new string
		is       error
		names    string
	}{
		{`"type":"BPE"`, `"type":"WordPiece"`, ErrUnsupported, "WordPiece"},
		{`"type":"BPE"`, `"type":"Unigram"`, ErrInvalid, "model.vocab"},
		{`"type":"BPE"`, `"type":"BPE","byte_fallback":true`, ErrUnsupported, "byte_fallback"},
		{`"type":"BPE"`, `"type":"BPE","dropout":0.1`, ErrUnsupported, "dropout"},
		{`"type":"BPE"`, `"type":"BPE","end_of_word_suffix":"</w>"`, ErrUnsupported, "</w>"},
		{`"type":"BPE"`, `"type":"BPE","continuing_subword_prefix":"##"`, ErrUnsupported, "##"},
		{`"type":"BPE"`, `"type":"BPE","unk_token":"?"`, ErrInvalid, `"?"`},
		{`"normalizer":null`, `"normalizer":{"type":"NFKC"}`, ErrUnsupported, "NFKC"},
		{`"normalizer":null`, `"normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Lowercase"}]}`, ErrUnsupported, "Lowercase"},
		{`"decoder":{"type":"ByteLevel"}`, `"decoder":{"type":"Metaspace"}`, ErrUnsupported, "Metaspace"},
		{`"decoder":{"type":"ByteLevel"}`, `"decoder":null`, ErrUnsupported, "decoder"},
		{`"post_processor":null`, `"post_processor":{"type":"BertProcessing"}`, ErrUnsupported, "BertProcessing"},
		{`"post_processor":null`, `"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<x>"}},{"Sequence":{"id":"A"}}]}`, ErrInvalid, "<x>"},
		{`"post_processor":null`, `"post_processor":{"type":"TemplateProcessing","single":[]}`, ErrUnsupported, "sequence A"},
		{`{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}`, `null`, ErrUnsupported, "pre_tokenizer"},
		{`{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}`, `{"type":"Whitespace"}`, ErrUnsupported, "Whitespace"},
		{`{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}`,
			`{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\p{N}{1,3}"},"behavior":"Removed","invert":true},{"type":"ByteLevel"}]}`, ErrUnsupported, "Removed"},
		{`{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}`,
			`{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\w+|x"},"behavior":"Isolated","invert":false},{"type":"ByteLevel"}]}`, ErrUnsupported, `\\w+|x`},
		{`{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}`,
			`{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"String":" "},"behavior":"Isolated"},{"type":"ByteLevel"}]}`, ErrUnsupported, "String"},
		{`"a b"`, `"a c"`, ErrInvalid, `"c"`},
		{`"a b"`, `"a b c"`, ErrInvalid, "a b c"},
		{`"a b"`, `["a"]`, ErrInvalid, "merge 0"},
		{`"id":3`, `"id":7`, ErrInvalid, "7"},
		{`"b":1`, `"b":0`, ErrInvalid, "id 0"},
		{`"b":1`, `"b":-1`, ErrInvalid, "-1"},
		{`"b":1`, `"b":4194304`, ErrInvalid, "4194304"},
		{small, `{`, ErrInvalid, "JSON"},
		{small, `{}`, ErrInvalid, "model"},
	}
	for _, c := range cases {
		changed := strings.Replace(small, c.old, c.new, 1)
		if changed == small {
			t.Fatalf("case %q changes nothing", c.old)
		}
		_, err := Load([]byte(changed))
		if !errors.Is(err, c.is) || !strings.Contains(fmt.Sprint(err), c.names) {
			t.Errorf("%s → %s: error %v, want %v naming %q", c.old, c.new, err, c.is, c.names)
		}
		var unsupported *UnsupportedError
		if errors.Is(c.is, ErrUnsupported) && !errors.As(err, &unsupported) {
			t.Errorf("%s: error %T is no *UnsupportedError", c.new, err)
		}
	}
}

func FuzzLoad(f *testing.F) {
	f.Add([]byte(small))
	f.Add([]byte(strings.Replace(small, "null", `{"type":"NFC"}`, 1)))
	f.Add([]byte(strings.Replace(small, `"a b"`, `["a","b"]`, 1)))
	f.Add([]byte(`{"model":{"type":"BPE","vocab":{},"merges":[]},"pre_tokenizer":{"type":"ByteLevel"},"decoder":{"type":"ByteLevel"}}`))
	f.Add([]byte(strings.Replace(small, `"special":true`, `"lstrip":true,"rstrip":true,"single_word":true,"normalized":true`, 1)))
	f.Add([]byte(smallFallback(f)))
	f.Fuzz(func(t *testing.T, data []byte) {
		tok, err := Load(data)
		if err != nil {
			if !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrUnsupported) {
				t.Fatalf("error %v is neither invalid nor unsupported", err)
			}
			return
		}
		ids := tok.Encode("ab <s> a\u0301b\n\xff", true)
		if again := tok.NewMessageCache(0).Encode("ab <s> a\u0301b\n\xff", true); !slices.Equal(ids, again) {
			t.Fatalf("%v from a cache of messages, want %v", again, ids)
		}
		if got, want := streamAll(tok, ids, true), tok.Decode(ids, true); got != want && !tok.tearsBytes() {
			t.Fatalf("stream %q, decode %q", got, want)
		}
	})
}

func FuzzEncode(f *testing.F) {
	for _, s := range odd {
		f.Add(s + " x " + s)
	}
	f.Add("\xff\xfe\xc0\x80\xed\xa0\x80")
	toks := map[string]*Tokenizer{}
	for _, path := range goldenFiles(f) {
		tok, _ := loadGolden(f, path)
		toks[filepath.Base(path)] = tok
	}
	toks["fallback"] = loadSmallFallback(f)
	f.Fuzz(func(t *testing.T, text string) {
		for name, tok := range toks {
			ids := tok.Encode(text, true)
			if again := tok.Encode(text, true); !slices.Equal(ids, again) {
				t.Fatalf("%s: first %v, then %v", name, ids, again)
			}
			if cached := tok.NewMessageCache(0).Encode(text, true); !slices.Equal(ids, cached) {
				t.Fatalf("%s: %v, from a cache of messages %v", name, ids, cached)
			}
			for _, id := range ids {
				if !tok.has(id) {
					t.Fatalf("%s: id %d is outside the vocabulary", name, id)
				}
			}
			want := tok.Decode(ids, false)
			if tok.tearsBytes() {
				want = naiveStream(tok, ids, false)
			}
			if got := streamAll(tok, ids, false); got != want {
				t.Fatalf("%s: stream %q, want %q", name, got, want)
			}
		}
		if tok := toks["llama3.json.gz"]; !strings.Contains(text, "<") { // no added token that takes white space
			if got := joinBytes(tok, tok.Encode(text, false)); got != text {
				t.Fatalf("bytes %q, text %q", got, text)
			}
		}
	})
}

func BenchmarkEncode(b *testing.B) {
	for _, path := range goldenFiles(b) {
		tok, g := loadGolden(b, path)
		var text strings.Builder
		for _, c := range g.Encode[12:30] { // the prose and code
			text.WriteString(c.text)
		}
		corpus := strings.Repeat(text.String(), 20)
		dst := make([]int32, 0, len(corpus))
		name := strings.TrimSuffix(filepath.Base(path), ".json.gz")
		b.Run(name+"/warm", func(b *testing.B) {
			b.SetBytes(int64(len(corpus)))
			for b.Loop() {
				dst = tok.AppendEncode(dst[:0], corpus, false)
			}
		})
		b.Run(name+"/cold", func(b *testing.B) { // no word is in the cache
			b.SetBytes(int64(text.Len()))
			for b.Loop() {
				b.StopTimer()
				clear(tok.cache.slots[:])
				b.StartTimer()
				dst = tok.AppendEncode(dst[:0], text.String(), false)
			}
		})
	}
}
