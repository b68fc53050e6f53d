// Package course decides where the KV of a held request comes from: from which prefill node, in the
// order in which the gateway ranked them, or from the decode node itself.
//
// Invariant: a course asks each node at most once, in order, and ends either with the KV delivered,
// with the decode node's own computing, or with the request.
//
// The package sends nothing, keeps no time and knows no node but by its place.
package course

import (
	"errors"
	"fmt"
)

// ErrBroken reports an inconsistent course.
var ErrBroken = errors.New("course: state is inconsistent")

// Prompt is what a decode node knows of a held request.
type Prompt struct {
	UpTo   int  // leading tokens that a prefill node would deliver
	Cached int  // of them, tokens in the cache
	Block  int  // tokens of a block
	Moved  bool // a short prompt whose KV was transferred before
	Nodes  int  // prefill nodes that may be asked
}

// Short reports whether the prompt leaves nothing that a later request could find in the cache.
func (p Prompt) Short() bool { return p.UpTo < p.Block }

// worth reports whether the transfer is worth its round trip. The part that a hit leaves may be
// less than a block, and the decode node computes a token in any case. A short prompt that was
// transferred before would be transferred each time.
func (p Prompt) worth() bool {
	return p.UpTo > p.Cached && (p.Cached == 0 || p.UpTo-p.Cached >= p.Block) && !(p.Short() && p.Moved)
}

// Outcome is the result of asking a node.
type Outcome uint8

// Outcomes.
const (
	Delivered Outcome = iota // all of the KV has arrived
	Failed                   // the node did not deliver
	Skipped                  // the node was not asked, because it failed too often before
	Useless                  // no prefill node can help: the cache has the KV by now, or the pool can never hold it
	Over                     // the request has ended
)

// Step is what a decode node does next.
type Step uint8

// Steps.
const (
	Ask     Step = iota // a prefill node
	Compute             // the prompt, on the decode node
	Stop                // there is nothing left to do
)

// Course is the course of one request. Make it with New.
type Course struct {
	nodes int
	next  int // node to ask
	last  Step
}

// New returns the course of a prompt.
func New(p Prompt) Course {
	if !p.worth() {
		return Course{last: Compute}
	}
	return Course{nodes: p.Nodes}
}

// Next returns the next step, and the node if that is Ask. Report follows an Ask.
func (c *Course) Next() (step Step, node int) {
	if c.last == Ask && c.next == c.nodes {
		c.last = Compute
	}
	step = c.last
	switch step {
	case Ask:
		c.next++
		return Ask, c.next - 1
	case Compute:
		c.last = Stop
	}
	return step, 0
}

// Report records the outcome of the last Ask.
func (c *Course) Report(o Outcome) {
	switch o {
	case Delivered, Over:
		c.last = Stop
	case Useless:
		c.last = Compute
	}
}

// Check verifies the course.
func (c *Course) Check() error {
	if c.next < 0 || c.next > c.nodes || c.last > Stop {
		return fmt.Errorf("%w: node %d of %d, step %d", ErrBroken, c.next, c.nodes, c.last)
	}
	return nil
}
