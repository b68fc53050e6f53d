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
// tokens, and ResumeTimeout those of a choice with tokens.
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
)

// Pauses between two searches for a node for a choice with tokens.
const (
	firstBackoff = 50 * time.Millisecond
	maxBackoff   = time.Second
)

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
	Untouched  bool // the node has not worked on the attempt
	Lost       bool // the connection ended during the attempt
}

// Choice is the state of one choice. The zero value has had no attempt. N names a node.
type Choice[N comparable] struct {
	state    State
	attempt  uint32        // the current one; grows by one with each
	tokens   int           // received
	from     int           // tokens when the current attempt began
	failures int           // accepted attempts in a row without a token
	tried    []N           // nodes that failed since the last token
	refused  []N           // of tried, those that answered with a refusal
	lostAt   time.Time     // when the last node was lost; zero: a node runs the choice, or none ever has
	retryAt  time.Time     // of Waiting; else zero
	backoff  time.Duration // the last wait, which the next doubles
}

// State returns what the choice waits for.
func (c *Choice[N]) State() State { return c.state }

// Attempt returns the number of the current attempt. Events of earlier attempts are stale.
func (c *Choice[N]) Attempt() uint32 { return c.attempt }

// Started reports whether the choice has tokens, which its client may have seen.
func (c *Choice[N]) Started() bool { return c.tokens > 0 }

// Fresh reports whether the current attempt has no token yet.
func (c *Choice[N]) Fresh() bool { return c.tokens == c.from }

// From returns the number of tokens before the current attempt.
func (c *Choice[N]) From() int { return c.from }

// Tried returns the nodes that have failed since the last token.
func (c *Choice[N]) Tried() []N { return c.tried }

// RetryAt returns when a Waiting choice looks for a node again; zero in other states.
func (c *Choice[N]) RetryAt() time.Time { return c.retryAt }

// Seek starts the search for a node, also after a pause or a wait.
func (c *Choice[N]) Seek() {
	c.state, c.retryAt = Seeking, time.Time{}
}

// Excludes reports whether the next attempt may not use a node.
func (c *Choice[N]) Excludes(node N) bool {
	return slices.Contains(c.refused, node) || c.Started() && slices.Contains(c.tried, node)
}

// Begin counts an attempt that is about to be sent and returns its number.
func (c *Choice[N]) Begin() uint32 {
	c.attempt++
	c.from = c.tokens
	return c.attempt
}

// Sent records that the attempt was sent.
func (c *Choice[N]) Sent() { c.state = Asked }

// Accepted records that the node has the attempt. Later events of the attempt imply it.
func (c *Choice[N]) Accepted() {
	c.state, c.lostAt, c.backoff = Running, time.Time{}, 0
}

// Token counts a token of a Running attempt.
func (c *Choice[N]) Token() { c.tokens++ }

// Live reports whether events of the current attempt count.
func (c *Choice[N]) Live() bool { return c.state == Asked || c.state == Running }

// Pause records that the attempt was cancelled because its client does not read.
func (c *Choice[N]) Pause() { c.state = Paused }

// Finish ends the choice with its last token.
func (c *Choice[N]) Finish() { c.state, c.retryAt = Finished, time.Time{} }

// Abandon ends the choice without its last token.
func (c *Choice[N]) Abandon() { c.state, c.retryAt = GivenUp, time.Time{} }

// Failed records that the current attempt failed on a node. The choice is then Seeking or GivenUp.
func (c *Choice[N]) Failed(node N, f Failure, now time.Time, l Limits) Action {
	accepted, progress := c.state == Running, c.tokens > c.from
	c.Seek()
	if progress {
		c.tried, c.refused, c.failures = c.tried[:0], c.refused[:0], 0
	}
	if c.lostAt.IsZero() {
		c.lostAt = now
	}
	if accepted { // meanwhile nodes that refused may have room again
		c.refused = c.refused[:0]
	}
	c.tried = append(c.tried, node)
	if f.Refused && !progress && !(accepted && f.HandedOver) {
		c.refused = append(c.refused, node)
	}
	unseen := f.Lost && !accepted // no node has judged the request
	if !progress && !unseen && !(c.Started() && f.Untouched) {
		c.failures++
	}
	switch {
	case f.Final, c.failures >= l.MaxAttempts:
		c.Abandon()
		return GiveUp
	case c.Started():
		return Resume
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
	c.tried, c.refused = c.tried[:0], c.refused[:0] // the nodes may have recovered
	c.backoff = min(max(firstBackoff, 2*c.backoff), maxBackoff)
	c.Delay(now.Add(c.backoff))
	return Wait
}

// Delay makes the choice look for a node at t.
func (c *Choice[N]) Delay(t time.Time) { c.state, c.retryAt = Waiting, t }

// errBroken is the cause of Check's errors.
var errBroken = errors.New("choice: broken state")

// Check verifies the invariants of the state.
func (c *Choice[N]) Check() error {
	switch {
	case c.state > GivenUp,
		c.retryAt.IsZero() == (c.state == Waiting),
		c.state == Waiting && !c.Started(),
		c.state == Running && (!c.lostAt.IsZero() || c.backoff != 0),
		(c.state == Asked || c.state == Running) && c.attempt == 0,
		c.from > c.tokens || c.attempt == 0 && c.tokens > 0,
		c.failures > int(c.attempt) || len(c.refused) > len(c.tried):
		return fmt.Errorf("%w: %+v", errBroken, *c)
	}
	return nil
}
