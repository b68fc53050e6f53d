package tokenizer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
)

// chatTexts are the prompts of a chat's turns: each is the one before and more,
// but for edits.
func chatTexts(rng *rand.Rand, specials []string) []string {
	pick := func() string { return specials[rng.IntN(len(specials))] }
	message := func() string {
		var b strings.Builder
		for b.Len() < rng.IntN(400) {
			b.WriteString(realText(rng, specials))
		}
		return b.String()
	}
	var prompts, parts []string
	for range 1 + rng.IntN(8) {
		parts = append(parts, pick()+"user"+pick()+message()+pick()+pick()+"assistant\n"+message()+pick())
		if rng.IntN(6) == 0 {
			parts[rng.IntN(len(parts))] = message() + pick()
		}
		if rng.IntN(10) == 0 {
			parts = slices.Delete(parts, 0, 1+rng.IntN(len(parts)))
		}
		prompts = append(prompts, strings.Join(parts, "")+pick()+"assistant\n")
	}
	return prompts
}

// check says what is wrong with the cache's own books.
func (c *MessageCache) check() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	size := 0
	for e := c.recent.Front(); e != nil; e = e.Next() {
		m := e.Value.(*message)
		size += m.size()
		if c.entries[m.hash] != e {
			return fmt.Errorf("message %q is in the list alone", m.text)
		}
	}
	if size != c.size || size > c.maxSize || len(c.entries) != c.recent.Len() {
		return fmt.Errorf("%d bytes in %d messages, books say %d in %d, bound %d", size, c.recent.Len(), c.size, len(c.entries), c.maxSize)
	}
	return nil
}

// TestMessageCacheEqualsEncode: whatever was encoded before, the ids are those
// that the tokenizer gives.
func TestMessageCacheEqualsEncode(t *testing.T) {
	eachGolden(t, func(t *testing.T, tok *Tokenizer, _ *golden) {
		var specials []string
		for id, special := range tok.special {
			if special {
				specials = append(specials, string(tok.TokenBytes(int32(id))))
			}
		}
		specials = append(specials, "<tool>", "solo", "<|lr|>") // where it has them: they strip, or look at neighbours
		c := tok.NewMessageCache(1 << 17)                       // small: messages are evicted
		for seed := range uint64(150) {
			rng := rand.New(rand.NewPCG(seed, 6))
			for turn, text := range chatTexts(rng, specials) {
				special := rng.IntN(2) == 0
				if got, want := c.Encode(text, special), tok.Encode(text, special); !slices.Equal(got, want) {
					t.Fatalf("seed %d, turn %d: Encode(%q)\n got %v\nwant %v", seed, turn, text, got, want)
				}
			}
			if err := c.check(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		if hits, misses, _ := c.Stats(); hits < 200 || misses < 200 {
			t.Errorf("%d hits and %d misses say little", hits, misses)
		}
	})
}

// TestCutsAreSafe: a token is no cut where text behind it can change what is
// found before or at it, or what is found behind depends on it.
func TestCutsAreSafe(t *testing.T) {
	tokens := []struct {
		fields string
		cut    bool
	}{
		{`"content":"<a>","special":true`, true},
		{`"content":"<left>","special":true,"lstrip":true`, true},
		{`"content":"<plain>"`, false},
		{`"content":"<right>","special":true,"rstrip":true`, false},
		{`"content":"<one>","special":true,"single_word":true`, false},
		{`"content":"<norm>","special":true,"normalized":true`, false},
		{`"content":"\n<b>","special":true`, false},
		{`"content":"word","special":true`, false},
		{`"content":"<in>","special":true`, false}, // held by the next two
		{`"content":"<in>ner","special":true`, false},
		{`"content":"x<in>y>","special":true`, true},
	}
	var added []string
	for i, token := range tokens {
		added = append(added, fmt.Sprintf(`{"id":%d,%s}`, 3+i, token.fields))
	}
	tok, err := Load([]byte(strings.Replace(small, `{"id":3,"content":"<s>","special":true}`, strings.Join(added, ","), 1)))
	if err != nil {
		t.Fatal(err)
	}
	got := map[int32]bool{}
	for a := range tok.cuts() {
		got[a.ID] = true
	}
	for i, token := range tokens {
		if got[int32(3+i)] != token.cut {
			t.Errorf("%s: a cut: %v, want %v", token.fields, got[int32(3+i)], token.cut)
		}
	}
}

func TestMessageCacheCostsNewTextAlone(t *testing.T) {
	tok, _ := loadGolden(t, "testdata/qwen2.json.gz")
	c := tok.NewMessageCache(0)
	turn := func(n int) string {
		return fmt.Sprintf("<|im_start|>user\n%d %s<|im_end|>\n", n, strings.Repeat("What is the weather like? ", 20))
	}
	text := ""
	for n := range 50 {
		text += turn(n)
		c.Encode(text, true)
		hits, misses, _ := c.Stats()
		if want := uint64(n * (n + 1) / 2); hits != want || misses != uint64(n+1) {
			t.Fatalf("after turn %d: %d hits and %d misses, want %d and %d", n, hits, misses, want, n+1)
		}
	}
	huge := tok.NewMessageCache(maxMessageShare * 1000)
	huge.Encode(strings.Repeat("x", 2000)+"<|im_end|>", true)
	if _, _, size := huge.Stats(); size != 0 {
		t.Errorf("a message past its share of the bound is kept: %d bytes", size)
	}
}

func TestMessageCacheConcurrently(t *testing.T) {
	tok, _ := loadGolden(t, "testdata/llama3.json.gz")
	c := tok.NewMessageCache(1 << 16)
	var wg sync.WaitGroup
	for worker := range uint64(4) {
		wg.Go(func() {
			for seed := range uint64(40) {
				for _, text := range chatTexts(rand.New(rand.NewPCG(seed, worker/2)), []string{"<|eot_id|>", "<|start_header_id|>"}) {
					if got, want := c.Encode(text, false), tok.Encode(text, false); !slices.Equal(got, want) {
						t.Errorf("worker %d, seed %d: Encode(%q) = %v, want %v", worker, seed, text, got, want)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	if err := c.check(); err != nil {
		t.Error(err)
	}
}

// BenchmarkNextTurn encodes the prompt of a chat whose earlier turns, 100 kB,
// were encoded before, with the cache and without; one new turn of 400 bytes.
func BenchmarkNextTurn(b *testing.B) {
	tok := realTokenizer(b, "qwen2")
	text := benchText(b)[:100_000]
	var history strings.Builder
	for i := 0; i+1000 <= len(text); i += 1000 {
		history.WriteString("<|im_start|>user\n" + strings.ToValidUTF8(text[i:i+1000], "") + "<|im_end|>\n")
	}
	prompt := func(n int) string {
		return fmt.Sprintf("%s<|im_start|>user\n%d %s<|im_end|>\n<|im_start|>assistant\n", history.String(), n, text[:400])
	}
	b.Run("cached", func(b *testing.B) {
		c := tok.NewMessageCache(0)
		c.Encode(history.String(), true)
		for n := 0; b.Loop(); n++ {
			c.Encode(prompt(n), true)
		}
		b.SetBytes(int64(history.Len()))
	})
	b.Run("uncached", func(b *testing.B) {
		for n := 0; b.Loop(); n++ {
			tok.Encode(prompt(n), true)
		}
		b.SetBytes(int64(history.Len()))
	})
}
