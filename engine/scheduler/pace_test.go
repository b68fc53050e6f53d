package scheduler

import (
	"testing"
	"time"
)

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
		p := NewPace(target, most)
		step := func(tokens int) { p.Record(tokens, c.fixed+time.Duration(tokens)*c.perToken) }
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
		p.Record(1, time.Minute) // the machine slept
		for range 20 {
			step(p.limit)
		}
		if p.limit < c.least || p.limit > c.most {
			t.Errorf("%v a token: %d tokens a step after a stall, want %d to %d", c.perToken, p.limit, c.least, c.most)
		}
	}
	p := NewPace(0, most)
	if p.Record(most, time.Hour); p.limit != most {
		t.Errorf("without a target: %d", p.limit)
	}
}
