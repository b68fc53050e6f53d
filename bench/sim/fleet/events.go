package fleet

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// Action is the kind of an Event.
type Action uint8

// Actions.
const (
	Kill   Action = iota // the node's process dies
	Drain                // the node takes no new work; after Timeout its streams move
	Start                // a process of the node starts, or its drain ends
	Cancel               // clients of a share of the requests in flight leave
)

var actions = [...]string{"kill", "drain", "start", "cancel"}

func (a Action) String() string { return actions[a] }

// Target is a node or a gateway, numbered from 0 in its role. The zero value is the first decode
// node.
type Target struct {
	Prefill bool
	Gateway bool
	Node    int
}

// String returns the name of the node or gateway.
func (t Target) String() string {
	return fmt.Sprintf("%s-%d", t.role(), t.Node)
}

func (t Target) role() string {
	switch {
	case t.Gateway:
		return "gateway"
	case t.Prefill:
		return "prefill"
	}
	return "decode"
}

// Event is a change of the fleet at a time.
type Event struct {
	At      time.Duration
	Action  Action
	Target  Target
	Timeout time.Duration // of Drain
	Share   float64       // of Cancel
}

// String returns the event as ParseEvent reads it.
func (e Event) String() string {
	switch e.Action {
	case Cancel:
		return fmt.Sprintf("%v cancel %g%%", e.At, 100*e.Share)
	case Drain:
		return fmt.Sprintf("%v drain %v %v", e.At, e.Target, e.Timeout)
	}
	return fmt.Sprintf("%v %v %v", e.At, e.Action, e.Target)
}

// DrainTimeout is the time that a drain gives streams unless its event has another.
const DrainTimeout = 30 * time.Second

// maxNodes bounds a fleet.
const maxNodes = 100_000

// ParseEvent parses "120s kill decode-1", "1m drain prefill-0 10s", "90s start decode-4",
// "2m kill gateway-0" and "30s cancel 10%".
func ParseEvent(text string) (e Event, err error) {
	bad := func(why string) (Event, error) {
		return Event{}, fmt.Errorf("%w: event %q: %s: write such as 120s kill decode-1, 60s drain decode-0 10s, 90s start decode-4 or 30s cancel 10%%", ErrOptions, text, why)
	}
	parts := strings.Fields(text)
	if len(parts) < 3 {
		return bad("a time, an action and a node are wanted")
	}
	if e.At, err = time.ParseDuration(parts[0]); err != nil || e.At < 0 {
		return bad(fmt.Sprintf("%q is not a time since the run's start", parts[0]))
	}
	at := 0
	for at < len(actions) && actions[at] != parts[1] {
		at++
	}
	if at == len(actions) {
		return bad(fmt.Sprintf("%q is not an action", parts[1]))
	}
	e.Action = Action(at)
	if e.Action == Cancel {
		percent, ok := strings.CutSuffix(parts[2], "%")
		share, err := strconv.ParseFloat(percent, 64)
		if !ok || err != nil || !(share > 0 && share <= 100) || len(parts) > 3 {
			return bad(fmt.Sprintf("%q is not a share above 0%%", strings.Join(parts[2:], " ")))
		}
		e.Share = share / 100
		return e, nil
	}
	role, number, _ := strings.Cut(parts[2], "-")
	n, err := strconv.Atoi(number)
	e.Target = Target{role == "prefill", role == "gateway", n}
	if role != e.Target.role() || err != nil || n < 0 || n >= maxNodes {
		return bad(fmt.Sprintf("%q is not a node", parts[2]))
	}
	switch {
	case e.Action == Drain && e.Target.Gateway:
		return bad("gateways are not drained: kill or start them")
	case e.Action == Drain && len(parts) == 4:
		if e.Timeout, err = time.ParseDuration(parts[3]); err != nil || e.Timeout < 0 {
			return bad(fmt.Sprintf("%q is not a duration", parts[3]))
		}
	case len(parts) > 3:
		return bad(fmt.Sprintf("%q is one word too many", parts[3]))
	case e.Action == Drain:
		e.Timeout = DrainTimeout
	}
	return e, nil
}

// largest returns the numbers of nodes of each role, with those that events start.
func (o *Options) largest() (prefill, decode int) {
	prefill, decode = o.Prefill, o.Decode
	for _, e := range o.Events {
		if e.Target.Gateway {
			continue
		}
		if e.Action == Start && e.Target.Prefill {
			prefill = max(prefill, e.Target.Node+1)
		} else if e.Action == Start {
			decode = max(decode, e.Target.Node+1)
		}
	}
	return prefill, decode
}

// checkEvents returns an error for events of nodes that the fleet never has.
func (o *Options) checkEvents() error {
	prefill, decode := o.largest()
	if prefill+decode > maxNodes {
		return fmt.Errorf("%w: %d nodes: at most %d are simulated", ErrOptions, prefill+decode, maxNodes)
	}
	for _, e := range o.Events {
		n, last := decode, e.Target
		if e.Target.Prefill {
			n = prefill
		} else if e.Target.Gateway {
			n = o.Gateways
		}
		last.Node = n - 1
		switch {
		case e.Action != Cancel && e.Target.Node >= n:
			return fmt.Errorf("%w: event %q: the fleet has no %v: its last one is %v", ErrOptions, e, e.Target, last)
		case e.Action == Start && e.Target.Prefill && o.Prefill == 0:
			return fmt.Errorf("%w: event %q: a fleet of colocated nodes has no prefill nodes: give it one, such as 1P2D", ErrOptions, e)
		}
	}
	return nil
}

// setEvents puts the events on the clock.
func (f *fleet) setEvents() {
	draw := rand.New(rand.NewPCG(f.o.Seed, 1<<32))
	for _, e := range f.o.Events {
		f.clock.at(e.At, func() { f.do(e, draw) })
	}
}

// do executes an event.
func (f *fleet) do(e Event, draw *rand.Rand) {
	if e.Action == Cancel {
		for i := range f.result.Requests {
			r := &f.result.Requests[i]
			if r.At > f.clock.now {
				break
			}
			if !r.closed && r.arrived && draw.Float64() < e.Share {
				f.cancel(r, ErrCancelled)
			}
		}
		return
	}
	if e.Target.Gateway {
		if g := f.gateways[e.Target.Node]; e.Action == Kill {
			g.kill()
		} else {
			g.down = false
		}
		return
	}
	nodes := f.decode
	if e.Target.Prefill {
		nodes = f.prefill
	}
	switch n := nodes[e.Target.Node]; e.Action {
	case Kill:
		n.kill()
	case Drain:
		n.drain(e.Timeout)
	case Start:
		n.launch()
	}
}

// kill ends the gateway's process. Its clients lose their streams, and its nodes end the work when
// their connections break. Later requests arrive at other gateways.
func (g *gateway) kill() {
	if g.down {
		return
	}
	g.down = true
	g.f.result.Killed++
	for i := range g.f.result.Requests {
		if r := &g.f.result.Requests[i]; r.g == g && r.arrived && !r.closed {
			g.f.drop(r, ErrGateway)
		}
	}
}

// arrivesAt returns the gateway at which a request arrives: its own, or the next one that works;
// nil: none works.
func (f *fleet) arrivesAt(r *Request) *gateway {
	for i := range f.gateways {
		if g := f.gateways[(int(r.index)+i)%len(f.gateways)]; !g.down {
			return g
		}
	}
	return nil
}
