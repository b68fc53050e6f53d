package fleet

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/route"
)

// Errors of requests.
var (
	ErrTooLong   = errors.New("no node can hold the request")
	ErrRefused   = errors.New("the gateway's queue refused the request")
	ErrNoNode    = errors.New("no decode node is available")
	ErrNode      = errors.New("the decode node failed")
	ErrDeadline  = errors.New("the request's deadline passed")
	ErrCancelled = errors.New("the client left")
	ErrGateway   = errors.New("the gateway failed")
)

// maxAnswer is longer than every answer.
const maxAnswer = math.MaxInt

const (
	// shortTokens and shortShare are those of gateway/exchange: so short prompts have a share of the
	// room for prompt tokens for themselves.
	shortTokens = 256
	shortShare  = 8
)

// room counts the requests and prompt tokens that a gateway may send to nodes, and has sent.
type room struct {
	requests, tokens     int // room of the fleet
	stale                bool
	running, sent, short int // requests; tokens of prompts; of these, those of short prompts
}

func (m *room) count(tokens int)    { m.add(tokens, tokens) }
func (m *room) computed(tokens int) { m.add(tokens, -tokens) }

func (m *room) add(prompt, tokens int) {
	m.sent += tokens
	if prompt <= shortTokens {
		m.short += tokens
	}
}

// bound returns a limit, and the largest number where there is none.
func bound(n int) int {
	if n <= 0 {
		return math.MaxInt
	}
	return n
}

// expect returns the expected length of an answer of at most maxTokens.
func (g *gateway) expect(maxTokens int) int { return g.answers.Expect(maxTokens) }

// measure computes the room of the usable nodes from their reports, as gateway/native/nodes.
func (g *gateway) measure() {
	l, m := &g.f.limits, &g.room
	m.stale = false
	m.requests, m.tokens = math.MaxInt, math.MaxInt
	if g.f.o.Limits == nil || g.f.o.Heartbeat == 0 || !slices.Contains(g.decode.usable, true) {
		return
	}
	m.requests, m.tokens = 0, 0
	for _, k := range []*known{&g.decode, &g.prefill} {
		for i := range k.nodes {
			if !k.usable[i] {
				continue
			}
			r := &k.reports[i]
			m.tokens += int(r.Backlog(l.NodeBacklogTime))
			if k == &g.decode {
				m.requests += r.Room(g.f.o.MaxSeqs, max(0, l.NodeBacklog), k.own[i])
			}
		}
	}
	if l.NodeBacklogTime < 0 {
		m.tokens = math.MaxInt
	}
}

// mayGo reports whether a request with so many prompt tokens lacks at most KV memory, by the rule
// of gateway/exchange.
func (g *gateway) mayGo(tokens int) bool {
	m := &g.room
	if m.stale {
		g.measure()
	}
	return m.running < m.requests && (m.sent < m.tokens || tokens <= shortTokens && m.short+tokens <= m.tokens/shortShare)
}

// arrive routes a request that a client sends, or queues it.
func (f *fleet) arrive(r *Request) {
	l := &f.limits
	r.arrived = true
	g := f.arrivesAt(r)
	if g == nil {
		f.lose(r, ErrGateway)
		return
	}
	r.g = g
	if l.RequestTimeout > 0 {
		f.clock.at(f.clock.now+l.RequestTimeout, func() { f.cancel(r, ErrDeadline) })
	}
	if l.MaxPromptTokens > 0 && r.Prompt > l.MaxPromptTokens {
		f.lose(r, fmt.Errorf("%w: %d tokens, --max-prompt-tokens is %d", ErrTooLong, r.Prompt, l.MaxPromptTokens))
		return
	}
	if g.waiting.Len() == 0 && g.route(r) {
		return
	}
	patience := time.Duration(math.MaxInt64)
	if l.QueueTimeout > 0 {
		patience = l.QueueTimeout
	}
	r.item = &admit.Item{Flow: g.flow, Tokens: r.Prompt, Owner: r}
	evicted, no := g.waiting.Push(f.at(), r.item, patience)
	for _, i := range evicted {
		f.lose(i.Owner.(*Request), ErrRefused)
	}
	if no != nil {
		f.lose(r, ErrRefused)
		return
	}
	f.result.Waited++
	if l.QueueTimeout > 0 {
		f.clock.at(f.clock.now+patience, func() {
			if r.item.Waiting() {
				g.waiting.Remove(f.at(), r.item)
				f.lose(r, ErrRefused)
			}
		})
	}
	g.fill()
}

// at returns the virtual time for a queue.
func (f *fleet) at() time.Time { return time.Unix(0, int64(f.clock.now)) }

// fill routes waiting requests while there is room for the next one, and then those that
// may pass it, first to nodes that it does not wait for.
func (g *gateway) fill() {
	if g.filling || g.down || g.waiting.Len() == 0 {
		return
	}
	g.filling = true
	defer func() { g.filling = false }()
	routes := func(i *admit.Item) bool { return g.route(i.Owner.(*Request)) }
	for g.waiting.Len() > 0 && routes(g.waiting.Next()) {
		g.waiting.Take(g.f.at())
	}
	if g.waiting.Len() == 0 {
		return
	}
	if g.mayGo(g.waiting.Next().Tokens) { // it waits for KV memory
		g.view.Fill()
		g.reservedNode = route.Roomiest(g.view.Decode, &g.lastRequest)
		for i := g.waiting.NextElsewhere(routes); i != nil; i = g.waiting.NextElsewhere(routes) {
			g.waiting.PassElsewhere(g.f.at(), i)
		}
		g.reservedNode = -1
	}
	for i := g.waiting.NextShorter(routes); i != nil; i = g.waiting.NextShorter(routes) {
		g.waiting.Pass(g.f.at(), i)
	}
}

// route selects a request's nodes and sends it. It returns false if the fleet has no room for it.
func (g *gateway) route(r *Request) bool {
	if !g.mayGo(r.Prompt) {
		return false
	}
	d := g.pick(r, true)
	if d.Decode < 0 {
		switch {
		case !slices.Contains(g.decode.usable, true):
			g.f.lose(r, ErrNoNode)
		case !slices.ContainsFunc(g.view.Decode, func(s route.State) bool { return s.Memory.Holds(g.lastRequest.Demand) }):
			g.f.lose(r, ErrTooLong)
		default:
			return false
		}
		return true
	}
	g.turn++
	r.admitted = true
	g.room.running++
	g.send(r, d)
	return true
}

// send begins an attempt on the nodes of a decision.
func (g *gateway) send(r *Request, d route.Decision) {
	f := g.f
	a := &attempt{r: r, n: g.decode.nodes[d.Decode], tokens: r.Prompt + r.emitted}
	a.prefill = a.nodes[:0]
	g.remember(&d)
	for _, at := range d.Prefill {
		a.prefill = append(a.prefill, g.prefill.nodes[at])
	}
	r.a = a
	r.choice.Begin()
	r.choice.Sent()
	g.claim(a)
	if f.o.Dispatch == 0 {
		f.addAttempt(a)
		return
	}
	f.clock.runAt(f.clock.now+f.o.Dispatch, (*adding)(a))
}

// failLater makes an attempt fail when its gateway learns of it.
func (f *fleet) failLater(a *attempt, why choice.Failure) {
	f.afterMessage(func() {
		if !a.over {
			a.r.g.failed(a, why)
		}
	})
}

// failed ends an attempt that a node has not finished, and starts the next one or gives up.
func (g *gateway) failed(a *attempt, why choice.Failure) {
	f, r, now := g.f, a.r, g.f.at()
	g.leave(a)
	switch r.choice.Failed(a.n.at, why, now, g.attempts()) {
	case choice.Retry:
		if !f.budget.AllowN(now, 1) {
			f.lose(r, ErrNode)
			return
		}
		f.result.Retried++
	case choice.Move:
		f.result.Retried++
	case choice.Resume:
		f.result.Resumed++
		turn := f.resumes.ReserveN(now, 1)
		if wait := turn.DelayFrom(now); wait > f.limits.ResumeTimeout {
			turn.CancelAt(now)
			f.lose(r, ErrNode)
			return
		} else if wait > 0 {
			r.choice.Delay(now.Add(wait))
			g.wake(r)
			return
		}
	default:
		f.lose(r, ErrNode)
		return
	}
	g.again(r)
}

// attempts returns the limits of attempts.
func (g *gateway) attempts() choice.Limits {
	return choice.Limits{MaxAttempts: g.f.limits.MaxAttempts, ResumeTimeout: g.f.limits.ResumeTimeout}
}

// again starts another attempt of an admitted request, or waits for a node. A request with tokens
// resumes even where memory is short.
func (g *gateway) again(r *Request) {
	f := g.f
	r.choice.Seek()
	d := g.pick(r, !r.choice.Started())
	if d.Decode < 0 && d.Reason == route.ReasonNoRoom {
		d = g.pick(r, false)
	}
	if d.Decode >= 0 && !r.choice.Excludes(d.Decode) {
		g.send(r, d)
		return
	}
	if r.choice.NoNode(f.at(), g.attempts()) == choice.Wait {
		g.wake(r)
		return
	}
	f.lose(r, ErrNoNode)
}

// wake starts another attempt at the time that the choice waits for.
func (g *gateway) wake(r *Request) {
	at := r.choice.RetryAt
	g.f.clock.at(time.Duration(at.UnixNano()), func() {
		if r.choice.State == choice.Waiting && r.choice.RetryAt.Equal(at) {
			g.again(r)
		}
	})
}

// finished ends a request whose answer is complete.
func (f *fleet) finished(a *attempt) {
	r := a.r
	r.g.leave(a)
	r.choice.Finish()
	r.g.answers.Add(r.emitted)
	f.close(r)
}

// lose ends a request with an error.
func (f *fleet) lose(r *Request, err error) {
	r.Err = err
	r.choice.Abandon()
	f.result.Failed++
	f.close(r)
}

// close ends a request.
func (f *fleet) close(r *Request) {
	f.progress = f.clock.now
	f.result.Span = max(f.result.Span, r.Last, f.clock.now)
	f.result.open--
	r.closed, r.chain = true, nil
	if r.admitted {
		r.g.room.running--
	}
	r.g.fill()
}

// cancel ends a request at its gateway.
func (f *fleet) cancel(r *Request, why error) {
	if r.closed {
		return
	}
	f.result.Cancelled++
	f.drop(r, why)
}

// drop ends a request without an answer of its nodes, which learn of it by a message.
func (f *fleet) drop(r *Request, why error) {
	if r.item != nil {
		r.g.waiting.Remove(f.at(), r.item)
	}
	if a := r.a; a != nil {
		r.g.leave(a)
		f.cleanUp(f.o.RoundTrip/2, func() { f.abort(a) })
	}
	f.lose(r, why)
}
