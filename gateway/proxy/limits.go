package proxy

import (
	"cmp"
	"math"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// checkLimits refuses a request beyond the gateway's limits, as far as they can be checked without
// parsing and tokenizing.
func (r *relay) checkLimits() *openai.Error {
	l := r.S.Limits()
	if fault := r.S.CheckChoices(r.envelope.N); fault != nil {
		return fault
	}
	switch e := &r.envelope; {
	case e.Logprobs == math.MaxInt32:
		return openai.BadRequest(e.Asked, "%s asks for all tokens: at most %d, the gateway's --max-logprobs", e.Asked, l.MaxLogprobs)
	case e.Logprobs > l.MaxLogprobs:
		return openai.BadRequest(e.Asked, "%s: must be at most %d, not %d: the gateway's --max-logprobs", e.Asked, l.MaxLogprobs, e.Logprobs)
	}
	if l.MaxPromptTokens <= 0 {
		return nil
	}
	n, exact := upstream.PromptTokens(r.envelope.Prompt)
	if r.envelope.Several {
		n, exact = upstream.MaxPromptTokens(r.body)
	}
	if exact || r.S.PromptFits(n) {
		return r.S.CheckPrompt(r.On, n)
	}
	return openai.BadRequest(openai.PromptParam(r.On), "the prompt's text is longer than %d tokens of %d bytes: this gateway takes at most so many (--max-prompt-tokens)", l.MaxPromptTokens, upstream.BytesPerToken)
}

// ownName returns the servers' name of a model.
func ownName(m *upstream.Model) string { return cmp.Or(m.As, m.Name) }

// admission returns the queue of a model, or nil if its servers have no bound.
func (p *Proxy) admission(m *upstream.Model) *exchange.Admission {
	each := p.Limits().UpstreamRequests
	if each <= 0 {
		return nil
	}
	return p.QueueOf(ownName(m), roomOf(m, each))
}

// roomOf returns the number of requests that a model's servers get at once. It is unlimited if no
// server is up, because then requests gain nothing by waiting.
func roomOf(m *upstream.Model, each int) int64 {
	up := m.Up()
	if up == 0 || each <= 0 {
		return math.MaxInt64
	}
	return int64(up) * int64(each)
}

// FollowRoom adapts the queues to the servers that are up. It releases the requests of a removed
// model, which then fail, and drops the queue.
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
	// A body that is not JSON counts as one choice.
	choices, tokens := int64(max(1, r.envelope.N))*int64(max(1, r.envelope.Batch)), int64(max(1, len(r.envelope.Prompt)/bytesPerToken))
	return exchange.Claim{Queue: a, Priority: r.Priority(r.envelope.Priority), Choices: choices, Tokens: tokens}, nil
}

// releaseBody drops the request's body once an answer has begun, because no other server can
// continue it. A stream of minutes must not hold a prompt of megabytes.
func (r *relay) releaseBody() {
	r.body, r.envelope.Prompt = nil, nil
	r.renamed, r.patched = reuse(r.renamed, httpserver.HeadBytes), reuse(r.patched, httpserver.HeadBytes)
	httpserver.DropBody(r.Ctx)
}
