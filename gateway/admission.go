package gateway

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

const (
	// roomInterval is how often the fleet's room is looked at anew; what ends here
	// makes room at once.
	roomInterval = 100 * time.Millisecond
	// shortTokens is the longest prompt that prefill nodes compute before others for sure,
	// shortShare the part of the room for prompt tokens, 1/shortShare, that such prompts may
	// have beside all others.
	shortTokens = 256
	shortShare  = 8
	// chargeTokens is after how many tokens of an answer its flow is charged.
	chargeTokens = 32
)

// admission lets requests through to the fleet while it has room for them, and
// has the others wait here, where their order can still be chosen. While nobody
// waits that takes a few atomic operations and no lock.
type admission struct {
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
	room    kvRoom
	avoid   *nodes.Node   // another request waits for its room; set before ready is closed
	evicted bool          // likewise
	ready   chan struct{} // closed when it waits no more
}

func newAdmission(l admit.Limits) *admission {
	a := &admission{q: admit.New(l), anyone: admit.NewFlow(1)}
	a.setRoom(math.MaxInt64, math.MaxInt64)
	return a
}

// setRoom takes the fleet's room and fills it.
func (a *admission) setRoom(requests, tokens int64) {
	a.room.Store(requests)
	a.tokenRoom.Store(tokens)
	a.fill()
}

// kvRoom is what a request asks of the nodes' KV memory. The zero value asks
// nothing.
type kvRoom struct {
	blocks int64 // that it is expected to take
	// on reports whether a node has room beside pending blocks, of those that are not to be
	// avoided, and which may have it first where none has.
	on func(pending int64, avoid ...*nodes.Node) (has bool, most *nodes.Node)
}

// fits says that there is room for a request of so many prompt tokens, on a node that is not
// to be avoided.
func (a *admission) fits(tokens int64, kv kvRoom, avoid ...*nodes.Node) bool {
	if !a.mayGo(tokens) {
		return false
	}
	if kv.on == nil {
		return true
	}
	has, _ := kv.on(a.blocks.Load(), avoid...)
	return has
}

// mayGo says that a request of so many prompt tokens may go as soon as a node has KV memory
// for it. It may take more than is left of the room for tokens, so that none is too large
// to ever get through. Long prompts that fill the room do not keep short ones away, which
// prefill nodes compute first.
func (a *admission) mayGo(tokens int64) bool {
	return a.running.Load() < a.room.Load() && (a.tokens.Load() < a.tokenRoom.Load() || a.passes(tokens))
}

// passes says that a prompt is short, and that few short ones are before the nodes.
func (a *admission) passes(tokens int64) bool {
	return tokens <= shortTokens && a.short.Load()+tokens <= a.tokenRoom.Load()/shortShare
}

// count adds the tokens of a prompt that is to be computed.
func (a *admission) count(tokens int64) { a.add(tokens, tokens) }

func (a *admission) add(prompt, tokens int64) {
	a.tokens.Add(tokens)
	if prompt <= shortTokens {
		a.short.Add(tokens)
	}
}

// pass lets a request through if nobody waits and there is room.
func (a *admission) pass(choices, tokens int64, kv kvRoom) bool {
	if a.waiting.Load() > 0 || !a.fits(tokens, kv) {
		return false
	}
	if a.running.Add(choices)-choices >= a.room.Load() { // others were faster
		a.leave(choices)
		return false
	}
	a.count(tokens)
	a.blocks.Add(kv.blocks)
	return true
}

// routed returns the KV blocks of a request that are counted until its attempts
// begin.
func (a *admission) routed(blocks int64) {
	a.blocks.Add(-blocks)
	if blocks > 0 && a.waiting.Load() > 0 {
		a.fill()
	}
}

// answered counts the length of an answer.
func (a *admission) answered(tokens int) {
	a.answersMu.Lock()
	defer a.answersMu.Unlock()
	a.answers.Add(tokens)
}

// expect is the length that an answer is expected to have.
func (a *admission) expect(maxTokens int) int {
	a.answersMu.Lock()
	defer a.answersMu.Unlock()
	return a.answers.Expect(maxTokens)
}

// leave tells that choices are done.
func (a *admission) leave(choices int64) {
	a.running.Add(-choices)
	if a.waiting.Load() > 0 {
		a.fill()
	}
}

// computed tells that the tokens of a prompt that was counted are on nobody's list any
// more.
func (a *admission) computed(tokens int64) {
	a.add(tokens, -tokens)
	if a.waiting.Load() > 0 {
		a.fill()
	}
}

// fill lets those through whose turn it is, while there is room.
func (a *admission) fill() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fillLocked(time.Now())
}

func (a *admission) fillLocked(now time.Time) {
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
func (a *admission) waitsFor() *nodes.Node {
	next := a.q.Next()
	if next == nil {
		return nil
	}
	w := next.Owner.(*waiter)
	if w.room.on == nil || !a.mayGo(w.tokens) {
		return nil
	}
	_, most := w.room.on(a.blocks.Load())
	return most
}

func (a *admission) fitsItem(i *admit.Item) bool {
	w := i.Owner.(*waiter)
	return a.fits(w.tokens, w.room)
}

// let counts a request whose turn has come.
func (a *admission) let(i *admit.Item) {
	w := i.Owner.(*waiter)
	a.running.Add(w.choices)
	a.count(w.tokens)
	a.blocks.Add(w.room.blocks)
	close(w.ready)
}

// push has a request wait, for patience at most.
func (a *admission) push(w *waiter, patience time.Duration) *admit.Refusal {
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
func (a *admission) withdraw(w *waiter) bool {
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
func (a *admission) charge(f *admit.Flow, priority int32, tokens int) {
	if f == nil || tokens == 0 || a.waiting.Load() == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.q.Charge(f, priority, tokens)
}

func (a *admission) setLimits(l admit.Limits) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.q.SetLimits(l)
}

func (a *admission) setWeight(f *admit.Flow, weight float64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.q.SetWeight(f, weight)
}

// queued is what waits.
func (a *admission) queued() (requests, tokens int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.q.Len(), a.q.Tokens()
}

// idle says that nothing is counted.
func (a *admission) idle() bool { return a.running.Load() == 0 && a.waiting.Load() == 0 }

// check verifies the accounts; idle: no request is being answered.
func (a *admission) check(idle bool) error {
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

// keepRoom follows the fleet's room until ctx ends.
func (g *Gateway) keepRoom(ctx context.Context) {
	tick := time.NewTicker(roomInterval)
	defer tick.Stop()
	for {
		g.lookForRoom()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// claim is a request that asks for room.
type claim struct {
	a               *admission
	flow            *admit.Flow
	priority        int32
	choices, tokens int64
	room            kvRoom
	start, deadline time.Time
	queued          bool            // it waits, or has waited
	avoid           *nodes.Node     // set by waitForRoom: another request waits for that node
	gone            <-chan struct{} // the client has gone; nil: nobody looks
}

// claim implements backend.
func (j *job) claim() (claim, *openai.Error) {
	kv, fault := j.kvRoom()
	return claim{a: j.model.queue, priority: j.req.Priority, choices: int64(len(j.choices)), tokens: int64(j.nPrompt), room: kv}, fault
}

// waitForRoom has a claim wait for its turn. cause is of metrics.StreamAborts,
// where something other than a limit ended that.
func (g *Gateway) waitForRoom(c *claim) (fault *openai.Error, cause string) {
	a := c.a
	w := &waiter{choices: c.choices, tokens: c.tokens, room: c.room, ready: make(chan struct{})}
	w.item = admit.Item{Flow: c.flow, Priority: c.priority, Tokens: int(c.tokens), Owner: w}
	began := time.Now()
	patience := min(g.lim().QueueTimeout, c.deadline.Sub(began))
	if no := a.push(w, patience); no != nil {
		return g.noPlace(c, no, patience), ""
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	if fault, cause = g.turnOf(c, w, timer.C, patience); fault == nil {
		c.avoid = w.avoid
	}
	if fault != nil && !a.withdraw(w) && !w.evicted { // its turn came in the same moment
		a.computed(c.tokens)
		a.routed(c.room.blocks)
		a.leave(c.choices)
	}
	g.meters.queueTime.Observe(time.Since(began).Seconds())
	return fault, cause
}

// turnOf waits for a claim's turn, or for the end of its patience.
func (g *Gateway) turnOf(c *claim, w *waiter, over <-chan time.Time, patience time.Duration) (fault *openai.Error, cause string) {
	select {
	case <-w.ready:
		if w.evicted {
			g.refused("evicted")
			return tooMany(c.retryAfter(), "the gateway's queue is full and this request made place for another, of a better priority or of a key that holds less of it"), ""
		}
		return nil, ""
	case <-c.gone:
		return errGone, causeClientGone
	case <-g.cut:
		return errShutdown, causeShutdown
	case <-over:
		if !time.Now().Before(c.deadline) {
			return tooLate(c.start, c.deadline), causeDeadline
		}
		g.refused("timeout")
		return tooMany(c.retryAfter(), "the fleet had no room for this request within %v", patience.Round(time.Millisecond)), ""
	}
}

// tooLate is the end of a request whose deadline has passed.
func tooLate(start, deadline time.Time) *openai.Error {
	return &openai.Error{Status: 504, Type: openai.TypeTimeout, Message: fmt.Sprintf("the request took longer than %v", deadline.Sub(start))}
}

// noPlace is what a request is told that may not wait.
func (g *Gateway) noPlace(c *claim, no *admit.Refusal, patience time.Duration) *openai.Error {
	switch no.Reason {
	case admit.Late:
		g.refused("late")
		return tooMany(seconds(no.Wait-patience), "the fleet is busy: this request would wait about %v for its turn, and may wait %v",
			no.Wait.Round(100*time.Millisecond), patience.Round(time.Millisecond))
	case admit.TooMany:
		g.refused("queue")
		_, tokens := c.a.queued()
		return tooMany(seconds(no.Wait), "%d prompt tokens wait for the fleet and this request has %d more: the bound is %d", tokens, c.tokens, g.lim().MaxQueuedTokens)
	}
	g.refused("queue")
	requests, _ := c.a.queued()
	return tooMany(seconds(no.Wait), "%d requests wait for the fleet, as many as may", requests)
}

// retryAfter is in how many seconds a request like this one would have its turn
// at once, as far as can be told.
func (c *claim) retryAfter() int {
	c.a.mu.Lock()
	defer c.a.mu.Unlock()
	wait, _ := c.a.q.Predict(time.Now(), c.flow, c.priority)
	return seconds(wait)
}

// maxRetryAfter is the longest time that a client is told to stay away.
const maxRetryAfter = time.Hour

// seconds is a time to wait as Retry-After has it.
func seconds(d time.Duration) int {
	d = min(max(d, retryAfter*time.Second), maxRetryAfter)
	return int(math.Ceil(d.Seconds()))
}

// refused counts a refusal.
func (g *Gateway) refused(limit string) { g.meters.set.Counter(metrics.GatewayRefused, limit).Inc() }
