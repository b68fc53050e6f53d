package fleet

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
)

// sending is a transfer that begins at a time, and when it arrived.
type sending struct {
	at, arrived time.Duration
	bytes       float64
	t           transfer
}

// send plays transfers, and calls each after every event.
func send(t *testing.T, f *fleet, list []*sending, each func()) {
	for _, s := range list {
		s.arrived = -1
		s.t.arrived = func() { s.arrived = f.clock.now }
		f.clock.at(s.at, func() { f.release(&s.t, s.bytes, true) })
	}
	for len(f.clock.heap) > 0 {
		f.clock.next()
		each()
	}
	for i, s := range list {
		if s.arrived < s.at {
			t.Errorf("transfer %d of %g bytes at %v has not arrived", i, s.bytes, s.at)
		}
	}
}

// linked returns a node with a link.
func linked(link float64) *node { return &node{kind: &Kind{Link: link}} }

// Equal transfers that begin together on one link take as many times as long as there are. Others
// end when equal shares of the link have carried them: after the k-th shortest one ends, the n-k
// others each have an n-k-th of the link.
func TestSharedLink(t *testing.T) {
	const link = 1e9
	for _, toOne := range []bool{true, false} {
		for _, sizes := range [][]float64{{1e9, 1e9, 1e9}, {1e8, 3e8, 9e8, 9e8}, {5e8}} {
			f := &fleet{o: Options{Bandwidth: 10 * link}}
			one := linked(link)
			var list []*sending
			for _, bytes := range sizes {
				s := &sending{bytes: bytes}
				if s.t.from, s.t.to = linked(link), one; !toOne {
					s.t.from, s.t.to = one, linked(link)
				}
				list = append(list, s)
			}
			send(t, f, list, func() {})
			slices.Sort(sizes)
			end, before := 0.0, 0.0
			for k, bytes := range sizes {
				end += (bytes - before) * float64(len(sizes)-k) / link
				before = bytes
				if got := list[k].arrived.Seconds(); math.Abs(got-end) > 1e-7 {
					t.Errorf("transfers of %v bytes, to one node %v: number %d arrived after %v s, want %v", sizes, toOne, k, got, end)
				}
			}
		}
	}
}

// At no time is a link or a transfer faster than its limit, every byte crosses, and a transfer
// whose nodes have no other one has the whole bandwidth.
func TestRandomTransfers(t *testing.T) {
	for seed := range uint64(50) {
		draw := rand.New(rand.NewPCG(seed, 7))
		f := &fleet{o: Options{Bandwidth: 1e9 * (.1 + draw.Float64()), Link: 1e9}}
		var nodes [2][]*node
		for role := range nodes {
			for range 1 + draw.IntN(4) {
				nodes[role] = append(nodes[role], linked(1e9))
			}
		}
		var list []*sending
		for range 1 + draw.IntN(30) {
			s := &sending{at: time.Duration(draw.IntN(3e9)), bytes: 1e9 * draw.Float64()}
			s.t.from, s.t.to = nodes[0][draw.IntN(len(nodes[0]))], nodes[1][draw.IntN(len(nodes[1]))]
			list = append(list, s)
		}
		crossed, rates, last := make([]float64, len(list)), make([]float64, len(list)), time.Duration(0)
		send(t, f, list, func() {
			used := map[*node]float64{}
			for i, s := range list {
				crossed[i] += rates[i] * (f.clock.now - last).Seconds()
				rates[i] = s.t.rate
				used[s.t.from] += s.t.rate
				used[s.t.to] += s.t.rate
				alone := len(s.t.from.transfers) == 1 && len(s.t.to.transfers) == 1
				if s.t.rate > f.o.Bandwidth || s.t.rate > 0 && alone && s.t.rate != min(f.o.Bandwidth, f.o.Link) {
					t.Fatalf("seed %d: at %v transfer %d has %g bytes/s", seed, f.clock.now, i, s.t.rate)
				}
			}
			last = f.clock.now
			for _, rate := range used {
				if rate > f.o.Link*(1+1e-9) {
					t.Fatalf("seed %d: at %v a link carries %g bytes/s", seed, f.clock.now, rate)
				}
			}
		})
		for i, s := range list {
			if math.Abs(crossed[i]-s.bytes) > 100 { // some nanoseconds' worth
				t.Errorf("seed %d: %g of %g bytes of transfer %d crossed", seed, crossed[i], s.bytes, i)
			}
		}
		for _, n := range slices.Concat(nodes[0], nodes[1]) {
			if len(n.transfers) > 0 {
				t.Errorf("seed %d: %d transfers are left", seed, len(n.transfers))
			}
		}
	}
}

// Four prompts that four prefill nodes compute at the same time, for one decode node: the last one
// arrives when the decode node's link has carried all. With fast links the result is as without.
func TestTransfersOfAFleet(t *testing.T) {
	const tokens, prompts = 4097, 4
	var trace []sim.Request
	for range prompts {
		trace = append(trace, sim.Request{Tokens: tokens, Output: 1})
	}
	run := func(link, bandwidth float64) *Result {
		o := dynamoFleet(t, prompts, 1, route.RoundRobin, 1)
		o.Steps, o.MinRemote, o.Link, o.Bandwidth = stepTimes[1], 1, link, bandwidth
		for i := range trace {
			trace[i].Blocks = []kvcache.Hash{kvcache.Hash(i + 1)}
		}
		r, err := Run(trace, o)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	without, fast := run(0, 1e11), run(1e12, 1e11)
	for i := range trace {
		if a, b := without.Requests[i].First, fast.Requests[i].First; (a - b).Abs() > time.Microsecond {
			t.Errorf("request %d has its first token after %v without links, %v with fast ones", i, a, b)
		}
	}
	const link = 1e9
	slow := run(link, 1e11)
	alone := run(0, link/prompts)
	all := time.Duration(prompts * (tokens - 1) * DefaultKVBytes / link * 1e9) // from the start of the step on
	for i := range trace {
		first := slow.Requests[i].First
		if (first-alone.Requests[i].First).Abs() > 20*time.Millisecond || first < all || first > all+30*time.Millisecond {
			t.Errorf("request %d has its first token after %v, want %v later than its step begins, and at %g bytes/s alone %v", i, first, all, link/prompts, alone.Requests[i].First)
		}
	}
}

// A transfer whose last byte crosses when the whole is released arrives once, and leaves its links.
func TestReleasedAsItEnds(t *testing.T) {
	f, a, b := &fleet{o: Options{Bandwidth: 1e9}}, linked(1e9), linked(1e9)
	arrived := 0
	s := transfer{from: a, to: b, arrived: func() { arrived++ }}
	f.clock.at(time.Second, func() { f.release(&s, 1e9, true) }) // before the alarm of the last byte
	f.release(&s, 1e9, false)
	for len(f.clock.heap) > 0 {
		f.clock.next()
	}
	if arrived != 1 || f.clock.now != time.Second || len(a.transfers)+len(b.transfers) > 0 {
		t.Errorf("arrived %d times until %v, %d and %d transfers are left", arrived, f.clock.now, len(a.transfers), len(b.transfers))
	}
}

// The alarms of transfers whose ends change all the time do not pile up.
func TestVoidAlarms(t *testing.T) {
	const transfers = 5000
	f, to := &fleet{o: Options{Bandwidth: 1e9}}, linked(1e9)
	most, arrived := 0, 0
	for i := range transfers {
		s := &transfer{from: linked(1e9), to: to, arrived: func() { arrived++ }}
		f.clock.at(time.Duration(i)*time.Microsecond, func() {
			f.release(s, 1e9, true)
			most = max(most, len(f.clock.heap))
			if len(to.transfers) > 30 { // the others end at once
				f.stop(to.transfers[0])
			}
		})
	}
	for len(f.clock.heap) > 0 {
		f.clock.next()
	}
	if arrived != 30 || most > 3*transfers {
		t.Errorf("%d transfers arrived, and there were %d alarms", arrived, most)
	}
}
