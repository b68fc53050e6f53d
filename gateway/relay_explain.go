package gateway

import (
	"fmt"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/gateway/route"
)

// upstreamView is a server of another kind as people see it.
type upstreamView struct {
	Name     string `json:"name"`
	Role     string `json:"role"`
	Up       bool   `json:"up"`
	Reason   string `json:"reason,omitempty"` // why not
	Breaker  string `json:"breaker"`
	Draining bool   `json:"draining,omitempty"`
	Load     int64  `json:"requests"`         // of this gateway
	Usable   *bool  `json:"usable,omitempty"` // for the request in question
}

func viewOf(s *upstream.Server) upstreamView {
	return upstreamView{Name: s.Name, Role: s.Role.String(), Up: s.Up(), Reason: s.Why(), Breaker: s.Breaker(), Draining: s.Draining(), Load: s.InFlight.Load()}
}

// relayExplanation is the answer of /debug/route for a model of servers of another
// kind.
type relayExplanation struct {
	Words     []string       `json:"words"`
	Model     string         `json:"model"`
	Tokens    int            `json:"prompt_tokens,omitempty"` // 0: its bytes were hashed
	Policy    string         `json:"policy"`
	Upstream  string         `json:"upstream,omitempty"`
	Prefill   string         `json:"prefill,omitempty"`
	Upstreams []upstreamView `json:"upstreams"`
}

// whyThere says in words what a reason means for a server of another kind.
var whyThere = map[route.Reason]string{
	route.ReasonPrefix: "it is the home of prompts that begin like this one",
	route.ReasonLoad:   "the home of prompts that begin like this one has too many requests",
	route.ReasonHealth: "the home of prompts that begin like this one is not usable",
	route.ReasonPolicy: "the policy does not look at prompts",
}

// explainForeign answers where a prompt (?prompt=TEXT, or ?messages=JSON) for a
// model of servers of another kind would go; false: the model is not theirs.
func (g *Gateway) explainForeign(ctx *fasthttp.RequestCtx) bool {
	if g.foreign == nil {
		return false
	}
	args := ctx.QueryArgs()
	m := g.foreign.Now().Find(string(args.Peek("model")))
	if own, fault := g.find(string(args.Peek("model"))); m == nil || fault == nil && own.Name == string(args.Peek("model")) {
		return false
	}
	how, fault := g.Routing(&ctx.Request.Header)
	raw, path, member := args.Peek("messages"), "/v1/chat/completions", "messages"
	if text := args.Peek("prompt"); len(text) > 0 {
		raw, path, member = openai.AppendString(nil, string(text)), "/v1/completions", "prompt"
	}
	if fault == nil && len(raw) == 0 {
		fault = openai.BadRequest("prompt", "give a prompt as ?prompt=TEXT or messages as ?messages=JSON (and a policy in the header %s)", exchange.PolicyHeader)
	}
	if fault != nil {
		g.fail(ctx, fault)
		return true
	}
	r := relay{Exchange: exchange.Exchange{S: g.Service, Path: path, Hints: how}, g: g, model: m, look: upstream.Body{Prompt: raw, N: 1, Batch: 1}}
	why := r.hash(fmt.Appendf(nil, `{"%s":%s}`, member, raw))
	var view route.View
	d, forced := r.decide(&view)
	e := relayExplanation{Model: m.Name, Tokens: r.nPrompt, Policy: how.Policy.String(), Upstreams: []upstreamView{}}
	see := func(servers []*upstream.Server, states []route.State) {
		for i, s := range servers {
			v := viewOf(s)
			v.Usable = &states[i].Usable
			e.Upstreams = append(e.Upstreams, v)
		}
	}
	see(m.Servers, view.Decode)
	see(m.Prefill, view.Prefill)
	if d.Decode < 0 {
		e.Words = []string{fmt.Sprintf("No upstream is usable: %d serve the model.", len(m.Servers))}
		g.json(ctx, e)
		return true
	}
	s, prefill := r.chosen(d)
	e.Upstream = s.Name
	e.Words = []string{
		fmt.Sprintf("To %s: %s.", s.Name, whyThere[d.Reason]),
		fmt.Sprintf("It has %d requests of this gateway; %d of the model's %d upstreams are up.", s.InFlight.Load(), m.Up(), len(m.Servers)),
	}
	switch {
	case why == nil:
		e.Words = append(e.Words, fmt.Sprintf("Its prompt is known by its %d tokens, in blocks of %d.", r.nPrompt, kvcache.DefaultBlockTokens))
	case why != errNoHash:
		e.Words = append(e.Words, fmt.Sprintf("Its prompt is known by its first bytes: %s.", why.Message))
	}
	if forced.Server {
		e.Words = append(e.Words, "No upstream is up with its breaker closed, so that those that are not are asked all the same.")
	}
	switch {
	case prefill != nil:
		e.Prefill = prefill.Name
		e.Words = append(e.Words, fmt.Sprintf("%s computes the prompt, joined as %s does it.", prefill.Name, g.foreign.Protocol()))
	case s.Role == upstream.Decode:
		e.Words = append(e.Words, "No prefill server of the model is usable.")
	}
	g.json(ctx, e)
	return true
}
