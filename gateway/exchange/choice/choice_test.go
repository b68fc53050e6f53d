package choice

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// naive is the same life written with flags: what is set together, and when, is stated
// at each event instead of following from a state.
type naive struct {
	done, gone, accepted, paused, asked bool
	attempt                             uint32
	tokens, from, failures, handed      int
	tried, refused                      []int
	lost, again                         time.Time
	pause                               time.Duration
}

func (n *naive) seek() { n.again, n.paused, n.asked, n.accepted = time.Time{}, false, false, false }

func (n *naive) failed(node int, f Failure, now time.Time, l Limits) Action {
	accepted := n.accepted
	n.seek()
	moved := n.tokens > n.from
	if moved {
		n.tried, n.refused, n.failures, n.handed = nil, nil, 0, 0
	}
	if n.lost.IsZero() {
		n.lost = now
	}
	if accepted {
		n.refused = nil
	}
	n.tried = append(n.tried, node)
	if f.Refused && !moved && (!accepted || !f.HandedOver) {
		n.refused = append(n.refused, node)
	}
	handed := false
	switch unseen := f.Lost && !accepted; {
	case f.Drained && accepted && !moved && n.handed < 16:
		n.handed++
		handed = true
	case moved, unseen, n.tokens > 0 && f.Untouched:
	default:
		n.failures++
	}
	if f.Final || n.failures >= l.MaxAttempts {
		n.gone = true
		return GiveUp
	}
	if n.tokens > 0 {
		return Resume
	}
	if handed {
		return Move
	}
	return Retry
}

func (n *naive) noNode(now time.Time, l Limits) Action {
	if n.tokens == 0 {
		n.gone = true
		return GiveUp
	}
	if n.lost.IsZero() {
		n.lost = now
	}
	if now.Sub(n.lost) >= l.ResumeTimeout {
		n.gone = true
		return GiveUp
	}
	n.tried, n.refused = nil, nil
	switch {
	case n.pause == 0:
		n.pause = firstBackoff
	case n.pause*2 > maxBackoff:
		n.pause = maxBackoff
	default:
		n.pause *= 2
	}
	n.again = now.Add(n.pause)
	return Wait
}

// state is what the flags add up to.
func (n *naive) state() State {
	switch {
	case n.gone:
		return GivenUp
	case n.done:
		return Finished
	case !n.again.IsZero():
		return Waiting
	case n.paused:
		return Paused
	case n.accepted:
		return Running
	case n.asked:
		return Asked
	}
	return Seeking
}

// compare reports whether both are in one state, and Check finds nothing.
func compare(t *testing.T, seed uint64, step int, c *Choice[int], n *naive) {
	t.Helper()
	excluded := func(node int) bool {
		return slices.Contains(n.refused, node) || n.tokens > 0 && slices.Contains(n.tried, node)
	}
	for node := range 4 {
		if c.Excludes(node) != excluded(node) {
			t.Fatalf("seed %d, step %d: node %d is excluded: %v, want %v: %+v", seed, step, node, c.Excludes(node), excluded(node), *n)
		}
	}
	if err := c.Check(); err != nil || c.State != n.state() || c.Attempt != n.attempt || c.Started() != (n.tokens > 0) || c.Fresh() != (n.tokens == n.from) ||
		c.From != n.from || !slices.Equal(c.Tried, n.tried) || !c.RetryAt.Equal(n.again) || c.failures != n.failures || c.handed != n.handed || c.Live() != (n.state() == Asked || n.state() == Running) {
		t.Fatalf("seed %d, step %d: %v\ngot  %+v\nwant %v %+v", seed, step, err, *c, n.state(), *n)
	}
}

// Random events, in any order that a caller can see, lead where the flags lead.
func TestRandomEvents(t *testing.T) {
	limits := Limits{MaxAttempts: 3, ResumeTimeout: 5 * time.Second}
	met := map[State]int{}
	for seed := range uint64(20000) {
		r := rand.New(rand.NewPCG(seed, 17))
		c, n, now := new(Choice[int]), new(naive), time.Unix(1000, 0)
		for step := range 60 {
			now = now.Add(time.Duration(r.IntN(400)) * time.Millisecond)
			node := r.IntN(4)
			f := Failure{Refused: r.IntN(2) == 0, Final: r.IntN(12) == 0}
			if f.HandedOver = f.Refused && r.IntN(2) == 0; !f.Refused {
				f.Lost = r.IntN(2) == 0
			}
			f.Drained = f.HandedOver && r.IntN(2) == 0
			f.Untouched = r.IntN(2) == 0
			var got, want Action
			switch s := c.State; {
			case s == Finished || s == GivenUp:
				met[s]++
				goto next
			case s == Waiting || s == Paused:
				c.Seek()
				n.seek()
			case s == Seeking && r.IntN(4) == 0:
				got, want = c.NoNode(now, limits), n.noNode(now, limits)
			case s == Seeking:
				c.Begin()
				n.attempt, n.from = n.attempt+1, n.tokens
				if r.IntN(4) == 0 { // it cannot be sent
					got, want = c.Failed(node, f, now, limits), n.failed(node, f, now, limits)
					break
				}
				c.Sent()
				n.asked = true
			case r.IntN(5) == 0:
				got, want = c.Failed(node, f, now, limits), n.failed(node, f, now, limits)
				if got == Resume && r.IntN(3) == 0 { // its turn among those that resume comes later
					at := now.Add(time.Second)
					c.Delay(at)
					n.again = at
				}
			case r.IntN(12) == 0:
				c.Pause()
				n.paused, n.asked, n.accepted = true, false, false
			case r.IntN(20) == 0:
				c.Finish()
				n.done = true
			default:
				c.Accepted()
				n.accepted, n.lost, n.pause = true, time.Time{}, 0
				if r.IntN(2) == 0 {
					c.Token()
					n.tokens++
				}
			}
			if got != want {
				t.Fatalf("seed %d, step %d: action %v, want %v", seed, step, got, want)
			}
			met[c.State]++
			compare(t, seed, step, c, n)
		}
	next:
	}
	for s := Seeking; s <= GivenUp; s++ {
		if met[s] < 1000 {
			t.Errorf("%v was met %d times, want 1000", s, met[s])
		}
	}
}

// A choice without tokens is given up after MaxAttempts failures of nodes that had it.
func TestAttemptsAreBounded(t *testing.T) {
	var c Choice[string]
	l := Limits{MaxAttempts: 3, ResumeTimeout: time.Second}
	now := time.Unix(1000, 0)
	for i, want := range []Action{Retry, Retry, GiveUp} {
		c.Begin()
		c.Sent()
		if got := c.Failed("n", Failure{}, now, l); got != want {
			t.Fatalf("failure %d: %v, want %v", i, got, want)
		}
	}
	if c.State != GivenUp {
		t.Fatal(c.State)
	}
}

// Nodes that are drained one after the other hand a choice without tokens on. Neither
// its attempts nor the retry budget are used up, until that has gone on for too long.
func TestDrainedNodesAreNoFailures(t *testing.T) {
	c, l, drained := new(Choice[string]), Limits{MaxAttempts: 2, ResumeTimeout: time.Second}, Failure{Refused: true, HandedOver: true, Drained: true}
	fail := func(accepted bool) Action {
		c.Begin()
		c.Sent()
		if accepted {
			c.Accepted()
		}
		return c.Failed("n", drained, time.Unix(1000, 0), l)
	}
	for i := range maxHandovers {
		if got := fail(true); got != Move || c.Excludes("n") {
			t.Fatalf("drained node %d: %v, excluded %v", i, got, c.Excludes("n"))
		}
	}
	if got := fail(true); got != Retry {
		t.Errorf("one more: %v", got)
	}
	if got := fail(true); got != GiveUp {
		t.Errorf("and another one: %v", got)
	}
	c = new(Choice[string])
	if got := fail(false); got != Retry || !c.Excludes("n") {
		t.Errorf("a node that did not take it: %v, excluded %v", got, c.Excludes("n"))
	}
}

// A choice with tokens that no node takes waits longer each time, and is given up
// ResumeTimeout after its node was lost.
func TestWaitsAreBounded(t *testing.T) {
	var c Choice[string]
	l := Limits{MaxAttempts: 3, ResumeTimeout: 3 * time.Second}
	now := time.Unix(1000, 0)
	lost := now
	c.Begin()
	c.Sent()
	c.Accepted()
	c.Token()
	if a := c.Failed("n", Failure{Lost: true}, now, l); a != Resume || !c.Excludes("n") {
		t.Fatal(a, c.Excludes("n"))
	}
	var waits []time.Duration
	for c.NoNode(now, l) == Wait {
		waits = append(waits, c.RetryAt.Sub(now))
		now = c.RetryAt
		c.Seek()
		if c.Excludes("n") {
			t.Fatal("a node that was lost is never tried again")
		}
	}
	if want := []time.Duration{50e6, 100e6, 200e6, 400e6, 800e6, 1e9, 1e9}; !slices.Equal(waits, want) || now.Sub(lost) < l.ResumeTimeout || c.State != GivenUp {
		t.Errorf("waited %v, want %v; given up after %v, %v", waits, want, now.Sub(lost), c.State)
	}
}

// What Check is there to find.
func TestCheckSeesFaults(t *testing.T) {
	for name, c := range map[string]Choice[int]{
		"state":                      {State: GivenUp + 1},
		"waits without a time":       {State: Waiting, Attempt: 1, tokens: 1},
		"a time without a wait":      {RetryAt: time.Unix(1, 0)},
		"waits without a token":      {State: Waiting, RetryAt: time.Unix(1, 0)},
		"runs and is lost":           {State: Running, Attempt: 1, lostAt: time.Unix(1, 0)},
		"runs without an attempt":    {State: Running},
		"tokens without an attempt":  {tokens: 1},
		"from beyond":                {Attempt: 1, From: 1},
		"failures without attempts":  {failures: 1},
		"handovers without attempts": {handed: 1},
		"handovers without end":      {Attempt: 99, handed: maxHandovers + 1},
		"refused that was not tried": {refused: []int{1}},
	} {
		if c.Check() == nil {
			t.Errorf("%s: Check finds nothing in %+v", name, c)
		}
	}
}
