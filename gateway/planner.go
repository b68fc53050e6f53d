package gateway

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/deploy/planner/control"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/cluster"
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
// this gateway, and those that other gateways publish. A gateway that publishes none, such as one
// of an older release, is taken to have as many as the mean of the others.
type planner struct {
	g *Gateway
	o Planner
	// publish sends a message to the other gateways; nil: there is no bus.
	publish func(m []byte) bool

	mu     sync.Mutex
	demand control.Demand // since the last tick
	cached float64        // share of prompt tokens that answered requests found in caches
	others map[string]*otherGateway

	members atomic.Pointer[[]nodes.Member]
	c       *control.Controller // owned by run, as quorum
	quorum  control.Quorum
	began   time.Time
	now     atomic.Pointer[desired]
}

// otherGateway is what another gateway has published.
type otherGateway struct {
	received bool           // it has ever published
	demand   control.Demand // since the last tick
	backlog  float64        // prompt tokens without caches that wait in its queue
	silent   int            // ticks since its last message, or since it was first seen
	joined   bool           // it was first seen after this planner's first tick
	logged   bool           // as unknown
}

// unknown reports whether the gateway's demand is not known.
func (o *otherGateway) unknown() bool { return !o.received || o.silent >= silentTicks }

// silentTicks is the number of ticks without a message after which a gateway's demand is unknown.
const silentTicks = 3

// demandTopic is the topic of the messages of planners.
const demandTopic = "demand"

// demandMessage is what a gateway publishes at each tick. Readers ignore fields that they do not
// know.
type demandMessage struct {
	Gateway string `json:"gateway"`
	control.Demand
	Backlog float64 `json:"backlog"`
}

// desired is the answer of /admin/desired.
type desired struct {
	Model   string      `json:"model"`
	Leads   bool        `json:"leads"`
	Note    string      `json:"note,omitempty"`
	Known   int         `json:"gateways_known"` // whose demand counts
	Unknown int         `json:"gateways_unknown"`
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
	return &planner{g: g, o: o, c: control.New(o.Options), began: time.Now(), others: map[string]*otherGateway{}}
}

// share publishes the demand to other gateways, and reads theirs.
func (p *planner) share(bus *cluster.Bus) {
	p.publish = func(m []byte) bool { return bus.Send(demandTopic, m) }
	bus.Listen(demandTopic, p.receive)
}

// receive adds the demand that another gateway has published. Messages that are not sound, and
// those of processes that are no members, do not count.
func (p *planner) receive(text []byte) {
	var m demandMessage
	err := json.Unmarshal(text, &m)
	if err != nil || m.Gateway == "" || m.Gateway == p.o.ID || !m.Sound() || !(m.Backlog >= 0) || math.IsInf(m.Backlog, 0) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.others[m.Gateway]
	if o == nil {
		return // the next tick adds members
	}
	o.received, o.silent, o.backlog, o.logged = true, 0, m.Backlog, false
	o.demand.Add(&m.Demand)
}

// sum returns the demand of all gateways since the last tick, the prompt tokens without caches that
// wait in their queues, and the number of gateways whose demand is known. own is the demand of this
// one. A gateway is logged once when its demand is unknown. One that has just joined counts as one
// without requests, because targets would rise with each gateway that is started again.
func (p *planner) sum(gateways []string, own control.Demand, backlog float64) (all control.Demand, waiting float64, known int) {
	all, waiting, known = own, backlog, 1
	counted := len(gateways)
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := range p.others {
		if !slices.Contains(gateways, id) {
			delete(p.others, id)
		}
	}
	for _, id := range gateways {
		if id == p.o.ID {
			continue
		}
		o := p.others[id]
		if o == nil {
			o = &otherGateway{joined: p.now.Load() != nil}
			p.others[id] = o
		}
		o.silent++
		switch {
		case !o.unknown():
			known++
			all.Add(&o.demand)
			waiting += o.backlog
		case o.joined && o.silent < silentTicks:
			counted--
		case o.silent >= silentTicks && !o.logged:
			o.logged = true
			p.g.Log.Warn("planner: demand of a gateway is unknown", "gateway", id, "received", o.received)
		}
		o.demand = control.Demand{}
	}
	share := float64(counted) / float64(known)
	all.Scale(share)
	return all, share * waiting, known
}

// arrived counts a choice that the fleet can serve, whether or not it is refused later.
func (p *planner) arrived(prompt int) {
	p.mu.Lock()
	p.demand.Arrive(&p.o.Costs, prompt, int(p.cached*float64(prompt)))
	p.mu.Unlock()
}

// unserved counts a request that no node was there for. No tokenizer has read it, so that its
// tokens are estimated. No node serves more than its KV memory holds.
func (p *planner) unserved(bytes int) {
	tokens := max(1, bytes/bytesPerToken)
	if most := int(p.o.Costs.KVTokens); most > 0 {
		tokens = min(tokens, most)
	}
	p.arrived(tokens)
}

// bytesPerToken is the usual length of a token in the bodies of requests.
const bytesPerToken = 4

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
	s, gateways, members, known := p.sample(at)
	leads := p.quorum.Leads(p.o.ID, gateways, members)
	d := p.c.Tick(s)
	now := &desired{Leads: leads, Known: known, Unknown: len(gateways) - known}
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
		if leads && d[r].Known {
			to.Desired = &to.Advised
		}
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
	// A client that waits for the metrics then finds the same numbers in /admin/desired.
	for r, of := range []*desiredRole{&now.Prefill, &now.Decode} {
		value := 0.0
		if of.Desired != nil {
			value = float64(*of.Desired)
		}
		p.g.Meters.Gauge(metrics.DesiredNodes, control.Role(r).String()).Set(value)
	}
}

// sample returns the state of the fleet since the last sample, the ids of the gateways, the
// members, and the number of the gateways whose demand is known. It publishes the demand of this
// gateway.
func (p *planner) sample(at time.Duration) (s control.Sample, gateways []string, members []control.Member, known int) {
	s.At = at
	p.mu.Lock()
	own := p.demand
	p.demand = control.Demand{}
	uncached := max(0, 1-p.cached)
	p.mu.Unlock()
	gateways = []string{p.o.ID}
	members = []control.Member{{ID: p.o.ID}}
	if all := p.members.Load(); all != nil {
		members = members[:0]
		for i := range *all {
			m := &(*all)[i]
			members = append(members, control.Member{ID: m.ID, Draining: m.Draining})
			if m.Role == "gateway" && m.ID != p.o.ID {
				gateways = append(gateways, m.ID)
			}
		}
	}
	waiting := uncached * float64(p.g.native.QueuedTokens())
	if p.publish != nil {
		if text, err := json.Marshal(demandMessage{p.o.ID, own, waiting}); err == nil {
			p.publish(text)
		}
	}
	var backlog float64
	s.Demand, backlog, known = p.sum(gateways, own, waiting)
	silent := 0 // decode nodes that gossip lists as ready, and that have no connection
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
				if v.Ready && control.Role(r) == control.Decode {
					silent++
				}
			}
		}
	}
	s.Backlog = backlog * p.o.Costs.PromptToken
	s.Stale = s.Nodes[control.Decode].Ready == 0 && (silent > 0 || s.Requests == 0)
	return s, gateways, members, known
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

// unserved returns the function that counts requests that no node was there for; nil: none are.
func (g *Gateway) unserved() func(bytes int) {
	if g.planner == nil {
		return nil
	}
	return g.planner.unserved
}

// ended counts and records a choice that has ended.
func (g *Gateway) ended(a *native.Ended) {
	if g.planner != nil && a.End == native.EndAnswered {
		g.planner.answered(a)
	}
	g.recorder.ended(a)
}
