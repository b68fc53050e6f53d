package fleet

import (
	"errors"
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
)

// take adds a routed request to its decode node and asks the first prefill node
// for its prompt.
func (f *fleet) take(r *Request) {
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
	switch missing := r.Prompt - 1 - cached; {
	case len(r.prefill) == 0:
		f.result.Local++
		n.start()
	case cached > 0 && missing < f.o.BlockTokens: // a transfer would save nothing
		f.proceed(r)
	default:
		f.ask(r)
	}
}

// proceed has the decode node compute a held request's prompt.
func (f *fleet) proceed(r *Request) {
	n := f.decode[r.decode]
	f.result.Local++
	if err := n.s.Proceed(r.id); err != nil {
		f.fail(err)
	}
	n.start()
}

// ask sends a request's prompt to its next prefill node, or has its decode node
// compute it when none is left.
func (f *fleet) ask(r *Request) {
	if len(r.prefill) == 0 {
		f.proceed(r)
		return
	}
	p := f.prefill[r.prefill[0]]
	r.prefill = r.prefill[1:]
	f.later(func() {
		p.tickets++
		r.ticket = p.tickets
		p.jobs[r.ticket] = r
		p.line.Add(r.ticket, r.Prompt-1, 0)
		p.admit()
	})
}

// later has something happen after a message has travelled.
func (f *fleet) later(do func()) { f.clock.at(f.clock.now+f.o.RoundTrip/2, do) }

// admit has jobs ask for their grants while the node is about to compute them.
func (p *node) admit() {
	for {
		ticket, ok := p.line.Next(p.f.clock.now)
		if !ok {
			return
		}
		r, asked := p.jobs[ticket], p.f.clock.now
		p.f.later(func() { p.f.grant(r, p, asked) })
	}
}

// leave ends a job's time in the node's line.
func (p *node) leave(r *Request) {
	p.line.Remove(r.ticket)
	delete(p.jobs, r.ticket)
	p.admit()
}

// grant reserves the blocks of a prompt that p is about to compute, or has it wait for
// room in turn. asked is when p asked for them.
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
	f.later(func() {
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
			p.leave(r)
			f.ask(r)
		}
	})
}

// granted sends p the grant, or has the decode node compute the prompt where no
// prefill node can.
func (f *fleet) granted(r *Request, p *node, asked time.Duration, res scheduler.Reservation, err error) {
	switch {
	case err == nil:
		r.reservation, r.from = res.ID, res.From
		f.result.GrantWait += f.clock.now - asked
		f.later(func() { f.compute(r, p) })
	case errors.Is(err, scheduler.ErrNothingMissing), errors.Is(err, scheduler.ErrNeverFits):
		p.leave(r)
		f.proceed(r)
	default:
		f.fail(err)
	}
}

// reserveWaiting gives blocks to the grants that wait for them, as far as there are any.
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

// computed ends a job: its KV has arrived when the last layer has, which leaves
// as the step ends, and when all bytes have crossed the link.
func (f *fleet) computed(p *node, r *Request) {
	p.leave(r)
	bytes := time.Duration(float64(r.Prompt-1-r.from) * f.o.KVBytes / f.o.Bandwidth * float64(time.Second))
	end := max(f.clock.now+bytes/time.Duration(f.o.Layers), r.pushed+bytes) + f.o.RoundTrip/2
	f.clock.at(end, func() {
		n := f.decode[r.decode]
		if err := n.s.Arrived(r.reservation); err != nil {
			f.fail(err)
		}
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
