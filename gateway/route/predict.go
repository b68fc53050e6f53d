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
	class  int32 // only nodes of this class; anyClass: all
	most   int   // result of bound; negative: not computed yet

	assumed float64 // rate of nodes that have not computed a prompt; 0: not computed yet
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
	need := max(0, r.Uncached-n.Held)
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
	return (float64(max(0, n.Queued)) + recompute*float64(max(0, r.Uncached-n.Held))) / s.rate(i)
}

// local is compute on a decode node, where streams take part of each step.
func (s *side) local(r *Request, i int) float64 { return s.compute(r, i) * s.slowed(i) }

// delays returns the time of a prompt on a decode node with the cost for the node's streams.
func (s *State) delays(local float64) float64 {
	return local * (1 + delayShare*float64(max(0, s.Load)))
}

func (s *side) slowed(i int) float64 {
	return 1 + min(mostInterference, interference*float64(max(0, s.states[i].Load)))
}

// transfer returns the time of moving n tokens that computing them at rate does not hide, in
// seconds.
func transfer(n int, rate float64) float64 {
	return transferSetup + max(0, float64(n)/transferRate-float64(n)/rate)
}

// remotes has the time of the best prefill node of each numerics class.
type remotes struct {
	n    int
	best [4]struct { // more classes at once do not occur in a working upgrade
		class   int32
		seconds float64
	}
}

func (f *remotes) predict(g *ring, states []State, r *Request) {
	s := side{ring: g, states: states, most: -1}
	for i := range states {
		if !states[i].Usable {
			continue
		}
		seconds, at, class := s.compute(r, i)+transferSetup, 0, g.class[i]
		for at < f.n && f.best[at].class != class {
			at++
		}
		switch {
		case at < f.n:
			f.best[at].seconds = min(f.best[at].seconds, seconds)
		case f.n < len(f.best):
			f.best[at].class, f.best[at].seconds = class, seconds
			f.n++
		}
	}
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
		return s.price(r, i)*s.slowed(i) + load
	}
	t := s.local(r, i)
	if need := r.Uncached - n.Held; need >= r.MinRemote {
		if remote += float64(need) / transferRate; remote < t || s.forbidden(r, i) {
			t = remote
		}
	}
	return t + load
}

// nearest returns the home of the request, or the node that is clearly faster by cost. It returns
// -1 if no node is usable.
func (s *side) nearest(r *Request, cost func(int) float64) (int, Reason) {
	home, reason := s.home(r.Key)
	if home < 0 || !s.informed() {
		return home, reason
	}
	best, least := home, cost(home)
	limit := least
	for i := range s.states {
		if !s.fits(i) || i == home {
			continue
		}
		c := cost(i)
		if c < least || c == least && best != home && s.nodes[i].Name < s.nodes[best].Name {
			best, least = i, c
		}
	}
	if best == home || limit <= least*(1+stickShare)+stickTime {
		return home, reason
	}
	if r.Shared {
		best = s.draw(r, best, least, cost)
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
func (s *side) draw(r *Request, best int, least float64, cost func(int) float64) int {
	at, n, bits := best, uint64(0), r.Draw
	for i := range s.states {
		if !s.fits(i) || s.states[i].Held < s.states[best].Held || cost(i) > least*(1+tieShare) {
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
