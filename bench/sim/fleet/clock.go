package fleet

import (
	"slices"
	"time"
)

// clock runs alarms at virtual times, in order of the times. At one time ends of steps come first,
// in the order of the nodes, and then functions, in the order in which they were set. So the order
// does not depend on when a step's alarm was set.
type clock struct {
	now   time.Duration
	order uint64 // of the alarm that runs
	set   uint64
	heap  []alarm // a heap in which each alarm has up to four children
	most  int     // alarms of the heap before void ones are removed
}

// alarm is a runner and its time.
type alarm struct {
	at    time.Duration
	order uint64
	runner
	now  *int // the number of the plan that has set the alarm; nil: the alarm is never void
	plan int  // this number when the alarm was set; another one makes the alarm void
}

// runner is what happens at an alarm. Those of which each request has some are types of its attempt
// and its asks, because a function would allocate memory for its variables.
type runner interface{ run() }

// call is a function as a runner.
type call func()

func (c call) run() { c() }

// ending is the end of a node's step.
type ending node

func (n *ending) run() { (*node)(n).stepEnd() }

func (a *alarm) void() bool { return a.now != nil && *a.now != a.plan }

// leastVoid is the number of alarms from which on void ones are removed.
const leastVoid = 4096

// functions is the order of the first function. Nodes have lower ones.
const functions = maxNodes

// at calls a function at a time that is not before now.
func (c *clock) at(t time.Duration, do func()) { c.runAt(t, call(do)) }

// runAt is at of a runner.
func (c *clock) runAt(t time.Duration, r runner) {
	c.set++
	c.push(alarm{at: t, order: functions + c.set, runner: r})
}

// planned is at of a call that is void once plan has another value.
func (c *clock) planned(t time.Duration, plan *int, do func()) {
	c.set++
	c.push(alarm{at: t, order: functions + c.set, runner: call(do), now: plan, plan: *plan})
}

// stepEnds ends a node's step at a time that is after now.
func (c *clock) stepEnds(n *node, t time.Duration) {
	c.push(alarm{at: t, order: n.order, runner: (*ending)(n), now: &n.plan, plan: n.plan})
}

// arrive moves to the time of an arrival.
func (c *clock) arrive(t time.Duration) { c.now, c.order = t, functions }

// isBefore reports whether a time is before the first alarm. At one time, arrivals are between ends
// of steps and functions.
func (c *clock) isBefore(t time.Duration) bool {
	return len(c.heap) == 0 || t < c.heap[0].at || t == c.heap[0].at && c.heap[0].order > functions
}

// past reports whether a node's step that ends at a time has ended before the alarm that runs.
func (c *clock) past(n *node, end time.Duration) bool {
	return end < c.now || end == c.now && n.order < c.order
}

// next moves to the earliest alarm and runs it.
func (c *clock) next() {
	a := c.pop()
	if a.void() {
		return
	}
	c.now, c.order = a.at, a.order
	a.run()
}

func (a *alarm) before(b *alarm) bool { return a.at < b.at || a.at == b.at && a.order < b.order }

func (c *clock) push(a alarm) {
	if len(c.heap) >= max(leastVoid, c.most) {
		c.purge()
	}
	c.heap = append(c.heap, a)
	i := len(c.heap) - 1
	for i > 0 {
		up := (i - 1) / 4
		if !a.before(&c.heap[up]) {
			break
		}
		c.heap[i] = c.heap[up]
		i = up
	}
	c.heap[i] = a
}

func (c *clock) pop() alarm {
	h := c.heap
	first, last := h[0], h[len(h)-1]
	h[len(h)-1] = alarm{}
	c.heap = h[:len(h)-1]
	if len(c.heap) > 0 {
		c.sink(0, last)
	}
	return first
}

// purge removes void alarms: plans that changed often have left many of them, for times far ahead.
func (c *clock) purge() {
	all := c.heap
	c.heap = slices.DeleteFunc(all, func(a alarm) bool { return a.void() })
	for i := (len(c.heap) - 2) / 4; i >= 0; i-- {
		c.sink(i, c.heap[i])
	}
	c.most = 2 * len(c.heap)
}

// sink puts an alarm at the i-th place of the heap or below it.
func (c *clock) sink(i int, last alarm) {
	h := c.heap
	for {
		least := 4*i + 1
		if least >= len(h) {
			break
		}
		for j := least + 1; j < min(4*i+5, len(h)); j++ {
			if h[j].before(&h[least]) {
				least = j
			}
		}
		if !h[least].before(&last) {
			break
		}
		h[i] = h[least]
		i = least
	}
	h[i] = last
}
