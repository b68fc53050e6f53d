// Package liveness decides which decode nodes lose their streams because they are silent: stopped
// processes, and machines without a network, whose connections stay open.
//
// Algorithm: the gateway observes all connected nodes every Interval. Each observation adds the
// time since the last one to a clock, but at most MaxGap. A node's silence is measured by that
// clock, from the last byte that the node sent. Therefore a gateway that was stopped or starved for
// longer than MaxGap does not count its own pause as a silence of the nodes. A node with unread
// bytes in the gateway's socket is not silent. A node is asked to answer (Ask) well before its
// silence is complete, so that nodes which rarely send heartbeats do not count as stopped.
//
// Invariant: within Window at most half of the connected nodes lose their streams, and none do
// while all nodes are silent. After such a silence each node has the whole bound again, because
// the nodes' bytes arrive one after the other when a network comes back.
//
// The package does not read bytes, close connections or choose where streams move.
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
	// Interval is the longest regular time between two observations.
	Interval = 200 * time.Millisecond
	// MaxGap is the part of the time between two observations that counts as silence.
	MaxGap = 2 * Interval
	// Window is the time in which at most half of the nodes lose their streams.
	Window = 10 * time.Second
	// MinSilence is the shortest useful bound: nodes send heartbeats every 500 ms.
	MinSilence = time.Second
	// minWait is the least time that Next returns.
	minWait = 5 * time.Millisecond
)

// Node is a connected node in an observation.
type Node struct {
	Name   string
	ReadAt time.Time // when bytes of its connection were last read
	Unread bool      // its socket has unread bytes
}

// Verdict is the decision about one node.
type Verdict uint8

const (
	Alive Verdict = iota // not silent, or not for long enough
	Ask                  // request an answer from the node
	Lost                 // move its streams to other nodes
	Held                 // silent for too long, but its streams are not moved
)

// Decider is the state between observations. It is not safe for concurrent use.
type Decider struct {
	silence time.Duration
	last    time.Time     // of the last observation; zero: none yet
	clock   time.Duration // counted time
	mute    time.Duration // clock when all nodes were last silent
	nodes   map[string]state
	spare   map[string]state // empty; swapped with nodes at each observation
	moved   []move           // nodes that were Lost within Window, oldest first, each name once
	room    int              // the bound on moved at the last Lost

	verdicts []Verdict // of the last observation
	silent   []int     // indices of nodes whose silence is complete
	next     time.Duration
}

type state struct {
	readAt   time.Time     // ReadAt of the last observation
	lastByte time.Duration // clock at the last byte
	asked    time.Duration // clock at the last Ask
}

type move struct {
	name string
	at   time.Duration // clock
}

// New returns a Decider that reports nodes as Lost after silence, or after MinSilence if that is
// longer.
func New(silence time.Duration) *Decider {
	silence = max(silence, MinSilence)
	return &Decider{silence: silence, mute: -silence, nodes: map[string]state{}, spare: map[string]state{}, next: Interval}
}

// askAfter is the silence after which a node is asked, and asked again.
func (d *Decider) askAfter() time.Duration { return d.silence * 2 / 5 }

// muteAfter is the silence of all nodes after which the network counts as lost. An idle node that
// answers when it is asked is not silent for so long, because it is asked at most Interval after
// askAfter and its answer is observed Interval later.
func (d *Decider) muteAfter() time.Duration { return max(d.silence/2, d.askAfter()+2*Interval) }

// Observe takes all connected nodes at now and returns a verdict for each, which is valid until the
// next call. The silence of a node that was missing in an earlier call begins again.
func (d *Decider) Observe(now time.Time, nodes []Node) []Verdict {
	var step time.Duration
	if !d.last.IsZero() {
		step = min(max(0, now.Sub(d.last)), MaxGap)
	}
	d.last = now
	d.clock += step
	for len(d.moved) > 0 && d.clock-d.moved[0].at >= Window {
		d.moved = d.moved[1:]
	}

	d.verdicts, d.silent, d.next = d.verdicts[:0], d.silent[:0], Interval
	anySpeaks, mute := false, len(nodes) > 0
	for i, n := range nodes {
		s, known := d.nodes[n.Name]
		switch {
		case !known, n.Unread:
			s = state{readAt: n.ReadAt, lastByte: d.clock, asked: d.clock}
		case n.ReadAt.After(s.readAt):
			s.readAt, s.lastByte = n.ReadAt, d.clock-min(max(0, now.Sub(n.ReadAt)), step)
		}
		verdict, quiet := Alive, d.clock-s.lastByte
		anySpeaks = anySpeaks || quiet < d.silence/2
		mute = mute && quiet >= d.muteAfter()
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
	switch {
	case mute:
		d.mute = d.clock
	case anySpeaks && len(d.silent) > 0 && d.clock-d.mute >= d.silence:
		d.move(nodes)
	}
	return d.verdicts
}

// move marks silent nodes as Lost, the longest silence first, until half of all nodes were Lost
// within Window.
func (d *Decider) move(nodes []Node) {
	slices.SortStableFunc(d.silent, func(a, b int) int {
		return cmp.Compare(d.nodes[nodes[a].Name].lastByte, d.nodes[nodes[b].Name].lastByte)
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

// Silence returns how long the node had been silent at the last observation.
func (d *Decider) Silence(name string) time.Duration {
	s, known := d.nodes[name]
	if !known {
		return 0
	}
	return d.clock - s.lastByte
}

// Next returns the time until the next observation: Interval, or less if the silence of a node will
// be complete before.
func (d *Decider) Next() time.Duration { return d.next }

// ErrBroken reports a violation that Check found.
var ErrBroken = errors.New("liveness: invariant violated")

// Check verifies that the Lost nodes are in order, each once, within Window, and at most half of
// all.
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
		return fmt.Errorf("%w: %d nodes of an earlier observation are kept", ErrBroken, len(d.spare))
	}
	return nil
}
