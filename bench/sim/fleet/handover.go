package fleet

import (
	"errors"
	"time"

	"github.com/tandem-serving/tandem/decode/course"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// addRequest adds a routed request to its decode node and sends its prompt to the first prefill
// node.
func (f *fleet) addRequest(r *Request) {
	n := f.decode[r.decode]
	id, cached, err := n.add(r, scheduler.Request{Tokens: f.prompt(r), Hold: len(r.prefill) > 0, MaxNew: r.Output})
	switch {
	case errors.Is(err, scheduler.ErrTooLong):
		r.Refused = true
		f.gateway.release(r)
		f.result.open--
		return
	case err != nil:
		f.fail(err)
		return
	}
	r.id = id
	if len(r.prefill) == 0 {
		f.result.Local++
		n.start()
		return
	}
	r.course = course.New(course.Prompt{UpTo: r.Prompt - 1, Cached: cached, Block: f.o.BlockTokens, Nodes: len(r.prefill)})
	f.follow(r)
}

// follow executes the next step of a held request's course.
func (f *fleet) follow(r *Request) {
	switch step, node := r.course.Next(); step {
	case course.Ask:
		f.ask(r, f.prefill[r.prefill[node]])
	case course.Compute:
		f.proceed(r)
	}
}

// proceed makes the decode node compute a held request's prompt.
func (f *fleet) proceed(r *Request) {
	n := f.decode[r.decode]
	f.result.Local++
	if err := n.s.Proceed(r.id); err != nil {
		f.fail(err)
	}
	n.start()
}

// ask sends a request's prompt to a prefill node.
func (f *fleet) ask(r *Request, p *node) {
	f.afterMessage(func() {
		p.tickets++
		r.ticket = p.tickets
		p.jobs[r.ticket] = r
		p.line.Add(r.ticket, r.Prompt-1, 0)
		p.admit()
	})
}

// afterMessage runs do after a message has arrived.
func (f *fleet) afterMessage(do func()) { f.clock.at(f.clock.now+f.o.RoundTrip/2, do) }

// admit makes jobs request their grants while the node is about to compute them.
func (p *node) admit() {
	for {
		ticket, ok := p.line.Next(p.f.clock.now)
		if !ok {
			return
		}
		r, asked := p.jobs[ticket], p.f.clock.now
		p.f.afterMessage(func() { p.f.grant(r, p, asked) })
	}
}

// leave removes a job from the node's line.
func (p *node) leave(r *Request) {
	p.line.Remove(r.ticket)
	delete(p.jobs, r.ticket)
	p.admit()
}

// grant reserves the blocks of a prompt that p is about to compute, or queues the grant
// until there is room. asked is when p requested it.
func (f *fleet) grant(r *Request, p *node, asked time.Duration) {
	n := f.decode[r.decode]
	ready := func(res scheduler.Reservation, err error) { f.granted(r, p, asked, res, err) }
	res, err := n.s.ReserveInTurn(r.id, r.Prompt-1)
	if !errors.Is(err, scheduler.ErrNoRoom) || errors.Is(err, scheduler.ErrNeverFits) {
		ready(res, err)
		return
	}
	f.result.GrantsDeferred++
	n.awaiting[r.id] = ready
	f.afterMessage(func() {
		p.line.StepAside(r.ticket, f.clock.now)
		p.admit()
	})
	if f.o.GrantTimeout == 0 {
		return
	}
	f.clock.at(f.clock.now+f.o.GrantTimeout, func() {
		if r.reservation == 0 && n.s.StopWaiting(r.id) {
			delete(n.awaiting, r.id)
			f.result.GrantTimeouts++
			f.end(r, p, course.Failed)
		}
	})
}

// granted sends p the grant, or makes the decode node compute the prompt if no prefill
// node can.
func (f *fleet) granted(r *Request, p *node, asked time.Duration, res scheduler.Reservation, err error) {
	switch {
	case err == nil:
		r.reservation, r.from = res.ID, res.From
		f.result.GrantWait += f.clock.now - asked
		f.afterMessage(func() { f.compute(r, p) })
	case errors.Is(err, scheduler.ErrNothingMissing), errors.Is(err, scheduler.ErrNeverFits):
		f.end(r, p, course.Useless)
	default:
		f.fail(err)
	}
}

// end removes a request from p's line and continues its course.
func (f *fleet) end(r *Request, p *node, o course.Outcome) {
	p.leave(r)
	r.course.Report(o)
	f.follow(r)
}

// reserveWaiting reserves blocks for waiting grants while there are any.
func (n *node) reserveWaiting() {
	for {
		id, res, err, ok := n.s.NextReserved()
		if !ok {
			return
		}
		ready := n.awaiting[id]
		delete(n.awaiting, id)
		ready(res, err)
	}
}

// compute adds a granted job to the prefill node's scheduler.
func (f *fleet) compute(r *Request, p *node) {
	r.pushed = f.clock.now
	p.line.Grant(r.ticket)
	_, cached, err := p.add(r, scheduler.Request{Tokens: f.prompt(r)[:r.Prompt-1], ComputeOnly: true, Ticket: r.ticket})
	if err != nil {
		f.fail(err)
		return
	}
	p.line.Cached(r.ticket, cached)
	p.admit()
	p.start()
}

// computed ends a job. Its KV has arrived when the last layer, which is sent when the step
// ends, has arrived and all bytes have crossed the link.
func (f *fleet) computed(p *node, r *Request) {
	p.leave(r)
	bytes := time.Duration(float64(r.Prompt-1-r.from) * f.o.KVBytes / f.o.Bandwidth * float64(time.Second))
	end := max(f.clock.now+bytes/time.Duration(f.o.Layers), r.pushed+bytes) + f.o.RoundTrip/2
	f.clock.at(end, func() {
		n := f.decode[r.decode]
		if err := n.s.Arrived(r.reservation); err != nil {
			f.fail(err)
		}
		r.course.Report(course.Delivered)
		n.start()
	})
}

// emit counts a token of a request's answer.
func (f *fleet) emit(r *Request) {
	now := f.clock.now
	if r.emitted == 0 {
		r.First = now
		f.gateway.started(r)
	} else {
		f.result.gaps.add(now - r.Last)
	}
	r.Last = now
	r.emitted++
	f.result.Tokens++
}

// finished ends a request.
func (f *fleet) finished(r *Request) {
	f.gateway.release(r)
	f.result.open--
}
