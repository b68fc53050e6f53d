package exchange

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/auth"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

const (
	// Prompts of at most shortTokens are computed before others by prefill nodes. Up to
	// 1/shortShare of the room for prompt tokens is theirs in addition to what others use.
	shortTokens = 256
	shortShare  = 8
	// chargeTokens is the number of tokens of an answer after which its flow is charged.
	chargeTokens = 32
)

// Admission admits requests while the fleet has room, and queues the others, whose order it can
// still choose. While the queue is empty that takes a few atomic operations and no lock.
type Admission struct {
	room      atomic.Int64 // choices that may run at once
	tokenRoom atomic.Int64 // prompt tokens that may wait on nodes
	running   atomic.Int64 // choices that were admitted and have not ended
	tokens    atomic.Int64 // of their prompts, not yet computed as far as is known
	short     atomic.Int64 // of these, those of prompts of at most shortTokens
	waiting   atomic.Int64 // len of q
	blocks    atomic.Int64 // KV blocks of admitted requests without an attempt

	answersMu sync.Mutex
	answers   route.Answers // lengths of the model's answers

	mu     sync.Mutex // guards q and the flows' shares in it
	q      *admit.Queue
	anyone *admit.Flow                 // of requests without a key
	flows  map[*admit.Flow]*admit.Flow // by the key's own flow; only in queues other than Service.Queue
}

// waiter is a queued request.
type waiter struct {
	Claim   // avoid is set before ready is closed
	item    admit.Item
	evicted bool          // set before ready is closed
	ready   chan struct{} // closed when the request is admitted or evicted
}

// NewAdmission returns a queue with unlimited room.
func NewAdmission(l admit.Limits) *Admission {
	a := &Admission{q: admit.New(l), anyone: admit.NewFlow(1)}
	a.SetRoom(math.MaxInt64, math.MaxInt64)
	return a
}

// SetRoom sets the fleet's room, and admits what fits.
func (a *Admission) SetRoom(requests, tokens int64) {
	a.room.Store(requests)
	a.tokenRoom.Store(tokens)
	a.fill()
}

// Room is a request's demand for KV memory. The zero value is no demand.
type Room struct {
	Blocks int64 // expected
	// On reports whether a node other than avoid has room in addition to pending blocks. If none
	// has, most is the node that probably has room first. Nodes are comparable values; nil is none.
	On func(pending int64, avoid any) (has bool, most any)
}

// Waiting returns the number of queued requests.
func (a *Admission) Waiting() int64 { return a.waiting.Load() }

// Running returns the number of choices that were admitted and have not ended.
func (a *Admission) Running() int64 { return a.running.Load() }

// Room returns the number of choices that the fleet runs at once.
func (a *Admission) Room() int64 { return a.room.Load() }

// fits reports whether a node other than avoid has room for a request with so many prompt tokens.
func (a *Admission) fits(tokens int64, kv Room, avoid any) bool {
	if !a.mayGo(tokens) {
		return false
	}
	if kv.On == nil {
		return true
	}
	has, _ := kv.On(a.blocks.Load(), avoid)
	return has
}

// mayGo reports whether a request with so many prompt tokens lacks at most KV memory. The request
// may exceed what is left of the room for tokens, so that every prompt is admitted at some time.
// Long prompts that fill the room do not block short ones, which prefill nodes compute first.
func (a *Admission) mayGo(tokens int64) bool {
	return a.running.Load() < a.room.Load() && (a.tokens.Load() < a.tokenRoom.Load() || a.passes(tokens))
}

// passes reports whether a prompt is short and within the share of short prompts.
func (a *Admission) passes(tokens int64) bool {
	return tokens <= shortTokens && a.short.Load()+tokens <= a.tokenRoom.Load()/shortShare
}

// Count adds the tokens of a prompt that is to be computed.
func (a *Admission) Count(tokens int64) { a.add(tokens, tokens) }

func (a *Admission) add(prompt, tokens int64) {
	a.tokens.Add(tokens)
	if prompt <= shortTokens {
		a.short.Add(tokens)
	}
}

// pass admits a request if the queue is empty and there is room.
func (a *Admission) pass(choices, tokens int64, kv Room) bool {
	if a.waiting.Load() > 0 || !a.fits(tokens, kv, nil) {
		return false
	}
	if a.running.Add(choices)-choices >= a.room.Load() { // others were faster
		a.Leave(choices)
		return false
	}
	a.Count(tokens)
	a.blocks.Add(kv.Blocks)
	return true
}

// Routed releases the KV blocks of a request whose attempts count their own.
func (a *Admission) Routed(blocks int64) {
	a.blocks.Add(-blocks)
	if blocks > 0 {
		a.fill()
	}
}

// Answered records the length of an answer.
func (a *Admission) Answered(tokens int) {
	a.answersMu.Lock()
	defer a.answersMu.Unlock()
	a.answers.Add(tokens)
}

// Expect returns the expected length of an answer of at most maxTokens.
func (a *Admission) Expect(maxTokens int) int {
	a.answersMu.Lock()
	defer a.answersMu.Unlock()
	return a.answers.Expect(maxTokens)
}

// Leave releases the places of choices that have ended.
func (a *Admission) Leave(choices int64) {
	a.running.Add(-choices)
	a.fill()
}

// Computed releases the tokens of a prompt that Count added, because they are computed or dropped.
func (a *Admission) Computed(tokens int64) {
	a.add(tokens, -tokens)
	a.fill()
}

// fill admits queued requests while there is room.
func (a *Admission) fill() {
	if a.waiting.Load() == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fillLocked(time.Now())
}

func (a *Admission) fillLocked(now time.Time) {
	for a.q.Len() > 0 && a.fitsItem(a.q.Next()) {
		a.let(a.q.Take(now))
	}
	if node := a.waitsFor(); node != nil {
		elsewhere := func(i *admit.Item) bool {
			w := i.Owner.(*waiter)
			return a.fits(w.Tokens, w.Room, node)
		}
		for i := a.q.NextElsewhere(elsewhere); i != nil; i = a.q.NextElsewhere(elsewhere) {
			i.Owner.(*waiter).avoid = node
			a.q.PassElsewhere(now, i)
			a.let(i)
		}
	}
	for i := a.q.NextShorter(a.fitsItem); i != nil; i = a.q.NextShorter(a.fitsItem) {
		a.q.Pass(now, i)
		a.let(i)
	}
	a.waiting.Store(int64(a.q.Len()))
}

// waitsFor returns the node that probably has KV memory first for the request at the head of the
// queue; nil: it waits for something else, or for any node.
func (a *Admission) waitsFor() any {
	next := a.q.Next()
	if next == nil {
		return nil
	}
	w := next.Owner.(*waiter)
	if w.Room.On == nil || !a.mayGo(w.Tokens) {
		return nil
	}
	_, most := w.Room.On(a.blocks.Load(), nil)
	return most
}

func (a *Admission) fitsItem(i *admit.Item) bool {
	w := i.Owner.(*waiter)
	return a.fits(w.Tokens, w.Room, nil)
}

// let admits a queued request.
func (a *Admission) let(i *admit.Item) {
	w := i.Owner.(*waiter)
	a.running.Add(w.Choices)
	a.Count(w.Tokens)
	a.blocks.Add(w.Room.Blocks)
	close(w.ready)
}

// push queues a request for at most patience.
func (a *Admission) push(w *waiter, patience time.Duration) *admit.Refusal {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	evicted, no := a.q.Push(now, &w.item, patience)
	for _, i := range evicted {
		v := i.Owner.(*waiter)
		v.evicted = true
		close(v.ready)
	}
	// Publish the queue's length before filling: a concurrent Leave either sees a waiter or has
	// already released its places.
	a.waiting.Store(int64(a.q.Len()))
	a.fillLocked(now)
	return no
}

// withdraw removes a waiter. It returns false if the waiter was admitted or evicted before.
func (a *Admission) withdraw(w *waiter) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !w.item.Waiting() {
		return false
	}
	a.q.Remove(time.Now(), &w.item)
	a.waiting.Store(int64(a.q.Len()))
	return true
}

// charge counts tokens that a flow is served, while the queue is not empty.
func (a *Admission) charge(f *admit.Flow, priority int32, tokens int) {
	if f == nil || tokens == 0 || a.waiting.Load() == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.q.Charge(f, priority, tokens)
}

// SetLimits changes the bounds of the queue.
func (a *Admission) SetLimits(l admit.Limits) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.q.SetLimits(l)
}

// SetWeight changes a flow's weight.
func (a *Admission) SetWeight(f *admit.Flow, weight float64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.q.SetWeight(f, weight)
}

// Queued returns the number of queued requests and of their prompt tokens.
func (a *Admission) Queued() (requests, tokens int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.q.Len(), a.q.Tokens()
}

// Idle reports whether no request is admitted or queued.
func (a *Admission) Idle() bool { return a.running.Load() == 0 && a.waiting.Load() == 0 }

// Check verifies the counts. idle: no request is in flight.
func (a *Admission) Check(idle bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.q.Check(); err != nil {
		return err
	}
	r, t, s, b, w := a.running.Load(), a.tokens.Load(), a.short.Load(), a.blocks.Load(), a.q.Len()
	if r < 0 || t < 0 || s < 0 || b < 0 || idle && (r != 0 || t != 0 || s != 0 || b != 0 || w != 0) {
		return fmt.Errorf("gateway: %d choices and %d prompt tokens, %d of short prompts, are counted as on nodes, %d KV blocks as on their way, %d requests wait, idle %t", r, t, s, b, w, idle)
	}
	return nil
}

// Claim is a request's demand for admission, and what it holds after that.
type Claim struct {
	Queue    *Admission // nil: none, the request is admitted at once
	Priority int32
	Choices  int64 // that have not ended
	Tokens   int64 // of all prompts, until attempts count their own
	Room     Room  // likewise
	// Late returns the answer to a request whose wait is over; nil, or a nil answer: 429.
	Late func() *openai.Error

	served int  // tokens that are not charged to the key's flow yet
	queued bool // the request waits or has waited
	avoid  any  // node that a request ahead waits for; nil: none
}

// waitForRoom waits for the claim's turn. The error is the reason why the request is refused.
func (x *Exchange) waitForRoom(c *Claim) *openai.Error {
	a := c.Queue
	w := &waiter{Claim: *c, ready: make(chan struct{})}
	w.item = admit.Item{Flow: x.flow(a), Priority: c.Priority, Tokens: int(c.Tokens), Owner: w}
	began := time.Now()
	patience := min(x.S.Limits().QueueTimeout, x.Deadline.Sub(began))
	if no := a.push(w, patience); no != nil {
		return x.S.noPlace(c, no, patience)
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	fault := x.turnOf(c, w, timer.C, x.abortion(), patience)
	if fault == nil {
		c.queued, c.avoid = true, w.avoid
	} else if !a.withdraw(w) && !w.evicted { // its turn came in the same moment
		a.Computed(c.Tokens)
		a.Routed(c.Room.Blocks)
		a.Leave(c.Choices)
	}
	x.S.Meters.Histogram(metrics.GatewayQueueTime).Observe(time.Since(began).Seconds())
	return fault
}

// turnOf waits until a claim is admitted or evicted, its client has gone, or its patience is over.
func (x *Exchange) turnOf(c *Claim, w *waiter, over <-chan time.Time, aborted <-chan struct{}, patience time.Duration) *openai.Error {
	select {
	case <-w.ready:
		if w.evicted {
			x.S.Refused("evicted")
			return openai.TooMany(c.Queue.retryAfter(&w.item), "the gateway's queue is full and this request made place for another, of a better priority or of a key that holds less of it")
		}
		return nil
	case <-x.Gone():
		return x.CutOff(CauseClientGone)
	case <-aborted:
		return x.CutOff(CauseAborted)
	case <-x.S.Cut.Done():
		return x.CutOff(CauseShutdown)
	case <-over:
		if !time.Now().Before(x.Deadline) {
			return x.CutOff(CauseDeadline)
		}
		x.S.Refused("timeout")
		if c.Late != nil {
			if fault := c.Late(); fault != nil {
				return fault
			}
		}
		return openai.TooMany(c.Queue.retryAfter(&w.item), "the fleet had no room for this request within %v", patience.Round(time.Millisecond))
	}
}

// noPlace returns the answer to a request that may not queue.
func (s *Service) noPlace(c *Claim, no *admit.Refusal, patience time.Duration) *openai.Error {
	switch no.Reason {
	case admit.Late:
		s.Refused("late")
		return openai.TooMany(seconds(no.Wait-patience), "the fleet is busy: this request would wait about %v for its turn, and may wait %v",
			no.Wait.Round(100*time.Millisecond), patience.Round(time.Millisecond))
	case admit.TooMany:
		s.Refused("queue")
		_, tokens := c.Queue.Queued()
		return openai.TooMany(seconds(no.Wait), "%d prompt tokens wait for the fleet and this request has %d more: the bound is %d", tokens, c.Tokens, s.Limits().MaxQueuedTokens)
	}
	s.Refused("queue")
	requests, _ := c.Queue.Queued()
	return openai.TooMany(seconds(no.Wait), "%d requests wait for the fleet, as many as may", requests)
}

// retryAfter returns the predicted seconds after which a request like this one would be admitted at
// once.
func (a *Admission) retryAfter(i *admit.Item) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	wait, _ := a.q.Predict(time.Now(), i.Flow, i.Priority)
	return seconds(wait)
}

// maxRetryAfter bounds the Retry-After of answers.
const maxRetryAfter = time.Hour

// seconds rounds a wait up to a Retry-After.
func seconds(d time.Duration) int {
	d = min(max(d, RetryAfter*time.Second), maxRetryAfter)
	return int(math.Ceil(d.Seconds()))
}

// Refused counts a refusal because of a limit.
func (s *Service) Refused(limit string) { s.Meters.Counter(metrics.GatewayRefused, limit).Inc() }

// QueueOf returns the queue of key. It makes the queue, with room for so many requests, if there is
// none.
func (s *Service) QueueOf(key any, room int64) *Admission {
	if a, ok := s.queues.Load(key); ok {
		return a.(*Admission)
	}
	a := NewAdmission(s.queueLimits())
	a.SetRoom(room, math.MaxInt64)
	first, _ := s.queues.LoadOrStore(key, a)
	return first.(*Admission)
}

// DropQueue removes the queue of key.
func (s *Service) DropQueue(key any) { s.queues.Delete(key) }

// EachQueue calls f with each queue and its key. The key of Service.Queue is nil.
func (s *Service) EachQueue(f func(key any, a *Admission)) {
	if s.Queue != nil {
		f(nil, s.Queue)
	}
	s.queues.Range(func(key, a any) bool {
		f(key, a.(*Admission))
		return true
	})
}

// flowOf returns the flow of a key in a queue other than Service.Queue, because a flow belongs to
// one queue.
func (a *Admission) flowOf(k *auth.Key) *admit.Flow {
	if k == nil {
		return a.anyone
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.flows == nil {
		a.flows = map[*admit.Flow]*admit.Flow{}
	}
	f := a.flows[k.Flow()]
	if f == nil {
		if len(a.flows) >= maxFlows && a.q.Len() == 0 {
			clear(a.flows)
		}
		f = admit.NewFlow(k.Limits.Weight)
		a.flows[k.Flow()] = f
	}
	a.q.SetWeight(f, k.Limits.Weight)
	return f
}

// maxFlows is the number of flows beyond which those of an empty queue are dropped.
const maxFlows = 64 << 10
