package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/masks"
	"github.com/tandem-serving/tandem/engine/ngram"
	"github.com/tandem-serving/tandem/engine/sample"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// testEnd is the token that ends an output; the others are printable ASCII.
const testEnd = testVocab - 1

var testWords = func() *grammar.Vocabulary {
	tokens := make([][]byte, testVocab)
	for id := range testEnd {
		tokens[id] = []byte{byte(' ' + id)}
	}
	return grammar.NewVocabulary(tokens, nil, []int32{testEnd})
}()

// nextOf is the token of a mask that the device samples.
func nextOf(mask []uint64, h uint32) int32 {
	n := 0
	for _, w := range mask {
		n += bits.OnesCount64(w)
	}
	k := int(h % uint32(n))
	for i, w := range mask {
		for ; w != 0; w &= w - 1 {
			if k == 0 {
				return int32(64*i + bits.TrailingZeros64(w))
			}
			k--
		}
	}
	panic("no token")
}

func guided(o *Options) {
	o.GrammarLimits = grammar.DefaultLimits()
	o.Vocabulary = func() (masks.Vocabulary, error) { return masks.Vocabulary{Vocabulary: testWords}, nil }
}

var testGrammars = []Grammar{
	{Kind: grammar.JSONObject, Compact: true},
	{Kind: grammar.JSONSchema, Text: []byte(`{"type":"object","properties":{"a name":{"enum":["first","second"]},"n":{"type":"integer","minimum":0,"maximum":999}},"required":["a name","n"],"additionalProperties":false}`)},
	{Kind: grammar.Regex, Text: []byte(`(ab|cd|[e-z]){4,30}(the end)?`)},
	{Kind: grammar.Choice, Choices: []string{"yes, certainly", "no", "yes, perhaps"}},
}

// walkAlone returns what a request samples under its grammar, by a Matcher of its own.
func walkAlone(t *testing.T, g Grammar, prompt []int32, seed uint64, most int) (out []int32, finish Finish) {
	t.Helper()
	c, err := grammar.Compile(g, grammar.DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	a, err := grammar.NewAutomaton(c, testWords, grammar.DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	m, err := a.NewMatcher()
	if err != nil {
		t.Fatal(err)
	}
	mask := make([]uint64, testWords.Words())
	h := uint32(seed)
	for _, token := range prompt {
		h = sum(h, token)
	}
	for {
		if err := m.Mask(mask); err != nil {
			t.Fatal(err)
		}
		token := nextOf(mask, h)
		out, h = append(out, token), sum(h, token)
		switch err := m.Accept(token); {
		case err != nil:
			t.Fatal(err)
		case token == testEnd:
			return out, FinishStop
		case len(out) == most:
			return out, FinishLength
		}
	}
}

// Constrained requests sample the same tokens alone, beside others, in chunks, with guesses, after a
// preemption, and when they continue an output. The requests beside them sample what they would alone.
func TestConstrainedOnEveryPath(t *testing.T) {
	finished, preempted, accepted := 0, uint64(0), uint64(0)
	for round := range 12 {
		c := scheduler.Config{Pool: kvcache.Config{Blocks: 18 + 6*(round%4)}, MaxSeqs: 2 + round%5, MaxBatchedTokens: 8 + round, MaxModelLen: 64}
		if round%2 == 1 {
			c.MaxOutputs, c.MaxDrafts, c.Draft = c.MaxSeqs+20, 1+round%6, ngram.Lookup{Min: 1, Max: 2}.Draft
		}
		b := newBench(t, c, guided).start()
		r := rand.New(rand.NewPCG(uint64(round), 2))
		var all []*caller
		for i := range 10 {
			q := b.caller(tokens(3+r.IntN(20), i%4), 4+r.IntN(36))
			q.Sampling.Seed = uint64(r.IntN(1000))
			if i%4 > 0 {
				g := testGrammars[r.IntN(len(testGrammars))]
				q.Grammar = &g
			}
			all = append(all, q)
			b.add(q)
		}
		for i, q := range all {
			last := q.wait()
			if q.Grammar == nil {
				continue
			}
			want, finish := walkAlone(t, *q.Grammar, q.Prompt, q.Sampling.Seed, q.MaxTokens)
			if !slices.Equal(q.tokens, want) || last.Finish != finish {
				t.Fatalf("round %d, request %d: %v, finish %d, %v; alone %v, finish %d", round, i, q.tokens, last.Finish, last.Err, want, finish)
			}
			if finish == FinishStop {
				finished++
			}
			if len(want) < 2 {
				continue
			}
			again := b.caller(q.Prompt, q.MaxTokens)
			again.Grammar, again.Sampling.Seed, again.Output = q.Grammar, q.Sampling.Seed, want[:1+r.IntN(len(want)-1)]
			b.add(again)
			if last := again.wait(); !slices.Equal(slices.Concat(again.Output, again.tokens), want) || last.Finish != finish {
				t.Fatalf("round %d, request %d continued after %d tokens: %v; want %v", round, i, len(again.Output), again.tokens, want)
			}
		}
		b.settled()
		s := b.Stats()
		preempted += s.Scheduler.Preemptions
		for _, n := range s.Scheduler.Accepted {
			accepted += n
		}
		if s.Masks.Computed == 0 || s.Masks.Waiting != 0 || s.Masks.Ended != 0 {
			t.Errorf("round %d: %+v", round, s.Masks)
		}
	}
	if finished < 20 || preempted == 0 || accepted < 100 {
		t.Errorf("%d answers finished, %d preemptions, %d guesses accepted", finished, preempted, accepted)
	}
}

// Without a draft of any kind, tokens that are alone in their masks are guesses. Choices of one prompt differ by their seeds only. A stop token ends an output inside its
// grammar.
func TestCertainTokensAndChoices(t *testing.T) {
	c := small()
	c.MaxDrafts, c.MaxOutputs = 6, c.MaxSeqs+20
	b := newBench(t, c, guided).start()
	g := Grammar{Kind: grammar.Regex, Text: []byte(`(one certain run|another long run)( and[x-z]){2}`)}
	var all []*caller
	for i := range 8 {
		q := b.caller(tokens(9, 1), 40)
		q.Grammar, q.Sampling.Seed = &g, uint64(i)
		if i >= 4 {
			q.Stop = []int32{'d' - ' '}
		}
		all = append(all, q)
		b.add(q)
	}
	outputs := map[string]bool{}
	for i, q := range all {
		last := q.wait()
		want, finish := walkAlone(t, g, q.Prompt, q.Sampling.Seed, q.MaxTokens)
		if n := slices.Index(want, 'd'-' '); i >= 4 {
			want, finish = want[:n+1], FinishStop
		}
		if !slices.Equal(q.tokens, want) || last.Finish != finish {
			t.Errorf("choice %d: %v, finish %d; alone %v, finish %d", i, q.tokens, last.Finish, want, finish)
		}
		outputs[fmt.Sprint(q.tokens)] = true
	}
	b.settled()
	s := b.Stats().Scheduler
	accepted := uint64(0)
	for _, n := range s.Accepted {
		accepted += n
	}
	if len(outputs) < 4 || accepted < 60 {
		t.Errorf("%d outputs, %d of %d certain tokens accepted", len(outputs), accepted, s.Drafted)
	}
}

// The rules of a request apply within its mask: bias chooses among the tokens that the grammar
// allows and none besides, and an end that min_tokens excludes is not sampled, whatever its bias. A
// mask of which the rules leave no token ends the request.
func TestRulesWithinMask(t *testing.T) {
	l, err := Load(LoadOptions{Model: "model/testdata/gqa-tied", Threads: 1, KVMemory: 4 << 20, MaxSeqs: 4, MaxBatchedTokens: 24, MaxModelLen: 96, KVDType: "float32", Device: "cpu", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	words, end := twinWords(l.Model.VocabSize()), int32(l.Model.VocabSize()-1)
	eo := l.Options()
	guided(&eo)
	eo.Vocabulary = func() (masks.Vocabulary, error) { return masks.Vocabulary{Vocabulary: words}, nil }
	e, err := New(eo)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	go e.Run(ctx)
	const most = 100
	for _, c := range []struct {
		pattern string
		rules   Rules
		want    string
		err     string
	}{
		{"[ab]{6}", Rules{Bias: []sample.Bias{{Token: 'b' - ' ', Value: most}, {Token: 'z' - ' ', Value: most}}}, "bbbbbb", ""},
		{"[ab]{6}", Rules{Bias: []sample.Bias{{Token: 'b' - ' ', Value: -most}}}, "aaaaaa", ""},
		{"a{1,12}", Rules{Bias: []sample.Bias{{Token: end, Value: most}}}, "a", ""},
		{"a{1,12}", Rules{MinTokens: 6, Stops: []int32{end}, Bias: []sample.Bias{{Token: end, Value: most}}}, "aaaaaa", ""},
		{"aa", Rules{MinTokens: 6, Stops: []int32{end}}, "aa", "exclude every token"},
		{"(ab|cd)+", Rules{Allowed: []int32{'a' - ' ', 'b' - ' ', 'z' - ' ', end}, MinTokens: 4, Stops: []int32{end}, Bias: []sample.Bias{{Token: end, Value: most}}}, "abab", ""},
	} {
		var text []byte
		done := make(chan Token, 1)
		r := &Request{Prompt: tokens(6, 3), MaxTokens: 20, Rules: c.rules, Grammar: &Grammar{Kind: grammar.Regex, Text: []byte(c.pattern)}}
		r.Emit = func(tk Token) {
			if tk.ID >= 0 && tk.ID != end {
				text = append(text, byte(' '+tk.ID))
			}
			if tk.Finish != 0 {
				done <- tk
			}
		}
		if _, _, err := e.Add(r); err != nil {
			t.Fatal(err)
		}
		last := <-done
		if string(text) != c.want || (last.Err != nil) != (c.err != "") || !strings.Contains(fmt.Sprint(last.Err), c.err) || c.err == "" && last.Finish != FinishStop {
			t.Errorf("%s with %+v: %q, finish %d, %v; want %q, %q", c.pattern, c.rules, text, last.Finish, last.Err, c.want, c.err)
		}
	}
	stop()
	<-e.Done()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// While a mask is not known its request sits out, and others run. It holds the place of its rank.
func TestMaskIsNotReady(t *testing.T) {
	ready := make(chan struct{})
	b := newBench(t, small(), func(o *Options) {
		guided(o)
		v := o.Vocabulary
		o.Vocabulary = func() (masks.Vocabulary, error) { <-ready; return v() }
	}).start()
	slow := b.caller(tokens(6, 1), 10)
	slow.Grammar = &testGrammars[2]
	b.add(slow)
	for i := range 4 {
		other := b.caller(tokens(6, 2+i), 8)
		b.add(other)
		if other.wait(); len(other.tokens) != 8 {
			t.Errorf("%d tokens beside a request that waits", len(other.tokens))
		}
	}
	b.settled()
	if s := b.Stats(); s.SatOut < 20 || s.Scheduler.Running != 1 || len(slow.tokens) != 0 {
		t.Errorf("%+v", s)
	}
	gone := b.caller(tokens(6, 1), 10) // it ends before its mask is known
	gone.Grammar = &testGrammars[0]
	b.Abort(b.add(gone))
	close(ready)
	slow.wait()
	if want, _ := walkAlone(t, *slow.Grammar, slow.Prompt, 7, 10); !slices.Equal(slow.tokens, want) {
		t.Errorf("%v, want %v", slow.tokens, want)
	}
}

// A request that cannot continue ends with an error that says why, and no others end.
func TestConstrainedRequestCannotContinue(t *testing.T) {
	b := newBench(t, small(), guided).start()
	other := b.caller(tokens(5, 9), 40)
	b.add(other)
	for _, c := range []struct {
		g       Grammar
		output  string
		outside bool
		want    error
		text    string
	}{
		{Grammar{Kind: grammar.Regex, Text: []byte("a(")}, "", false, nil, "regex"},
		{Grammar{Kind: grammar.Regex, Text: []byte("aé")}, "", false, grammar.ErrDeadEnd, "after 1 tokens"},
		{Grammar{Kind: grammar.Regex, Text: []byte("abc")}, "x", false, grammar.ErrRefused, "after 0 tokens"},
		{Grammar{Kind: grammar.Regex, Text: []byte("abc")}, "a", true, nil, "exclude every token"},
		{Grammar{Kind: grammar.Regex, Text: []byte("ab")}, "a", false, nil, "exclude every token"}, // by the rules
		{Grammar{Kind: grammar.Regex, Text: []byte("x+"), MaskSteps: 50}, "", false, grammar.ErrBudget, "more than 50 steps"},
	} {
		r := b.caller(tokens(5, 1), 30)
		r.Grammar = &c.g
		for _, ch := range []byte(c.output) {
			r.Output = append(r.Output, int32(ch-' '))
		}
		b.d.outside.Store(c.outside)
		if string(c.g.Text) == "ab" {
			r.Rules.BadWords = [][]int32{{'b' - ' '}}
		}
		var ends []Finish
		r.OnFinish = func(s RequestStats) { ends = append(ends, s.Finish) }
		b.add(r)
		last := r.wait()
		if last.Finish != FinishError || !errors.Is(last.Err, ErrConstraint) || c.want != nil && !errors.Is(last.Err, c.want) || !strings.Contains(fmt.Sprint(last.Err), c.text) {
			t.Errorf("%s: %+v, want %v with %q", c.g.Text, last, c.want, c.text)
		}
		b.settled()
		if !slices.Equal(ends, []Finish{FinishError}) {
			t.Errorf("%s: ends reported %v", c.g.Text, ends)
		}
	}
	if other.wait(); len(other.tokens) != 40 {
		t.Errorf("%d tokens beside them", len(other.tokens))
	}
}

// A worker may have computed, or have failed, before the step looks at the guide that it advanced.
// A failure ends the request before another step, and a mask delays none.
func TestWorkerIsFasterThanStep(t *testing.T) {
	for text, want := range map[string]error{"a": nil, "x": grammar.ErrRefused} {
		b := newBench(t, small(), guided).start()
		r := b.caller(tokens(5, 1), 8)
		r.Grammar = &Grammar{Kind: grammar.Regex, Text: []byte("a[b-y]+")}
		r.OnAdded = func(int) { // on the step goroutine, before the request's first step
			for id, run := range b.live {
				ready := func() {
					for !run.guide.Ready() {
						runtime.Gosched()
					}
				}
				ready()
				b.settleGuides()
				run.guide.Advance(b.masks, 1, int32(text[0]-' '))
				ready()
				b.awaitGuide(id, run)
				if waits := len(b.guided) > 0; waits != (want != nil) {
					t.Errorf("after %s: waits %v", text, waits)
				}
			}
		}
		b.add(r)
		last := r.wait()
		if want == nil {
			if last.Finish != FinishStop && last.Finish != FinishLength {
				t.Errorf("after %s: %+v", text, last)
			}
		} else if !errors.Is(last.Err, want) || !errors.Is(last.Err, ErrConstraint) || len(r.tokens) > 0 {
			t.Errorf("after %s: %+v after %d tokens, want %v", text, last, len(r.tokens), want)
		}
	}
}

func TestConstrainedWithoutVocabulary(t *testing.T) {
	b := newBench(t, small(), nil).start()
	r := b.caller(tokens(5, 1), 4)
	r.Grammar = &testGrammars[0]
	if _, _, err := b.Add(&r.Request); !errors.Is(err, ErrGrammar) {
		t.Errorf("%v", err)
	}
}

// twinWords is a vocabulary of printable ASCII, other pairs of letters, and a token that ends.
func twinWords(vocab int) *grammar.Vocabulary {
	tokens := make([][]byte, vocab)
	for id := range vocab - 1 {
		if tokens[id] = []byte{byte(' ' + id)}; id >= 95 {
			tokens[id] = []byte{byte('a' + id%26), byte('a' + id/26%26)}
		}
	}
	return grammar.NewVocabulary(tokens, nil, []int32{int32(vocab - 1)})
}
