package route

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/lengths"
)

// The plain form of a decision: every value is computed for every node, in a pass of its own, on
// 64-bit numbers. Pick must decide as plainPick does, bit for bit.

// plainView is a View of the plain form.
type plainView struct{ Decode, Prefill []plainState }

// plainState is the known state of a node.
type plainState struct {
	Usable bool
	Local  bool // decode: its last prompt of a size worth a transfer was computed there
	Load   int  // its requests; negative counts as none
	Held   int  // leading tokens of the prompt in its cache
	Queued int  // prompt tokens that wait to be computed
	// Prefill: ShortFirst reports that prompts with the least work left are computed first. Lengths
	// has the tokens of Queued that belong to prompts of at most each length.
	ShortFirst bool
	Lengths    lengths.Queue
	Rate       float64     // prompt tokens it computes per second; 0: not known
	StepTokens int         // most tokens of a step; 0: not known
	Memory     plainMemory // decode: less the blocks of the gateway's own decisions since the heartbeat
	Full       bool        // decode: Pick found no room for the request
}

// plainMemory is a decode node's KV memory, in blocks.
type plainMemory struct {
	Total    int // 0: not known
	Free     int // empty
	Cached   int // evictable: of prefixes that no request uses
	Reserved int // that accepted requests will take for their prompts
}

// plainPick returns the decision for a request. Its Prefill is appended to dst, which may be nil.
func plainPick(t *Table, r Request, v plainView, dst []int) Decision {
	d := Decision{Decode: -1, Reason: ReasonNoDecode, PrefillReason: ReasonNoPrefill, First: -1}
	plainFull(v.Decode, &r)
	var far plainRemotes
	decode := plainSide{ring: &t.decode, states: v.Decode, most: -1}
	if r.Policy == Prefix {
		far.predict(&t.prefill, v.Prefill, &r)
		d.Decode, d.Reason = decode.nearest(&r, func(i int) float64 { return decode.first(&r, i, &far) })
	} else {
		d.Decode, d.Reason = decode.byPolicy(&r)
	}
	if d.Decode < 0 {
		if slices.ContainsFunc(v.Decode, func(s plainState) bool { return s.Usable && s.Full }) {
			d.Reason = ReasonNoRoom
		}
		return d
	}
	state := v.Decode[d.Decode]
	if state.Rate > 0 {
		d.First = seconds(decode.local(&r, d.Decode))
	}
	need := r.Uncached - state.Held
	if need < r.MinRemote {
		d.PrefillReason = ReasonShort
		return d
	}
	prefill := plainSide{ring: &t.prefill, states: v.Prefill, class: t.decode.class[d.Decode], most: -1}
	var best int
	if r.Policy == Prefix {
		best, _ = prefill.nearest(&r, func(i int) float64 { return prefill.price(&r, i) })
	} else {
		best, _ = prefill.byPolicy(&r)
	}
	if best < 0 {
		return d
	}
	known := v.Prefill[best].Rate > 0
	remote := prefill.compute(&r, best) + transfer(need, v.Prefill[best].Rate)
	if state.Rate > 0 && known { // both are known: choose the faster one
		local := decode.local(&r, d.Decode)
		d.Local, d.Remote = seconds(local), seconds(remote)
		if r.Policy == Prefix && r.MinRemote > 1 && !decode.forbidden(&r, d.Decode) && staysLocal(state.delays(local), remote, state.Local) {
			d.PrefillReason = ReasonLocal
			return d
		}
	}
	if d.PrefillReason, d.First = ReasonRemote, -1; known {
		d.First = seconds(remote)
	}
	start := len(dst)
	d.Prefill = prefill.follow(r.Key, append(dst, best), start)
	return d
}

// plainSide is one of the two lists of nodes, in the view of one request.
type plainSide struct {
	*ring
	states []plainState
	class  int32 // only nodes of this class; anyClass: all
	most   int   // result of bound; negative: not computed yet

	assumed float64 // rate of nodes that have not computed a prompt; 0: not computed yet
}

// rate returns a node's speed in tokens per second. A node that has not computed a prompt gets the
// mean of those that have, because it would get no prompt if it were assumed to be slower.
func (s *plainSide) rate(i int) float64 {
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
			s.assumed = max(1, math.Round(sum/float64(n)))
		}
	}
	return s.assumed
}

// fits reports whether the node may get the request.
func (s *plainSide) fits(i int) bool {
	return s.states[i].Usable && !s.states[i].Full && (s.class == anyClass || s.ring.class[i] == s.class)
}

// compute returns the time until a node has computed the prompt, in seconds.
func (s *plainSide) compute(r *Request, i int) float64 {
	n, rate := &s.states[i], s.rate(i)
	need := max(0, r.Uncached-n.Held)
	return (n.ahead(need, rate) + float64(need)) / rate
}

// ahead returns how many tokens are computed before a prompt of need tokens, at a rate. A node that
// computes the least work first computes only prompts that are as short, and the current step.
func (s *plainState) ahead(need int, rate float64) float64 {
	queued := float64(max(0, s.Queued))
	if class := lengths.Class(need); s.ShortFirst && class < lengths.N {
		step := min(float64(cmp.Or(s.StepTokens, usualStepTokens)), lengths.StepTime.Seconds()*rate)
		return min(queued, float64(max(0, s.Lengths[class]))+step)
	}
	return queued
}

// price is compute with the cost for other requests.
func (s *plainSide) price(r *Request, i int) float64 {
	n := &s.states[i]
	return (float64(max(0, n.Queued)) + recompute*float64(max(0, r.Uncached-n.Held))) / s.rate(i)
}

// local is compute on a decode node, where streams take part of each step.
func (s *plainSide) local(r *Request, i int) float64 { return s.compute(r, i) * s.slowed(i) }

// delays returns the time of a prompt on a decode node with the cost for the node's streams.
func (s *plainState) delays(local float64) float64 {
	return local * (1 + delayShare*float64(max(0, s.Load)))
}

func (s *plainSide) slowed(i int) float64 {
	return 1 + min(mostInterference, interference*float64(max(0, s.states[i].Load)))
}

// plainRemotes has the time of the best prefill node of each numerics class.
type plainRemotes struct {
	n    int
	best [4]struct { // more classes at once do not occur in a working upgrade
		class   int32
		seconds float64
	}
}

func (f *plainRemotes) predict(g *ring, states []plainState, r *Request) {
	s := plainSide{ring: g, states: states, most: -1}
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

func (f *plainRemotes) of(class int32) float64 {
	for i := range f.n {
		if f.best[i].class == class {
			return f.best[i].seconds
		}
	}
	return math.Inf(1)
}

// first returns the cost of the first token on a decode node: the time of the faster of local and
// remote prefill or, without a prefill node, price.
func (s *plainSide) first(r *Request, i int, far *plainRemotes) float64 {
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
func (s *plainSide) nearest(r *Request, cost func(int) float64) (int, Reason) {
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
func (s *plainSide) draw(r *Request, best int, least float64, cost func(int) float64) int {
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
func (s *plainSide) informed() bool {
	for i := range s.states {
		if n := &s.states[i]; n.Rate > 0 || n.Held > 0 || n.Queued > 0 {
			return true
		}
	}
	return false
}

// forbidden reports whether a decode node must leave the prompt to a prefill node, because its
// streams would pause for longer than interTokenTarget, or because its KV memory is full up to the
// margin for running requests. Without a usable prefill node, the decode node computes the prompt
// in any case.
func (s *plainSide) forbidden(r *Request, i int) bool {
	n := &s.states[i]
	if n.Memory.used() >= 1-roomMargin {
		return true
	}
	chunk := min(r.Uncached-n.Held, cmp.Or(n.StepTokens, usualStepTokens))
	return n.Load > 0 && float64(chunk) > interTokenTarget*s.rate(i)
}

// home returns the first usable node of the class at or after the key whose load is below the
// bound, or -1 if no node is usable. The reason reports why nodes before it were skipped.
func (s *plainSide) home(key kvcache.Hash) (int, Reason) {
	bound := s.bound()
	if bound == 0 {
		return -1, ReasonNoDecode
	}
	reason, at := ReasonPrefix, s.search(key)
	for i := range s.points {
		n := int(s.point(at + i).node)
		switch {
		case !s.fits(n):
			if reason == ReasonPrefix {
				reason = ReasonHealth
			}
		case s.states[n].Load >= bound:
			reason = ReasonLoad
		default:
			return n, reason
		}
	}
	return -1, ReasonNoDecode
}

// follow appends the nodes after the key to dst, as substitutes of those in dst[start:], until
// there are MaxPrefill. Nodes within the load bound come first.
func (s *plainSide) follow(key kvcache.Hash, dst []int, start int) []int {
	bound := s.bound()
	if bound == 0 {
		return dst
	}
	at := s.search(key)
	for _, within := range [...]bool{true, false} {
		for i := range s.points {
			if len(dst)-start == MaxPrefill {
				return dst
			}
			n := int(s.point(at + i).node)
			if s.fits(n) && (s.states[n].Load < bound) == within && !slices.Contains(dst[start:], n) {
				dst = append(dst, n)
			}
		}
	}
	return dst
}

// bound returns the load that no usable node with room may exceed after it got the request, or 0 if
// there is no such node. Because the bound is above the mean, some usable node is always below it.
// It is computed once per decision.
func (s *plainSide) bound() int {
	if s.most >= 0 {
		return s.most
	}
	usable, load := 0, 0
	for i := range s.states {
		if s.fits(i) {
			usable++
			load += max(s.states[i].Load, 0)
		}
	}
	if s.most = 0; usable > 0 {
		s.most = int(math.Ceil(LoadBound * float64(load+1) / float64(usable)))
	}
	return s.most
}

// Holds reports whether an empty pool could hold the prompt and a token.
func (m *plainMemory) Holds(d Demand) bool { return m.Total == 0 || d.Prompt <= m.Total }

// Fits reports whether the pool has room for a request, of whose prompt it has cached blocks. An
// idle pool has room for every request for which Holds is true. Cached blocks of the prompt are not
// taken again, but may be among the evictable ones.
func (m *plainMemory) Fits(d Demand, cached int) bool {
	if m.Total == 0 || d.Prompt == 0 {
		return true
	}
	return m.Holds(d) && m.spare(d, cached) >= 0
}

// spare returns how many blocks are left with the request; negative: how many are missing.
func (m *plainMemory) spare(d Demand, cached int) int {
	most := m.Total - int(roomMargin*float64(m.Total))
	need := min(d.Prompt+d.Answer, most)
	cached = min(cached, d.Prompt)
	room := m.Free + m.Cached - m.Reserved - (m.Total - most)
	return room - (need - cached + min(cached, m.Cached))
}

// used returns the share of the pool that is not available to new requests; 0: not known.
func (m *plainMemory) used() float64 {
	if m.Total == 0 {
		return 0
	}
	return min(1, max(0, 1-float64(m.Free+m.Cached-m.Reserved)/float64(m.Total)))
}

// plainFull marks the nodes that have no room for the request.
func plainFull(states []plainState, r *Request) {
	for i := range states {
		s := &states[i]
		s.Full = !s.HasRoom(r)
	}
}

// HasRoom reports whether the node has KV memory for the request.
func (s *plainState) HasRoom(r *Request) bool { return s.Memory.Fits(r.Demand, s.heldBlocks(r)) }

// heldBlocks returns about how many of the prompt's blocks the node has.
func (s *plainState) heldBlocks(r *Request) int {
	if r.Uncached <= 0 {
		return 0
	}
	return r.Demand.Prompt * min(max(0, s.Held), r.Uncached) / (r.Uncached + 1)
}

// byPolicy returns the choice of a policy other than Prefix, or -1 if no node is usable.
func (s *plainSide) byPolicy(r *Request) (int, Reason) {
	if r.Policy == ConsistentHash || r.Policy == Session {
		return s.home(r.Key)
	}
	usable := 0
	for i := range s.states {
		if s.fits(i) {
			usable++
		}
	}
	if usable == 0 {
		return -1, ReasonNoDecode
	}
	switch r.Policy {
	case RoundRobin:
		return s.byName(int(r.Turn % uint64(usable))), ReasonPolicy
	case PowerOfTwo:
		a := s.byName(int(uint32(r.Draw) % uint32(usable)))
		b := s.byName(int(uint32(r.Draw>>32) % uint32(usable)))
		if s.states[b].Load < s.states[a].Load {
			a = b
		}
		return a, ReasonPolicy
	}
	best := -1
	for i := range s.states {
		if !s.fits(i) {
			continue
		}
		if best < 0 || s.states[i].Load < s.states[best].Load ||
			s.states[i].Load == s.states[best].Load && s.nodes[i].Name < s.nodes[best].Name {
			best = i
		}
	}
	return best, ReasonPolicy
}

// byName returns the n-th node that fits, in the order of names.
func (s *plainSide) byName(n int) int {
	for _, i := range s.sorted {
		if s.fits(int(i)) {
			if n == 0 {
				return int(i)
			}
			n--
		}
	}
	return -1
}

// plainOf returns a view in the plain form.
func plainOf(v View) (p plainView) {
	list := func(states []State) (plain []plainState) {
		for _, s := range states {
			plain = append(plain, plainState{
				Usable: s.Usable, Local: s.Local, Load: int(s.Load), Held: int(s.Held), Queued: int(s.Queued), ShortFirst: s.ShortFirst,
				Lengths: lengths.Queue{int(s.Lengths[0]), int(s.Lengths[1]), int(s.Lengths[2])}, Rate: s.Rate, StepTokens: int(s.StepTokens), Full: s.Full,
				Memory: plainMemory{int(s.Memory.Total), int(s.Memory.Free), int(s.Memory.Cached), int(s.Memory.Reserved)},
			})
		}
		return plain
	}
	return plainView{list(v.Decode), list(v.Prefill)}
}

// drawing draws views and requests. Small numbers of different values make equal costs frequent.
type drawing struct {
	*rand.Rand
	values int  // of each number, about
	hard   bool // rates that no node has
}

func (d *drawing) n(most int) int32 {
	return int32(d.IntN(d.values) * most / d.values)
}

func (d *drawing) rate() float64 {
	if d.hard && d.IntN(4) == 0 {
		return []float64{0, -1, math.NaN(), math.Inf(1), 5e-324, 1e308, 1e-9}[d.IntN(7)]
	}
	return float64(d.n(5) * 2000)
}

func (d *drawing) states(n int) []State {
	states := make([]State, n)
	memory, short := d.IntN(3) > 0, d.IntN(2) == 0
	for i := range states {
		s := &states[i]
		*s = State{
			Usable: d.IntN(8) > 0, Local: d.IntN(2) == 0, ShortFirst: short && d.IntN(5) > 0, Full: d.IntN(20) == 0,
			Load: d.n(80) - 1, Held: d.n(2500), Queued: d.n(9000) - 1, Rate: d.rate(), StepTokens: d.n(3) * 1024,
		}
		s.Lengths = Lengths{s.Queued / 4, s.Queued / 3, s.Queued / 2}
		if memory && d.IntN(5) > 0 {
			total := 1 + d.Int32N([]int32{3, 40, 400, 100_000}[d.IntN(4)])
			s.Memory = Memory{Total: total, Free: d.Int32N(total + 1), Cached: d.Int32N(total + 1), Reserved: d.Int32N(total+1) / 2}
		}
	}
	return states
}

func (d *drawing) request() Request {
	r := Request{
		Policy: Policy(d.IntN(int(Session) + 1)), Key: kvcache.Hash(d.Uint64()), Uncached: []int{0, 1, 60, 250, 1000, 2047, 50_000}[d.IntN(7)],
		MinRemote: []int{-5, 0, 1, 64, 1000, math.MaxInt}[d.IntN(6)], Turn: d.Uint64(), Draw: d.Uint64(), Shared: d.IntN(2) == 0,
	}
	if d.IntN(2) == 0 {
		r.Policy = Prefix
	}
	if d.IntN(3) > 0 {
		r.Demand = Demand{Prompt: d.IntN(120), Answer: d.IntN(60)}
	}
	return r
}

// Pick decides as the plain form does, and marks the same nodes as full.
func TestPickIsThePlainOne(t *testing.T) {
	reasons := map[Reason]int{}
	for seed := range uint64(1200) {
		d := &drawing{Rand: rand.New(rand.NewPCG(seed, 9)), values: []int{1, 2, 4, 1000}[seed%4], hard: seed%5 == 0}
		most := 40
		if seed%400 == 0 {
			most = 1000
		}
		of := func(nodes []Node) []Node {
			classes := 1 + d.IntN(7)
			for i := range nodes {
				if nodes[i].Class = fmt.Sprint(d.IntN(classes)); d.IntN(12) == 0 {
					nodes[i].Class = ""
				}
			}
			return permute(nodes, d.Perm(len(nodes)))
		}
		table := New(of(fleet(d.IntN(most), "")), of(fleet(d.IntN(most), "")))
		for range 10 {
			v, r := View{Decode: d.states(len(table.decode.nodes)), Prefill: d.states(len(table.prefill.nodes))}, d.request()
			plain := plainOf(v)
			got, want := table.Pick(r, v, nil), plainPick(table, r, plain, nil)
			reasons[got.Reason]++
			reasons[got.PrefillReason]++
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("seed %d: %+v, the plain form %+v, of %+v\ndecode %+v\nprefill %+v", seed, got, want, r, v.Decode, v.Prefill)
			}
			for i := range v.Decode {
				if v.Decode[i].Full != plain.Decode[i].Full {
					t.Fatalf("seed %d: decode node %d full: %t, the plain form %t, for %+v: %+v", seed, i, v.Decode[i].Full, plain.Decode[i].Full, r, v.Decode[i])
				}
			}
		}
	}
	for _, r := range []Reason{ReasonPrefix, ReasonLoad, ReasonHealth, ReasonCached, ReasonPolicy, ReasonNoDecode, ReasonNoRoom, ReasonRemote, ReasonLocal, ReasonShort, ReasonNoPrefill} {
		if reasons[r] < 20 {
			t.Errorf("%d decisions for the reason %s", reasons[r], r)
		}
	}
}
