package render

import (
	"compress/gzip"
	"encoding/json"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tandem-serving/tandem/engine/tokenizer"
)

func testTokenizer(t testing.TB) *tokenizer.Tokenizer {
	t.Helper()
	f, err := os.Open("../../engine/tokenizer/testdata/gpt2.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zr, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var doc struct{ Tokenizer json.RawMessage }
	if err := json.NewDecoder(zr).Decode(&doc); err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Load(doc.Tokenizer)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// naiveStop cuts text at the stop that is complete first, the longest of those,
// by trying every end and every start in order.
func naiveStop(text string, stops []string, include bool) (string, bool) {
	for end := 1; end <= len(text); end++ {
		for start := range end {
			for _, s := range stops {
				if s != "" && text[start:end] == s {
					if include {
						return text[:end], true
					}
					return text[:start], true
				}
			}
		}
	}
	return text, false
}

// TestTextEqualsNaive pushes random tokens, whose stop strings are pieces of
// their own text, and holds the joined deltas against the whole text cut once.
func TestTextEqualsNaive(t *testing.T) {
	tok := testTokenizer(t)
	stopped, heldBack := 0, 0
	for seed := range uint64(4000) {
		rng := rand.New(rand.NewPCG(seed, 1))
		ids := make([]int32, 1+rng.IntN(25))
		for i := range ids {
			if rng.IntN(3) == 0 { // few letters, so that stops overlap themselves
				ids[i], _ = tok.ID(string(rune('a' + rng.IntN(2))))
			} else {
				ids[i] = int32(rng.IntN(tok.VocabSize() + 1))
			}
		}
		skip := rng.IntN(2) == 0
		whole := tok.Decode(ids, skip)
		o := TextOptions{IncludeStop: rng.IntN(2) == 0, SkipSpecial: skip}
		for range rng.IntN(4) {
			o.Stops = append(o.Stops, randomStop(rng, whole))
		}
		free := "" // of the tokens that no stop ends
		if rng.IntN(3) == 0 {
			o.MinTokens = rng.IntN(len(ids) + 1)
			for s, i := tok.NewStream(skip), 0; i < o.MinTokens; i++ {
				free += s.Next(ids[i])
			}
		}
		want, wantStop := naiveStop(whole[len(free):], o.Stops, o.IncludeStop)
		want = free + want

		x := NewText(tok, o)
		var got strings.Builder
		ended := false
		push := func(delta string, stop bool) {
			if !utf8.ValidString(delta) {
				t.Fatalf("seed %d: delta %q is no UTF-8", seed, delta)
			}
			if ended && (delta != "" || !stop) {
				t.Fatalf("seed %d: %q, %v after the stop", seed, delta, stop)
			}
			if delta == "" && !stop {
				heldBack++
			}
			got.WriteString(delta)
			ended = stop
		}
		for _, id := range ids {
			push(x.Push(id))
		}
		push(x.Flush())
		if got.String() != want || ended != wantStop {
			t.Fatalf("seed %d: stops %q, include %v, text %q\n got %q, stopped %v\nwant %q, stopped %v",
				seed, o.Stops, o.IncludeStop, whole, got.String(), ended, want, wantStop)
		}
		if match, ok := x.Stopped(); ok != wantStop || ok && !contains(o.Stops, match) {
			t.Fatalf("seed %d: Stopped gave %q, %v", seed, match, ok)
		}
		if ended {
			stopped++
		}
	}
	if stopped < 500 || heldBack < 500 {
		t.Errorf("only %d texts stopped and %d tokens were held back", stopped, heldBack)
	}
}

func randomStop(rng *rand.Rand, whole string) string {
	if rng.IntN(4) == 0 {
		return []string{"", "zzz", "aab", "\ufffd", "\n\n"}[rng.IntN(5)]
	}
	rs := []rune(whole)
	if len(rs) == 0 {
		return "a"
	}
	from := rng.IntN(len(rs))
	return string(rs[from:min(len(rs), from+1+rng.IntN(6))])
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}

func TestTextHoldsBack(t *testing.T) {
	tok := testTokenizer(t)
	x := NewText(tok, TextOptions{Stops: []string{"aba"}})
	var got []string
	for _, c := range "cabcaba!" {
		id, _ := tok.ID(string(c))
		delta, stopped := x.Push(id)
		if stopped {
			delta += "|"
		}
		got = append(got, delta)
	}
	want := "c,,,abc,,,|,|"
	if strings.Join(got, ",") != want {
		t.Errorf("deltas %q, want %q", strings.Join(got, ","), want)
	}
}

func TestTextAllocatesNothing(t *testing.T) {
	tok := testTokenizer(t)
	the, _ := tok.ID("Ġthe")
	for _, stops := range [][]string{nil, {"###", "\nUser:"}} {
		x := NewText(tok, TextOptions{Stops: stops})
		if n := testing.AllocsPerRun(50, func() { x.Push(the) }); n != 0 {
			t.Errorf("Push with stops %q allocates %v times", stops, n)
		}
	}
}

// A text whose pieces are decoded and then searched, in other pieces, ends as one that is pushed.
func TestSearchEqualsPush(t *testing.T) {
	tok := testTokenizer(t)
	stopped := 0
	for seed := range uint64(1000) {
		rng := rand.New(rand.NewPCG(seed, 2))
		ids := tok.Encode("the cat sat on the mat, and the cat ate the hat: aa aaa aaaa bab abab"[rng.IntN(30):], false)
		o := TextOptions{Stops: []string{randomStop(rng, tok.Decode(ids, true)), ""}, IncludeStop: rng.IntN(2) == 0, MinTokens: rng.IntN(4)}
		push, search := NewText(tok, o), NewText(tok, o)
		want, got, hit, found := "", []byte(nil), false, false
		for _, id := range ids {
			if !hit {
				var delta string
				delta, hit = push.Push(id)
				want += delta
			}
			for piece := []byte(search.Decode(id)); len(piece) > 0 && !found; {
				n := 1 + rng.IntN(len(piece))
				got, found = search.Search(got, piece[:n], false)
				piece = piece[n:]
			}
		}
		if !hit {
			rest, at := push.Flush()
			want, hit = want+rest, at
		}
		if !found {
			got, found = search.Search(got, []byte(search.Rest()), true)
		}
		if string(got) != want || found != hit {
			t.Fatalf("seed %d, %q: %q %v, want %q %v", seed, o.Stops, got, found, want, hit)
		}
		if hit {
			stopped++
		}
	}
	if stopped < 100 || stopped == 1000 {
		t.Errorf("%d texts stopped", stopped)
	}
}
