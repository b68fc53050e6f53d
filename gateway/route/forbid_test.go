package route

import "testing"

// A decode node computes no prompt that would pause its streams for longer than the
// target, or for which it lacks memory, however long the queue of the prefill node. It
// computes the prompt where no prefill node can.
func TestPromptIsForbiddenOnDecode(t *testing.T) {
	tb, alone := New(fleet(1, ""), fleet(1, "")), New(fleet(1, ""), nil)
	full := Memory{Total: 1000, Free: 20}
	queue := State{Usable: true, Rate: 1000, Queued: 100_000}
	for _, c := range []struct {
		name     string
		decode   State
		uncached int
		want     Reason
	}{
		{"streams would pause for 1 s", State{Rate: 1000, Load: 1}, 1000, ReasonRemote},
		{"streams would pause for just the target", State{Rate: 1000, Load: 1}, 100, ReasonLocal},
		{"streams would pause for just more", State{Rate: 1000, Load: 1}, 101, ReasonRemote},
		{"computed locally before", State{Rate: 1000, Load: 1, Local: true}, 1000, ReasonRemote},
		{"what is not cached is short", State{Rate: 1000, Load: 1, Held: 900}, 1000, ReasonLocal},
		{"no streams", State{Rate: 1000}, 1000, ReasonLocal},
		{"many steps, each below the target", State{Rate: 30_000, Load: 1}, 50_000, ReasonLocal},
		{"many steps, each above the target", State{Rate: 20_000, Load: 1}, 50_000, ReasonRemote},
		{"many steps, each above the target, as told", State{Rate: 30_000, Load: 1, StepTokens: 8192}, 50_000, ReasonRemote},
		{"many steps, each below the target, as told", State{Rate: 20_000, Load: 1, StepTokens: 1024}, 50_000, ReasonLocal},
		{"memory is full", State{Rate: 1000, Memory: full}, 100, ReasonRemote},
		{"memory is reserved", State{Rate: 1000, Memory: Memory{Total: 1000, Free: 500, Cached: 400, Reserved: 880}}, 100, ReasonRemote},
		{"memory is cached", State{Rate: 1000, Memory: Memory{Total: 1000, Cached: 100}}, 100, ReasonLocal},
		{"shorter than a transfer is worth", State{Rate: 100, Load: 1, Memory: full}, 63, ReasonShort},
	} {
		c.decode.Usable = true
		r := Request{Key: 9, Uncached: c.uncached, MinRemote: 64}
		v := View{Decode: []State{c.decode}, Prefill: []State{queue}}
		if d := tb.Pick(r, v, nil); d.Decode != 0 || d.PrefillReason != c.want || (len(d.Prefill) == 1) != (c.want == ReasonRemote) {
			t.Errorf("%s: %+v, want %s", c.name, d, c.want)
		}
		if c.want == ReasonShort {
			continue
		}
		v.Prefill[0].Usable = false
		if d := tb.Pick(r, v, nil); d.Decode != 0 || d.PrefillReason != ReasonNoPrefill || len(d.Prefill) != 0 {
			t.Errorf("%s, no usable prefill node: %+v", c.name, d)
		}
		if d := alone.Pick(r, View{Decode: v.Decode}, nil); d.Decode != 0 || d.PrefillReason != ReasonNoPrefill {
			t.Errorf("%s, no prefill node: %+v", c.name, d)
		}
	}
}

// Where a decode node must not compute a prompt, the time of the prefill node is its
// cost, so that a decode node that may compute it is chosen.
func TestForbiddenNodeCostsTheRemoteTime(t *testing.T) {
	tb := New(fleet(1, ""), nil)
	s := side{ring: &tb.decode, states: states(1, 1000), class: anyClass, most: -1}
	r, far := &Request{Key: 9, Uncached: 1000, MinRemote: 64}, remoteIn(tb, 100)
	free := s.first(r, 0, &far)
	s.states[0].Load = 1
	if taken := s.first(r, 0, &far); free > 2 || taken < 100 {
		t.Errorf("cost %g s with a stream, %g s without; want the 100 s of the prefill node and 1 s", taken, free)
	}
}
