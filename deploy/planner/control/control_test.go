package control

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// options are those of a kind of node whose prompts take a second for 1,000 tokens.
func options() Options {
	return Options{
		Costs: Costs{PromptToken: 1e-3, Fixed: 10e-3, PerSeq: 1e-3, PerCtx: 1e-7, KVTokens: 1e6, Start: 40 * time.Second},
		TTFT:  2 * time.Second, ITL: 50 * time.Millisecond, Most: [roles]int{50, 50},
	}
}

// play ticks a controller with a constant demand, whose nodes are as many as it wants, and returns
// its last decisions.
func play(c *Controller, from, to, tick time.Duration, change func(*Sample)) (d [roles]Decision) {
	for at := from; at < to; at += tick {
		s := Sample{At: at}
		for range 20 { // 4 s of prompts, and 2 s of answers without their fixed part, per second
			s.Arrive(c.Costs(), 1000, 0)
			s.End(c.Costs(), 1000, 450)
		}
		for r := range s.Nodes {
			s.Nodes[r].Ready = c.targets[r]
			if !c.started {
				s.Nodes[r].Ready = 3
			}
		}
		if change != nil {
			change(&s)
		}
		d = c.Tick(s)
	}
	return d
}

// The work of a load gives the number of nodes, which is reached within bounds and kept.
func TestLevel(t *testing.T) {
	c := New(options())
	d := play(c, 0, 10*time.Minute, 5*time.Second, nil)
	// Prompts: 4 s/s at a load of 0.75. Answers: 4 per second with 450 · (1 ms + 1225 · 0.1 µs) = 0.505 s
	// each, at 0.8 of the four fifths that the ITL leaves.
	if d[Prefill].Target < 5 || d[Prefill].Target > 8 || d[Decode].Target != 4 && d[Decode].Target != 3 {
		t.Errorf("%+v", d)
	}
	if d[Prefill].Need < 5.3 || d[Prefill].Need > 5.4 || d[Decode].Need < 3.1 || d[Decode].Need > 3.3 {
		t.Errorf("%+v", d)
	}
}

// Prompts that wait beyond what the nodes compute in time ask for nodes in addition.
func TestBacklog(t *testing.T) {
	c := New(options())
	before := play(c, 0, 10*time.Minute, 5*time.Second, nil)[Prefill]
	after := play(c, 10*time.Minute, 10*time.Minute+10*time.Second, 5*time.Second, func(s *Sample) { s.Backlog = 50 })[Prefill]
	if after.Target <= before.Target || after.Target > 2*before.Target || !strings.Contains(after.Why, "50.0 s of prompts wait") && after.Change != 0 {
		t.Errorf("%+v, then %+v", before, after)
	}
	if usual := play(c, 10*time.Minute+10*time.Second, 10*time.Minute+20*time.Second, 5*time.Second, func(s *Sample) { s.Backlog = 3 })[Prefill]; usual.Target != after.Target {
		t.Errorf("a usual backlog changes %d to %d", after.Target, usual.Target)
	}
}

// Without load a role shrinks after Hold, a step for each cooldown, and not while nodes are lost or do
// not report.
func TestShrink(t *testing.T) {
	c := New(options())
	play(c, 0, 10*time.Minute, 5*time.Second, nil)
	start := c.targets[Prefill]
	idle := func(s *Sample) { s.Demand = Demand{} }
	stale := func(s *Sample) { s.Demand, s.Stale = Demand{}, true }
	if d := play(c, 10*time.Minute, 14*time.Minute, 5*time.Second, idle)[Prefill]; d.Target != start {
		t.Errorf("shrinks from %d to %d within 4 minutes", start, d.Target)
	}
	if d := play(c, 14*time.Minute, 40*time.Minute, 5*time.Second, stale)[Prefill]; d.Target != start {
		t.Errorf("shrinks from %d to %d without reports", start, d.Target)
	}
	lost := func(s *Sample) {
		s.Demand = Demand{}
		if s.At%(100*time.Second) == 0 {
			s.Nodes[Prefill].Ready--
		}
	}
	if d := play(c, 40*time.Minute, 50*time.Minute, 5*time.Second, lost)[Prefill]; d.Target != start {
		t.Errorf("shrinks from %d to %d while nodes are lost", start, d.Target)
	}
	if d := play(c, 50*time.Minute, 51*time.Minute+30*time.Second, 5*time.Second, idle)[Prefill]; d.Target != start-2 {
		t.Errorf("from %d to %d in a minute and a half", start, d.Target)
	}
	if d := play(c, 52*time.Minute, 90*time.Minute, 5*time.Second, idle)[Prefill]; d.Target != 1 {
		t.Errorf("%d nodes without load", d.Target)
	}
}

// Whatever is sampled, targets stay within the bounds and steps up within theirs, and a second
// controller decides the same.
func TestRandomSamples(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 7))
		o := options()
		o.Least, o.Most = [roles]int{r.IntN(4), r.IntN(4)}, [roles]int{r.IntN(30), r.IntN(30)}
		c, twin := New(o), New(o)
		at := time.Duration(0)
		last, most, first := [roles]int{}, [roles]int{}, time.Duration(0)
		for i := range 2000 {
			at += time.Duration(r.IntN(20_000)) * time.Millisecond
			s := Sample{At: at, Backlog: r.Float64() * float64(r.IntN(3)) * 100, Stale: r.IntN(20) == 0}
			for range r.IntN(1 + i%200) {
				s.Arrive(&o.Costs, r.IntN(4000), r.IntN(4000))
				s.End(&o.Costs, r.IntN(4000), r.IntN(500))
			}
			for role := range s.Nodes {
				s.Nodes[role] = Nodes{r.IntN(30), r.IntN(5)}
			}
			if i == 0 {
				first = at
			}
			d := c.Tick(s)
			if twin.Tick(s) != d {
				t.Fatalf("seed %d, tick %d: two controllers differ", seed, i)
			}
			for role := range d {
				low, high := max(1, o.Least[role]), max(1, o.Least[role], o.Most[role])
				step := d[role].Target - last[role]
				if most[role] = max(most[role], s.Nodes[role].Ready+s.Nodes[role].Starting); at-first < firstTime { // the nodes are followed
					if want := min(max(most[role], low), high); d[role].Target != want || d[role].Change != 0 {
						t.Fatalf("seed %d, tick %d: %+v, want %d", seed, i, d[role], want)
					}
					step = 0
				}
				if d[role].Target < low || d[role].Target > high || (step != d[role].Change || step > max(leastStep, last[role])) || d[role].Change != 0 && d[role].Why == "" {
					t.Fatalf("seed %d, tick %d: %+v after %d, bounds %d to %d", seed, i, d[role], last[role], low, high)
				}
				last[role] = d[role].Target
			}
		}
	}
}

// A gateway that starts sees the nodes one after the other. It takes none of those that it has not
// seen yet from the fleet, and its targets are known from two equal ticks on.
func TestStart(t *testing.T) {
	c := New(options())
	for i, nodes := range []int{0, 1, 8, 8, 5, 8} {
		s := Sample{At: time.Duration(i) * 5 * time.Second, Stale: nodes == 0}
		for r := range s.Nodes {
			s.Nodes[r].Ready = nodes
		}
		for r, d := range c.Tick(s) {
			if want := max(1, nodes, c.targets[r]); d.Target != want || d.Change != 0 || d.Known != (i >= 3) {
				t.Errorf("tick %d, %v: %+v, want %d", i, Role(r), d, want)
			}
		}
	}
	if c.targets != [roles]int{8, 8} {
		t.Errorf("%v", c.targets)
	}
	empty := New(options())
	for at := time.Duration(0); at < time.Hour; at += 5 * time.Second {
		if d := empty.Tick(Sample{At: at, Stale: true})[Decode]; d.Known || d.Target != 1 {
			t.Fatalf("without nodes: %+v", d)
		}
	}
}

// Figures that are not finite, or negative, decide nothing and leave no trace.
func TestBadSample(t *testing.T) {
	c := New(options())
	before := play(c, 0, 10*time.Minute, 5*time.Second, nil)
	at := 10 * time.Minute
	for _, x := range []float64{math.NaN(), math.Inf(1), -1} {
		for _, field := range []func(s *Sample) *float64{
			func(s *Sample) *float64 { return &s.Work }, func(s *Sample) *float64 { return &s.Backlog }, func(s *Sample) *float64 { return &s.DecodedSq },
		} {
			d := play(c, at, at+5*time.Second, 5*time.Second, func(s *Sample) { *field(s) = x })
			if at += 5 * time.Second; d[Prefill].Change != 0 || d[Decode].Change != 0 {
				t.Errorf("%g: %+v", x, d)
			}
		}
	}
	if after := play(c, at, at+10*time.Minute, 5*time.Second, nil); after[Prefill].Target != before[Prefill].Target || after[Decode].Target != before[Decode].Target {
		t.Errorf("%+v, then %+v", before, after)
	}
	if d := play(c, at+10*time.Minute, at+10*time.Minute+5*time.Second, 5*time.Second, func(s *Sample) { s.Backlog = 1e300 })[Prefill]; d.Change < leastStep || d.Target > c.o.Most[Prefill] {
		t.Errorf("a backlog beyond all integers: %+v", d)
	}
}

// The gateway with the lowest id leads where it sees a majority of the members last known.
func TestQuorum(t *testing.T) {
	var q Quorum
	for i, c := range []struct {
		gateways []string
		members  string // a letter for each; capital: it drains
		want     bool
	}{
		{[]string{"g2"}, "abcdef", true}, {[]string{"g2", "g1"}, "abcdefg", false}, {[]string{"g2", "g3"}, "abcdefg", true},
		{[]string{"g2"}, "abc", false}, // a partition: 3 of 7
		{[]string{"g2"}, "abcd", true}, {[]string{"g2"}, "ab", false}, {[]string{"g2"}, "abx", true},
		// Half of the members vanish at once, and come back, or others do in their place.
		{[]string{"g2"}, "abxyzw", true}, {[]string{"g2"}, "abx", false}, {[]string{"g2"}, "abx", false}, {[]string{"g2"}, "abxk", true},
		// Half of the members are removed by operators, which drain them first, all at once or where there is no majority.
		{[]string{"g2"}, "abXK", true}, {[]string{"g2"}, "ab", true},
		{[]string{"g2"}, "abcdef", true}, {[]string{"g2"}, "abC", false}, {[]string{"g2"}, "ab", false}, {[]string{"g2"}, "abd", true},
	} {
		var members []Member
		for _, letter := range c.members {
			members = append(members, Member{strings.ToLower(string(letter)), letter < 'a'})
		}
		if got := q.Leads("g2", slices.Clone(c.gateways), members); got != c.want {
			t.Errorf("case %d: %v", i, got)
		}
	}
}

// A tick takes far less than a millisecond.
func BenchmarkTick(b *testing.B) {
	c := New(options())
	s := Sample{Nodes: [roles]Nodes{{5, 0}, {5, 0}}}
	for range 1000 {
		s.Arrive(c.Costs(), 1000, 100)
		s.End(c.Costs(), 1000, 200)
	}
	for b.Loop() {
		s.At += 5 * time.Second
		c.Tick(s)
	}
}

// A fleet without decode nodes is decided about by what arrives, once a gateway has had the time to
// see nodes. It never shrinks for want of nodes.
func TestFromZero(t *testing.T) {
	none := func(s *Sample) { s.Nodes = [roles]Nodes{} }
	c := New(options())
	unanswered := func(s *Sample) {
		none(s)
		s.Ended, s.Decoded, s.DecodedSq, s.Context = 0, 0, 0, 0
	}
	if d := play(c, 0, lossTime-5*time.Second, 5*time.Second, unanswered); d[Decode].Known || d[Prefill].Known {
		t.Errorf("%+v", d)
	}
	if d := play(c, lossTime-5*time.Second, lossTime+10*time.Second, 5*time.Second, unanswered); !d[Decode].Known || d[Decode].Target != 1 || d[Prefill].Target < 5 {
		t.Errorf("%+v", d)
	}
	// A fleet that had nodes grows at once, and keeps what it wants for as long as it has none.
	c = New(options())
	before := play(c, 0, 10*time.Minute, 5*time.Second, nil)
	more := func(s *Sample) {
		none(s)
		for range 40 {
			s.Arrive(c.Costs(), 1000, 0)
		}
		s.Ended, s.Decoded, s.DecodedSq, s.Context = 0, 0, 0, 0
	}
	if d := play(c, 10*time.Minute, 11*time.Minute, 5*time.Second, more); !d[Decode].Known || d[Decode].Target <= before[Decode].Target || d[Prefill].Target <= before[Prefill].Target {
		t.Errorf("%+v, then %+v", before, d)
	}
	targets := c.targets
	play(c, 11*time.Minute, time.Hour, 5*time.Second, func(s *Sample) {
		none(s)
		s.Demand = Demand{}
	})
	if c.targets != targets {
		t.Errorf("shrinks from %v to %v without nodes", targets, c.targets)
	}
}

// Demand of several gateways adds up.
func TestAdd(t *testing.T) {
	c := options().Costs
	var a, b, both Demand
	a.Arrive(&c, 100, 0)
	a.End(&c, 100, 20)
	b.Arrive(&c, 300, 50)
	both.Arrive(&c, 100, 0)
	both.Arrive(&c, 300, 50)
	both.End(&c, 100, 20)
	a.Add(&b)
	if a != both {
		t.Errorf("%+v, want %+v", a, both)
	}
	a.Scale(2)
	if a.Requests != 4 || a.DecodedSq != 2*both.DecodedSq || !a.Sound() {
		t.Errorf("%+v", a)
	}
	if a.Scale(-1); a.Sound() {
		t.Error("a negative demand is sound")
	}
	if a.Work = math.Inf(1); a.Sound() {
		t.Error("an infinite demand is sound")
	}
}

// Figures that no fleet has do not count. Without the check their means would not be numbers, which
// shrink a role to one node.
func TestImpossibleFigures(t *testing.T) {
	const forged = 10 * time.Minute
	want := play(New(options()), 0, time.Hour, 5*time.Second, nil)
	for _, demand := range []Demand{
		{Requests: 1e200, Ended: 1, Decoded: 1e200, DecodedSq: 1e200}, {Ended: 1e-300, Decoded: 1e17, Context: 1e17}, {Requests: 1, Work: 1e300, Square: 1e300}, {Work: math.NaN()},
	} {
		c := New(options())
		play(c, 0, forged, 5*time.Second, nil)
		play(c, forged, forged+5*time.Second, 5*time.Second, func(s *Sample) { s.Demand = demand })
		got := play(c, forged+5*time.Second, time.Hour, 5*time.Second, nil)
		for r := range got {
			if got[r].Target != want[r].Target || math.Abs(got[r].Need/want[r].Need-1) > .01 {
				t.Errorf("after %+v: %s %+v, want %+v", demand, Role(r), got[r], want[r])
			}
		}
	}
	// Figures at the bounds give finite needs.
	c := New(options())
	play(c, 0, forged, 5*time.Second, nil)
	for _, demand := range []Demand{{Requests: mostFigure, Ended: 1, Decoded: mostFigure, DecodedSq: mostFigure, Context: mostFigure}, {Requests: mostFigure, Ended: 1, Context: mostFigure}} {
		d := play(c, c.last+5*time.Second, c.last+10*time.Second, 5*time.Second, func(s *Sample) { s.Demand = demand })
		if need := d[Decode].Need; math.IsNaN(need) || math.IsInf(need, 0) || d[Decode].Target > 50 {
			t.Errorf("after %+v: %+v", demand, d[Decode])
		}
	}
}
