package kvtransfer

import "time"

// nap is how an end sleeps that waits for a provider which works only while it is asked.
type nap struct {
	timer *time.Timer
	idle  int // sleeps since something was found
}

// Sleeps begin with the first, twice as long after so many each, to the last.
const (
	firstNap  = 20 * time.Microsecond
	napsEach  = 16
	doublings = 5
)

// fabricLooks is how often an end looks in vain, without leaving its thread, before it sleeps: pages come microseconds apart.
const fabricLooks = 128

func newNap() *nap {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &nap{timer: t}
}

// looks is how often to look before the next sleep: one who has slept in vain looks once.
func (n *nap) looks() int {
	if n.idle > 0 {
		return 1
	}
	return fabricLooks
}

// over: something was found.
func (n *nap) over() { n.idle = 0 }

// sleep returns after a while, or when it is woken.
func (n *nap) sleep(wake, gone <-chan struct{}) {
	n.sleepFor(firstNap<<min(n.idle/napsEach, doublings), wake, gone)
	n.idle++
}

// sleepFor says whether it was woken.
func (n *nap) sleepFor(d time.Duration, wake, gone <-chan struct{}) (woken bool) {
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

// wait returns when it is woken.
func (n *nap) wait(wake, gone <-chan struct{}) {
	n.idle = 0
	select {
	case <-wake:
	case <-gone:
	}
}
