package gateway

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/deploy/planner/control"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// plannerInterval is the time between two decisions of the planner.
const plannerInterval = 5 * time.Second

// Planner configures how many nodes the gateway asks an autoscaler for.
type Planner struct {
	control.Options
	ID       string        // of this gateway among the members
	Model    string        // fingerprint of the profile's model, in a profile's format; empty: not known
	Interval time.Duration // between two decisions; 0: plannerInterval
}

// planner computes how many nodes the fleet of this gateway should have. It sees the requests of
// this gateway, and takes those of the others to be as many.
type planner struct {
	g *Gateway
	o Planner

	mu     sync.Mutex
	demand control.Demand // since the last tick
	cached float64        // share of prompt tokens that answered requests found in caches

	members atomic.Pointer[[]nodes.Member]
	c       *control.Controller // owned by run, as quorum
	quorum  control.Quorum
	began   time.Time
	now     atomic.Pointer[desired]
}

// desired is the answer of /admin/desired.
type desired struct {
	Model   string      `json:"model"`
	Leads   bool        `json:"leads"`
	Note    string      `json:"note,omitempty"`
	Prefill desiredRole `json:"prefill"`
	Decode  desiredRole `json:"decode"`
}

// desiredRole is the number of nodes of a role.
type desiredRole struct {
	Desired *int    `json:"desired,omitempty"` // only of the gateway that leads, once it has seen nodes
	Advised int     `json:"advised"`
	Ready   int     `json:"ready"`
	Start   int     `json:"starting"`
	Need    float64 `json:"need"` // nodes that the expected work needs
	Why     string  `json:"why,omitempty"`
	Changed string  `json:"changed,omitempty"` // when the number was last changed
}

// newPlanner returns a planner.
func newPlanner(g *Gateway, o Planner) *planner {
	o.Interval = cmp.Or(o.Interval, plannerInterval)
	return &planner{g: g, o: o, c: control.New(o.Options), began: time.Now()}
}

// arrived counts a choice that the fleet can serve, whether or not it is refused later.
func (p *planner) arrived(prompt int) {
	p.mu.Lock()
	p.demand.Arrive(&p.o.Costs, prompt, int(p.cached*float64(prompt)))
	p.mu.Unlock()
}

// answered counts an answer.
func (p *planner) answered(a *native.Ended) {
	n := float64(max(1, len(a.Prompt.Tokens)))
	p.mu.Lock()
	p.cached += (float64(a.Cached)/n - p.cached) * min(1, n/cachedTokens)
	p.demand.End(&p.o.Costs, len(a.Prompt.Tokens), a.Output)
	p.mu.Unlock()
}

// cachedTokens is the number of prompt tokens over which the share of cached ones is averaged.
const cachedTokens = 1e6

// run decides in intervals until ctx ends.
func (p *planner) run(ctx context.Context) {
	tick := time.NewTicker(p.o.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			p.tick(time.Since(p.began))
		}
	}
}

// tick makes a decision, and logs changes.
func (p *planner) tick(at time.Duration) {
	s, gateways, members := p.sample(at)
	leads := p.quorum.Leads(p.o.ID, gateways, members)
	d := p.c.Tick(s)
	now := &desired{Leads: leads}
	if m := p.g.native.Models.Load(); m != nil {
		now.Model = m.Name
	}
	last := p.now.Load()
	if m := p.g.native.Models.Load(); m != nil && p.o.Model != "" && p.o.Model != fmt.Sprintf("%#016x", m.Fingerprint) {
		now.Note = "the profile is of another model: its times may not be those of the nodes"
		if last == nil || last.Note == "" {
			p.g.Log.Warn("planner: profile of another model", "model", m.Name)
		}
	}
	for r, to := range []*desiredRole{&now.Prefill, &now.Decode} {
		role := control.Role(r)
		*to = desiredRole{Advised: d[r].Target, Ready: s.Nodes[r].Ready, Start: s.Nodes[r].Starting, Need: d[r].Need, Why: d[r].Why}
		value := 0.0
		if leads && d[r].Known {
			to.Desired, value = &to.Advised, float64(to.Advised)
		}
		p.g.Meters.Gauge(metrics.DesiredNodes, role.String()).Set(value)
		if last != nil {
			of := []*desiredRole{&last.Prefill, &last.Decode}[r]
			to.Changed = of.Changed
			if to.Why == "" {
				to.Why = of.Why
			}
		}
		if d[r].Change != 0 {
			to.Changed = time.Now().UTC().Format(time.RFC3339)
			p.g.Log.Info("planner: number of nodes changed", "role", role.String(), "from", d[r].Target-d[r].Change, "to", d[r].Target, "why", d[r].Why, "leads", leads)
		}
	}
	p.now.Store(now)
}

// sample returns the state of the fleet since the last sample, the ids of the gateways, and the
// number of members.
func (p *planner) sample(at time.Duration) (s control.Sample, gateways []string, members int) {
	s.At = at
	p.mu.Lock()
	s.Demand, p.demand = p.demand, control.Demand{}
	uncached := max(0, 1-p.cached)
	p.mu.Unlock()
	gateways = []string{p.o.ID}
	members = 1
	if all := p.members.Load(); all != nil {
		members = 0
		for i := range *all {
			m := &(*all)[i]
			if members++; m.Role == "gateway" && m.ID != p.o.ID {
				gateways = append(gateways, m.ID)
			}
		}
	}
	share := float64(len(gateways))
	for _, x := range []*float64{&s.Requests, &s.Work, &s.Square, &s.Ended, &s.Decoded, &s.DecodedSq, &s.Context} {
		*x *= share
	}
	queued := 0
	for _, m := range p.g.native.Models.All() {
		_, tokens := m.Queue().Queued()
		queued += tokens
	}
	backlog := share * uncached * float64(queued)
	fleet := p.g.native.Nodes.Now()
	for r, all := range [][]*nodes.Node{fleet.Prefill, fleet.Decode} {
		for _, n := range all {
			v := n.View()
			switch {
			case v.Draining:
			case v.Ready && v.Connected:
				s.Nodes[r].Ready++
				backlog += float64(v.QueuedTokens)
			default:
				s.Nodes[r].Starting++
			}
		}
	}
	s.Backlog = backlog * p.o.Costs.PromptToken
	s.Stale = s.Nodes[control.Decode].Ready == 0
	return s, gateways, members
}

// desired answers with the number of nodes that the fleet should have.
func (g *Gateway) desired(ctx *fasthttp.RequestCtx) {
	if g.planner == nil {
		g.fail(ctx, &openai.Error{Status: 404, Type: openai.TypeNotFound, Message: "this gateway has no planner: start it with --planner-profile FILE"})
		return
	}
	d := g.planner.now.Load()
	if d == nil {
		g.fail(ctx, openai.Unavailable(int(plannerInterval/time.Second), "the planner has not decided yet: ask again in %v", g.planner.o.Interval))
		return
	}
	g.json(ctx, d)
}

// arrived returns the function that counts requests; nil: none are counted.
func (g *Gateway) arrived() func(prompt int) {
	if g.planner == nil {
		return nil
	}
	return g.planner.arrived
}

// ended counts and records a choice that has ended.
func (g *Gateway) ended(a *native.Ended) {
	if g.planner != nil && a.End == native.EndAnswered {
		g.planner.answered(a)
	}
	g.recorder.ended(a)
}
