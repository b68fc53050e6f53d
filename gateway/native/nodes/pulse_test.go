package nodes

import (
	"testing"
	"time"
)

func TestPulse(t *testing.T) {
	var p pulse
	at := time.Unix(100, 0)
	for i, c := range []struct {
		after        time.Duration
		beats, steps uint64
		busy         bool
		still        time.Duration // in seconds
		quiet        time.Duration
	}{
		{1, 0, 0, false, 0, 0}, // nothing heard yet
		{1, 0, 0, false, 0, 0},
		{1, 1, 5, true, 0, 0}, // its first heartbeat
		{1, 2, 5, true, 1, 0}, // no step
		{1, 2, 5, true, 2, 1}, // nor a heartbeat
		{1, 3, 6, true, 0, 0},
		{1, 4, 6, false, 0, 0}, // nothing to do
		{5, 4, 6, false, 5, 5}, // not even heartbeats
		{1, 5, 6, true, 6, 0},  // work, and no step since
		{1, 6, 7, true, 0, 0},
		{1, 0, 0, false, 0, 0}, // a new connection
		{1, 1, 7, true, 1, 0},  // to a node that stands still
		{1, 2, 9, true, 0, 0},
	} {
		at = at.Add(c.after * time.Second)
		if still := p.beat(at, c.beats, c.steps, c.busy); still != c.still*time.Second || at.Sub(p.beatAt) != c.quiet*time.Second {
			t.Errorf("%d: still for %v, quiet for %v, want %+v", i, still, at.Sub(p.beatAt), c)
		}
	}
}
