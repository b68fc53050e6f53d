package route

import (
	"testing"
	"time"

	"github.com/tandem-serving/tandem/internal/lengths"
)

// The larger of a heartbeat's counts and the gateway's own counts.
func TestMerge(t *testing.T) {
	s := State{Usable: true, Held: 7, Load: 99}
	s.Merge(&Report{Running: 2, Waiting: 3, Held: 1, Queued: 10, Rate: 5}, Sent{Requests: 4, Queued: 30}, 0)
	if want := (State{Usable: true, Held: 7, Load: 6, Queued: 30, Rate: 5}); s != want {
		t.Errorf("%+v, want %+v", s, want)
	}
	s.Merge(&Report{}, Sent{Requests: 4}, 0)
	if s.Load != 4 || s.Queued != 0 || s.Rate != 0 {
		t.Errorf("without a heartbeat: %+v", s)
	}
}

// Counts by length merge as the whole queue does. Of a node that does not tell them,
// because it computes prompts in order of arrival, none are believed.
func TestMergeLengths(t *testing.T) {
	var s State
	told := Report{Queued: 2000, ShortFirst: true, Lengths: lengths.Queue{10, 300, 300}}
	s.Merge(&told, Sent{Queued: 100, Lengths: lengths.Queue{100, 100, 100}}, 0)
	if want := (Lengths{100, 300, 300}); !s.ShortFirst || s.Lengths != want {
		t.Errorf("%v %v, want %v", s.ShortFirst, s.Lengths, want)
	}
	s.Merge(&Report{Queued: 2000}, Sent{Queued: 100, Lengths: lengths.Queue{100, 100, 100}}, 0)
	if s.ShortFirst {
		t.Error("a node of the version before is taken to compute short prompts first")
	}
}

// Behind 50,000 tokens of long prompts a short one waits for a step where the node
// computes the least work first, and for all of them where it does not; and so it goes
// there, or stays on the decode node.
func TestShortPromptsPassLongOnes(t *testing.T) {
	tb := New(fleet(1, ""), fleet(1, ""))
	v := View{Decode: states(1, 1000), Prefill: states(1, 1000)}
	v.Decode[0].Load = 10
	far := &v.Prefill[0]
	far.Queued, far.ShortFirst = 50_000, true
	for _, c := range []struct {
		name   string
		tokens int
		change func()
		wait   time.Duration
		reason Reason
	}{
		{"a short prompt", 64, func() {}, (64 + 50) * time.Millisecond, ReasonRemote},
		{"behind others as short", 64, func() { far.Lengths = Lengths{300, 300, 300} }, (64 + 300 + 50) * time.Millisecond, ReasonLocal},
		{"behind ones that are longer", 64, func() { far.Lengths = Lengths{0, 5000, 5000} }, (64 + 50) * time.Millisecond, ReasonRemote},
		{"a long one", 1025, func() {}, (1025 + 50_000) * time.Millisecond, ReasonRemote}, // it would pause ten streams for a second
		{"in order of arrival", 64, func() { far.ShortFirst = false }, (64 + 50_000) * time.Millisecond, ReasonLocal},
		{"an idle node", 64, func() { far.ShortFirst, far.Queued = true, 0 }, 64 * time.Millisecond, ReasonRemote},
	} {
		c.change()
		d := tb.Pick(Request{Key: 9, Uncached: c.tokens, MinRemote: 64}, v, nil)
		if got := d.Remote - 2*time.Millisecond; got.Round(time.Millisecond) != c.wait || d.PrefillReason != c.reason {
			t.Errorf("%s: %v and reason %s, want %v and %s", c.name, got, d.PrefillReason, c.wait, c.reason)
		}
	}
}

// A node takes as many requests as it runs, and waiting more, without those of other gateways. One
// whose requests wait for KV memory takes those that it runs.
func TestRoomOfAReport(t *testing.T) {
	for _, c := range []struct {
		r                           Report
		running, waiting, own, want int
	}{
		{Report{}, 8, 2, 0, 10},
		{Report{Running: 5, Held: 1}, 8, 2, 6, 10},
		{Report{Running: 5, Held: 1}, 8, 2, 4, 8},
		{Report{Running: 5, Waiting: 3}, 8, 2, 8, 7},
		{Report{Waiting: 3}, 8, 2, 3, 3},
		{Report{Running: 20}, 8, 2, 0, 0},
	} {
		if got := c.r.Room(c.running, c.waiting, c.own); got != c.want {
			t.Errorf("%+v: room for %d, want %d", c, got, c.want)
		}
	}
	r := Report{Rate: 10_000}
	if slow, fast := (&Report{}).Backlog(time.Second), r.Backlog(time.Second/2); slow != leastBacklog || fast != 5000 {
		t.Errorf("%d and %d tokens", slow, fast)
	}
}
