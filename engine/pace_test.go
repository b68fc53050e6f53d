package engine

import (
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Over steps whose scored rows cost a fixed time each, what a step scores settles at
// one step's time next to streams, and at idleScoreTime without.
func TestScorePace(t *testing.T) {
	const step, row = 8 * time.Millisecond, 2 * time.Millisecond
	var p scorePace
	stream := scheduler.Seq{Tokens: []int32{1}, Sample: true}
	run := func(seqs ...scheduler.Seq) time.Duration {
		took := step
		for _, q := range seqs {
			took += time.Duration(q.ScoreTo-q.ScoreFrom) * row
		}
		p.record(scheduler.Batch{Seqs: seqs}, took)
		return took
	}
	scored := func() scheduler.Seq {
		n := p.limit()
		return scheduler.Seq{Tokens: make([]int32, n), ScoreTo: n}
	}
	if p.limit() != firstScoreRows {
		t.Errorf("%d rows before the first was measured", p.limit())
	}
	for range 20 {
		run(stream)
	}
	run(stream, scored())
	for range 20 {
		if took := run(stream, scored()); took > 2*step {
			t.Fatalf("a step of %v took %v with what was scored", step, took)
		}
	}
	if p.limit() != 4 {
		t.Errorf("%d rows next to a stream, want 4", p.limit())
	}
	for range 20 {
		run(scored())
	}
	if n := p.limit(); n < 40 || n > 50 {
		t.Errorf("%d rows with nobody else there, want %v of work", n, idleScoreTime)
	}
	p.record(scheduler.Batch{Seqs: []scheduler.Seq{{Tokens: make([]int32, 500)}, scored()}}, time.Hour)
	if n := p.limit(); n < 40 {
		t.Errorf("a step with a chunk made it %d rows", n)
	}
	p = scorePace{row: time.Hour, decoding: true}
	if p.limit() != 1 {
		t.Errorf("%d rows an hour each", p.limit())
	}
}

// A step's tokens settle where it takes the target, from above and from below, on a
// slow device and on one for which the bound is none; steps that are not full and take
// less change nothing, and steps have a least size however slow they are.
func TestStepPace(t *testing.T) {
	const target, most = 100 * time.Millisecond, 2048
	for _, c := range []struct {
		perToken, fixed time.Duration
		least, most     int
	}{
		{800 * time.Microsecond, 0, 120, 126},
		{800 * time.Microsecond, 10 * time.Millisecond, 105, 113},
		{20 * time.Microsecond, 8 * time.Millisecond, most, most},
		{10 * time.Millisecond, 0, leastStepTokens, leastStepTokens},
		{0, 0, most, most}, // as in virtual time
	} {
		p := newStepPace(target, most)
		step := func(tokens int) { p.record(tokens, c.fixed+time.Duration(tokens)*c.perToken) }
		for range 20 {
			step(p.limit)
		}
		if p.limit < c.least || p.limit > c.most {
			t.Errorf("%v a token and %v: %d tokens a step, want %d to %d", c.perToken, c.fixed, p.limit, c.least, c.most)
		}
		before := p.limit
		step(before / 4)
		if p.limit != before {
			t.Errorf("%v a token: a short step changed %d to %d", c.perToken, before, p.limit)
		}
		p.record(1, time.Minute) // the machine slept
		for range 20 {
			step(p.limit)
		}
		if p.limit < c.least || p.limit > c.most {
			t.Errorf("%v a token: %d tokens a step after a stall, want %d to %d", c.perToken, p.limit, c.least, c.most)
		}
	}
	p := newStepPace(0, most)
	if p.record(most, time.Hour); p.limit != most {
		t.Errorf("without a target: %d", p.limit)
	}
}
