package route

import (
	"cmp"
	"math"
	"time"

	"github.com/tandem-serving/tandem/internal/lengths"
)

// What predictions are made of. They are judgements, held against the fleet
// simulator (bench/sim); what is measured (queues, rates, caches) outweighs them.
const (
	// unknownRate stands for the speed of nodes while none has computed a prompt
	// yet, in tokens per second.
	unknownRate = 5000.0
	// transferSetup is the round trip of grant and lease, transferRate the tokens
	// per second that a connection moves: computing hides what is below its speed.
	transferSetup = 0.002
	transferRate  = 100_000.0
	// perRequest is the price of one more request on a decode node: it makes every
	// step of the others longer.
	perRequest = 0.001
	// interference is by how much each stream of a decode node slows a prompt that
	// is computed beside it, up to mostInterference.
	interference     = 0.05
	mostInterference = 1.0
	// A node takes a request from its home only when it is faster by this share
	// and this time, in seconds: views are a heartbeat old, and a prefix computed
	// twice is cached twice.
	stickShare = 0.03
	stickTime  = 0.003
	// tieShare is by how much nodes differ that are taken for equally good where several
	// gateways choose by the same views.
	tieShare = 0.10
	// recompute is the price of a token to compute against one that waits: its
	// work delays whoever comes after, and its blocks push out others'.
	recompute = 6.0
	// delayShare prices a prompt on a decode node: by this share of its time for each
	// stream that waits meanwhile.
	delayShare = 0.1
	// fullPrice is the price of a decode node whose KV memory is full, in seconds; of
	// one that is half full it is half. It keeps large prompts from finding no room.
	fullPrice = 0.3
	// A decode node changes between own and remote prefill only for this share.
	hysteresis = 0.20
)

// side is one of the two lists of nodes, as one request sees it.
type side struct {
	*ring
	states []State
	class  int32 // only nodes of this one; anyClass: all
	most   int   // of bound; negative: not counted yet

	assumed float64 // rate of nodes that have not computed a prompt; 0: not counted yet
}

// rate is a node's speed in tokens per second. One that has not computed a prompt yet
// is taken to be as fast as those that have, on the mean: it would get none if it were
// taken to be slower.
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

// fits says whether the node may get the request.
func (s *side) fits(i int) bool {
	return s.states[i].Usable && !s.states[i].Full && (s.class == anyClass || s.ring.class[i] == s.class)
}

// compute is the time from now to the prompt's KV on a node, in seconds.
func (s *side) compute(r *Request, i int) float64 {
	n, rate := &s.states[i], s.rate(i)
	need := max(0, r.Uncached-n.Held)
	return (n.ahead(need, rate) + float64(need)) / rate
}

// ahead is how many tokens are computed before a prompt of need tokens, at a rate. A node
// that computes the least work first computes those of prompts that are as short, and
// what its step has begun with.
func (s *State) ahead(need int, rate float64) float64 {
	queued := float64(max(0, s.Queued))
	if class := lengths.Class(need); s.ShortFirst && class < lengths.N {
		step := min(float64(cmp.Or(s.StepTokens, usualStepTokens)), lengths.StepTime.Seconds()*rate)
		return min(queued, float64(max(0, s.Lengths[class]))+step)
	}
	return queued
}

// price is compute with what it costs others.
func (s *side) price(r *Request, i int) float64 {
	n := &s.states[i]
	return (float64(max(0, n.Queued)) + recompute*float64(max(0, r.Uncached-n.Held))) / s.rate(i)
}

// local is compute on a decode node, whose streams have their part of each step.
func (s *side) local(r *Request, i int) float64 { return s.compute(r, i) * s.slowed(i) }

// delays is the time of a prompt on a decode node, with what it costs the node's
// streams.
func (s *State) delays(local float64) float64 {
	return local * (1 + delayShare*float64(max(0, s.Load)))
}

func (s *side) slowed(i int) float64 {
	return 1 + min(mostInterference, interference*float64(max(0, s.states[i].Load)))
}

// transfer is what of moving n tokens is not hidden by computing them at rate.
func transfer(n int, rate float64) float64 {
	return transferSetup + max(0, float64(n)/transferRate-float64(n)/rate)
}

// remotes is the best prefill node of each numerics class.
type remotes struct {
	n    int
	best [4]struct { // more classes at once are an upgrade gone wrong
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

// first is what the first token costs on a decode node: where prefill nodes can
// compute the prompt, the time of the faster of the two; where none can, as price.
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

// nearest is the home of the request, or the node that cost says is clearly
// faster; -1: nobody is usable.
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

// draw is one of the nodes that cost at most tieShare more than the best and hold as much
// of the prompt.
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

// informed says whether more is known than how many requests nodes have.
func (s *side) informed() bool {
	for i := range s.states {
		if n := &s.states[i]; n.Rate > 0 || n.Held > 0 || n.Queued > 0 {
			return true
		}
	}
	return false
}

// staysLocal chooses between own and remote prefill; was is what it was before.
func staysLocal(local, remote float64, was bool) bool {
	if was {
		return remote >= local*(1-hysteresis)
	}
	return local < remote*(1-hysteresis)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
