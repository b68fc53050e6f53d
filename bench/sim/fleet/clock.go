package fleet

import (
	"container/heap"
	"time"
)

// clock runs functions at virtual times, in order of the times. Functions of the same
// time run in the order in which they were set.
type clock struct {
	now  time.Duration
	set  uint64
	heap alarms
}

// alarm is a function to be called at a time.
type alarm struct {
	at    time.Duration
	order uint64
	call  func()
}

// at calls a function at a time that is not before now.
func (c *clock) at(t time.Duration, call func()) {
	c.set++
	heap.Push(&c.heap, alarm{t, c.set, call})
}

// next moves to the earliest alarm and calls its function.
func (c *clock) next() {
	a := heap.Pop(&c.heap).(alarm)
	c.now = a.at
	a.call()
}

type alarms []alarm

func (a alarms) Len() int { return len(a) }
func (a alarms) Less(i, j int) bool {
	return a[i].at < a[j].at || a[i].at == a[j].at && a[i].order < a[j].order
}
func (a alarms) Swap(i, j int) { a[i], a[j] = a[j], a[i] }

// Push implements heap.Interface.
func (a *alarms) Push(x any) { *a = append(*a, x.(alarm)) }

// Pop implements heap.Interface.
func (a *alarms) Pop() any {
	last := (*a)[len(*a)-1]
	(*a)[len(*a)-1] = alarm{}
	*a = (*a)[:len(*a)-1]
	return last
}
