package engine

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/bits"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/draft"
)

// drafted runs the same requests, several at once, on a model with a draft model
// or without, and returns their tokens and what was counted.
func drafted(t *testing.T, name, small string) (tokens [][]int32, s Stats) {
	t.Helper()
	const checkpoints = "model/testdata/"
	o := LoadOptions{Model: checkpoints + name, Threads: 2, KVMemory: 4 << 20, MaxSeqs: 8, MaxBatchedTokens: 64, MaxModelLen: 160}
	if small != "" {
		o.Speculation = Speculation{Tokens: 4, Model: checkpoints + small}
	}
	l, err := Load(o)
	if err != nil {
		t.Fatal(err)
	}
	e, err := New(l.Options())
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	go e.Run(ctx)
	defer func() {
		stop()
		<-e.Done()
		if d, ok := l.Drafter.(*draft.Drafter); ok {
			if u := d.Usage(); u.Used != 0 || u.Cached == 0 {
				t.Errorf("the draft model's blocks when all have ended: %+v", u)
			}
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	samplings := []Sampling{{}, {Temperature: 0.8}, {Temperature: 1.3, TopP: 0.9, TopK: 20}, {Temperature: 0.7, MinP: 0.1}}
	rules := []Rules{{}, {Repetition: 1.3, Presence: 0.4, Frequency: 0.2}, {MinTokens: 5, Stops: []int32{1, 2}, Bias: []Bias{{Token: 9, Value: 3}}}}
	done := make(chan error, 12)
	tokens = make([][]int32, cap(done))
	for i := range cap(done) {
		var out []int32
		r := &Request{Prompt: make([]int32, 3+11*i), MaxTokens: 30, Sampling: samplings[i%len(samplings)], Rules: rules[i%len(rules)], Root: 7}
		r.Sampling.Seed = uint64(i)
		for p := range r.Prompt {
			r.Prompt[p] = int32(p*(i/2+1)) % 100 // each two share a prefix
		}
		r.Emit = func(tok Token) {
			if out = append(out, tok.ID); tok.Finish != 0 {
				tokens[i] = out
				done <- tok.Err
			}
		}
		if _, _, err := e.Add(r); err != nil {
			t.Fatal(err)
		}
	}
	for range cap(done) {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Check(); err != nil {
		t.Error(err)
	}
	return tokens, e.Stats()
}

// A draft model changes no token, whatever the sampling. The model itself guesses
// what it is going to draw, at any temperature; another one seldom does.
func TestDraftModelChangesNothing(t *testing.T) {
	plain, _ := drafted(t, "qwen3", "")
	for draft, c := range map[string]struct{ least, most float64 }{"qwen3": {0.97, 1}, "mha": {0, 0.5}} {
		got, s := drafted(t, "qwen3", draft)
		for i := range got {
			if !slices.Equal(got[i], plain[i]) {
				t.Errorf("request %d: %v with a draft model, %v without", i, got[i], plain[i])
			}
		}
		accepted := uint64(0)
		for _, n := range s.Scheduler.Accepted {
			accepted += n
		}
		// What was guessed behind a stop token counts as refused.
		share := float64(accepted) / float64(s.Scheduler.Drafted)
		t.Logf("%s guesses: %d of %d accepted in %d steps", draft, accepted, s.Scheduler.Drafted, s.Steps)
		if s.Scheduler.Drafts == 0 || share < c.least || share > c.most {
			t.Errorf("%s: %.3f of %d guesses were accepted, want %v to %v", draft, share, s.Scheduler.Drafted, c.least, c.most)
		}
	}
}

// unable is a Drafter that fails whenever it is asked.
type unable struct{}

func (unable) Draft([]draft.Request) error { return draft.ErrStep }
func (unable) Remove(uint64)               {}
func (unable) Check() error                { return nil }

// A drafter that fails in every step costs no token, and is not spoken of in each.
func TestDraftFailsQuietly(t *testing.T) {
	l, err := Load(LoadOptions{Model: "model/testdata/qwen3", Threads: 1, KVMemory: 4 << 20, Speculation: Speculation{Tokens: 2, Model: "model/testdata/qwen3"}})
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	o := l.Options()
	o.Drafter, o.Logger = unable{}, slog.New(slog.NewTextHandler(&said, nil))
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	go e.Run(ctx)
	tokens, done := 0, make(chan error, 1)
	r := &Request{Prompt: []int32{5, 6, 7}, MaxTokens: 40, Root: 1}
	r.Emit = func(tok Token) {
		if tokens++; tok.Finish != 0 {
			done <- tok.Err
		}
	}
	if _, _, err := e.Add(r); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	failed := e.Stats().FailedDrafts
	stop()
	<-e.Done()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if n := strings.Count(said.String(), "draft model step failed"); tokens != 40 || failed < 30 || n != bits.Len64(failed) {
		t.Errorf("%d tokens, %d failures, said %d times:\n%s", tokens, failed, n, said.String())
	}
}

// What cannot guess for a model is refused with the name of its flag.
func TestDraftModelRefusals(t *testing.T) {
	const dir = "model/testdata/"
	for says, o := range map[string]LoadOptions{
		"--speculative-config: the draft model model/testdata/mha has 256 tokens in its vocabulary, the model gqa-tied 512": {
			Model: dir + "gqa-tied", Speculation: Speculation{Tokens: 2, Model: dir + "mha"}},
		"--speculative-config: engine: cannot load the model " + dir + "none": {Model: dir + "qwen3", Speculation: Speculation{Tokens: 2, Model: dir + "none"}},
		"want at most 16 tokens": {Model: dir + "qwen3", Speculation: Speculation{Tokens: 17, Model: dir + "mha"}},
	} {
		l, err := Load(o)
		if err == nil {
			_ = l.Close()
		}
		if err == nil || !strings.Contains(err.Error(), says) || !errors.Is(err, ErrOption) && !errors.Is(err, ErrModel) {
			t.Errorf("err = %v, want %q", err, says)
		}
	}
}
