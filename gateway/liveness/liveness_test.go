package liveness

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

const silence = 2 * time.Second

// world is a gateway and its nodes: what is true, and what a look sees of it.
type world struct {
	t     *testing.T
	seed  uint64
	r     *rand.Rand
	d     *Decider
	now   time.Time
	nodes []*peer
	lost  []move // at: real time since start
	start time.Time
}

type peer struct {
	name    string
	every   time.Duration // between two heartbeats
	stopped time.Time     // zero: it runs
	sent    time.Time     // the last heartbeat
	read    time.Time     // when the gateway last read
	waiting bool          // a heartbeat is not read yet
	gone    bool          // it has lost its connection
}

func newWorld(t *testing.T, seed uint64, n int) *world {
	w := &world{t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 1)), d: New(silence), start: time.Unix(1000, 0)}
	w.now = w.start
	for i := range n {
		w.nodes = append(w.nodes, &peer{name: fmt.Sprintf("d%d", i), every: 500 * time.Millisecond, sent: w.now, read: w.now})
	}
	return w
}

// pass lets time go by during which the gateway reads nothing.
func (w *world) pass(d time.Duration) {
	end := w.now.Add(d)
	for _, p := range w.nodes {
		for p.stopped.IsZero() && !p.sent.Add(p.every).After(end) {
			p.sent, p.waiting = p.sent.Add(p.every), true
		}
	}
	w.now = end
}

// read has the gateway read what waits.
func (w *world) read() {
	for _, p := range w.nodes {
		if p.waiting {
			p.read, p.waiting = w.now, false
		}
	}
}

func (w *world) stop(p *peer) { p.stopped = w.now }

func (w *world) stopAll() {
	for _, p := range w.nodes {
		if p.stopped.IsZero() {
			w.stop(p)
		}
	}
}

// resume is SIGCONT: the node sends a heartbeat.
func (w *world) resume(p *peer) {
	p.stopped, p.sent, p.waiting, p.gone = time.Time{}, w.now, true, false
}

// look looks and holds the verdicts against the rules that always hold.
func (w *world) look() (lost []string) {
	w.t.Helper()
	var (
		seen  []Node
		peers []*peer
	)
	for _, p := range w.nodes {
		if !p.gone {
			seen, peers = append(seen, Node{Name: p.name, ReadAt: p.read, Unread: p.waiting}), append(peers, p)
		}
	}
	for i, v := range w.d.Observe(w.now, seen) {
		if v != Lost {
			continue
		}
		p := peers[i]
		p.gone = true
		lost = append(lost, p.name)
		if p.stopped.IsZero() {
			w.t.Errorf("seed %d: %s runs and is lost at %v", w.seed, p.name, w.now.Sub(w.start))
		}
		if quiet := w.now.Sub(p.sent); quiet < silence {
			w.t.Errorf("seed %d: %s is lost after %v", w.seed, p.name, quiet)
		}
		w.lost = append(w.lost, move{p.name, w.now.Sub(w.start)})
	}
	within := map[string]bool{}
	for _, m := range w.lost {
		if w.now.Sub(w.start)-m.at < Window {
			within[m.name] = true
		}
	}
	if len(within) > len(w.nodes)/2 {
		w.t.Errorf("seed %d: %d of %d nodes lost within %v", w.seed, len(within), len(w.nodes), Window)
	}
	if err := w.d.Check(); err != nil {
		w.t.Errorf("seed %d: %v", w.seed, err)
	}
	return lost
}

// turn is one regular round of the gateway.
func (w *world) turn() []string {
	w.pass(w.d.Next())
	w.read()
	return w.look()
}

// Whatever the order of stops, resumes, pauses of the gateway and looks: no node that
// runs is lost, none before its silence is complete, and never more than half.
func TestAnyOrder(t *testing.T) {
	moved := 0
	for seed := range uint64(400) {
		w := newWorld(t, seed, 1+int(seed%7))
		for range 400 {
			p := w.nodes[w.r.IntN(len(w.nodes))]
			switch w.r.IntN(40) {
			case 0, 1:
				if p.stopped.IsZero() {
					w.stop(p)
				}
			case 2:
				if !p.stopped.IsZero() {
					w.resume(p)
				}
			case 3: // the gateway is stopped, or has no processor
				w.pass(time.Duration(w.r.Int64N(int64(15 * time.Second))))
			case 4: // it looks before it reads
				w.pass(time.Duration(w.r.Int64N(int64(2 * time.Second))))
				w.look()
			case 5:
				w.stopAll()
			case 6:
				p.every = time.Duration(100+w.r.IntN(1400)) * time.Millisecond
			}
			w.turn()
		}
		moved += len(w.lost)
		if t.Failed() {
			t.FailNow()
		}
	}
	if moved < 1000 {
		t.Errorf("only %d moves: the test is not about moves", moved)
	}
}

// One of three nodes that stops is lost as soon as its silence is complete.
func TestPromptMove(t *testing.T) {
	for seed := range uint64(200) {
		w := newWorld(t, seed, 3)
		for range 10 + w.r.IntN(20) {
			w.turn()
		}
		p := w.nodes[w.r.IntN(3)]
		w.pass(time.Duration(w.r.IntN(200)) * time.Millisecond)
		w.stop(p)
		w.turn()
		for turns := 0; len(w.lost) == 0 && turns < 10_000; turns++ {
			w.turn()
		}
		if took := w.now.Sub(p.stopped); took > silence+2*minWait+Interval {
			t.Fatalf("seed %d: lost %v after the stop", seed, took)
		}
	}
}

// What does not move: the only node, nodes while none can be heard, nodes that a
// gateway finds quiet after its own pause, nodes that rarely send.
func TestNoNeedlessMove(t *testing.T) {
	for name, c := range map[string]struct {
		nodes int
		setup func(w *world)
	}{
		"one node, stopped":   {1, func(w *world) { w.stop(w.nodes[0]) }},
		"all nodes, stopped":  {5, func(w *world) { w.stopAll() }},
		"a gateway, stopped":  {3, func(w *world) { w.pass(10 * time.Second); w.look(); w.pass(30 * time.Second); w.look() }},
		"a starved gateway":   {3, func(w *world) { starve(w, 1500*time.Millisecond) }},
		"a very slow gateway": {3, func(w *world) { starve(w, 7*time.Second) }},
		"rare heartbeats":     {3, func(w *world) { w.nodes[1].every = silence - Interval }},
	} {
		w := newWorld(t, 1, c.nodes)
		for range 20 {
			w.turn()
		}
		c.setup(w)
		for range 200 {
			w.turn()
		}
		if len(w.lost) > 0 {
			t.Errorf("%s: lost %v", name, w.lost)
		}
	}
}

// starve has the gateway look long after each other, before it reads.
func starve(w *world, gap time.Duration) {
	for range 20 {
		w.pass(gap)
		w.look()
		w.pass(time.Millisecond)
		w.read()
	}
}

// Time of which the gateway saw nothing counts with at most MaxGap.
func TestGap(t *testing.T) {
	w := newWorld(t, 1, 3)
	w.turn()
	w.stop(w.nodes[0])
	w.turn()
	before := w.d.Silence("d0")
	w.pass(time.Hour)
	w.read()
	w.look()
	if got := w.d.Silence("d0") - before; got != MaxGap {
		t.Errorf("an hour counts as %v", got)
	}
	if got := w.d.Silence("nobody"); got != 0 {
		t.Errorf("an unknown node is silent for %v", got)
	}
}

// Half of the nodes go at once, the others only after Window, and only while one
// can be heard.
func TestHalf(t *testing.T) {
	for n, want := range map[int][2]int{2: {1, 1}, 3: {1, 2}, 4: {2, 3}, 5: {2, 3}, 9: {4, 6}} {
		w := newWorld(t, 1, n)
		w.turn()
		for _, p := range w.nodes[1:] {
			w.stop(p)
		}
		at := func() time.Duration { return w.now.Sub(w.start) }
		for at() < 5*time.Second {
			w.turn()
		}
		if len(w.lost) != want[0] {
			t.Errorf("%d of %d nodes lost at first, want %d", len(w.lost), n, want[0])
		}
		for at() < 15*time.Second {
			w.turn()
		}
		if len(w.lost) != want[1] { // of those that are still connected
			t.Errorf("%d of %d nodes lost after %v, want %d", len(w.lost), n, at(), want[1])
		}
	}
}

// A node is asked before its silence is complete, again and again, and a node that
// is gone is not remembered.
func TestAsk(t *testing.T) {
	d, now := New(silence), time.Unix(1000, 0)
	a := Node{Name: "a", ReadAt: now}
	asked := 0
	for range 9 {
		if d.Observe(now, []Node{a})[0] == Ask {
			asked++
		}
		now = now.Add(Interval)
	}
	if asked != 2 {
		t.Errorf("asked %d times in 1.6 s", asked)
	}
	d.Observe(now, nil)
	if got := d.Observe(now, []Node{a})[0]; got != Alive || d.Silence("a") != 0 {
		t.Errorf("a returned node: %v, silent for %v", got, d.Silence("a"))
	}
}

// silentAfter makes a Decider that has seen these nodes speak, and lets them be
// silent until the silence of all is complete but for one look.
func silentAfter(names ...string) (d *Decider, look func(names ...string) map[string]Verdict) {
	d = New(silence)
	now, heard := time.Unix(1000, 0), time.Unix(1000, 0)
	look = func(names ...string) map[string]Verdict {
		now = now.Add(Interval)
		nodes := []Node{{Name: "speaker", ReadAt: now}}
		for _, n := range names {
			nodes = append(nodes, Node{Name: n, ReadAt: heard})
		}
		verdicts := map[string]Verdict{}
		for i, v := range d.Observe(now, nodes) {
			verdicts[nodes[i].Name] = v
		}
		return verdicts
	}
	for range silence / Interval {
		look(names...)
	}
	return d, look
}

// Half of all nodes may be lost, and those that are gone by then still count.
// The others are held, and asked no more.
func TestHalfCountsTheGone(t *testing.T) {
	d, look := silentAfter("a", "b")
	if v := look("a", "b"); v["a"] != Lost || v["b"] != Held || v["speaker"] != Alive {
		t.Fatalf("of three nodes two are silent: %v: want one lost, one held", v)
	}
	// a is gone. Four of its kind are new: of all six three may be lost.
	for range silence/Interval + 1 {
		look("b", "c", "d", "e")
	}
	for range 3 {
		look("b", "c", "d", "e")
	}
	if len(d.moved) != 3 {
		t.Errorf("%d nodes of six lost within %v: want 3", len(d.moved), Window)
	}
	if err := d.Check(); err != nil {
		t.Error(err)
	}
}

// The bounds that docs and flags name.
func TestBounds(t *testing.T) {
	d := New(silence)
	now := time.Unix(1000, 0)
	node := []Node{{Name: "a", ReadAt: now}}
	d.Observe(now, node)
	if d.Next() != 200*time.Millisecond {
		t.Errorf("the next look is in %v: want 200 ms", d.Next())
	}
	d.Observe(now.Add(time.Minute), node)
	if got := d.Silence("a"); got != 400*time.Millisecond {
		t.Errorf("a minute without a look counts as %v of silence: want 400 ms", got)
	}
	if got := d.Silence("b"); got != 0 {
		t.Errorf("a node that was never seen is silent for %v", got)
	}
	if Window != 10*time.Second || MinSilence != time.Second || New(0).silence != time.Second {
		t.Errorf("at most half are lost in %v, after %v of silence at least", Window, New(0).silence)
	}
}

// The next look comes when the silence of a node is complete, if that is before the
// regular one, and a node whose silence is complete asks for no early look.
func TestNextLookIsAtTheEndOfASilence(t *testing.T) {
	start := time.Unix(1000, 0)
	for quiet, want := range map[time.Duration]time.Duration{
		0:                                Interval,
		silence - Interval - 1:           Interval,
		silence - Interval + 30e6:        Interval - 30e6,
		silence - 50*time.Millisecond:    50 * time.Millisecond,
		silence - minWait:                minWait,
		silence - 1:                      minWait,
		silence:                          Interval,
		silence + 10*time.Millisecond:    Interval,
		silence + 3*Interval:             Interval,
		2*silence + 7*time.Millisecond/2: Interval,
	} {
		d, node := New(silence), []Node{{Name: "a", ReadAt: start}}
		d.Observe(start, node)
		for at := time.Duration(0); at < quiet; {
			at = min(at+Interval, quiet)
			d.Observe(start.Add(at), node)
		}
		if d.Silence("a") != quiet || d.Next() != want {
			t.Errorf("after %v of silence (counted: %v) the next look is in %v: want %v", quiet, d.Silence("a"), d.Next(), want)
		}
	}
}

// Of nodes whose silence is complete, the one that has been silent for longest moves
// first.
func TestLongestSilenceMovesFirst(t *testing.T) {
	start := time.Unix(1000, 0)
	heard := map[string]time.Duration{"a": 300 * time.Millisecond, "b": 100 * time.Millisecond, "c": 200 * time.Millisecond}
	for _, order := range [][]string{{"a", "b", "c"}, {"c", "b", "a"}, {"b", "c", "a"}} {
		d := New(silence)
		var verdicts []Verdict
		const speaks = silence + 3*Interval     // until then none moves, because no node is heard
		const end = speaks - Interval + silence // until then none moves, because all were silent
		for at := time.Duration(0); at <= end; at += Interval {
			var nodes []Node
			for _, name := range order {
				nodes = append(nodes, Node{Name: name, ReadAt: start.Add(min(at, heard[name]))})
			}
			if at >= speaks {
				nodes = append(nodes, Node{Name: "speaker", ReadAt: start.Add(at), Unread: true})
			}
			if verdicts = d.Observe(start.Add(at), nodes); at < end && slices.Contains(verdicts, Lost) {
				t.Errorf("lost after %v", at)
			}
		}
		var lost []string
		for i, name := range order {
			if verdicts[i] == Lost {
				lost = append(lost, name)
			}
		}
		if !slices.Equal(lost, []string{"b", "c"}) && !slices.Equal(lost, []string{"c", "b"}) {
			t.Errorf("nodes in the order %v: %v are lost, want b and c, which are silent for longest", order, lost)
		}
	}
}

// When a network comes back the nodes are heard one after the other, and none of them is lost. A
// node that is not heard within the bound is.
func TestNetworkReturns(t *testing.T) {
	start := time.Unix(1000, 0)
	const back = silence + 5*Interval
	returns := map[string]time.Duration{"a": back, "b": back + Interval, "c": back + silence - 2*Interval, "gone": time.Hour}
	d, lost := New(silence), map[string]time.Duration{}
	for at := time.Duration(0); at <= back+3*silence; at += Interval {
		var nodes []Node
		for name, after := range returns {
			n := Node{Name: name, ReadAt: start}
			if at >= after {
				n.ReadAt = start.Add(at)
			}
			nodes = append(nodes, n)
		}
		for i, v := range d.Observe(start.Add(at), nodes) {
			if name := nodes[i].Name; v == Lost && lost[name] == 0 {
				lost[name] = at
			}
		}
	}
	if len(lost) != 1 || lost["gone"] > back+silence {
		t.Errorf("lost %v, want gone alone, after at most %v", lost, back+silence)
	}
}

// A node is lost although the only other one is idle and speaks when it is asked.
func TestIdleSpeaker(t *testing.T) {
	for _, silence := range []time.Duration{MinSilence, silence, 5 * time.Second} {
		d, start := New(silence), time.Unix(1000, 0)
		now, read, lost := start, start, false
		for !lost && now.Sub(start) < 2*silence {
			verdicts := d.Observe(now, []Node{{Name: "gone", ReadAt: start}, {Name: "idle", ReadAt: read}})
			lost = verdicts[0] == Lost
			if verdicts[1] == Ask {
				read = now.Add(time.Millisecond)
			}
			now = now.Add(d.Next())
		}
		if !lost {
			t.Errorf("with a bound of %v the node is not lost after %v", silence, now.Sub(start))
		}
	}
}

// A clock that goes back counts as no time.
func TestTimeGoesBack(t *testing.T) {
	d, now := New(silence), time.Unix(1000, 0)
	node := []Node{{Name: "a", ReadAt: now}}
	d.Observe(now, node)
	for i := range 10 {
		d.Observe(now.Add(time.Duration(-i)*time.Second), node)
	}
	if got := d.Silence("a"); got != 0 {
		t.Errorf("silent for %v by a clock that goes back: want 0", got)
	}
}

// Streams move only while another node was heard within half of the silence: a gateway
// that hears nobody may itself be without a network.
func TestSpeakerIsHeardRecently(t *testing.T) {
	start := time.Unix(1000, 0)
	for last, want := range map[time.Duration]Verdict{0: Held, silence/2 - 1: Held, silence / 2: Held, silence/2 + 1: Lost, silence * 5 / 8: Lost, silence: Lost} {
		d := New(silence)
		var verdicts []Verdict
		for at := time.Duration(0); at <= silence; at += Interval {
			speaker := start.Add(min(at, last))
			verdicts = d.Observe(start.Add(at), []Node{{Name: "silent", ReadAt: start}, {Name: "speaker", ReadAt: speaker}})
		}
		if verdicts[0] != want {
			t.Errorf("another node was heard %v before the end of the silence: verdict %v, want %v", silence-last, verdicts[0], want)
		}
	}
}

func TestCheckFindsDamage(t *testing.T) {
	for name, damage := range map[string]func(*Decider){
		"order": func(d *Decider) {
			d.moved, d.room = []move{{"early", d.clock - 2}, {"x", d.clock}, {"y", d.clock - 1}}, 3
		},
		"first two": func(d *Decider) { d.moved, d.room = []move{{"x", d.clock}, {"y", d.clock - 1}}, 2 },
		"old":       func(d *Decider) { d.moved, d.room = []move{{"x", d.clock - Window}}, 2 },
		"twice":     func(d *Decider) { d.moved, d.room = []move{{"x", d.clock}, {"x", d.clock}}, 2 },
		"room":      func(d *Decider) { d.moved, d.room = []move{{"x", d.clock}, {"y", d.clock}}, 1 },
		"earlier":   func(d *Decider) { d.spare["x"] = state{} },
	} {
		t.Run(name, func(t *testing.T) {
			d, _ := silentAfter("a")
			if err := d.Check(); err != nil {
				t.Fatal(err)
			}
			damage(d)
			if err := d.Check(); !errors.Is(err, ErrBroken) {
				t.Errorf("Check = %v: want %v", err, ErrBroken)
			}
			if err := d.Check(); name == "order" && !strings.Contains(fmt.Sprint(err), fmt.Sprintf("y moved at %v, after x at %v", d.clock-1, d.clock)) {
				t.Errorf("Check = %v: want both nodes, y and x, and their times", err)
			}
		})
	}
}
