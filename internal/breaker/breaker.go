// Package breaker stops calls to a peer that failed several times in a row.
//
// A breaker is closed at first. It opens after Options.Failures failures in a row, and refuses
// calls for Options.Pause. Then it is half-open and lets one call through at a time: a success
// closes it, a failure opens it again.
//
// The package does not make calls, and does not retry them.
package breaker

import (
	"errors"
	"time"

	"github.com/sony/gobreaker/v2"
)

// States of a breaker.
const (
	Closed   = "closed"
	HalfOpen = "half-open"
	Open     = "open"
)

// Options of a Breaker.
type Options struct {
	Failures uint32                // in a row, which open it
	Pause    time.Duration         // for which it stays open
	Ignore   func(error) bool      // reports whether an error is no evidence about the peer; nil: never
	Changed  func(from, to string) // is called after each change of state; nil: not called
}

// Breaker is one peer's breaker. Make it with New. It is safe for concurrent use.
type Breaker struct {
	b *gobreaker.TwoStepCircuitBreaker[struct{}]
}

// New returns a closed breaker.
func New(o Options) *Breaker {
	s := gobreaker.Settings{
		Timeout:     o.Pause,
		ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= o.Failures },
		IsExcluded:  o.Ignore,
	}
	if o.Changed != nil {
		s.OnStateChange = func(_ string, from, to gobreaker.State) { o.Changed(from.String(), to.String()) }
	}
	return &Breaker{gobreaker.NewTwoStepCircuitBreaker[struct{}](s)}
}

// Allow reports whether a call may be made. The caller passes the call's result to done, once. The
// error is one of those for which Refused returns true.
func (b *Breaker) Allow() (done func(error), err error) { return b.b.Allow() }

// errPanic is the result of a call that panics.
var errPanic = errors.New("breaker: the call panicked")

// Do calls f and returns its error, or one for which Refused returns true.
func (b *Breaker) Do(f func() error) error {
	done, err := b.Allow()
	if err != nil {
		return err
	}
	err = errPanic
	defer func() { done(err) }()
	err = f()
	return err
}

// Refused reports whether a breaker refused a call.
func Refused(err error) bool {
	return errors.Is(err, gobreaker.ErrOpenState) || errors.Is(err, gobreaker.ErrTooManyRequests)
}

// State returns one of Closed, HalfOpen and Open.
func (b *Breaker) State() string { return b.b.State().String() }
