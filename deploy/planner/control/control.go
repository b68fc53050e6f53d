// Package control decides how many prefill and decode nodes a fleet should have now.
//
// The decision rests on the work that arrives at the gateways' entrance, refused requests included,
// and not on how busy nodes are: a decode node with one stream is always busy, and the rate of
// completed requests is never above what the fleet can do. Work is in seconds of a node, by the
// step times of a profile. Two means with time constants of 20 and 120 seconds give the level and
// the trend, and a slower one what fewer nodes would have had to do. The standard deviation of each
// follows from the squares of the requests' work.
//
// The law is asymmetric. A role grows at once when the work that is expected at the end of a node's
// start exceeds it beyond noise. It shrinks by a step when fewer nodes would have been enough, with
// noise and a dead band, for the whole of Options.Hold.
//
// Invariant: equal samples give equal decisions. A target is within Options.Least and Options.Most,
// and no decision adds more than max(4, 100 %) of the nodes. The package starts nothing, reads no
// clock and knows no autoscaler.
package control

import (
	"fmt"
	"math"
	"time"
)

// Role is a role of nodes.
type Role int

// Roles.
const (
	Prefill Role = iota
	Decode
	roles
)

// String returns the role's name.
func (r Role) String() string { return [...]string{"prefill", "decode"}[r] }

// Costs are the step times of a kind of node in seconds, as a profile has them.
type Costs struct {
	PromptToken, PromptPair float64 // of a prompt's token, and for each token before it
	Fixed, PerSeq, PerCtx   float64 // of a step that decodes
	KVTokens                float64 // of a node's KV memory
	Start                   time.Duration
}

// Prompt returns the seconds of a prompt with so many cached tokens.
func (c *Costs) Prompt(tokens, cached int) float64 {
	n := float64(max(1, tokens-cached))
	return n * (c.PromptToken + c.PromptPair*(float64(max(0, cached))+n/2))
}

// Options are the goals and bounds of a fleet.
type Options struct {
	Costs
	TTFT, ITL   time.Duration // goals of a first token, and between two tokens
	Least, Most [roles]int    // nodes
	Hold        time.Duration // how long fewer nodes must be enough; 0: DefaultHold
	Cooldown    time.Duration // between two steps down; 0: DefaultCooldown
}

// Constants of the law.
const (
	DefaultHold     = 300 * time.Second
	DefaultCooldown = 60 * time.Second

	prefillLoad = 0.75 // of a prefill node's time that its work may take
	decodeLoad  = 0.8  // of what the ITL leaves of a decode node's time
	kvLoad      = 0.5  // of KV memory: variance and arriving prompts need the rest
	band        = 0.1  // part of the nodes by which fewer must be more than enough
	growing     = 2.5  // standard deviations beyond which a mean is not noise
	shrinking   = 3

	shortTime = 20 * time.Second
	longTime  = 120 * time.Second
	// slowTime bounds the time constant of the mean by which a role shrinks, which covers slowCount
	// requests where that takes longer than longTime.
	slowTime  = 15 * time.Minute
	slowCount = 300
	leastStep = 4
	// lossTime is the time after a loss of nodes without steps down.
	lossTime = 120 * time.Second
	// leastDrain bounds the time in which a backlog is to be computed.
	leastDrain = 10 * time.Second
	// changeTime, with two starts, is the time after a change in which the fleet may still follow.
	// Until then a role does not shrink.
	changeTime = 60 * time.Second
	// firstTime is the time before the first decision, in which means settle.
	firstTime = 30 * time.Second
	// answers is the number of answers over which their mean work is averaged.
	answers = 1000
	// mostFigure bounds the figures of a demand. No fleet has larger ones, and what is computed from
	// figures up to it is finite.
	mostFigure = 1e18
)

// Demand is what arrived and ended at the gateways.
type Demand struct {
	Requests  float64 `json:"requests"`   // arrived, refused ones included
	Work      float64 `json:"work"`       // seconds of their prompts
	Square    float64 `json:"square"`     // sum of the squares
	Ended     float64 `json:"ended"`      // requests that ended with an answer
	Decoded   float64 `json:"decoded"`    // seconds of a node for their answers, without the fixed part of steps
	DecodedSq float64 `json:"decoded_sq"` // sum of the squares
	Context   float64 `json:"context"`    // sum over their answers' tokens of the tokens that each attends to
}

// fields returns the figures.
func (d *Demand) fields() []*float64 {
	return []*float64{&d.Requests, &d.Work, &d.Square, &d.Ended, &d.Decoded, &d.DecodedSq, &d.Context}
}

// Add adds the demand at another gateway.
func (d *Demand) Add(other *Demand) {
	more := other.fields()
	for i, x := range d.fields() {
		*x += *more[i]
	}
}

// Scale multiplies the demand.
func (d *Demand) Scale(by float64) {
	for _, x := range d.fields() {
		*x *= by
	}
}

// Sound reports whether all figures are from 0 to mostFigure, and whole answers ended.
func (d *Demand) Sound() bool {
	for _, x := range d.fields() {
		if !(*x >= 0 && *x <= mostFigure) {
			return false
		}
	}
	return d.Ended == 0 || d.Ended >= 1
}

// Arrive adds a request.
func (d *Demand) Arrive(c *Costs, prompt, cached int) {
	w := c.Prompt(prompt, cached)
	d.Requests++
	d.Work += w
	d.Square += w * w
}

// End adds an answer.
func (d *Demand) End(c *Costs, prompt, output int) {
	n := float64(max(0, output))
	context := n * (float64(prompt) + n/2)
	w := n*c.PerSeq + context*c.PerCtx
	d.Ended++
	d.Decoded += w
	d.DecodedSq += w * w
	d.Context += context
}

// Nodes is the state of a role.
type Nodes struct {
	Ready    int // that take work
	Starting int // that will
}

// Sample is the state of the fleet at a tick.
type Sample struct {
	At      time.Duration // since any moment; grows from tick to tick
	Demand                // since the last tick
	Backlog float64       // seconds of prompts that wait, in gateways and on nodes
	Nodes   [roles]Nodes
	// Stale means that nodes have not reported: nothing is decided, nor for figures that are not
	// sound. A fleet without decode nodes that gets requests is not stale.
	Stale bool
}

// Decision is the number of nodes that a role should have.
type Decision struct {
	Target int
	Change int     // of the target by this decision
	Need   float64 // nodes that the expected work needs
	Why    string  // with the arithmetic
	// Known is whether nodes were seen and, once, did not change between two ticks. Before that a
	// target may be too small, because the fleet is only partly seen.
	Known bool
}

// mean is an exponential mean of a rate.
type mean struct{ work, square float64 }

// add moves the mean over a tick.
func (m *mean) add(work, square float64, tick, over time.Duration) {
	share := 1 - math.Exp(-tick.Seconds()/over.Seconds())
	m.work += (work/tick.Seconds() - m.work) * share
	m.square += (square/tick.Seconds() - m.square) * share
}

// deviation returns the standard deviation of a mean over a time: requests arrive at random, each
// with its work.
func deviation(square float64, over time.Duration) float64 {
	return math.Sqrt(square / 2 / over.Seconds())
}

// Controller is the state of the law for one model.
type Controller struct {
	o           Options
	began, last time.Duration
	started     bool
	requests    mean // their rate
	// Rates of work. slow has the time constant slowTime.
	short, long, slow [roles]mean
	perRequest        struct{ ended, decoded, square, context float64 } // of answers
	targets           [roles]int
	enough            [roles][]needed      // nodes that were needed with noise, over Hold; falling
	lowered           [roles]time.Duration // when the target was last lowered
	changed           [roles]time.Duration // or changed
	lost              [roles]time.Duration // when nodes were last lost
	ready             [roles]int
	have              [roles]int // nodes at the last tick
	known             bool
}

// needed is a number of nodes at a time.
type needed struct {
	at    time.Duration
	nodes float64
}

// New returns a controller.
func New(o Options) *Controller {
	if o.Hold == 0 {
		o.Hold = DefaultHold
	}
	if o.Cooldown == 0 {
		o.Cooldown = DefaultCooldown
	}
	for r := range o.Least {
		o.Least[r] = max(1, o.Least[r])
		o.Most[r] = max(o.Least[r], o.Most[r])
	}
	return &Controller{o: o}
}

// Costs returns the controller's costs.
func (c *Controller) Costs() *Costs { return &c.o.Costs }

// Tick returns the decision for each role.
func (c *Controller) Tick(s Sample) (d [roles]Decision) {
	if !c.started {
		c.started, c.began, c.last = true, s.At, s.At
		for r := range c.targets {
			c.targets[r] = c.within(Role(r), s.Nodes[r].Ready+s.Nodes[r].Starting)
			c.lost[r], c.lowered[r] = -lossTime, -c.o.Hold
		}
	}
	tick := s.At - c.last
	c.last = s.At
	if !s.sound() {
		s.Demand, s.Backlog, s.Stale = Demand{}, 0, true
	} else if tick > 0 {
		c.learn(&s, tick)
	}
	c.look(&s, tick)
	for r := range roles {
		d[r] = c.decide(r, &s)
		d[r].Known = c.known
	}
	return d
}

// sound reports whether all figures of the sample are possible.
func (s *Sample) sound() bool { return s.Sound() && s.Backlog >= 0 && !math.IsInf(s.Backlog, 0) }

// look follows the nodes until the first decision: a gateway that has just started sees them one
// after the other, and the first of them are not the fleet.
func (c *Controller) look(s *Sample, tick time.Duration) {
	same := tick > 0 && !s.Stale
	if n := s.Nodes[Decode]; n.Ready+n.Starting == 0 && s.At-c.began < lossTime {
		// A gateway that has just started may not see the nodes yet, which a target of one would stop.
		same = false
	}
	for r, n := range s.Nodes {
		have := n.Ready + n.Starting
		same = same && have == c.have[r]
		if c.have[r] = have; !c.settled(s.At) {
			c.targets[r] = c.within(Role(r), max(c.targets[r], have))
		}
	}
	c.known = c.known || same
}

// settled reports whether means have settled.
func (c *Controller) settled(now time.Duration) bool { return now-c.began >= firstTime }

// learn moves the means. A decode node's work of a request is that of the answers that ended.
func (c *Controller) learn(s *Sample, tick time.Duration) {
	p := &c.perRequest
	if s.Ended > 0 {
		p.ended = min(p.ended+s.Ended, answers)
		share := min(1, s.Ended/p.ended)
		p.decoded += (s.Decoded/s.Ended - p.decoded) * share
		p.square += (s.DecodedSq/s.Ended - p.square) * share
		p.context += (s.Context/s.Ended - p.context) * share
	}
	c.requests.add(s.Requests, 0, tick, min(longTime, max(tick, s.At-c.began)))
	for r, work := range [roles][2]float64{{s.Work, s.Square}, {s.Requests * p.decoded, s.Requests * p.square}} {
		if age := s.At - c.began; age <= firstTime { // a plain mean until it is worth an exponential one
			c.short[r].add(work[0], work[1], tick, max(tick, age))
			c.long[r].add(work[0], work[1], tick, max(tick, age))
			c.slow[r].add(work[0], work[1], tick, max(tick, age))
			continue
		}
		c.short[r].add(work[0], work[1], tick, shortTime)
		c.long[r].add(work[0], work[1], tick, longTime)
		c.slow[r].add(work[0], work[1], tick, c.slowTime())
	}
}

// slowTime returns the time constant of the slow means.
func (c *Controller) slowTime() time.Duration {
	return min(slowTime, max(longTime, time.Duration(slowCount/max(1e-3, c.requests.work)*float64(time.Second))))
}

// need returns the nodes of a role that so much work per second needs.
func (c *Controller) need(r Role, work float64) float64 {
	work = max(0, work)
	if r == Prefill {
		return work / prefillLoad
	}
	o, p := &c.o, &c.perRequest
	busy := work / decodeLoad / max(0.05, 1-o.Fixed/o.ITL.Seconds())
	if p.decoded == 0 || o.KVTokens == 0 {
		return busy
	}
	context := work / p.decoded * p.context // tokens of context that are attended to, per second
	return max(busy, work+context*o.Fixed/(kvLoad*o.KVTokens))
}

// decide returns the decision for a role.
func (c *Controller) decide(r Role, s *Sample) Decision {
	now, nodes := s.At, s.Nodes[r]
	have := nodes.Ready + nodes.Starting
	if nodes.Ready < c.ready[r] && nodes.Ready < c.targets[r] {
		c.lost[r] = now
	}
	c.ready[r] = nodes.Ready
	short, long := &c.short[r], &c.long[r]
	lead := (shortTime + c.o.Start).Seconds() / (longTime - shortTime).Seconds() // the mean lags by its time constant
	expected := short.work + lead*max(0, short.work-long.work)
	noise := growing * (1 + lead) * deviation(max(short.square, long.square), shortTime)
	need, sure := c.need(r, expected), c.need(r, expected-noise)
	drain := 0.0
	if r == Prefill {
		// A backlog that the nodes compute within half of the goal is usual.
		excess := max(0, s.Backlog-float64(nodes.Ready)*c.o.TTFT.Seconds()/2)
		drain = excess / max(leastDrain, c.o.TTFT).Seconds()
		need, sure = need+drain, sure+drain
	}
	slow := &c.slow[r]
	c.remember(r, now, max(need, c.need(r, max(long.work, slow.work+shrinking*deviation(slow.square, c.slowTime())))+drain))
	d := Decision{Target: c.targets[r], Need: need}
	target := c.targets[r]
	switch {
	case s.Stale, !c.settled(now):
	case sure > float64(target):
		d.Target = int(min(math.Ceil(need), float64(target+max(leastStep, target))))
		d.Why = fmt.Sprintf("work %.2f s/s, expected %.2f in %v: %.2f nodes, %.2f without noise, above %d", short.work, expected, c.o.Start, need, sure, target)
		if drain > 0 {
			d.Why += fmt.Sprintf("; %.1f s of prompts wait: %.2f nodes of these", s.Backlog, drain)
		}
	case s.Nodes[Decode].Ready == 0: // nothing shows that fewer are enough
	case have != target && now-c.changed[r] < changeTime+2*c.o.Start || now-c.lowered[r] < c.o.Cooldown || now-c.lost[r] < lossTime || now-c.began < c.o.Hold:
	default:
		most := c.most(r)
		step := max(1, target/10)
		for step > 0 && most > float64(target-step)*(1-band) {
			step--
		}
		if step > 0 {
			d.Target = target - step
			d.Why = fmt.Sprintf("work %.2f s/s: at most %.2f nodes with noise for %v, below %d less %.0f %%", slow.work, most, c.o.Hold, d.Target, 100*band)
		}
	}
	d.Target = c.within(r, d.Target)
	d.Change = d.Target - target
	if d.Change < 0 {
		c.lowered[r] = now
	}
	if d.Change != 0 {
		c.changed[r] = now
	}
	c.targets[r] = d.Target
	return d
}

// within returns a target within the bounds.
func (c *Controller) within(r Role, n int) int { return min(max(n, c.o.Least[r]), c.o.Most[r]) }

// remember keeps the nodes that were needed over Hold, falling, so that the first is the largest.
func (c *Controller) remember(r Role, now time.Duration, nodes float64) {
	q := c.enough[r]
	for len(q) > 0 && q[len(q)-1].nodes <= nodes {
		q = q[:len(q)-1]
	}
	q = append(q, needed{now, nodes})
	for q[0].at < now-c.o.Hold {
		q = q[1:]
	}
	c.enough[r] = q
}

// most returns the most nodes that were needed over Hold.
func (c *Controller) most(r Role) float64 { return c.enough[r][0].nodes }

// Member is a process of the fleet.
type Member struct {
	ID       string
	Draining bool // it takes no work, because it is about to leave
}

// Quorum decides which gateway leads.
type Quorum struct {
	known map[string]bool // members that were known last, and whether they drained
}

// Leads reports whether a gateway leads: it has the lowest id of the gateways that it sees, and
// sees a majority of the members that were known last. A member that drained and is gone was
// removed on purpose, and no longer counts as known. members has all members, this one included.
func (q *Quorum) Leads(self string, gateways []string, members []Member) bool {
	now := make(map[string]bool, len(members))
	for _, m := range members {
		now[m.ID] = m.Draining
	}
	for id, drained := range q.known {
		if draining, there := now[id]; there {
			q.known[id] = draining
		} else if drained {
			delete(q.known, id)
		}
	}
	if 2*len(now) <= len(q.known) {
		return false
	}
	q.known = now
	for _, id := range gateways {
		if id < self {
			return false
		}
	}
	return true
}
