// Package liveness decides which decode nodes lose their streams because they are
// silent: stopped processes and machines without a network, whose connections stay
// open.
//
// Algorithm: the gateway looks at all connected nodes every LookInterval. Each look
// adds the time since the last look to a clock, with at most MaxGap. A node's silence
// is measured by that clock, from the last byte that the node sent. A gateway that was
// stopped or starved for longer than MaxGap therefore does not take its own pause for
// a silence of the nodes. A node with unread bytes in the gateway's socket is not
// silent. A node is asked to answer (Ask) well before its silence is complete, so that
// nodes which rarely send heartbeats are not mistaken for stopped ones.
//
// Invariant: within Window at most half of the connected nodes lose their streams, and
// none do while no other node can be heard.
//
// The package does not read bytes, close connections or choose where streams go.
package liveness

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Fixed bounds.
const (
	// LookInterval is the longest regular time between two looks.
	LookInterval = 200 * time.Millisecond
	// MaxGap is how much of the time between two looks counts as silence.
	MaxGap = 2 * LookInterval
	// Window is the time in which at most half of the nodes lose their streams.
	Window = 10 * time.Second
	// MinSilence is the shortest useful bound: nodes send heartbeats every 500 ms.
	MinSilence = time.Second
	// minWait keeps Next from asking for looks in quick succession.
	minWait = 5 * time.Millisecond
)

// Node is what one look sees of a connected node.
type Node struct {
	Name    string
	HeardAt time.Time // when bytes of its connection were last read
	Unread  bool      // bytes wait in the socket
}

// Verdict is the decision about one node.
type Verdict uint8

const (
	Heard Verdict = iota // or not silent for long enough
	Ask                  // request an answer from the node
	Lost                 // move its streams to other nodes
	Held                 // silent for too long, but its streams stay where they are
)

// Decider is the state between looks. It is not safe for concurrent use.
type Decider struct {
	silence time.Duration
	last    time.Time     // of the last look; zero: none yet
	clock   time.Duration // counted time
	nodes   map[string]state
	spare   map[string]state // the other one of two maps that take turns
	moved   []move           // of the last Window, oldest first, each name once
	room    int              // how many names moved could have at the last Lost

	verdicts []Verdict // of the last look
	silent   []int     // indices of nodes whose silence is complete
	next     time.Duration
}

type state struct {
	read  time.Time     // HeardAt of the last look
	heard time.Duration // clock at the last byte
	asked time.Duration // clock at the last Ask
}

type move struct {
	name string
	at   time.Duration // clock
}

// New returns a Decider by which nodes are lost after silence, which is at least
// MinSilence.
func New(silence time.Duration) *Decider {
	return &Decider{silence: max(silence, MinSilence), nodes: map[string]state{}, spare: map[string]state{}, next: LookInterval}
}

// askAfter is the silence after which a node is asked, and asked again.
func (d *Decider) askAfter() time.Duration { return d.silence * 2 / 5 }

// Look takes the connected nodes as they are at now and returns a verdict for each,
// valid until the next call. A node that is not among them starts anew when it
// returns.
func (d *Decider) Look(now time.Time, nodes []Node) []Verdict {
	var step time.Duration
	if !d.last.IsZero() {
		step = min(max(0, now.Sub(d.last)), MaxGap)
	}
	d.last = now
	d.clock += step
	for len(d.moved) > 0 && d.clock-d.moved[0].at >= Window {
		d.moved = d.moved[1:]
	}

	d.verdicts, d.silent, d.next = d.verdicts[:0], d.silent[:0], LookInterval
	speaking := false
	for i, n := range nodes {
		s, known := d.nodes[n.Name]
		switch {
		case !known, n.Unread:
			s = state{read: n.HeardAt, heard: d.clock, asked: d.clock}
		case n.HeardAt.After(s.read):
			s.read, s.heard = n.HeardAt, d.clock-min(max(0, now.Sub(n.HeardAt)), step)
		}
		verdict, quiet := Heard, d.clock-s.heard
		speaking = speaking || quiet < d.silence/2
		switch {
		case quiet >= d.silence:
			d.silent = append(d.silent, i)
			verdict = Held
		case quiet >= d.askAfter() && d.clock-s.asked >= d.askAfter():
			s.asked, verdict = d.clock, Ask
		}
		if quiet < d.silence {
			d.next = min(d.next, max(minWait, d.silence-quiet))
		}
		d.verdicts = append(d.verdicts, verdict)
		d.spare[n.Name] = s
	}
	d.nodes, d.spare = d.spare, d.nodes
	clear(d.spare)
	if speaking && len(d.silent) > 0 {
		d.move(nodes)
	}
	return d.verdicts
}

// move marks silent nodes as lost, the longest silence first, until half of all nodes
// have moved within Window.
func (d *Decider) move(nodes []Node) {
	slices.SortStableFunc(d.silent, func(a, b int) int {
		return cmp.Compare(d.nodes[nodes[a].Name].heard, d.nodes[nodes[b].Name].heard)
	})
	all := len(nodes)
	for _, m := range d.moved {
		if _, here := d.nodes[m.name]; !here {
			all++
		}
	}
	for _, i := range d.silent {
		name := nodes[i].Name
		at := slices.IndexFunc(d.moved, func(m move) bool { return m.name == name })
		switch {
		case at >= 0:
			d.moved = slices.Delete(d.moved, at, at+1)
		case len(d.moved) >= all/2:
			continue
		default:
			d.room = all / 2
		}
		d.moved = append(d.moved, move{name, d.clock})
		d.verdicts[i] = Lost
	}
}

// Silence returns how long the node has been silent at the last look.
func (d *Decider) Silence(name string) time.Duration {
	s, known := d.nodes[name]
	if !known {
		return 0
	}
	return d.clock - s.heard
}

// Next returns how long to wait until the next look: LookInterval, or less where the
// silence of a node is complete before.
func (d *Decider) Next() time.Duration { return d.next }

// ErrBroken is what Check finds.
var ErrBroken = errors.New("liveness: the state does not hold")

// Check verifies that moves are in order, each name once, within Window and no more
// than half of the nodes.
func (d *Decider) Check() error {
	for i, m := range d.moved {
		switch {
		case i > 0 && m.at < d.moved[i-1].at:
			return fmt.Errorf("%w: %s moved at %v, after %s at %v", ErrBroken, m.name, m.at, d.moved[i-1].name, d.moved[i-1].at)
		case d.clock-m.at >= Window:
			return fmt.Errorf("%w: %s moved at %v is kept at %v", ErrBroken, m.name, m.at, d.clock)
		case slices.ContainsFunc(d.moved[:i], func(o move) bool { return o.name == m.name }):
			return fmt.Errorf("%w: %s moved twice", ErrBroken, m.name)
		}
	}
	if len(d.moved) > d.room {
		return fmt.Errorf("%w: %d nodes moved within %v, at most %d may", ErrBroken, len(d.moved), Window, d.room)
	}
	if len(d.spare) != 0 {
		return fmt.Errorf("%w: %d nodes of an earlier look are kept", ErrBroken, len(d.spare))
	}
	return nil
}
