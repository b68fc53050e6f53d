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

	assumed float64 // rate of nodes that have not computed a prompt; 0: not computed yet

	survey
}

// rate returns a node's speed in tokens per second. A node that has not computed a prompt gets the
// mean of those that have, because it would get no prompt if it were assumed to be slower.
func (s *side) rate(i int) float64 {
	if r := s.states[i].Rate; r > 0 {
		return r
	}
	if s.assumed == 0 {
		sum, n := 0.0, 0
		for i := range s.states {
			if r := s.states[i].Rate; r > 0 {
				sum, n = sum+r, n+1
			}
		}
		if s.assumed = unknownRate; n > 0 {
			s.assumed = sum / float64(n)
		}
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

// predict surveys the prefill nodes of each class in one pass.
func (f *remotes) predict(s *side, r *Request) {
	none := &remote{class: -1}
	best, states, uncached := none, s.states, r.Uncached // local variables make the loop faster
	classes := s.ring.class[:len(states)]
	for i := range states {
		n := &states[i]
		if !n.Usable {
			continue
		}
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
		best.usable, best.load = best.usable+1, best.load+max(0, int(n.Load))
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
	if x.best < 0 || cost < x.least || cost == x.least && s.nodes[i].Name < s.nodes[x.best].Name {
		x.best, x.least, x.limit = i, cost, cost*(1+slack)
	}
}

// surveyDecode marks the nodes without room for the request, and surveys the others. The cost of a
// node takes two divisions. A node whose cost is above the least so far, as products show, is left
// out: its time is at least that of the work before the first token, at the node's rate, or that of
// the prefill node.
func (s *side) surveyDecode(r *Request) {
	x := newSurvey()
	class, remote, weight := int32(-1), 0.0, 1
	need, room := -1, 0 // of the node before; how much load a remote prefill leaves room for
	states, uncached := s.states, r.Uncached
	classes := s.ring.class[:len(states)]
	for i := range states { // a decode side is of any class
		n := &states[i]
		if n.Full = n.Memory.Total != 0 && !n.HasRoom(r); n.Full || !n.Usable {
			continue
		}
		load := max(0, int(n.Load))
		x.usable, x.load = x.usable+1, x.load+load
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
	s.setBound()
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
	load := perRequest*float64(max(0, n.Load)) + fullPrice*n.Memory.used()
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

// nearest returns the home of the request, or the best node of the survey if it is clearly faster.
// It returns -1 if no node is usable.
func (s *side) nearest(r *Request) (int, Reason) {
	home, reason := s.home(r.Key)
	if home < 0 || !s.informed() {
		return home, reason
	}
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
	at, n, bits := s.best, uint64(0), r.Draw
	for i := range s.states {
		if !s.fits(i) || s.states[i].Held < s.states[s.best].Held || s.cost(r, i) > s.least*(1+tieShare) {
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

// informed reports whether more is known than the numbers of requests.
func (s *side) informed() bool {
	for i := range s.states {
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
