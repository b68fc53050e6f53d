package route

import (
	"cmp"
	"math"
	"time"

	"github.com/tandem-serving/tandem/internal/lengths"
)

// Parameters of predictions. They are estimates, checked with the fleet simulator (bench/sim).
// Measured values (queues, rates, caches) outweigh them.
const (
	// unknownRate is the assumed speed of nodes in tokens per second until one has computed a prompt.
	unknownRate = 5000.0
	// transferSetup is the time of grant and lease in seconds. transferRate is the speed of a
	// connection in tokens per second; a slower computation hides the transfer.
	transferSetup = 0.002
	transferRate  = 100_000.0
	// perRequest is the cost of one more request on a decode node, in seconds, because it makes each
	// step of the other requests longer.
	perRequest = 0.001
	// interference is the share by which each stream of a decode node slows a prompt that the node
	// computes, up to mostInterference.
	interference     = 0.05
	mostInterference = 1.0
	// A node other than the home gets a request only if it is faster by stickShare and by stickTime
	// seconds, because views are a heartbeat old, and a prefix computed twice is cached twice.
	stickShare = 0.03
	stickTime  = 0.003
	// tieShare is the share within which nodes count as equally good if several gateways choose by the
	// same views.
	tieShare = 0.10
	// recompute is the cost of a token to compute, relative to one that waits: it delays later
	// requests, and its blocks evict others.
	recompute = 6.0
	// delayShare is the cost of a prompt on a decode node, as a share of its time for each stream that
	// waits meanwhile.
	delayShare = 0.1
	// fullPrice is the cost of a decode node whose KV memory is full, in seconds. It is proportional
	// to the used share, and keeps room for large prompts.
	fullPrice = 0.3
	// hysteresis is the share that a change between local and remote prefill has to save.
	hysteresis = 0.20
)

// side is one of the two lists of nodes, in the view of one request.
type side struct {
	*ring
	states []State
	class  int32    // only nodes of this class; anyClass: all
	most   int      // result of bound; negative: not computed yet
	far    *remotes // decode: of the prefill nodes

	outline *outline // nil: none
	held    *Holdings

	found   int     // result of search plus one; 0: not computed yet
	assumed float64 // rate of nodes that have not computed a prompt; 0: not computed yet

	survey
}

// rate returns a node's speed in tokens per second. A node that has not computed a prompt gets the
// mean of those that have, because it would get no prompt if it were assumed to be slower.
func (s *side) rate(i int) float64 {
	if r := s.states[i].Rate; r > 0 {
		return r
	}
	return s.assumedRate()
}

// assumedRate returns the speed of nodes that have not computed a prompt, in whole tokens per
// second, so that it does not depend on the order of the nodes.
func (s *side) assumedRate() float64 {
	if s.assumed != 0 {
		return s.assumed
	}
	sum, n := 0.0, 0
	if s.outline != nil {
		for g := range s.outline.groups {
			rates, rated := s.sumRates(g)
			sum, n = sum+rates, n+rated
		}
	} else {
		for i := range s.states {
			if r := s.states[i].Rate; r > 0 {
				sum, n = sum+r, n+1
			}
		}
	}
	if s.assumed = unknownRate; n > 0 {
		s.assumed = max(1, math.Round(sum/float64(n)))
	}
	return s.assumed
}

// fits reports whether the node may get the request.
func (s *side) fits(i int) bool {
	return s.states[i].Usable && !s.states[i].Full && (s.class == anyClass || s.ring.class[i] == s.class)
}

// compute returns the time until a node has computed the prompt, in seconds.
func (s *side) compute(r *Request, i int) float64 {
	n, rate := &s.states[i], s.rate(i)
	need := max(0, r.Uncached-int(n.Held))
	return (n.ahead(need, rate) + float64(need)) / rate
}

// ahead returns how many tokens are computed before a prompt of need tokens, at a rate. A node that
// computes the least work first computes only prompts that are as short, and the current step.
func (s *State) ahead(need int, rate float64) float64 {
	queued := float64(max(0, s.Queued))
	if class := lengths.Class(need); s.ShortFirst && class < lengths.N {
		step := min(float64(cmp.Or(s.StepTokens, usualStepTokens)), lengths.StepTime.Seconds()*rate)
		return min(queued, float64(max(0, s.Lengths[class]))+step)
	}
	return queued
}

// price is compute with the cost for other requests.
func (s *side) price(r *Request, i int) float64 {
	n := &s.states[i]
	return (float64(max(0, n.Queued)) + recompute*float64(max(0, r.Uncached-int(n.Held)))) / s.rate(i)
}

// local is compute on a decode node, where streams take part of each step.
func (s *side) local(r *Request, i int) float64 {
	return s.compute(r, i) * slowed(int(s.states[i].Load))
}

// delays returns the time of a prompt on a decode node with the cost for the node's streams.
func (s *State) delays(local float64) float64 {
	return local * (1 + delayShare*float64(max(0, s.Load)))
}

// slowed returns the factor by which a number of streams makes a prompt's computation longer.
func slowed(streams int) float64 {
	return 1 + min(mostInterference, interference*float64(max(0, streams)))
}

// transfer returns the time of moving n tokens that computing them at rate does not hide, in
// seconds.
func transfer(n int, rate float64) float64 {
	return transferSetup + max(0, float64(n)/transferRate-float64(n)/rate)
}

// remotes has the prefill nodes of each numerics class.
type remotes struct {
	n    int
	best [4]remote // more classes at once do not occur in a working upgrade
}

// remote has the usable prefill nodes of a class.
type remote struct {
	class        int32
	seconds      float64 // of the fastest node
	secondsLimit float64 // without transferSetup, with slack
	survey
}

// predict surveys the prefill nodes of each class.
func (f *remotes) predict(s *side, r *Request) {
	if s.outline == nil {
		f.survey(s, r, s.all, true)
		return
	}
	s.refresh()
	f.survey(s, r, s.held.Most, false)
	need := float64(max(0, r.Uncached-s.held.Least))
	o, first, fastest := s.outline, -1, -1
	for at := range o.groups {
		g := &o.groups[at]
		switch b := &o.bounds[at]; {
		case g.usable == 0:
		case g.mixed:
			f.survey(s, r, s.members(at), true)
		default:
			of := f.find(g.class)
			of.usable, of.load = of.usable+g.usable, of.load+g.load
			*b = s.prefillBounds(g, need)
			if first < 0 || b.cost < o.bounds[first].cost {
				first = at
			}
			if fastest < 0 || b.seconds < o.bounds[fastest].seconds {
				fastest = at
			}
		}
	}
	if first < 0 {
		return
	}
	f.surveyGroup(s, r, first, need)
	if fastest != first {
		f.surveyGroup(s, r, fastest, need)
	}
	for at := range o.groups {
		if g := &o.groups[at]; g.usable > 0 && !g.mixed && at != first && at != fastest {
			f.surveyGroup(s, r, at, need)
		}
	}
}

// surveyGroup surveys the nodes of a group if one of them may be the best or the fastest.
func (f *remotes) surveyGroup(s *side, r *Request, at int, need float64) {
	if !f.mayHave(s, at) {
		return
	}
	if s.tighten(at) {
		if s.outline.bounds[at] = s.prefillBounds(&s.outline.groups[at], need); !f.mayHave(s, at) {
			return
		}
	}
	f.survey(s, r, s.members(at), false)
}

// mayHave reports whether a group may have a node that is better or faster than those of the
// survey.
func (f *remotes) mayHave(s *side, at int) bool {
	of, b := f.find(s.outline.groups[at].class), &s.outline.bounds[at]
	return b.seconds+transferSetup < of.seconds || of.mayHave(s, at, b.cost)
}

// prefillBounds returns bounds of a group of prefill nodes that each lack at least need tokens.
func (s *side) prefillBounds(g *group, need float64) (b bounds) {
	b = bounds{g.at(recompute * need), g.at(need)}
	if g.short {
		b.seconds = g.slope * need * (1 - slack)
	}
	if g.unknown() {
		rate := s.assumedRate()
		b.cost = min(b.cost, (float64(g.queued)+recompute*need)/rate)
		b.seconds = min(b.seconds, need/rate)
	}
	return b
}

// mayHave reports whether a group whose costs are at least bound may have a better node than the
// best of the survey.
func (x *survey) mayHave(s *side, group int, bound float64) bool {
	return bound < x.least || bound == x.least && (x.best < 0 || int(s.rank[x.best]) >= group*groupNodes)
}

// survey surveys nodes. It adds their number and load if count is set.
func (f *remotes) survey(s *side, r *Request, nodes []int32, count bool) {
	none := &remote{class: -1}
	best, states, uncached := none, s.states, r.Uncached // local variables make the loop faster
	classes := s.ring.class[:len(states)]
	for _, at := range nodes {
		i := int(at)
		n := &states[i]
		if !n.Usable {
			continue
		}
		s.hold(i)
		if classes[i] != best.class {
			if best = f.find(classes[i]); best == nil {
				best = none
				continue
			}
		}
		rate := n.Rate
		if !(rate > 0) {
			rate = s.rate(i)
		}
		queued, need := max(0, int(n.Queued)), max(0, uncached-int(n.Held))
		if !(float64(n.leastAhead()+need) > best.secondsLimit*rate) {
			if c := s.compute(r, i); c+transferSetup < best.seconds {
				best.seconds, best.secondsLimit = c+transferSetup, c*(1+slack)
			}
		}
		if n.Full {
			continue
		}
		if count {
			best.usable, best.load = best.usable+1, best.load+max(0, int(n.Load))
		}
		if !(float64(queued+recompute*need) > best.limit*rate) {
			best.consider(s, i, s.price(r, i))
		}
	}
}

// find returns the prefill nodes of a class, which it adds; nil: there are too many classes.
func (f *remotes) find(class int32) *remote {
	for i := range f.n {
		if f.best[i].class == class {
			return &f.best[i]
		}
	}
	if f.n == len(f.best) {
		return nil
	}
	f.best[f.n] = remote{class: class, seconds: math.Inf(1), secondsLimit: math.Inf(1), survey: newSurvey()}
	f.n++
	return &f.best[f.n-1]
}

// slack is the relative error that comparisons with products instead of quotients allow for. The
// error of the few operations is below 1e-15.
const slack = 1e-12

// leastAhead returns a lower bound of what ahead returns.
func (s *State) leastAhead() int {
	if s.ShortFirst {
		return 0
	}
	return max(0, int(s.Queued))
}

// survey has the nodes that fit: their number, their load, and the one with the least cost. Of
// nodes with equal costs it is the first by name.
type survey struct {
	usable, load int
	best         int // -1: none
	least        float64
	limit        float64 // least with slack
}

func newSurvey() survey { return survey{best: -1, least: math.Inf(1), limit: math.Inf(1)} }

// consider makes a node the best one if it costs less, or as much and is the first by name.
func (x *survey) consider(s *side, i int, cost float64) {
	if x.best < 0 || cost < x.least || cost == x.least && s.rank[i] < s.rank[x.best] {
		x.best, x.least, x.limit = i, cost, cost*(1+slack)
	}
}

// surveyDecode marks the nodes without room for the request, and surveys the others.
func (s *side) surveyDecode(r *Request) {
	s.survey = newSurvey()
	if s.outline == nil {
		s.scan(r, s.all, true)
		s.setBound()
		return
	}
	s.refresh()
	s.scan(r, s.held.Most, false)
	o, first := s.outline, -1
	for at := range o.groups {
		g, b := &o.groups[at], &o.bounds[at]
		room := g.hasRoom(&r.Demand)
		if !room && s.tighten(at) {
			room = g.hasRoom(&r.Demand)
		}
		if !room || g.full {
			for _, i := range s.members(at) {
				s.states[i].Full = false
			}
			g.full = !room
		}
		switch {
		case !room || g.mixed:
			b.cost = math.Inf(1)
			s.scan(r, s.members(at), true)
		case g.usable == 0:
			b.cost = math.Inf(1)
		default:
			s.usable, s.load = s.usable+g.usable, s.load+g.load
			if b.cost = s.decodeBound(g, r); first < 0 || b.cost < o.bounds[first].cost {
				first = at
			}
		}
	}
	if first >= 0 {
		s.scanGroup(r, first)
	}
	for at := range o.groups {
		if at != first && !math.IsInf(o.bounds[at].cost, 1) {
			s.scanGroup(r, at)
		}
	}
	s.setBound()
}

// scanGroup scans the nodes of a group if one of them may be the best.
func (s *side) scanGroup(r *Request, at int) {
	b := &s.outline.bounds[at]
	if !s.mayHave(s, at, b.cost) {
		return
	}
	if s.tighten(at) {
		if b.cost = s.decodeBound(&s.outline.groups[at], r); !s.mayHave(s, at, b.cost) {
			return
		}
	}
	s.scan(r, s.members(at), false)
}

// decodeBound returns a bound of the costs of a group of decode nodes, without those in Most.
func (s *side) decodeBound(g *group, r *Request) float64 {
	need := r.Uncached - s.held.Least
	x, remote := float64(max(0, need)), math.Inf(1)
	for i := range s.far.n {
		remote = min(remote, s.far.best[i].seconds)
	}
	if math.IsInf(remote, 1) {
		x *= recompute
	}
	b := g.at(x)
	if g.unknown() {
		b = min(b, x/s.assumedRate()+g.extra)
	}
	if !math.IsInf(remote, 1) && r.Uncached >= r.MinRemote {
		b = min(b, remote+float64(need)/transferRate+g.extra)
	}
	return b
}

// scan surveys nodes. It adds their number and load if count is set. The cost of a node takes two
// divisions. A node whose cost is above the least so far, as products show, is left out: its time
// is at least that of the work before the first token, at its rate, or that of the prefill node.
func (s *side) scan(r *Request, nodes []int32, count bool) {
	x := s.survey
	class, remote, weight := int32(-1), 0.0, 1
	need, room := -1, 0 // of the node before; how much load a remote prefill leaves room for
	states, uncached := s.states, r.Uncached
	classes := s.ring.class[:len(states)]
	for _, at := range nodes { // a decode side is of any class
		i := int(at)
		n := &states[i]
		s.hold(i)
		if n.Full = n.Memory.Total != 0 && !n.HasRoom(r); n.Full || !n.Usable {
			continue
		}
		load := max(0, int(n.Load))
		if count {
			x.usable, x.load = x.usable+1, x.load+load
		}
		rate, missing := n.Rate, uncached-int(n.Held)
		if !(rate > 0) {
			rate = s.rate(i)
		}
		if c := classes[i]; c != class || missing != need {
			class, need, remote = c, missing, s.far.of(c)
			room = loadRoom(r, need, remote, x.limit)
			if weight = 1; math.IsInf(remote, 1) {
				weight = recompute
			}
		}
		work := (n.leastAhead() + weight*max(0, missing)) * (mostSlow + min(mostSlow, load))
		if float64(work) > x.limit*mostSlow*rate && load > room {
			continue
		}
		x.consider(s, i, s.first(r, i, s.far))
		room = loadRoom(r, need, remote, x.limit)
	}
	s.survey = x
}

// mostSlow is the number of streams from which slowed does not grow.
const mostSlow = mostInterference / interference

// loadRoom returns the largest load with which a decode node that lacks need tokens may cost at
// most limit, if a prefill node computes them; -1: no load.
func loadRoom(r *Request, need int, remote, limit float64) int {
	if need < r.MinRemote || math.IsInf(remote, 1) {
		return -1
	}
	room := math.Floor((limit - remote - float64(need)/transferRate) / perRequest)
	return int(min(max(room, -1), math.MaxInt32))
}

// surveyPrefill surveys the prefill nodes of side.class, of which predict has done most.
func (s *side) surveyPrefill(r *Request, far *remotes) {
	s.survey = newSurvey()
	if of := far.find(s.class); of != nil && (s.class != anyClass || far.n == 1) {
		s.survey = of.survey
	} else {
		for i := range s.states {
			if s.fits(i) {
				s.usable, s.load = s.usable+1, s.load+max(0, int(s.states[i].Load))
				s.consider(s, i, s.price(r, i))
			}
		}
	}
	s.setBound()
}

// cost returns the cost of a node for the request, by which the least one is chosen.
func (s *side) cost(r *Request, i int) float64 {
	if s.far != nil {
		return s.first(r, i, s.far)
	}
	return s.price(r, i)
}

func (f *remotes) of(class int32) float64 {
	for i := range f.n {
		if f.best[i].class == class {
			return f.best[i].seconds
		}
	}
	return math.Inf(1)
}

// first returns the cost of the first token on a decode node: the time of the faster of local and
// remote prefill or, without a prefill node, price.
func (s *side) first(r *Request, i int, far *remotes) float64 {
	n, remote := &s.states[i], far.of(s.ring.class[i])
	load := n.pressure()
	if math.IsInf(remote, 1) {
		return s.price(r, i)*slowed(int(n.Load)) + load
	}
	t := s.local(r, i)
	if need := r.Uncached - int(n.Held); need >= r.MinRemote {
		if remote += float64(need) / transferRate; remote < t || s.forbidden(r, i) {
			t = remote
		}
	}
	return t + load
}

// pressure returns the cost of a decode node's load and used KV memory, in seconds.
func (s *State) pressure() float64 {
	return perRequest*float64(max(0, s.Load)) + fullPrice*s.Memory.used()
}

// nearest returns the home of the request, or the best node of the survey if it is clearly faster.
// It returns -1 if no node is usable.
func (s *side) nearest(r *Request) (int, Reason) {
	home, reason := s.home(r.Key)
	if home < 0 || !s.informed() {
		return home, reason
	}
	s.hold(home)
	best := s.best
	if best == home || s.cost(r, home) <= s.least*(1+stickShare)+stickTime {
		return home, reason
	}
	if r.Shared {
		best = s.draw(r)
	}
	switch {
	case best == home:
		return home, reason
	case s.states[best].Held > s.states[home].Held:
		return best, ReasonCached
	}
	return best, ReasonLoad
}

// draw returns a random node of those that cost at most tieShare more than the best and hold as
// much of the prompt.
func (s *side) draw(r *Request) int {
	at, n, bits, most := s.best, uint64(0), r.Draw, s.least*(1+tieShare)
	for i := range s.states {
		if s.outline != nil && !s.mayCost(i, most) {
			continue
		}
		if s.hold(i); !s.fits(i) || s.states[i].Held < s.states[s.best].Held || s.cost(r, i) > most {
			continue
		}
		n++
		bits = bits*6364136223846793005 + 1442695040888963407 // Knuth's generator; its high bits are the good ones
		if (bits>>32)%n == 0 {
			at = i
		}
	}
	return at
}

// mayCost reports whether a node may cost at most so much, by the bounds of the last survey.
func (s *side) mayCost(i int, most float64) bool {
	if g := &s.outline.groups[s.outline.of[i]]; g.mixed || g.full || s.outline.bounds[s.outline.of[i]].cost <= most {
		return true
	}
	return s.held.of(i) > int32(s.held.Least)
}

// informed reports whether more is known than the numbers of requests.
func (s *side) informed() bool {
	for i := range s.states {
		s.hold(i)
		if n := &s.states[i]; n.Rate > 0 || n.Held > 0 || n.Queued > 0 {
			return true
		}
	}
	return false
}

// staysLocal chooses between local and remote prefill; was is the previous choice.
func staysLocal(local, remote float64, was bool) bool {
	if was {
		return remote >= local*(1-hysteresis)
	}
	return local < remote*(1-hysteresis)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
