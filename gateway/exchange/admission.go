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
	// shortTokens is the longest prompt that prefill nodes compute before others for sure,
	// shortShare the part of the room for prompt tokens, 1/shortShare, that such prompts may
	// have beside all others.
	shortTokens = 256
	shortShare  = 8
	// chargeTokens is after how many tokens of an answer its flow is charged.
	chargeTokens = 32
)

// Admission lets requests through to the fleet while it has room for them, and
// has the others wait here, where their order can still be chosen. While nobody
// waits that takes a few atomic operations and no lock.
type Admission struct {
	room      atomic.Int64 // requests that may be on nodes
	tokenRoom atomic.Int64 // prompt tokens that may be there uncomputed
	running   atomic.Int64 // requests let through and not done, each choice counted
	tokens    atomic.Int64 // their prompt tokens that are not computed, as far as is known
	short     atomic.Int64 // of these, tokens of prompts of at most shortTokens
	waiting   atomic.Int64 // len of q
	blocks    atomic.Int64 // KV blocks of requests let through whose attempts have not begun

	answersMu sync.Mutex
	answers   route.Answers // of the model

	mu     sync.Mutex // of q and flows' shares in it
	q      *admit.Queue
	anyone *admit.Flow                 // of requests without a key
	flows  map[*admit.Flow]*admit.Flow // of those with one, in queues of upstreams' models
}

// waiter is a request that waits.
type waiter struct {
	item    admit.Item
	choices int64
	tokens  int64
	room    Room
	avoid   any           // node; another request waits for its room; set before ready is closed
	evicted bool          // likewise
	ready   chan struct{} // closed when it waits no more
}

func NewAdmission(l admit.Limits) *Admission {
	a := &Admission{q: admit.New(l), anyone: admit.NewFlow(1)}
	a.SetRoom(math.MaxInt64, math.MaxInt64)
	return a
}

// SetRoom takes the fleet's room and fills it.
func (a *Admission) SetRoom(requests, tokens int64) {
	a.room.Store(requests)
	a.tokenRoom.Store(tokens)
	a.fill()
}

// Room is what a request asks of the nodes' KV memory. The zero value asks
// nothing.
type Room struct {
	Blocks int64 // that it is expected to take
	// On reports whether a node other than avoid has room next to pending blocks, and, where
	// none has, which may have it first. Nodes are values that can be compared; nil is none.
	On func(pending int64, avoid any) (has bool, most any)
}

// Waiting is the number of requests that wait.
func (a *Admission) Waiting() int64 { return a.waiting.Load() }

// Running is the number of choices that were let through and are not done.
func (a *Admission) Running() int64 { return a.running.Load() }

// Room is the number of choices that the fleet takes at once.
func (a *Admission) Room() int64 { return a.room.Load() }

// fits says that there is room for a request of so many prompt tokens, on a node that is not
// to be avoided.
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

// mayGo says that a request of so many prompt tokens may go as soon as a node has KV memory
// for it. It may take more than is left of the room for tokens, so that none is too large
// to ever get through. Long prompts that fill the room do not keep short ones away, which
// prefill nodes compute first.
func (a *Admission) mayGo(tokens int64) bool {
	return a.running.Load() < a.room.Load() && (a.tokens.Load() < a.tokenRoom.Load() || a.passes(tokens))
}

// passes says that a prompt is short, and that few short ones are before the nodes.
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

// pass lets a request through if nobody waits and there is room.
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

// Routed returns the KV blocks of a request that are counted until its attempts
// begin.
func (a *Admission) Routed(blocks int64) {
	a.blocks.Add(-blocks)
	if blocks > 0 && a.waiting.Load() > 0 {
		a.fill()
	}
}

// Answered counts the length of an answer.
func (a *Admission) Answered(tokens int) {
	a.answersMu.Lock()
	defer a.answersMu.Unlock()
	a.answers.Add(tokens)
}

// Expect is the length that an answer is expected to have.
func (a *Admission) Expect(maxTokens int) int {
	a.answersMu.Lock()
	defer a.answersMu.Unlock()
	return a.answers.Expect(maxTokens)
}

// Leave tells that choices are done.
func (a *Admission) Leave(choices int64) {
	a.running.Add(-choices)
	if a.waiting.Load() > 0 {
		a.fill()
	}
}

// Computed tells that the tokens of a prompt that was counted are on nobody's list any
// more.
func (a *Admission) Computed(tokens int64) {
	a.add(tokens, -tokens)
	if a.waiting.Load() > 0 {
		a.fill()
	}
}

// fill lets those through whose turn it is, while there is room.
func (a *Admission) fill() {
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
			return a.fits(w.tokens, w.room, node)
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

// waitsFor is the node that will probably have KV memory first for the request whose turn
// it is; nil: it waits for something else, or for nobody in particular.
func (a *Admission) waitsFor() any {
	next := a.q.Next()
	if next == nil {
		return nil
	}
	w := next.Owner.(*waiter)
	if w.room.On == nil || !a.mayGo(w.tokens) {
		return nil
	}
	_, most := w.room.On(a.blocks.Load(), nil)
	return most
}

func (a *Admission) fitsItem(i *admit.Item) bool {
	w := i.Owner.(*waiter)
	return a.fits(w.tokens, w.room, nil)
}

// let counts a request whose turn has come.
func (a *Admission) let(i *admit.Item) {
	w := i.Owner.(*waiter)
	a.running.Add(w.choices)
	a.Count(w.tokens)
	a.blocks.Add(w.room.Blocks)
	close(w.ready)
}

// push has a request wait, for patience at most.
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
	// Whoever leaves from here on sees that somebody waits; who left before has
	// made room, which is looked for now.
	a.waiting.Store(int64(a.q.Len()))
	a.fillLocked(now)
	return no
}

// withdraw takes a waiter out; false: it waits no more.
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

// charge counts tokens that a flow is served, while somebody waits.
func (a *Admission) charge(f *admit.Flow, priority int32, tokens int) {
	if f == nil || tokens == 0 || a.waiting.Load() == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.q.Charge(f, priority, tokens)
}

func (a *Admission) SetLimits(l admit.Limits) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.q.SetLimits(l)
}

func (a *Admission) SetWeight(f *admit.Flow, weight float64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.q.SetWeight(f, weight)
}

// Queued is what waits.
func (a *Admission) Queued() (requests, tokens int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.q.Len(), a.q.Tokens()
}

// Idle says that nothing is counted.
func (a *Admission) Idle() bool { return a.running.Load() == 0 && a.waiting.Load() == 0 }

// Check verifies the accounts; idle: no request is being answered.
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

// Claim is a request that asks for room.
type Claim struct {
	Queue    *Admission // nil: nothing is asked
	Priority int32
	Choices  int64
	Tokens   int64 // of all prompts
	Room     Room

	flow            *admit.Flow
	start, deadline time.Time
	queued          bool            // it waits, or has waited
	avoid           any             // set by waitForRoom: another request waits for that node
	gone            <-chan struct{} // the client has gone; nil: nobody looks
}

// waitForRoom has a claim wait for its turn. cause is of metrics.StreamAborts,
// where something other than a limit ended that.
func (s *Service) waitForRoom(c *Claim) (fault *openai.Error, cause string) {
	a := c.Queue
	w := &waiter{choices: c.Choices, tokens: c.Tokens, room: c.Room, ready: make(chan struct{})}
	w.item = admit.Item{Flow: c.flow, Priority: c.Priority, Tokens: int(c.Tokens), Owner: w}
	began := time.Now()
	patience := min(s.Limits().QueueTimeout, c.deadline.Sub(began))
	if no := a.push(w, patience); no != nil {
		return s.noPlace(c, no, patience), ""
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	if fault, cause = s.turnOf(c, w, timer.C, patience); fault == nil {
		c.avoid = w.avoid
	}
	if fault != nil && !a.withdraw(w) && !w.evicted { // its turn came in the same moment
		a.Computed(c.Tokens)
		a.Routed(c.Room.Blocks)
		a.Leave(c.Choices)
	}
	s.Meters.QueueTime.Observe(time.Since(began).Seconds())
	return fault, cause
}

// turnOf waits for a claim's turn, or for the end of its patience.
func (s *Service) turnOf(c *Claim, w *waiter, over <-chan time.Time, patience time.Duration) (fault *openai.Error, cause string) {
	select {
	case <-w.ready:
		if w.evicted {
			s.Refused("evicted")
			return openai.TooMany(c.retryAfter(), "the gateway's queue is full and this request made place for another, of a better priority or of a key that holds less of it"), ""
		}
		return nil, ""
	case <-c.gone:
		return ErrGone, CauseClientGone
	case <-s.Cut:
		return errShutdown, CauseShutdown
	case <-over:
		if !time.Now().Before(c.deadline) {
			return tooLate(c.start, c.deadline), CauseDeadline
		}
		s.Refused("timeout")
		return openai.TooMany(c.retryAfter(), "the fleet had no room for this request within %v", patience.Round(time.Millisecond)), ""
	}
}

// tooLate is the end of a request whose deadline has passed.
func tooLate(start, deadline time.Time) *openai.Error {
	return &openai.Error{Status: 504, Type: openai.TypeTimeout, Message: fmt.Sprintf("the request took longer than %v", deadline.Sub(start))}
}

// noPlace is what a request is told that may not wait.
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

// RetryAfter is in how many seconds a request like this one would have its turn
// at once, as far as can be told.
func (c *Claim) retryAfter() int {
	c.Queue.mu.Lock()
	defer c.Queue.mu.Unlock()
	wait, _ := c.Queue.q.Predict(time.Now(), c.flow, c.Priority)
	return seconds(wait)
}

// maxRetryAfter is the longest time that a client is told to stay away.
const maxRetryAfter = time.Hour

// seconds is a time to wait as Retry-After has it.
func seconds(d time.Duration) int {
	d = min(max(d, RetryAfter*time.Second), maxRetryAfter)
	return int(math.Ceil(d.Seconds()))
}

// refused counts a refusal.
func (s *Service) Refused(limit string) { s.Meters.Set.Counter(metrics.GatewayRefused, limit).Inc() }

// QueueOf returns the queue that key names, and makes one with room for so many requests where
// there is none.
func (s *Service) QueueOf(key any, room int64) *Admission {
	if a, ok := s.queues.Load(key); ok {
		return a.(*Admission)
	}
	a := NewAdmission(s.queueLimits())
	a.SetRoom(room, math.MaxInt64)
	first, _ := s.queues.LoadOrStore(key, a)
	return first.(*Admission)
}

// DropQueue removes the queue that key names.
func (s *Service) DropQueue(key any) { s.queues.Delete(key) }

// EachQueue calls f with all queues and their keys; that of Service.Queue is nil.
func (s *Service) EachQueue(f func(key any, a *Admission)) {
	if s.Queue != nil {
		f(nil, s.Queue)
	}
	s.queues.Range(func(key, a any) bool {
		f(key, a.(*Admission))
		return true
	})
}

// flowOf is whom a key's requests are charged to in a queue that is not the native
// nodes': flows belong to one queue.
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
		if len(a.flows) >= maxFlows && a.q.Len() == 0 { // of keys that may be gone
			clear(a.flows)
		}
		f = admit.NewFlow(k.Limits.Weight)
		a.flows[k.Flow()] = f
	}
	a.q.SetWeight(f, k.Limits.Weight)
	return f
}

// maxFlows is from how many keys on those that do not wait are forgotten.
const maxFlows = 64 << 10
