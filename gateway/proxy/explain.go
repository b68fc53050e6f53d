package proxy

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/gateway/route"
)

// View is an upstream server in /debug/route and /debug/nodes.
type View struct {
	Name     string   `json:"name"`
	Role     string   `json:"role"`
	Models   []string `json:"models,omitempty"` // by the server's own names; /debug/nodes only
	Up       bool     `json:"up"`
	Reason   string   `json:"reason,omitempty"` // why not
	Breaker  string   `json:"breaker"`
	Draining bool     `json:"draining,omitempty"`
	Load     int64    `json:"requests"`         // of this gateway
	Usable   *bool    `json:"usable,omitempty"` // for the request
}

// ViewOf returns the view of a server.
func ViewOf(s *upstream.Server) View {
	return View{Name: s.Name, Role: s.Role.String(), Up: s.Up(), Reason: s.Why(), Breaker: s.Breaker(), Draining: s.Draining(), Load: s.InFlight.Load()}
}

// Explanation is the answer of /debug/route for a model of upstreams.
type Explanation struct {
	Words     []string `json:"words"`
	Model     string   `json:"model"`
	Tokens    int      `json:"prompt_tokens,omitempty"` // 0: the prompt's bytes are its key
	Policy    string   `json:"policy"`
	Upstream  string   `json:"upstream,omitempty"`
	Prefill   string   `json:"prefill,omitempty"`
	Upstreams []View   `json:"upstreams"`
}

// reasonText describes reasons for upstream servers.
var reasonText = map[route.Reason]string{
	route.ReasonPrefix: "it is the home of prompts that begin like this one",
	route.ReasonLoad:   "the home of prompts that begin like this one has too many requests",
	route.ReasonHealth: "the home of prompts that begin like this one is not usable",
	route.ReasonPolicy: "the policy does not use prompts",
}

// Explain returns where a prompt for a model would be sent, and why. raw is the value of the member
// in a request's body for path.
func (p *Proxy) Explain(m *upstream.Model, how exchange.RouteHints, path, member string, raw []byte) Explanation {
	r := relay{Exchange: exchange.Exchange{S: p.Service, Path: path, Hints: how}, p: p, model: m, envelope: upstream.Envelope{Prompt: raw, N: 1, Batch: 1}}
	why := r.hash(fmt.Appendf(nil, `{"%s":%s}`, member, raw))
	var view route.View
	d, forced := r.decide(&view)
	e := Explanation{Model: m.Name, Tokens: r.nPrompt, Policy: how.Policy.String(), Upstreams: []View{}}
	addViews := func(servers []*upstream.Server, states []route.State) {
		for i, s := range servers {
			v := ViewOf(s)
			v.Usable = &states[i].Usable
			e.Upstreams = append(e.Upstreams, v)
		}
	}
	addViews(m.Servers, view.Decode)
	addViews(m.Prefill, view.Prefill)
	if d.Decode < 0 {
		e.Words = []string{fmt.Sprintf("No upstream is usable: %d serve the model.", len(m.Servers))}
		return e
	}
	s, prefill := r.chosen(d)
	e.Upstream = s.Name
	e.Words = []string{
		fmt.Sprintf("To %s: %s.", s.Name, reasonText[d.Reason]),
		fmt.Sprintf("It has %d requests of this gateway; %d of the model's %d upstreams are up.", s.InFlight.Load(), m.Up(), len(m.Servers)),
	}
	switch {
	case why == nil:
		e.Words = append(e.Words, fmt.Sprintf("Its key is the hash of the prompt's %d tokens, in blocks of %d.", r.nPrompt, kvcache.DefaultBlockTokens))
	case why != errNoHash:
		e.Words = append(e.Words, fmt.Sprintf("Its key is the hash of the prompt's first bytes: %s.", why.Message))
	}
	if forced.Server {
		e.Words = append(e.Words, "No upstream is up with a closed breaker, so that the others are tried.")
	}
	switch {
	case prefill != nil:
		e.Prefill = prefill.Name
		e.Words = append(e.Words, fmt.Sprintf("%s computes the prompt, with the protocol of %s.", prefill.Name, p.Pool.Protocol()))
	case s.Role == upstream.Decode:
		e.Words = append(e.Words, "No prefill server of the model is usable.")
	}
	return e
}
