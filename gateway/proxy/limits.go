package proxy

import (
	"math"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// What relayed requests may ask for, and where they wait: the bounds of native ones,
// as far as they can be held without parsing and tokenizing.

// checkLimits refuses a request that asks for more than this gateway allows.
func (r *relay) checkLimits() *openai.Error {
	l := r.S.Limits()
	if fault := r.S.CheckChoices(r.look.N); fault != nil {
		return fault
	}
	switch look := &r.look; {
	case look.Logprobs == math.MaxInt32:
		return openai.BadRequest(look.Asked, "%s asks for all tokens: at most %d, the gateway's --max-logprobs", look.Asked, l.MaxLogprobs)
	case look.Logprobs > l.MaxLogprobs:
		return openai.BadRequest(look.Asked, "%s: must be at most %d, not %d: the gateway's --max-logprobs", look.Asked, l.MaxLogprobs, look.Logprobs)
	}
	if l.MaxPromptTokens <= 0 {
		return nil
	}
	n, exact := upstream.PromptTokens(r.look.Prompt)
	if r.look.Several {
		n, exact = upstream.MaxPromptTokens(r.body)
	}
	if exact || r.S.PromptFits(n) {
		return r.S.CheckPrompt(r.On, n)
	}
	return openai.BadRequest(exchange.PromptParam(r.On), "the prompt's text is longer than %d tokens of %d bytes: this gateway takes at most so many (--max-prompt-tokens)", l.MaxPromptTokens, upstream.BytesPerToken)
}

// ownName is the name that a model's servers know it by.
func ownName(m *upstream.Model) string {
	if m.As != "" {
		return m.As
	}
	return m.Name
}

// admission is where requests for a model wait; nil: its servers have no bound.
func (p *Proxy) admission(m *upstream.Model) *exchange.Admission {
	each := p.Limits().UpstreamRequests
	if each <= 0 {
		return nil
	}
	return p.QueueOf(ownName(m), roomOf(m, each))
}

// roomOf is how many requests a model's servers take at once. Where none is up
// nothing is gained by waiting: a request tries them, or is told so.
func roomOf(m *upstream.Model, each int) int64 {
	up := m.Up()
	if up == 0 || each <= 0 {
		return math.MaxInt64
	}
	return int64(up) * int64(each)
}

// FollowRoom follows which servers are up. The queue of a model that is gone
// lets go what waits, which is told so, and goes with it.
func (p *Proxy) FollowRoom() {
	now := p.Pool.Now()
	p.EachQueue(func(key any, a *exchange.Admission) {
		name, ours := key.(string)
		if !ours {
			return
		}
		if m := now.Find(name); m != nil {
			a.SetRoom(roomOf(m, p.Limits().UpstreamRequests), math.MaxInt64)
		} else if a.SetRoom(math.MaxInt64, math.MaxInt64); a.Idle() {
			p.DropQueue(name)
		}
	})
}

// Claim implements exchange.Backend.
func (r *relay) Claim() (exchange.Claim, *openai.Error) {
	a := r.p.admission(r.model)
	if a == nil {
		return exchange.Claim{}, nil
	}
	// Of bodies that are no JSON nothing is known: they are one request each.
	choices, tokens := int64(max(1, r.look.N))*int64(max(1, r.look.Batch)), int64(max(1, len(r.look.Prompt)/bytesPerToken))
	return exchange.Claim{Queue: a, Priority: r.Priority(r.look.Priority), Choices: choices, Tokens: tokens}, nil
}

// letGo drops the request's body, once an answer has begun that no other server
// can take over: a stream of minutes should not hold a prompt of megabytes.
func (r *relay) letGo() {
	r.body, r.look.Prompt = nil, nil
	if cap(r.renamed) > httpserver.HeadBytes {
		r.renamed = nil
	}
	if cap(r.patched) > httpserver.HeadBytes {
		r.patched = nil
	}
	httpserver.DropBody(r.Ctx)
}
