// Package admit decides which of the waiting requests is admitted next, which requests are refused,
// and how long a new one would wait.
//
// Algorithm: requests of a better priority (a lower number) go first. Within a priority, the flows,
// one for each API key, share by start-time fair queueing. Each flow has a virtual time, which
// grows by its served tokens, of prompts and answers, divided by its weight. The flow with the
// least virtual time goes next; within a flow, the oldest request. A flow that becomes active again
// gets at least the current virtual time of its priority: neither its unused share nor its use
// while no request waited counts. Every Skip-th turn goes to the longest waiting request of a worse
// priority.
//
// While the fleet has no room for the next request, shorter requests of the best priority may pass
// it, because they fit into less KV memory and prefill nodes compute short prompts first. Together
// they may have PassTokens more than the tokens of the next request. Requests that go to nodes for
// which the next request does not wait may pass in any number (EASY backfilling; Lifka, The ANL/IBM
// SP Scheduling System, 1995).
//
// A full queue evicts the newest request of the worst priority. Within a priority it evicts from
// the flow that holds most tokens for its weight, so that no flow fills the queue at the expense of
// others.
//
// Invariant: each waiting request is admitted after a bounded number of turns, evicted, or removed
// by its owner. Waiting requests and tokens never exceed the Limits, except for a single request
// that is larger.
//
// The package does not know whether the fleet has room. It reads no clock and starts no goroutine:
// events and the time are arguments, decisions are results. It is not safe for concurrent use.
package admit

import (
	"cmp"
	"container/heap"
	"container/list"
	"math"
	"slices"
	"time"
)

// Defaults of Limits.
const (
	// DefaultSkip gives a sixteenth of all turns to worse priorities, which costs the best priority
	// 6 %.
	DefaultSkip = 16
	// PassTokens is the number of tokens by which shorter prompts that pass a request may exceed its
	// own tokens. A prefill node's queue (prefill/line) has the same bound.
	PassTokens = 2048
	// maxClasses is the number of priorities that are kept, with the virtual times of their flows.
	maxClasses = 64
)

// sizes has the largest number of tokens of each size of prompts. A request passes only requests of
// larger sizes.
var sizes = [...]int{64, 256, 1024, 4096, 16384, math.MaxInt}

func sizeOf(tokens int) int {
	return slices.IndexFunc(sizes[:], func(most int) bool { return tokens <= most })
}

// Limits of a Queue.
type Limits struct {
	Requests int // that wait
	Tokens   int // of their prompts
	Skip     int // one of so many turns goes to a worse priority; 0: DefaultSkip
}

// Flow is one of the shares of the fleet. Make it with NewFlow. It belongs to one Queue.
type Flow struct {
	weight float64
	epoch  uint64 // the Queue's epoch in which shares were made
	shares []*share
}

// NewFlow makes a flow. Of two flows that always have waiting requests, one with twice the weight
// is served twice the tokens.
func NewFlow(weight float64) *Flow { return &Flow{weight: weight} }

// Item is one waiting request.
type Item struct {
	Flow     *Flow
	Priority int32 // lower goes first
	Tokens   int   // of its prompts
	Owner    any   // for the caller

	share   *share
	seq     uint64 // order of arrival
	inShare *list.Element
	inClass *list.Element
	inSize  *list.Element
}

// Waiting reports whether the item is in a queue.
func (i *Item) Waiting() bool { return i.share != nil }

// class is one priority.
type class struct {
	priority int32
	v        float64               // virtual time of the last turn
	flows    flowHeap              // flows with items, the least virtual time first
	items    list.List             // of *Item, in the order of arrival
	bySize   [len(sizes)]list.List // the same
	tokens   int                   // of items
	weight   float64               // of flows
}

// share is the part of a flow in a class.
type share struct {
	flow   *Flow
	class  *class
	vt     float64   // virtual time: tokens served over the weight
	items  list.List // of *Item, in the order of arrival
	tokens int       // of items
	at     int       // index in class.flows; -1: it has no items
}

func (s *share) head() *Item { return s.items.Front().Value.(*Item) }

// last returns the newest request before those at the end that have nTokens together.
func (s *share) last(nTokens int) *Item {
	e := s.items.Back()
	for ; nTokens > 0; e = e.Prev() {
		nTokens -= e.Value.(*Item).Tokens
	}
	return e.Value.(*Item)
}

// flowHeap is a heap by virtual time. Of equal ones, the flow with the oldest request is first.
type flowHeap []*share

func (h flowHeap) Len() int { return len(h) }
func (h flowHeap) Less(i, j int) bool {
	if h[i].vt != h[j].vt {
		return h[i].vt < h[j].vt
	}
	return h[i].head().seq < h[j].head().seq
}
func (h flowHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}
func (h *flowHeap) Push(x any) {
	s := x.(*share)
	s.at = len(*h)
	*h = append(*h, s)
}
func (h *flowHeap) Pop() any {
	last := len(*h) - 1
	s := (*h)[last]
	s.at, (*h)[last] = -1, nil
	*h = (*h)[:last]
	return s
}

// Queue has the waiting requests. Make it with New.
type Queue struct {
	limits  Limits
	classes []*class // by priority, best first; some may be empty
	nItems  int
	nTokens int
	seq     uint64
	epoch   uint64 // grows whenever the queue becomes empty
	row     int    // turns in a row of the best priority, while a worse one waited
	passed  int    // tokens of requests that passed since the last turn
	pace    pace
}

// New makes an empty queue.
func New(l Limits) *Queue {
	q := new(Queue)
	q.SetLimits(l)
	return q
}

// SetLimits changes the limits. Waiting requests stay.
func (q *Queue) SetLimits(l Limits) {
	l.Skip = cmp.Or(l.Skip, DefaultSkip)
	q.limits = l
}

// Len returns the number of waiting requests.
func (q *Queue) Len() int { return q.nItems }

// Tokens returns the number of tokens of their prompts.
func (q *Queue) Tokens() int { return q.nTokens }

// Reason is the reason of a Refusal.
type Reason uint8

// Reasons.
const (
	Full    Reason = iota + 1 // Limits.Requests is reached
	TooMany                   // Limits.Tokens is reached
	Late                      // it would wait longer than its patience
)

// Refusal is the result for a request that may not wait.
type Refusal struct {
	Reason Reason
	// Wait is the predicted wait of a Late request, and otherwise the time until the queue has room;
	// 0: not known.
	Wait time.Duration
}

// Push adds a request that waits for at most patience. It returns a refusal if the predicted wait
// is longer, or if the queue is full and no other request can be evicted for it. The evicted
// requests are returned.
func (q *Queue) Push(now time.Time, i *Item, patience time.Duration) (evicted []*Item, no *Refusal) {
	i.Tokens = max(1, i.Tokens)
	if wait, known := q.Predict(now, i.Flow, i.Priority); known && wait > patience {
		return nil, &Refusal{Late, wait}
	}
	victims, no := q.victims(now, i)
	if no != nil {
		return nil, no
	}
	for _, v := range victims {
		q.remove(v)
	}
	if q.nItems == 0 {
		q.pace.begin(now)
	}
	s := q.share(i.Flow, i.Priority)
	q.seq++
	i.share, i.seq = s, q.seq
	i.inShare, i.inClass = s.items.PushBack(i), s.class.items.PushBack(i)
	i.inSize = s.class.bySize[sizeOf(i.Tokens)].PushBack(i)
	s.tokens += i.Tokens
	s.class.tokens += i.Tokens
	q.nItems++
	q.nTokens += i.Tokens
	if s.at < 0 {
		s.vt = max(s.vt, s.class.v)
		s.class.weight += s.flow.weight
		heap.Push(&s.class.flows, s)
	}
	return victims, nil
}

// victims returns the requests that have to be evicted for a request.
func (q *Queue) victims(now time.Time, i *Item) (out []*Item, no *Refusal) {
	nItems, nTokens := q.nItems, q.nTokens
	taken := map[*share]int{} // tokens of victims; never iterated
	full := func() bool {
		return nItems > 0 && (nItems+1 > q.limits.Requests || nTokens+i.Tokens > q.limits.Tokens)
	}
	for full() {
		v := q.victim(i, taken)
		if v == nil {
			no = &Refusal{Reason: Full, Wait: q.pace.after(now, float64(q.nTokens)/float64(max(1, q.nItems)))}
			if q.nItems+1 <= q.limits.Requests {
				no = &Refusal{Reason: TooMany, Wait: q.pace.after(now, float64(q.nTokens+i.Tokens-q.limits.Tokens))}
			}
			return nil, no
		}
		out = append(out, v)
		taken[v.share] += v.Tokens
		nItems--
		nTokens -= v.Tokens
	}
	return out, nil
}

// victim returns the next request to evict for a request, before those already taken from the end
// of each share. It is of the worst class, if that is worse than the request's. Otherwise it is of
// the same class, of a flow that holds more for its weight than the request's flow would. nil:
// there is none.
func (q *Queue) victim(i *Item, taken map[*share]int) *Item {
	for n := len(q.classes) - 1; n >= 0; n-- {
		c := q.classes[n]
		if c.priority < i.Priority {
			return nil
		}
		var most *share
		var last *Item // of most
		held := 0.0
		for _, s := range c.flows {
			left := s.tokens - taken[s]
			if h := float64(left) / s.flow.weight; left > 0 && h >= held {
				if l := s.last(taken[s]); h > held || l.seq > last.seq {
					most, last, held = s, l, h
				}
			}
		}
		if most == nil {
			continue
		}
		if c.priority == i.Priority {
			own := float64(i.Tokens)
			if at := slices.IndexFunc(c.flows, func(s *share) bool { return s.flow == i.Flow }); at >= 0 {
				own += float64(c.flows[at].tokens)
			}
			if most.flow == i.Flow || held <= own/i.Flow.weight {
				return nil
			}
		}
		return last
	}
	return nil
}

// share returns the share of a flow in a class.
func (q *Queue) share(f *Flow, priority int32) *share {
	if f.epoch != q.epoch {
		f.epoch, f.shares = q.epoch, nil
	}
	for _, s := range f.shares {
		if s.class.priority == priority && q.has(s.class) {
			return s
		}
	}
	s := &share{flow: f, class: q.class(priority), at: -1}
	if len(f.shares) >= maxClasses {
		f.shares = slices.DeleteFunc(f.shares, func(s *share) bool { return !q.has(s.class) })
	}
	f.shares = append(f.shares, s)
	return s
}

// has reports whether the queue still has a class.
func (q *Queue) has(c *class) bool {
	at, found := q.find(c.priority)
	return found && q.classes[at] == c
}

func (q *Queue) find(priority int32) (int, bool) {
	return slices.BinarySearchFunc(q.classes, priority, func(c *class, p int32) int { return cmp.Compare(c.priority, p) })
}

// class returns the class of a priority. If there are too many, it drops one without requests.
func (q *Queue) class(priority int32) *class {
	at, found := q.find(priority)
	if found {
		return q.classes[at]
	}
	if len(q.classes) >= maxClasses {
		if gone := slices.IndexFunc(q.classes, func(c *class) bool { return c.items.Len() == 0 }); gone >= 0 {
			q.classes = slices.Delete(q.classes, gone, gone+1)
			at, _ = q.find(priority)
		}
	}
	c := &class{priority: priority}
	q.classes = slices.Insert(q.classes, at, c)
	return c
}

// turn returns the best class with requests, and the longest waiting request of the other classes,
// or nil.
func (q *Queue) turn() (best *class, oldest *Item) {
	for _, c := range q.classes {
		if c.items.Len() == 0 {
			continue
		}
		if best == nil {
			best = c
			continue
		}
		if i := c.items.Front().Value.(*Item); oldest == nil || i.seq < oldest.seq {
			oldest = i
		}
	}
	return best, oldest
}

// Next returns the request that is admitted next, or nil if none waits.
func (q *Queue) Next() *Item {
	best, oldest := q.turn()
	switch {
	case best == nil:
		return nil
	case oldest != nil && q.row+1 >= q.limits.Skip:
		return oldest
	}
	return best.flows[0].head()
}

// Take removes Next from the queue and charges its prompt.
func (q *Queue) Take(now time.Time) *Item {
	i := q.Next()
	if i == nil {
		return nil
	}
	best, oldest := q.turn()
	s := i.share
	if q.row++; s.class != best || oldest == nil {
		q.row = 0
	}
	if s.class == best {
		s.class.v = s.vt
	}
	q.passed = 0
	q.PassElsewhere(now, i)
	return i
}

// NextShorter returns a request that fits and may pass Next: the oldest of the smallest size that
// has one. It may take room for which Next waits. nil: there is none.
func (q *Queue) NextShorter(fits func(*Item) bool) *Item {
	return q.shorter(func(next, i *Item) bool { return q.passed+i.Tokens <= PassTokens+next.Tokens && fits(i) })
}

// NextElsewhere is NextShorter for requests that fit into room for which Next does not wait.
func (q *Queue) NextElsewhere(fits func(*Item) bool) *Item {
	return q.shorter(func(_, i *Item) bool { return fits(i) })
}

// shorter returns the oldest request of the smallest size whose oldest request may pass next.
func (q *Queue) shorter(may func(next, i *Item) bool) *Item {
	next := q.Next()
	if next == nil {
		return nil
	}
	best, _ := q.turn()
	for size := range sizeOf(next.Tokens) {
		if e := best.bySize[size].Front(); e != nil && may(next, e.Value.(*Item)) {
			return e.Value.(*Item)
		}
	}
	return nil
}

// Pass removes a request that NextShorter returned, and charges its prompt.
func (q *Queue) Pass(now time.Time, i *Item) {
	q.passed += i.Tokens
	q.PassElsewhere(now, i)
}

// PassElsewhere is Pass of a request that NextElsewhere returned.
func (q *Queue) PassElsewhere(now time.Time, i *Item) {
	i.share.vt += float64(i.Tokens) / i.share.flow.weight
	q.pace.count(now, i.Tokens)
	q.Remove(now, i)
}

// Remove removes a request, if it is still in the queue.
func (q *Queue) Remove(now time.Time, i *Item) {
	if i.share == nil {
		return
	}
	q.remove(i)
	if q.nItems == 0 {
		q.pace.end(now)
		q.classes, q.row, q.passed = nil, 0, 0
		q.epoch++
	}
}

// remove unlinks an item. A share without items leaves its class's heap before, because the heap
// compares the heads of shares.
func (q *Queue) remove(i *Item) {
	s := i.share
	only := s.items.Len() == 1
	if only {
		heap.Remove(&s.class.flows, s.at)
		if s.class.weight -= s.flow.weight; len(s.class.flows) == 0 {
			s.class.weight = 0
		}
	}
	s.items.Remove(i.inShare)
	s.class.items.Remove(i.inClass)
	s.class.bySize[sizeOf(i.Tokens)].Remove(i.inSize)
	s.tokens -= i.Tokens
	s.class.tokens -= i.Tokens
	q.nItems--
	q.nTokens -= i.Tokens
	i.share = nil
	if !only {
		heap.Fix(&s.class.flows, s.at)
	}
}

// Charge adds tokens that a flow was served at a priority, such as those of its answers; negative
// ones are refunded. While no request waits, tokens are free.
func (q *Queue) Charge(f *Flow, priority int32, nTokens int) {
	if q.nItems == 0 {
		return
	}
	s := q.share(f, priority)
	s.vt = max(s.class.v, s.vt+float64(nTokens)/f.weight)
	if s.at >= 0 {
		heap.Fix(&s.class.flows, s.at)
	}
}

// SetWeight changes a flow's weight from now on.
func (q *Queue) SetWeight(f *Flow, weight float64) {
	if f.epoch == q.epoch {
		for _, s := range f.shares {
			if s.at >= 0 {
				s.class.weight += weight - f.weight
			}
		}
	}
	f.weight = weight
}

// Predict returns how long a request that arrives now would wait. It returns false while that is
// not known.
func (q *Queue) Predict(now time.Time, f *Flow, priority int32) (time.Duration, bool) {
	rate, known := q.pace.rate(now)
	if q.nItems == 0 {
		return 0, true
	}
	if !known {
		return 0, false
	}
	ahead := 0.0
	for _, c := range q.classes {
		if c.priority > priority {
			break
		}
		if c.priority < priority {
			ahead += float64(c.tokens)
			continue
		}
		own, weight := 0, c.weight+f.weight
		for _, s := range f.shares {
			if f.epoch == q.epoch && s.class == c && s.at >= 0 {
				own, weight = s.tokens, c.weight
			}
		}
		ahead += min(float64(c.tokens), float64(own)*weight/f.weight)
	}
	return time.Duration(ahead / rate * float64(time.Second)), true
}
