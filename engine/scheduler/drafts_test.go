package scheduler

import (
	"fmt"
	"os"
	"regexp"
	"slices"

	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/ngram"
)

// guessing is a scheduler with one request that is guessed for, and what its steps were.
type guessing struct {
	*Scheduler
	drafts []int // guesses of each step
	rows   int   // computed in all steps after that of the prompt
}

func newGuessing(t testing.TB, most int, draft func([]int32, int) []int32, prompt []int32) *guessing {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 1024}, MaxSeqs: 1, MaxOutputs: 1 + DraftLimit, MaxBatchedTokens: 8192, Draft: draft, MaxDrafts: most})
	add(t, s, Request{ID: 1, Tokens: prompt}, 0)
	return &guessing{Scheduler: s}
}

// write has the model draw these tokens, and returns the number of steps.
func (g *guessing) write(t testing.TB, text []int32) (steps int) {
	for len(text) > 0 {
		b := g.Schedule(0)
		q := b.Seqs[0]
		drafts := q.Tokens[len(q.Tokens)-q.Drafts:]
		n := 0
		for n < min(len(drafts), len(text)-1) && drafts[n] == text[n] {
			n++
		}
		g.Update(b, []Result{{Tokens: text[:n+1]}})
		text = text[n+1:]
		steps++
		g.drafts = append(g.drafts, len(drafts))
		g.rows += 1 + len(drafts)
	}
	if err := g.Check(); err != nil {
		t.Fatal(err)
	}
	return steps
}

// TestGuessesFollowAcceptance: a text that is guessed right has all guesses within five steps, also
// after one that never was, and a text that is guessed wrong costs a single row.
func TestGuessesFollowAcceptance(t *testing.T) {
	const prompt, most = 20, 16
	wide := []int{1, 3, 7, 15, 16, 16, 16, 16}
	for name, c := range map[string]struct {
		wrong func(at int) bool
		want  []int // of the first steps
		from  int   // the tokens before this place are written first
	}{
		"all right":       {func(int) bool { return false }, wide, prompt},
		"none right":      {func(int) bool { return true }, []int{1, 0, 0, 0, 0, 0, 0, 0, 0, 0}, prompt},
		"right later":     {func(at int) bool { return at < 500 }, append([]int{0}, wide...), 500},
		"wrong in a run":  {func(at int) bool { return at == 400 }, []int{16, 16, 16, 16}, 401},
		"wrong once more": {func(at int) bool { return at == 400 || at == 401 }, []int{8, 16, 16, 16}, 402},
		"every other one": {func(at int) bool { return at%2 == 0 }, []int{0, 1, 0, 1, 0, 1}, 401},
	} {
		t.Run(name, func(t *testing.T) {
			truth := text(1, 1000)
			g := newGuessing(t, most, func(tokens []int32, n int) []int32 {
				for range n {
					guess := truth[len(tokens)]
					if c.wrong(len(tokens)) {
						guess++
					}
					tokens = append(tokens, guess)
				}
				return tokens
			}, truth[:prompt])
			steps := g.write(t, truth[prompt:c.from])
			before := len(g.drafts)
			steps += g.write(t, truth[c.from:900])
			if got := g.drafts[before:][:len(c.want)]; !slices.Equal(got, c.want) {
				t.Errorf("guesses of the steps from token %d on: %v, want %v", c.from, got, c.want)
			}
			drafted, accepted, st := 0, uint64(0), g.Stats()
			for _, n := range g.drafts {
				drafted += n
			}
			for _, n := range st.Accepted {
				accepted += n
			}
			if int(st.Drafted) != drafted || int(accepted) != 900-prompt-steps {
				t.Errorf("%d guessed and %d accepted, of %d guesses in %d steps of %d tokens", st.Drafted, accepted, drafted, steps, 900-prompt)
			}
			if name == "none right" && drafted != 1 {
				t.Errorf("%d rows were computed for guesses", drafted)
			}
		})
	}
}

// TestGuessesDependOnOwnHistory: a request gets the drafts that it gets alone, whatever share
// of the drafts of other requests is accepted.
func TestGuessesDependOnOwnHistory(t *testing.T) {
	const tokens = 300
	// The first token identifies the request and determines which drafts are wrong.
	draft := func(tokens []int32, n int) []int32 {
		for range n {
			tokens = append(tokens, min(1, int32(len(tokens))%(2+7*tokens[0])))
		}
		return tokens
	}
	run := func(names ...int) map[int][]int {
		s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 1024}, MaxSeqs: len(names), MaxOutputs: len(names) * (1 + DraftLimit), MaxBatchedTokens: 1024, Draft: draft, MaxDrafts: DraftLimit})
		for _, name := range names {
			add(t, s, Request{ID: RequestID(name), Tokens: text(name, 1)}, 0)
		}
		drafts, written := make(map[int][]int), make(map[int]int)
		for len(s.running)+len(s.waiting) > 0 {
			b := s.Schedule(0)
			var results []Result
			for _, q := range b.Seqs {
				name, right := int(q.ID), 0
				for right < q.Drafts && q.Tokens[len(q.Tokens)-q.Drafts+right] == 1 {
					right++ // the model draws nothing but ones
				}
				written[name] += right + 1
				drafts[name] = append(drafts[name], q.Drafts)
				results = append(results, Result{Tokens: slices.Repeat([]int32{1}, right+1), Finished: written[name] >= tokens})
			}
			s.Update(b, results)
		}
		return drafts
	}
	among := run(0, 1, 2)
	for name := range 3 {
		if alone := run(name)[name]; !slices.Equal(alone, among[name]) {
			t.Errorf("request %d: guesses %v, alone %v", name, among[name], alone)
		}
	}
	if slices.Equal(among[0], among[2]) {
		t.Error("all requests have the same guesses")
	}
}

// BenchmarkGuesses is what guessing costs and brings, by text: rows that are computed and
// steps per token, and the percentage of guesses that were right.
func BenchmarkGuesses(b *testing.B) {
	const folder = "../../"
	code := words(b, folder+"engine/scheduler/step.go")
	renamed := slices.Clone(code)
	for i, w := range renamed {
		if w == " r" {
			renamed[i] = " req"
		}
	}
	for _, text := range []struct {
		name           string
		prompt, output []string
	}{
		{"quote", code, code[:2000]},
		{"edit", code, renamed[:2000]},
		{"code", words(b, folder+"engine/backend/cuda/replay.go"), code[:2000]},
		{"prose", words(b, folder+"README.md"), words(b, folder+"ARCHITECTURE.md")[:2000]},
	} {
		ids := make(map[string]int32)
		number := func(words []string) (tokens []int32) {
			for _, w := range words {
				if _, known := ids[w]; !known {
					ids[w] = int32(len(ids))
				}
				tokens = append(tokens, ids[w])
			}
			return tokens
		}
		prompt, output := number(text.prompt[:min(len(text.prompt), 5000)]), number(text.output)
		for _, l := range []ngram.Lookup{{Min: 5, Max: 5}, {Min: 2, Max: 4}, {Min: 1, Max: 4}} {
			for _, most := range []int{5, 16} {
				b.Run(fmt.Sprintf("%s/lookup=%d-%d/most=%d", text.name, l.Min, l.Max, most), func(b *testing.B) {
					for b.Loop() {
						g := newGuessing(b, most, l.Draft, prompt)
						steps := g.write(b, output)
						st := g.Stats()
						right := uint64(0)
						for _, n := range st.Accepted {
							right += n
						}
						b.ReportMetric(float64(g.rows)/float64(len(output)), "rows/token")
						b.ReportMetric(float64(steps)/float64(len(output)), "steps/token")
						b.ReportMetric(100*float64(right)/float64(max(1, st.Drafted)), "%right")
					}
				})
			}
		}
	}
}

var word = regexp.MustCompile(`\s?\w{1,6}|\s?[^\w\s]+|\s+`)

// words cuts a file into parts about as long as a tokenizer's tokens.
func words(t testing.TB, name string) []string {
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return word.FindAllString(string(text), -1)
}
