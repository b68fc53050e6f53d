package fleet

import (
	"errors"
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/decode/course"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/prefill/line"
)

// attempt is one attempt of a request on a decode node.
type attempt struct {
	r         *Request
	n         *node
	prefill   []*node // candidates, best first
	tokens    int     // of the prompt and of the answer when it began
	course    course.Course
	id        scheduler.RequestID // on its node
	added     bool                // the node has it
	over      bool                // for its gateway
	ask       *ask                // the last one
	claimed   int                 // tokens counted in claimedOf
	claimedOf *route.Sent
	blocks    int // expected number of blocks on its node
	epoch     int // of its node when the attempt was sent

	nodes [route.MaxPrefill]*node // of prefill
	first ask
}

// adding is an attempt that arrives at its node.
type adding attempt

func (a *adding) run() { a.n.f.addAttempt((*attempt)(a)) }

// accepting is an attempt that its node adds between two steps.
type accepting attempt

func (x *accepting) run() {
	switch a := (*attempt)(x); {
	case a.over:
	case a.n.epoch != a.epoch:
		a.n.f.failLater(a, choice.Failure{Lost: true})
	default:
		a.n.f.accept(a)
	}
}

// streams reports whether the attempt's gateway receives the tokens that its node samples.
func (a *attempt) streams() bool { return a.added && !a.over }

// ask is a prompt that a decode node has sent to a prefill node.
type ask struct {
	a           *attempt
	p           *node
	epoch       int // of p when it was sent
	ticket      line.ID
	id          scheduler.RequestID // on the prefill node; 0: not granted
	reservation scheduler.ReservationID
	asked       time.Duration // when the prefill node requested the grant
	cached      int           // tokens that the prefill node need not compute
	from        int           // first token that is transferred
	pushed      time.Duration // when its transfer began
	transfer    *transfer     // where links limit it; nil: it has not begun
	pushing     bool          // the prefill node has computed it, and its KV is under way
	removed     bool          // from the prefill node
	over        bool          // for its decode node
}

// addAttempt adds a routed request to its decode node and sends its prompt to the first prefill
// node.
func (f *fleet) addAttempt(a *attempt) {
	n := a.n
	switch {
	case a.over:
		return
	case !n.up:
		f.failLater(a, choice.Failure{Lost: true})
		return
	case n.draining:
		f.failLater(a, choice.Failure{Refused: true, HandedOver: true, Drained: true, Untouched: true})
		return
	}
	if len(a.prefill) == 0 { // the same as after the running step
		f.accept(a)
		return
	}
	a.epoch = n.epoch
	n.afterStep((*accepting)(a))
}

// accept adds an attempt to its node's scheduler.
func (f *fleet) accept(a *attempt) {
	n, r := a.n, a.r
	id, cached, err := n.add(scheduler.Request{Tokens: f.tokens[:a.tokens], Chain: f.chain(r), Hold: len(a.prefill) > 0, MaxNew: r.Output - r.emitted})
	switch {
	case errors.Is(err, scheduler.ErrTooLong):
		r.g.leave(a)
		f.lose(r, fmt.Errorf("%w: %d tokens", ErrTooLong, a.tokens))
		return
	case err != nil:
		f.fail(err)
		return
	}
	a.id, a.added = id, true
	n.attempts.put(uint64(id), a)
	r.choice.Accepted()
	if len(a.prefill) == 0 {
		f.result.Local++
		n.start()
		return
	}
	a.course = course.New(course.Prompt{UpTo: a.tokens - 1, Cached: cached, Block: f.o.BlockTokens, Nodes: len(a.prefill)})
	f.follow(a)
}

// follow executes the next step of a held request's course.
func (f *fleet) follow(a *attempt) {
	switch step, node := a.course.Next(); step {
	case course.Ask:
		f.ask(a, a.prefill[node])
	case course.Compute:
		f.proceed(a)
	}
}

// proceed makes the decode node compute a held request's prompt.
func (f *fleet) proceed(a *attempt) {
	f.result.Local++
	if err := a.n.change().Proceed(a.id); err != nil {
		f.fail(err)
	}
	a.n.start()
}

// ask sends a request's prompt to a prefill node.
func (f *fleet) ask(a *attempt, p *node) {
	k := &a.first
	if a.ask != nil {
		k = new(ask)
	}
	k.a, k.p, k.epoch = a, p, p.epoch
	a.ask = k
	f.clock.runAt(f.clock.now+f.o.RoundTrip/2, (*arriving)(k))
}

// arriving is a prompt that arrives at its prefill node.
type arriving ask

func (x *arriving) run() {
	k := (*ask)(x)
	p, f := k.p, k.p.f
	switch {
	case k.over:
		return
	case !p.up || p.draining || p.epoch != k.epoch:
		k.removed = true
		f.afterMessage(func() { f.askFailed(k) })
		return
	}
	p.tickets++
	k.ticket = p.tickets
	p.jobs.put(k.ticket, k)
	p.line.Add(k.ticket, k.a.tokens-1, 0)
	p.admit()
}

// admit makes jobs request their grants while the node is about to compute them.
func (n *node) admit() {
	for {
		ticket, ok := n.line.Next(n.f.clock.now)
		if !ok {
			return
		}
		k := n.jobs.get(ticket)
		k.asked = n.f.clock.now
		n.f.clock.runAt(n.f.clock.now+n.f.o.RoundTrip/2, (*requesting)(k))
	}
}

// requesting is a job whose request for a grant arrives at its decode node.
type requesting ask

func (k *requesting) run() { k.a.n.afterStep((*granting)(k)) }

// granting is a job whose decode node handles this request between two steps.
type granting ask

func (k *granting) run() { k.a.n.f.grant((*ask)(k)) }

// removeJob removes a job, in any state, from its prefill node.
func (n *node) removeJob(k *ask) {
	if k.removed {
		return
	}
	k.removed = true
	if k.transfer != nil {
		n.f.stop(k.transfer)
	}
	if n.jobs.get(k.ticket) != k {
		return
	}
	n.jobs.remove(k.ticket)
	if k.pushing {
		return
	}
	n.line.Remove(k.ticket)
	n.admit()
	if n.computing.get(uint64(k.id)) == k {
		n.computing.remove(uint64(k.id))
		if err := n.change().Abort(k.id); err != nil {
			n.f.fail(err)
		}
		n.start()
	}
}

// grant reserves the blocks of a prompt that its prefill node is about to compute, or queues the
// grant until there is room.
func (f *fleet) grant(k *ask) {
	if k.over {
		return
	}
	a, n := k.a, k.a.n
	res, err := n.changeNow().ReserveInTurn(a.id, a.tokens-1)
	if !errors.Is(err, scheduler.ErrNoRoom) || errors.Is(err, scheduler.ErrNeverFits) {
		f.granted(k, res, err)
		return
	}
	f.result.GrantsDeferred++
	n.awaiting[a.id] = k
	f.afterMessage(func() {
		if !k.removed {
			k.p.line.StepAside(k.ticket, f.clock.now)
			k.p.admit()
		}
	})
	if f.o.GrantTimeout == 0 {
		return
	}
	f.clock.at(f.clock.now+f.o.GrantTimeout, func() {
		if !k.over && k.reservation == 0 && n.change().StopWaiting(a.id) {
			delete(n.awaiting, a.id)
			f.result.GrantTimeouts++
			f.end(k, course.Failed)
		}
	})
}

// granted sends the prefill node the grant, or makes the decode node compute the prompt if no
// prefill node can.
func (f *fleet) granted(k *ask, res scheduler.Reservation, err error) {
	switch {
	case err == nil:
		k.reservation, k.from = res.ID, res.From
		f.result.GrantWait += f.clock.now - k.asked
		// Goroutines answer the grants of one step in any order.
		half := f.o.RoundTrip / 2
		f.clock.runAt(f.clock.now+half/2+time.Duration(f.draw.Int64N(int64(half)+1)), (*computing)(k))
	case errors.Is(err, scheduler.ErrNothingMissing), errors.Is(err, scheduler.ErrNeverFits):
		f.end(k, course.Useless)
	default:
		f.fail(err)
	}
}

// end removes a request from its prefill node's line and continues its course.
func (f *fleet) end(k *ask, o course.Outcome) {
	k.over = true
	k.p.removeJob(k)
	k.a.course.Report(o)
	f.follow(k.a)
}

// askFailed continues the course of a request whose prefill node has failed. Nothing writes its
// blocks any more.
func (f *fleet) askFailed(k *ask) {
	if k.over {
		return
	}
	k.over = true
	n := k.a.n
	if _, waits := n.awaiting[k.a.id]; waits {
		n.change().StopWaiting(k.a.id)
		delete(n.awaiting, k.a.id)
	}
	if k.reservation != 0 {
		if err := n.change().Release(k.reservation); err != nil {
			f.fail(err)
		}
	}
	k.a.course.Report(course.Failed)
	f.follow(k.a)
}

// reserveWaiting reserves blocks for waiting grants while there are any.
func (n *node) reserveWaiting() {
	for {
		id, res, err, ok := n.change().NextReserved()
		if !ok {
			return
		}
		k := n.awaiting[id]
		delete(n.awaiting, id)
		n.f.granted(k, res, err)
	}
}

// computing is a job whose grant arrives at its prefill node.
type computing ask

func (k *computing) run() { k.p.f.compute((*ask)(k)) }

// compute adds a granted job to the prefill node's scheduler.
func (f *fleet) compute(k *ask) {
	if k.removed {
		return
	}
	p := k.p
	k.pushed = f.clock.now
	p.line.Grant(k.ticket)
	id, cached, err := p.add(scheduler.Request{Tokens: f.tokens[:k.a.tokens-1], Chain: f.chain(k.a.r), ComputeOnly: true, Ticket: k.ticket})
	if err != nil {
		f.fail(err)
		return
	}
	k.id = id
	p.computing.put(uint64(id), k)
	k.cached = cached
	p.afterStep((*counting)(k))
	p.start()
}

// counting is a job whose prefill node counts its cached tokens between two steps.
type counting ask

func (k *counting) run() {
	k.p.line.Cached(k.ticket, k.cached)
	k.p.admit()
}

// computed ends a job. Its KV has arrived when the last layer, which is sent when the step
// ends, has arrived and all bytes have crossed the link.
func (f *fleet) computed(k *ask) {
	p := k.p
	k.pushing = true
	p.line.Remove(k.ticket)
	p.admit()
	bytes := float64(k.a.tokens-1-k.from) * f.o.KVBytes
	if f.links {
		f.release(f.transferOf(k), bytes, true)
		return
	}
	alone := time.Duration(bytes / f.o.Bandwidth * float64(time.Second))
	end := max(f.clock.now+alone/time.Duration(f.o.Layers), k.pushed+alone) + f.o.Setup + f.o.RoundTrip/2
	f.clock.runAt(end, (*delivering)(k))
}

// delivering is a job whose KV arrives at its decode node.
type delivering ask

func (k *delivering) run() { k.p.f.delivered((*ask)(k)) }

// delivered ends a job whose KV has arrived at its decode node.
func (f *fleet) delivered(k *ask) {
	if k.removed {
		return
	}
	k.removed = true
	k.p.jobs.remove(k.ticket)
	if k.over {
		return
	}
	k.over = true
	if err := k.a.n.change().Arrived(k.reservation); err != nil {
		f.fail(err)
	}
	k.a.course.Report(course.Delivered)
	k.a.n.start()
}

// abort ends an attempt on its node, after its gateway has ended it.
func (f *fleet) abort(a *attempt) {
	if a.added {
		a.n.remove(a)
		a.n.start()
	}
}

// remove removes an attempt from the node. Its prefill node learns of it by a message, and its
// blocks that the network may write are free when that node has answered.
func (n *node) remove(a *attempt) {
	f := n.f
	n.look() // counts its tokens until now
	a.added = false
	n.attempts.remove(uint64(a.id))
	if k := a.ask; k != nil && !k.over {
		k.over = true
		if _, waits := n.awaiting[a.id]; waits {
			n.change().StopWaiting(a.id)
			delete(n.awaiting, a.id)
		}
		f.cleanUp(f.o.RoundTrip/2, func() { k.p.removeJob(k) })
		if k.reservation != 0 && n.up {
			epoch := n.epoch
			f.cleanUp(f.o.RoundTrip, func() {
				if n.epoch == epoch {
					if err := n.change().Release(k.reservation); err != nil {
						f.fail(err)
					}
					n.start()
				}
			})
		}
	}
	if n.up {
		if err := n.change().Abort(a.id); err != nil {
			f.fail(err)
		}
	}
}

// emit counts a token of a request's answer.
func (f *fleet) emit(r *Request) {
	at := f.clock.now + f.o.Emit
	f.progress = f.clock.now
	switch {
	case r.emitted == 0:
		r.First = at
		if f.o.KeepGaps {
			r.Gaps = make([]time.Duration, 0, r.Output-1)
		}
	default:
		f.result.gaps.add(at-r.Last, 1)
		if f.o.KeepGaps {
			r.Gaps = append(r.Gaps, at-r.Last)
		}
	}
	r.g.started(r.a)
	r.choice.Token()
	r.Last = at
	r.emitted++
	f.result.Tokens++
}
