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
