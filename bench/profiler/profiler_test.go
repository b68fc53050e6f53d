package profiler

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/engine"
)

// small returns options of the built-in model with few shapes.
func small() Options {
	return Options{
		Load:  engine.LoadOptions{Model: engine.Builtin, Device: "cpu", MaxSeqs: 8, MaxBatchedTokens: 128, MaxModelLen: 512, KVMemory: 16 << 20},
		Model: "tandem-builtin", Budget: time.Minute, Log: io.Discard, rounds: 2,
	}
}

// A measurement gives a profile that can be read, with points for each kind of work and shapes that
// were not fitted. Equal machines are not assumed: no time is checked.
func TestMeasure(t *testing.T) {
	r, err := Measure(t.Context(), small())
	if err != nil && !errors.Is(err, ErrFit) { // a busy machine
		t.Fatal(err)
	}
	p := r.Profile
	p.Transfer = profile.Transfer{BytesPerSecond: 1e9}
	var b bytes.Buffer
	if err := p.Write(&b); err != nil {
		t.Fatal(err)
	}
	again, err := profile.Read(bytes.NewReader(b.Bytes()))
	if err != nil {
		t.Fatalf("%v\n%s", err, b.String())
	}
	if n := strings.Count(b.String(), "\n"); n > 35 {
		t.Errorf("%d lines:\n%s", n, b.String())
	}
	if again.Step.Source != profile.Measured || again.Model.Layers != 4 || again.Model.KVBytes != 2048 || again.Model.MaxLen != 512 || again.Start.Load <= 0 {
		t.Errorf("%+v", again)
	}
	if len(p.Step.Decode.Points) < 8 || len(p.Step.Prefill.Points) < 6 || len(r.HeldOut) < 4 {
		t.Errorf("%d points of decoding, %d of prompts, %d shapes that were not fitted", len(p.Step.Decode.Points), len(p.Step.Prefill.Points), len(r.HeldOut))
	}
	kinds := map[string]bool{}
	for i := range r.HeldOut {
		c := &r.HeldOut[i]
		kinds[strings.Fields(c.Shape)[0]] = true
		if c.Predicted <= 0 || c.Measured <= 0 || strings.Contains(c.Shape, " and ") != (strings.Contains(c.Shape, "chunk") && strings.Contains(c.Shape, "sequences")) {
			t.Errorf("%+v", c)
		}
	}
	if !kinds["chunk"] || len(kinds) < 2 {
		t.Errorf("%v", kinds)
	}
}

// The steps of a shape are found among others, and its time is that of the round that was fastest.
func TestBestRound(t *testing.T) {
	s := &sweep{}
	o := &shape{seqs: 2, ctx: 100}
	at := time.Unix(0, 0)
	play := func(took time.Duration) {
		var steps []step
		for i := range warmSteps + 5 {
			at = at.Add(took + 5*time.Microsecond)
			steps = append(steps, step{shape: profile.Shape{Streams: 2, ContextSum: 200 + 2*i}, took: took, ended: at, emitted: at.Add(time.Microsecond)},
				step{shape: profile.Shape{Streams: 1, ContextSum: 100}, took: time.Hour, ended: at})
		}
		s.keep(o, steps)
	}
	play(4 * time.Millisecond)
	play(2 * time.Millisecond)
	play(3 * time.Millisecond)
	if b := o.best(); len(o.rounds) != 3 || b.Seconds != 0.002 || b.Streams != 2 || b.ContextSum != 200+2*(warmSteps+2) {
		t.Errorf("%+v", o.rounds)
	}
	if n := o.noise(); n < 0.49 || n > 0.51 {
		t.Errorf("noise %g", n)
	}
	if b := quantile(s.between, 0.5); b < 4e-6 || b > 6e-6 {
		t.Errorf("between steps: %g", b)
	}
}

// Wrong options and an interrupted measurement end with an error.
func TestMeasureRefuses(t *testing.T) {
	o := small()
	o.Budget = 0
	if _, err := Measure(t.Context(), o); !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), "--budget") {
		t.Error(err)
	}
	o = small()
	o.Load.MaxModelLen = 64
	if _, err := Measure(t.Context(), o); !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), "--max-model-len") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Measure(ctx, small()); err == nil {
		t.Error("a cancelled measurement has no error")
	}
}

// Counts agree with their nouns.
func TestShapeText(t *testing.T) {
	for want, s := range map[string]shape{
		"1 sequence of 300 tokens":                                {seqs: 1, ctx: 300},
		"3 sequences of 1 token on average":                       {seqs: 3, ctx: 1, uneven: true},
		"chunk of 1 token after 512":                              {chunk: 1, start: 512},
		"chunk of 100 tokens after 1, and 1 sequence of 2 tokens": {chunk: 100, start: 1, seqs: 1, ctx: 2},
	} {
		if got := s.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := was(1) + ", " + was(2); got != "1 shape was, 2 shapes were" {
		t.Error(got)
	}
}
