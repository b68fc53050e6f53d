package kvtransfer

import "time"

// backoff is the adaptive sleep of a progress loop, for providers that need manual progress.
type backoff struct {
	timer *time.Timer
	idle  int // sleeps since the last completion
}

// The sleeps start with firstBackoff. They double after each sleepsPerStep, backoffSteps times.
const (
	firstBackoff  = 20 * time.Microsecond
	sleepsPerStep = 16
	backoffSteps  = 5
)

// fabricSpins is the number of polls without a completion before the first sleep. They stay on one
// thread, because pages arrive microseconds apart.
const fabricSpins = 128

func newBackoff() *backoff {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &backoff{timer: t}
}

// spins returns the number of polls before the next sleep: one after a sleep without a completion.
func (n *backoff) spins() int {
	if n.idle > 0 {
		return 1
	}
	return fabricSpins
}

// reset starts over, after a completion.
func (n *backoff) reset() { n.idle = 0 }

// sleep returns after the next interval, or when one of the channels is ready.
func (n *backoff) sleep(wake, gone <-chan struct{}) {
	n.sleepFor(firstBackoff<<min(n.idle/sleepsPerStep, backoffSteps), wake, gone)
	n.idle++
}

// sleepFor is sleep for a given time, and reports whether wake ended it.
func (n *backoff) sleepFor(d time.Duration, wake, gone <-chan struct{}) (woken bool) {
	n.timer.Reset(d)
	defer n.timer.Stop()
	select {
	case <-wake:
		return true
	case <-gone:
	case <-n.timer.C:
	}
	return false
}

// wait returns when one of the channels is ready.
func (n *backoff) wait(wake, gone <-chan struct{}) {
	n.idle = 0
	select {
	case <-wake:
	case <-gone:
	}
}
