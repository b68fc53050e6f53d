// Package choice decides about one choice of a request: when it is attempted on a node, retried on
// another one, resumed, paused for its client, or given up.
//
// A choice is in one State. Each method is an event: it takes what happened, and the time as a
// value, changes the state, and returns an Action if the caller has to act. A choice without a
// token is retried on a few nodes. A choice with tokens is resumed: its prompt and output continue
// on another node at the next position. If no node takes it, it waits for a bounded time.
//
// Invariant: exactly one thing advances a choice: the caller (Seeking), an event of its attempt
// (Asked, Running), the clock (Waiting), the client (Paused), or nothing (Finished, GivenUp).
// Attempts that a node accepted without progress are counted, and waits are bounded. Attempts that
// no node has seen are not counted. The caller's retry budget bounds those of a choice without
// tokens, and ResumeTimeout those of a choice with tokens. Attempts that ended because their node
// was drained are no failures, up to maxHandovers in a row.
//
// The package reads no clock, sends nothing and knows nothing of nodes: N names one.
package choice

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// State is what a choice waits for.
type State uint8

// States.
const (
	Seeking  State = iota // for the caller to find a node
	Asked                 // for a node to accept the attempt that was sent
	Running               // for tokens of the accepted attempt
	Waiting               // for RetryAt, because no node takes the choice
	Paused                // for the slow client; the attempt was cancelled
	Finished              // for nothing: the last token is there
	GivenUp               // for nothing: no attempt can follow
)

// String returns the state's name in errors.
func (s State) String() string {
	return [...]string{"seeking", "asked", "running", "waiting", "paused", "finished", "given up"}[s]
}

// Action is what the caller has to do after an event.
type Action uint8

// Actions.
const (
	GiveUp Action = iota // end the request: no attempt can follow
	Retry                // try another node, if the retry budget allows it
	Resume               // continue on another node
	Wait                 // look for a node again at RetryAt
	Move                 // try another node, whatever the retry budget: the node was drained
)

// Pauses between two searches for a node for a choice with tokens.
const (
	firstBackoff = 50 * time.Millisecond
	maxBackoff   = time.Second
)

// maxHandovers is how many drained nodes in a row, without a token, count as no failures.
const maxHandovers = 16

// Limits bound a choice's attempts.
type Limits struct {
	MaxAttempts   int           // in a row without a token
	ResumeTimeout time.Duration // how long a choice with tokens waits for a node
}

// Failure is what the error of an attempt means for further attempts.
type Failure struct {
	Refused    bool // the node answered with an error; false: its connection failed, or it was silent
	Final      bool // no other node would accept the request
	HandedOver bool // the node was drained or out of room, which is no judgement on the request
	Drained    bool // the node was drained
	Untouched  bool // the node has not worked on the attempt
	Lost       bool // the connection ended during the attempt
}

// Choice is the state of one choice. The zero value has had no attempt. N names a node. Callers do
// not change the fields.
type Choice[N comparable] struct {
	State    State
	Attempt  uint32        // number of the current one; events of earlier ones are stale
	From     int           // tokens when the current attempt began
	Tried    []N           // nodes that failed since the last token
	RetryAt  time.Time     // when a Waiting choice looks for a node again; else zero
	tokens   int           // received
	failures int           // attempts in a row without a token, handovers not counted
	handed   int           // handovers in a row without a token
	refused  []N           // of Tried, those that answered with a refusal
	lostAt   time.Time     // when the last node was lost; zero: a node runs the choice, or none ever has
	backoff  time.Duration // the last wait, which the next doubles
}

// Started reports whether the choice has tokens, which its client may have seen.
func (c *Choice[N]) Started() bool { return c.tokens > 0 }

// Fresh reports whether the current attempt has no token yet.
func (c *Choice[N]) Fresh() bool { return c.tokens == c.From }

// Seek starts the search for a node, also after a pause or a wait.
func (c *Choice[N]) Seek() {
	c.State, c.RetryAt = Seeking, time.Time{}
}

// Excludes reports whether the next attempt may not use a node.
func (c *Choice[N]) Excludes(node N) bool {
	return slices.Contains(c.refused, node) || c.Started() && slices.Contains(c.Tried, node)
}

// Begin counts an attempt that is about to be sent and returns its number.
func (c *Choice[N]) Begin() uint32 {
	c.Attempt++
	c.From = c.tokens
	return c.Attempt
}

// Sent records that the attempt was sent.
func (c *Choice[N]) Sent() { c.State = Asked }

// Accepted records that the node has the attempt. Later events of the attempt imply it.
func (c *Choice[N]) Accepted() {
	c.State, c.lostAt, c.backoff = Running, time.Time{}, 0
}

// Token counts a token of a Running attempt.
func (c *Choice[N]) Token() { c.tokens++ }

// Live reports whether events of the current attempt count.
func (c *Choice[N]) Live() bool { return c.State == Asked || c.State == Running }

// Pause records that the attempt was cancelled because its client does not read.
func (c *Choice[N]) Pause() { c.State = Paused }

// Finish ends the choice with its last token.
func (c *Choice[N]) Finish() { c.State, c.RetryAt = Finished, time.Time{} }

// Abandon ends the choice without its last token.
func (c *Choice[N]) Abandon() { c.State, c.RetryAt = GivenUp, time.Time{} }

// Failed records that the current attempt failed on a node. The choice is then Seeking or GivenUp.
func (c *Choice[N]) Failed(node N, f Failure, now time.Time, l Limits) Action {
	accepted, progress := c.State == Running, c.tokens > c.From
	c.Seek()
	if progress {
		c.Tried, c.refused, c.failures, c.handed = c.Tried[:0], c.refused[:0], 0, 0
	}
	if c.lostAt.IsZero() {
		c.lostAt = now
	}
	if accepted { // meanwhile nodes that refused may have room again
		c.refused = c.refused[:0]
	}
	c.Tried = append(c.Tried, node)
	if f.Refused && !progress && !(accepted && f.HandedOver) {
		c.refused = append(c.refused, node)
	}
	unseen := f.Lost && !accepted // no node has judged the request
	moved := accepted && !progress && f.Drained && c.handed < maxHandovers
	switch {
	case moved:
		c.handed++
	case !progress && !unseen && !(c.Started() && f.Untouched):
		c.failures++
	}
	switch {
	case f.Final, c.failures >= l.MaxAttempts:
		c.Abandon()
		return GiveUp
	case c.Started():
		return Resume
	case moved:
		return Move
	}
	return Retry
}

// NoNode records that no node is left for the choice. A choice with tokens waits and looks again,
// within ResumeTimeout from when its node was lost.
func (c *Choice[N]) NoNode(now time.Time, l Limits) Action {
	if !c.Started() {
		c.Abandon()
		return GiveUp
	}
	if c.lostAt.IsZero() { // it was paused
		c.lostAt = now
	}
	if now.Sub(c.lostAt) >= l.ResumeTimeout {
		c.Abandon()
		return GiveUp
	}
	c.Tried, c.refused = c.Tried[:0], c.refused[:0] // the nodes may have recovered
	c.backoff = min(max(firstBackoff, 2*c.backoff), maxBackoff)
	c.Delay(now.Add(c.backoff))
	return Wait
}

// Delay makes the choice look for a node at t.
func (c *Choice[N]) Delay(t time.Time) { c.State, c.RetryAt = Waiting, t }

// errBroken is the cause of Check's errors.
var errBroken = errors.New("choice: broken state")

// Check verifies the invariants of the state.
func (c *Choice[N]) Check() error {
	switch {
	case c.State > GivenUp,
		c.RetryAt.IsZero() == (c.State == Waiting),
		c.State == Waiting && !c.Started(),
		c.State == Running && (!c.lostAt.IsZero() || c.backoff != 0),
		(c.State == Asked || c.State == Running) && c.Attempt == 0,
		c.From > c.tokens || c.Attempt == 0 && c.tokens > 0,
		c.failures+c.handed > int(c.Attempt) || c.handed > maxHandovers,
		len(c.refused) > len(c.Tried):
		return fmt.Errorf("%w: %+v", errBroken, *c)
	}
	return nil
}
