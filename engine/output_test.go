package engine

import (
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
)

// plainProbs returns what the test device's logits give for a token after others.
func plainProbs(before []int32, token int32, n int) LogProbs {
	logits := make([]float32, testVocab)
	logits[next(before, 0)] = float32(len(before))
	var p LogProbs
	p.LogProb, p.Rank, p.Top = sample.LogProbs(sample.Portable{}, logits, token, n, nil, nil)
	return p
}

// Every token of a prompt except the first is reported once, in order, before the first
// sampled token: with few rows, with other requests, and after the request lost its blocks.
func TestPromptLogProbs(t *testing.T) {
	c := small()
	c.Pool.Blocks, c.MaxOutputs = 16, 6 // 64 tokens, fewer than two want
	b := newBench(t, c, nil)
	b.d.gate() // so that all are there before the first has got anywhere
	b.start()
	type scored struct {
		*caller
		got []LogProbs
	}
	var all []*scored
	for i := range 6 {
		s := &scored{caller: b.caller(tokens(9+4*i, i/2), 20)} // half of them share a prefix
		if i%3 < 2 {
			s.TopPromptLogProbs = i
			s.EmitPrompt = func(first int, probs []LogProbs) {
				if first != len(s.got)+1 || len(s.tokens) > 0 {
					t.Errorf("request %d: %d probabilities from %d on after %d, %d tokens are out", i, len(probs), first, len(s.got), len(s.tokens))
				}
				s.got = append(s.got, probs...)
			}
		}
		all = append(all, s)
		if i == 0 {
			b.add(s.caller)
			<-b.d.begun
			continue
		}
		go func() {
			if _, _, err := b.Add(&s.Request); err != nil {
				t.Error(err)
			}
		}()
	}
	b.posted(len(all) - 1)
	b.d.open()
	for i, s := range all {
		s.wait()
		if s.EmitPrompt == nil {
			continue
		}
		if len(s.got) != len(s.Prompt)-1 {
			t.Fatalf("request %d: %d probabilities for a prompt of %d", i, len(s.got), len(s.Prompt))
		}
		for at, p := range s.got {
			want := plainProbs(s.Prompt[:at+1], s.Prompt[at+1], i)
			if p.LogProb != want.LogProb || p.Rank != want.Rank || !slices.Equal(p.Top, want.Top) {
				t.Fatalf("request %d, position %d: %+v, want %+v", i, at+1, p, want)
			}
		}
	}
	b.settled()
	if s := b.Stats().Scheduler; s.Preemptions == 0 {
		t.Error("nobody was preempted")
	}
}

// The tokens of a step are sent before another request's prompt is scored, and
// OnStep comes between them.
func TestTokensLeaveBeforeScores(t *testing.T) {
	var order []string
	c := small()
	c.MaxOutputs = 12
	b := newBench(t, c, func(o *Options) {
		o.OnStep = func() { order = append(order, "sent") }
	})
	stream, scored := b.caller(tokens(5, 1), 40), b.caller(tokens(17, 2), 2)
	emit := stream.Emit
	stream.Emit = func(token Token) { order = append(order, "token"); emit(token) }
	scored.TopPromptLogProbs = 1
	scored.EmitPrompt = func(first int, probs []LogProbs) { order = append(order, "scores") }
	b.d.gate()
	b.start()
	b.add(stream)
	<-b.d.begun
	go func() {
		if _, _, err := b.Add(&scored.Request); err != nil {
			t.Error(err)
		}
	}()
	b.posted(1)
	b.d.open()
	stream.wait()
	scored.wait()
	b.settled()
	together := 0
	for i, what := range order {
		if what != "scores" {
			continue
		}
		if i >= 2 && order[i-1] == "sent" && order[i-2] == "token" {
			together++
		}
		if i+1 == len(order) || order[i+1] != "sent" && order[i+1] != "token" {
			t.Errorf("%q follows scores", order[i+1:])
		}
	}
	if together < 2 {
		t.Errorf("a token was sent right before scores %d times: %q", together, order)
	}
}

// rowReader is the test device as a backend whose logits are read in place.
type rowReader struct{ *device }

func (d rowReader) View(backend.Buf) []float32 { return d.logits }
func (d rowReader) EachRow(n int, look func(row int)) {
	var wg sync.WaitGroup
	for row := range n {
		wg.Go(func() { look(row) })
	}
	wg.Wait()
}

// Log-probabilities that several threads compute belong to their tokens.
func TestLogProbsByThreads(t *testing.T) {
	c := small()
	c.MaxOutputs = 12
	b := newBench(t, c, func(o *Options) { o.Backend = rowReader{o.Backend.(*device)} }).start()
	var all []*caller
	for i := range 5 {
		r := b.caller(tokens(6+3*i, i), 9)
		r.LogProbs, r.TopLogProbs = i%2 == 0, i // emit holds each token against the device's
		if i > 2 {
			r.TopPromptLogProbs = 2
			r.EmitPrompt = func(first int, probs []LogProbs) {
				for j, p := range probs {
					if want := plainProbs(r.Prompt[:first+j], r.Prompt[first+j], 2); p.LogProb != want.LogProb || !slices.Equal(p.Top, want.Top) {
						t.Errorf("request %d, position %d: %+v, want %+v", i, first+j, p, want)
					}
				}
			}
		}
		all = append(all, r)
		b.add(r)
	}
	for _, r := range all {
		r.wait()
	}
	b.settled()
}

func TestLogProbsOfNamedTokens(t *testing.T) {
	b := newBench(t, small(), nil).start()
	r := b.caller(tokens(5, 1), 1)
	r.LogProbs, r.TopLogProbs, r.LogProbTokens = true, 3, []int32{4, testVocab - 1}
	b.add(r)
	p := r.wait().LogProbs
	if p == nil || p.Rank != 1 || len(p.Top) != 2 || p.Top[0].Token != 4 || p.Top[1].Token != testVocab-1 || math.Abs(float64(p.LogProb-p.Top[0].LogProb)) < 1 {
		t.Errorf("%+v", p)
	}
}

// A guess changes when tokens come, not which: whatever share of the guesses is
// right, the output is that of no guesses, to a stop token in their midst.
func TestGuessesChangeNothing(t *testing.T) {
	for name, right := range map[string]int{"none right": 0, "some right": 3, "all right": 1} {
		t.Run(name, func(t *testing.T) {
			c := small()
			c.MaxOutputs, c.MaxBatchedTokens, c.MaxDrafts = 14, 20, 5
			c.Draft = func(tokens []int32, n int) []int32 {
				for i := range n {
					guess := next(tokens, 7)
					if right == 0 || (len(tokens)+i)%right != 0 {
						guess = (guess + 1) % testVocab
					}
					tokens = append(tokens, guess)
				}
				return tokens
			}
			b := newBench(t, c, nil).start()
			var all []*caller
			for i := range 6 {
				r := b.caller(tokens(5+i, i), 20+i) // emit holds each token against the device's
				r.LogProbs = i%2 == 0
				if i == 3 {
					out := slices.Clone(r.Prompt)
					for range 10 {
						out = append(out, next(out, 7))
					}
					r.Stop = out[len(out)-1:]
				}
				all = append(all, r)
				b.add(r)
			}
			for i, r := range all {
				r.wait()
				if want := map[bool]int{true: 20 + i, false: 10}[i != 3]; len(r.tokens) != want && (i != 3 || len(r.tokens) > want) {
					t.Errorf("request %d: %d tokens, want %d", i, len(r.tokens), want)
				}
			}
			b.settled()
			s := b.Stats()
			if (s.Scheduler.Accepted[0] > 0) != (right > 0) || s.Scheduler.Drafted == 0 {
				t.Errorf("%+v", s.Scheduler)
			}
			t.Logf("%d tokens in %d steps, %d guessed, accepted %v", s.Generated, s.Steps, s.Scheduler.Drafted, s.Scheduler.Accepted)
		})
	}
}
