package fleet

import (
	"errors"
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
)

// grantRetry is how often a grant that found no room is tried again, as in
// decode/fetch.go.
const grantRetry = 10 * time.Millisecond

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
	f.clock.at(f.clock.now+f.o.RoundTrip/2, func() {
		p.queue = append(p.queue, r)
		p.admit()
	})
}

// admit has jobs ask for their grants while the node is about to compute them,
// as prefill/queue.go does.
func (p *node) admit() {
	for len(p.queue) > 0 {
		r := p.queue[0]
		if p.ahead > 0 && p.ahead+r.Prompt-1 > p.f.o.RunAhead {
			return
		}
		p.queue = p.queue[1:]
		r.ahead = r.Prompt - 1
		p.ahead += r.ahead
		p.f.clock.at(p.f.clock.now+p.f.o.RoundTrip/2, func() { p.f.grant(r, p, p.f.clock.now) })
	}
}

// leave ends a job's time ahead of the node's engine.
func (p *node) leave(r *Request) {
	p.ahead -= r.ahead
	r.ahead = 0
	p.admit()
}

// grant reserves the blocks of a prompt that p is about to compute. asked is
// when p asked for them.
func (f *fleet) grant(r *Request, p *node, asked time.Duration) {
	res, err := f.decode[r.decode].s.Reserve(r.id, r.Prompt-1)
	switch {
	case err == nil:
		r.reservation, r.from = res.ID, res.From
		f.result.GrantWait += f.clock.now - asked
		f.clock.at(f.clock.now+f.o.RoundTrip/2, func() { f.compute(r, p) })
	case errors.Is(err, scheduler.ErrNothingMissing), errors.Is(err, scheduler.ErrNeverFits):
		p.leave(r)
		f.proceed(r)
	case !errors.Is(err, scheduler.ErrNoRoom):
		f.fail(err)
	case f.o.GrantTimeout > 0 && f.clock.now-asked >= f.o.GrantTimeout:
		f.result.GrantTimeouts++
		p.leave(r)
		f.ask(r)
	default:
		f.result.GrantRetries++
		f.clock.at(f.clock.now+grantRetry, func() { f.grant(r, p, asked) })
	}
}

// compute adds a granted job to the prefill node's scheduler.
func (f *fleet) compute(r *Request, p *node) {
	r.pushed = f.clock.now
	if _, _, err := p.add(r, scheduler.Request{Tokens: f.prompt(r)[:r.Prompt-1], ComputeOnly: true}); err != nil {
		f.fail(err)
		return
	}
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
