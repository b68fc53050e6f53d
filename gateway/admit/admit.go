// Package admit decides which of the requests that wait for the fleet goes next,
// which have to be turned away, and how long a new one would wait.
//
// Algorithm: requests of a better priority (a lower number) go first. Among those of
// one priority the flows, one for each API key, share by start-time fair queueing:
// each has a virtual time that grows by the tokens it is served, prompt and answer,
// over its weight, and the flow that is least advanced goes next; within a flow it
// is first come, first served. A flow that comes back joins at the virtual time of
// those that are there: what it has not used while it was away is gone, and so is
// what it used while nobody had to wait. Every Skip-th turn belongs to the request of a worse
// priority that has waited longest. While the fleet has no room for the request whose turn it
// is, shorter ones of the best priority may pass it, until their tokens are PassTokens more
// than its own: they fit into KV memory that it does not, and prefill nodes compute short
// prompts first. Of those that go to nodes which it does not wait for, any number may pass
// (EASY backfilling; Lifka, The ANL/IBM SP Scheduling System, 1995).
//
// A full queue gives up the newest request of the worst priority there, and within one
// priority of the flow that holds most of it for its weight, so that nobody fills it
// against the others.
//
// Invariant: whoever waits gets its turn after a bounded number of turns, or is
// evicted, or removed by its owner; requests and tokens that wait never exceed the
// Limits, but for a single request that is larger than they are.
//
// The package does not know whether the fleet has room, reads no clock, and has no
// goroutine: events and the time go in, decisions come out. One caller at a time.
package admit

import (
	"cmp"
	"container/heap"
	"container/list"
	"fmt"
	"math"
	"slices"
	"time"
)

// Defaults of Limits.
const (
	// DefaultSkip: a sixteenth of all turns keeps the worst priority moving, and
	// costs the best 6 %.
	DefaultSkip = 16
	// PassTokens is how many tokens of shorter prompts may pass a request, beside as many
	// as it has itself: what a prefill node's line (prefill/line) allows, too.
	PassTokens = 2048
	// maxClasses is how many priorities without a waiting request are remembered
	// with the virtual times of their flows.
	maxClasses = 64
)

// sizes are the most tokens of a prompt of each size; one that is longer has the last
// size. Requests pass those of larger sizes alone.
var sizes = [...]int{64, 256, 1024, 4096, 16384, math.MaxInt}

func sizeOf(tokens int) int {
	return slices.IndexFunc(sizes[:], func(most int) bool { return tokens <= most })
}

// Limits of a Queue.
type Limits struct {
	Requests int // that may wait
	Tokens   int // of their prompts
	Skip     int // of so many turns in a row one is a worse priority's; 0: DefaultSkip
}

// Flow is one of those that share the fleet. Make it with NewFlow; it belongs to
// one Queue.
type Flow struct {
	weight float64
	epoch  uint64 // of the Queue that shares are of
	shares []*share
}

// NewFlow makes a flow; of two that always wait, one with twice the weight is
// served twice the tokens.
func NewFlow(weight float64) *Flow { return &Flow{weight: weight} }

// Item is one waiting request.
type Item struct {
	Flow     *Flow
	Priority int32 // lower goes first
	Tokens   int   // of its prompts
	Owner    any   // the caller's

	share   *share
	seq     uint64 // of its arrival
	inShare *list.Element
	inClass *list.Element
	inSize  *list.Element
}

// Waiting says that the item is in a queue.
func (i *Item) Waiting() bool { return i.share != nil }

// class is one priority.
type class struct {
	priority int32
	v        float64               // virtual time of the last turn
	flows    flowHeap              // that wait, the least advanced first
	items    list.List             // of *Item, in the order of arrival
	bySize   [len(sizes)]list.List // the same
	tokens   int                   // of items
	weight   float64               // of flows
}

// share is what a flow has in a class.
type share struct {
	flow   *Flow
	class  *class
	vt     float64   // virtual time: tokens served over the weight
	items  list.List // of *Item, in the order of arrival
	tokens int       // of items
	at     int       // in class.flows; -1: none waits
}

func (s *share) head() *Item { return s.items.Front().Value.(*Item) }

// last is the newest request but for those at the end that have so many tokens.
func (s *share) last(nTokens int) *Item {
	e := s.items.Back()
	for ; nTokens > 0; e = e.Prev() {
		nTokens -= e.Value.(*Item).Tokens
	}
	return e.Value.(*Item)
}

// flowHeap is a heap by virtual time; ties go to who has waited longest.
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

// Queue is the requests that wait. Make it with New.
type Queue struct {
	limits  Limits
	classes []*class // by priority, best first; some may be empty
	nItems  int
	nTokens int
	seq     uint64
	epoch   uint64 // grows whenever nobody waits any more
	row     int    // turns in a row of the best priority, while a worse one waited
	passed  int    // tokens that have passed since the last turn
	pace    pace
}

// New makes an empty queue.
func New(l Limits) *Queue {
	if l.Skip == 0 {
		l.Skip = DefaultSkip
	}
	return &Queue{limits: l}
}

// SetLimits changes the limits; what waits stays.
func (q *Queue) SetLimits(l Limits) {
	if l.Skip == 0 {
		l.Skip = DefaultSkip
	}
	q.limits = l
}

// Len is how many requests wait.
func (q *Queue) Len() int { return q.nItems }

// Tokens is how many tokens their prompts have.
func (q *Queue) Tokens() int { return q.nTokens }

// Reason is why a request may not wait.
type Reason uint8

// Why a request may not wait.
const (
	Full    Reason = iota + 1 // Limits.Requests
	TooMany                   // Limits.Tokens
	Late                      // it would wait longer than it can
)

// Refusal says why a request may not wait.
type Refusal struct {
	Reason Reason
	// Wait is how long the request would wait, where it is Late, and else until
	// there is a place for it; 0: not known.
	Wait time.Duration
}

// Push has a request wait, for at most patience. It is refused if it would wait
// longer than that, as far as can be told, or if there is no place for it and none
// can be made. Who had to make a place for it is returned as evicted.
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
		v.share = nil
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

// victims are who makes a place for the request.
func (q *Queue) victims(now time.Time, i *Item) (out []*Item, no *Refusal) {
	nItems, nTokens := q.nItems, q.nTokens
	taken := map[*share]int{} // tokens of victims; only looked up
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

// victim is who makes a place for the request first, past those already taken from
// the end of each share: in the worst class, if that is worse than the request's,
// or else in its own, of a flow that holds more there for its weight than the
// request's would. nil: nobody has to.
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

// share finds or makes what a flow has in a class.
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

// has says that a class has not been forgotten.
func (q *Queue) has(c *class) bool {
	at, found := q.find(c.priority)
	return found && q.classes[at] == c
}

func (q *Queue) find(priority int32) (int, bool) {
	return slices.BinarySearchFunc(q.classes, priority, func(c *class, p int32) int { return cmp.Compare(c.priority, p) })
}

// class finds or makes one; where there are too many, one without requests goes.
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

// turn finds the best class with requests, and, of those behind it, the request
// that has waited longest; nil: there is none.
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

// Next is whose turn it is; nil: nobody waits.
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

// Take gives Next its turn: it waits no more, and its prompt is charged.
func (q *Queue) Take(now time.Time) *Item {
	i := q.Next()
	if i == nil {
		return nil
	}
	best, oldest := q.turn()
	s := i.share
	switch {
	case s.class != best || oldest == nil:
		q.row = 0
	default:
		q.row++
	}
	if s.class == best {
		s.class.v = s.vt
	}
	q.passed = 0
	s.vt += float64(i.Tokens) / s.flow.weight
	q.pace.took(now, i.Tokens)
	q.Remove(now, i)
	return i
}

// NextShorter is a request that may pass Next, of those for which there is room: the
// first to arrive of the smallest size that has one; nil: none may. It may take room that
// Next waits for.
func (q *Queue) NextShorter(fits func(*Item) bool) *Item {
	return q.shorter(func(next, i *Item) bool { return q.passed+i.Tokens <= PassTokens+next.Tokens && fits(i) })
}

// NextElsewhere is NextShorter of requests for which there is room that Next does not
// wait for.
func (q *Queue) NextElsewhere(fits func(*Item) bool) *Item {
	return q.shorter(func(_, i *Item) bool { return fits(i) })
}

// shorter is the first to arrive of the smallest size that has one which may pass next.
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

// Pass lets a request go that NextShorter returned: it waits no more, and its prompt is
// charged.
func (q *Queue) Pass(now time.Time, i *Item) {
	q.passed += i.Tokens
	q.PassElsewhere(now, i)
}

// PassElsewhere is Pass of a request that NextElsewhere returned.
func (q *Queue) PassElsewhere(now time.Time, i *Item) {
	i.share.vt += float64(i.Tokens) / i.share.flow.weight
	q.pace.took(now, i.Tokens)
	q.Remove(now, i)
}

// Remove takes a request out that waits no longer; it may be out already.
func (q *Queue) Remove(now time.Time, i *Item) {
	if i.share == nil {
		return
	}
	q.remove(i)
	i.share = nil
	if q.nItems == 0 {
		q.pace.end(now)
		q.classes, q.row, q.passed = nil, 0, 0
		q.epoch++
	}
}

// remove unlinks the item, which keeps its share.
func (q *Queue) remove(i *Item) {
	s := i.share
	s.items.Remove(i.inShare)
	s.class.items.Remove(i.inClass)
	s.class.bySize[sizeOf(i.Tokens)].Remove(i.inSize)
	s.tokens -= i.Tokens
	s.class.tokens -= i.Tokens
	q.nItems--
	q.nTokens -= i.Tokens
	if s.items.Len() > 0 {
		heap.Fix(&s.class.flows, s.at)
		return
	}
	// Its head, by which ties are broken, is gone: it leaves from the end.
	h := &s.class.flows
	last := len(*h) - 1
	if at := s.at; at != last {
		h.Swap(at, last)
		h.Pop()
		heap.Fix(h, at)
	} else {
		h.Pop()
	}
	if s.class.weight -= s.flow.weight; len(*h) == 0 {
		s.class.weight = 0
	}
}

// Charge counts tokens that a flow is served at a priority, such as those of its
// answers; while nobody waits they are free. What is negative is given back.
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

// Predict is how long a request that comes now would wait; false: there is no
// telling yet.
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

// String says what waits, for logs.
func (q *Queue) String() string {
	return fmt.Sprintf("%d requests with %d tokens in %d priorities", q.nItems, q.nTokens, len(q.classes))
}
