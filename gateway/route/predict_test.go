package route

import (
	"math"
	"strings"
	"testing"
	"time"
)

// states is n idle nodes that compute rate tokens per second.
func states(n int, rate float64) []State {
	s := idle(n)
	for i := range s {
		s[i].Rate = rate
	}
	return s
}

// A node takes a prompt from its home when it is clearly faster, for its cache or
// for the home's queue, and only then.
func TestPrefillFollowsCacheAndQueue(t *testing.T) {
	tb := New(fleet(1, ""), fleet(6, ""))
	v := View{Decode: idle(1), Prefill: states(6, 10000)}
	r := Request{Key: 9, Uncached: 4000, MinRemote: 64}
	first := func() int { return tb.Pick(r, v, nil).Prefill[0] }
	home := first()
	other := (home + 1) % 6
	v.Prefill[other].Held = 400
	if at := first(); at != other {
		t.Errorf("400 of 4000 tokens cached elsewhere: %d", at)
	}
	v.Prefill[other].Held = 16
	if at := first(); at != home {
		t.Errorf("a block elsewhere moved the prompt from %d to %d", home, at)
	}
	v.Prefill[other].Held = 3200
	v.Prefill[other].Queued = 15000
	if at := first(); at != other {
		t.Errorf("left a cache of 3200 tokens for a queue of 1.5 s: %d", at)
	}
	v.Prefill[other].Queued = 40000
	if at := first(); at == other {
		t.Error("waits 4 s for a prompt that takes 0.4 s")
	}
	v.Prefill[other] = State{Usable: true, Rate: 10000}
	v.Prefill[home].Queued = 30
	if at := first(); at != home {
		t.Errorf("a queue of 30 tokens moved the prompt from %d to %d", home, at)
	}
	v.Prefill[home].Queued = 3000
	if d := tb.Pick(r, v, nil); d.Prefill[0] == home || len(d.Prefill) != MaxPrefill {
		t.Errorf("stayed behind 3000 tokens: %+v", d)
	}
}

// The prompt is computed where that is predicted to be faster, and a choice once
// made needs a clear reason to change.
func TestLocalOrRemote(t *testing.T) {
	tb := New(fleet(1, ""), fleet(1, ""))
	r := Request{Key: 9, Uncached: 1000, MinRemote: 64}
	for _, c := range []struct {
		name           string
		decode, remote State
		want           Reason
	}{
		{"equal speeds", State{Rate: 10000}, State{Rate: 10000}, ReasonRemote},
		{"equal speeds, local so far", State{Rate: 10000, Local: true}, State{Rate: 10000}, ReasonLocal},
		{"a queue at the prefill node", State{Rate: 10000}, State{Rate: 10000, Queued: 2000}, ReasonLocal},
		{"a queue at both", State{Rate: 10000, Queued: 2000}, State{Rate: 10000, Queued: 2000}, ReasonRemote},
		{"a slow decode node, local so far", State{Rate: 1000, Local: true}, State{Rate: 10000}, ReasonRemote},
		{"a busy decode node", State{Rate: 10000, Load: 20}, State{Rate: 10000, Queued: 200}, ReasonRemote},
		{"nothing known of the decode node", State{}, State{Rate: 10000, Queued: 90000}, ReasonRemote},
		{"nearly all cached", State{Held: 950}, State{Rate: 10000}, ReasonShort},
	} {
		c.decode.Usable, c.remote.Usable = true, true
		d := tb.Pick(r, View{Decode: []State{c.decode}, Prefill: []State{c.remote}}, nil)
		if d.PrefillReason != c.want {
			t.Errorf("%s: %+v, want %s", c.name, d, c.want)
		}
		if words := strings.Join(tb.Explain(d, View{Decode: []State{c.decode}, Prefill: []State{c.remote}}, 1001, 64), " "); !strings.Contains(words, "Decode on 10.0.0.0:7000:") || strings.Contains(words, "%!") {
			t.Errorf("%s: %s", c.name, words)
		}
	}
	if d := tb.Pick(r, View{Decode: make([]State, 1), Prefill: make([]State, 1)}, nil); d.Decode != -1 || len(tb.Explain(d, View{Decode: make([]State, 1)}, 1, 1)) != 1 {
		t.Errorf("%+v", d)
	}
}

// A fleet that sends every prompt of a token to prefill nodes does so whatever is
// predicted; from two tokens on the faster node computes.
func TestMinRemoteOfOneIsAlwaysRemote(t *testing.T) {
	tb := New(fleet(1, ""), fleet(1, ""))
	v := View{Decode: []State{{Usable: true, Rate: 10000}}, Prefill: []State{{Usable: true, Rate: 10000, Queued: 90000}}}
	for min, want := range map[int]Reason{0: ReasonRemote, 1: ReasonRemote, 2: ReasonLocal, 3: ReasonLocal, 64: ReasonLocal} {
		if d := tb.Pick(Request{Key: 9, Uncached: 1000, MinRemote: min}, v, nil); d.PrefillReason != want {
			t.Errorf("at least %d tokens, and a queue at the prefill node: %s, want %s", min, d.PrefillReason, want)
		}
	}
}

// What a client is predicted to wait is the time of whoever computes the prompt.
func TestFirstTokenIsForetold(t *testing.T) {
	tb, alone := New(fleet(1, ""), fleet(1, "")), New(fleet(1, ""), nil)
	for _, c := range []struct {
		name           string
		table          *Table
		decode, remote State
		reason         Reason
		want           time.Duration
	}{
		{"remote: queue, what is not cached, setup", tb, State{Rate: 1000}, State{Rate: 10000, Queued: 2000, Held: 500}, ReasonRemote, 252 * time.Millisecond},
		{"remote, faster than its connection", tb, State{Held: 200}, State{Rate: 200_000}, ReasonRemote, 5*time.Millisecond + 2*time.Millisecond + 4*time.Millisecond},
		{"remote, its speed not known", tb, State{Rate: 1000}, State{}, ReasonRemote, -1},
		{"local, beside 4 streams", tb, State{Rate: 10000, Load: 4}, State{Rate: 10000, Queued: 2000}, ReasonLocal, 120 * time.Millisecond},
		{"short", tb, State{Rate: 1000, Held: 950}, State{Rate: 10000}, ReasonShort, 50 * time.Millisecond},
		{"all cached", tb, State{Rate: 1000, Held: 1000}, State{Rate: 10000}, ReasonShort, 0},
		{"short, its speed not known", tb, State{Held: 950}, State{Rate: 10000}, ReasonShort, -1},
		{"no prefill nodes", alone, State{Rate: 1000, Queued: 500}, State{}, ReasonNoPrefill, 1500 * time.Millisecond},
	} {
		c.decode.Usable, c.remote.Usable = true, true
		v := View{Decode: []State{c.decode}, Prefill: []State{c.remote}[:len(c.table.prefill.nodes)]}
		d := c.table.Pick(Request{Key: 9, Uncached: 1000, MinRemote: 64}, v, nil)
		if off := d.First - c.want; d.PrefillReason != c.reason || off.Abs() > time.Microsecond || c.want < 0 && d.First != c.want {
			t.Errorf("%s: %v after %s, want %v after %s", c.name, d.First, d.PrefillReason, c.want, c.reason)
		}
	}
	if d := tb.Pick(Request{}, View{Decode: make([]State, 1), Prefill: make([]State, 1)}, nil); d.First >= 0 {
		t.Errorf("nobody is usable, and the first token in %v", d.First)
	}
}

// Without prefill nodes the decode node that holds the prompt gets it.
func TestDecodeFollowsCache(t *testing.T) {
	tb := New(fleet(5, ""), nil)
	v := View{Decode: states(5, 2000)}
	r := Request{Key: 3, Uncached: 2000, MinRemote: 64}
	home := tb.Pick(r, v, nil).Decode
	other := (home + 2) % 5
	v.Decode[other].Held = 1600
	if d := tb.Pick(r, v, nil); d.Decode != other || d.Reason != ReasonCached || d.PrefillReason != ReasonNoPrefill {
		t.Errorf("%+v", d)
	}
	v.Decode[other].Queued = 100000
	if d := tb.Pick(r, v, nil); d.Decode != home {
		t.Errorf("%+v", d)
	}
}

func TestParsePolicy(t *testing.T) {
	for p := Prefix; p <= Session; p++ {
		if got, err := ParsePolicy(p.String()); got != p || err != nil {
			t.Errorf("%s: %v %v", p, got, err)
		}
	}
	if _, err := ParsePolicy("luck"); err == nil {
		t.Error("luck is a policy")
	}
}

// A node takes a request from its home only when it is faster by stickShare and
// by stickTime.
func TestHomeNeedsAClearReason(t *testing.T) {
	tb := New(fleet(3, ""), nil)
	home := tb.Pick(Request{Key: 9}, View{Decode: states(3, 10_000)}, nil).Decode
	other := (home + 1) % 3
	for _, c := range []struct {
		name        string
		home, other float64 // seconds
		want        int
	}{
		{"equal", 1, 1, home},
		{"faster by less than the share", 1.02, 1, home},
		{"faster by the share, but not by the time", stickTime * 2, stickTime * 1.5, home},
		{"faster by the share and nearly the time", 1 + stickShare + stickTime*0.9, 1, home},
		{"faster by more than both", 1 + stickShare + stickTime*1.1, 1, other},
	} {
		// Without prefill nodes and with nothing to compute, the queue alone is the cost.
		v := View{Decode: states(3, 10_000)}
		v.Decode[(home+2)%3].Queued = 100 * 10_000
		v.Decode[home].Queued, v.Decode[other].Queued = int32(math.Round(c.home*10_000)), int32(math.Round(c.other*10_000))
		if got := tb.Pick(Request{Key: 9}, v, nil).Decode; got != c.want {
			t.Errorf("%s: node %d, want %d (home %d)", c.name, got, c.want, home)
		}
	}
}

// The first token costs what the faster of decode and prefill nodes needs, where
// there are prefill nodes; where there are none, work weighs more than waiting.
func TestFirstTokenIsTheFasterOfTheTwo(t *testing.T) {
	tb := New(fleet(1, ""), nil)
	s := side{ring: &tb.decode, states: states(1, 1000), class: anyClass, most: -1}
	s.states[0].Queued = 500
	r := &Request{Key: 9, Uncached: 1000, MinRemote: 64}
	const alone = (500 + recompute*1000) / 1000
	for name, c := range map[string]struct {
		far  remotes
		want float64
	}{
		"no prefill node":     {remotes{}, alone},
		"a fast prefill node": {remoteIn(tb, 0.25), 0.25 + 1000/transferRate},
		"a slow prefill node": {remoteIn(tb, 100), 1.5},
	} {
		if got := s.first(r, 0, &c.far); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%s: %g s, want %g", name, got, c.want)
		}
	}
}

// remoteIn is what prefill nodes of the fleet's class predict.
func remoteIn(tb *Table, seconds float64) (f remotes) {
	f.n, f.best[0].class, f.best[0].seconds = 1, tb.decode.class[0], seconds
	return f
}

// Gateways that share their views spread what leaves its home over the nodes that are
// about as good; one that is alone takes the best. A cache is not given up for it.
func TestSharedViewsSpread(t *testing.T) {
	tb := New(fleet(8, ""), nil)
	v := View{Decode: states(8, 1000)}
	r := Request{Key: 9, Uncached: 1000, MinRemote: 64}
	home := tb.Pick(r, v, nil).Decode
	for i := range v.Decode {
		v.Decode[i].Queued = 100_000
	}
	at := func(n int) *State { return &v.Decode[(home+n)%8] }
	at(1).Queued, at(2).Queued, at(3).Queued, at(4).Queued = 5000, 5500, 5200, 7000
	drawn := func(shared bool) map[int]int {
		r.Shared = shared
		seen := map[int]int{}
		for i := range 3000 {
			r.Draw = uint64(i) * 0x9e3779b97f4a7c15
			seen[(tb.Pick(r, v, nil).Decode-home+8)%8]++
		}
		return seen
	}
	if seen := drawn(false); seen[1] != 3000 {
		t.Errorf("alone: %v, want the best alone", seen)
	}
	if seen := drawn(true); len(seen) != 3 || min(seen[1], seen[2], seen[3]) < 800 {
		t.Errorf("shared: %v, want a third for each of 1, 2 and 3, which differ by 4 %%", seen)
	}
	at(1).Held = 16
	if seen := drawn(true); seen[1] != 3000 {
		t.Errorf("1 has a block: %v", seen)
	}
}
