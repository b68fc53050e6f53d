//go:build !race

// The race detector has pools forget what they hold, which then is allocated anew.

package nodes

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/breaker"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// largeFleet is a snapshot of connected nodes that hold so many blocks each: the
// prompt's first 64 all of them, 96 every 33rd, its 128 one of them.
func largeFleet(nodes, blocks int) (*Snapshot, []kvcache.Hash) {
	r := rand.New(rand.NewPCG(1, 1))
	prompt := make([]kvcache.Hash, 128)
	for i := range prompt {
		prompt[i] = kvcache.Hash(r.Uint64())
	}
	s := &Snapshot{blocks: NewBlocks(), changes: new(changes)}
	s.blocks.index.Grow(nodes)
	var all []*Node
	var identities []route.Node
	for i := range nodes {
		id := fmt.Sprintf("10.0.%d.%d:7102", i/256, i%256)
		n := &Node{Name: id, breaker: breaker.New(breaker.Options{Failures: breakerFailures}), changes: s.changes, place: nowhere}
		n.setMember(&Member{ID: id, RPC: id, Fingerprint: 7, Class: "c", Ready: true})
		l := newLink(new(rpc.Conn), nil)
		l.setHeart(&heartbeat{Report: route.Report{Running: r.IntN(60), Queued: r.IntN(8000), Rate: 9000 + 1000*r.Float64()}})
		l.attach(n)
		s.blocks.slots[id] = i
		s.blocks.given++
		upTo := 64
		switch {
		case i == 77:
			upTo = 128
		case i%33 == 0:
			upTo = 96
		}
		for _, h := range prompt[:upTo] {
			s.blocks.index.Add(i, h)
		}
		for range blocks - upTo {
			s.blocks.index.Add(i, kvcache.Hash(r.Uint64()))
		}
		all, identities = append(all, n), append(identities, route.Node{Name: id, Class: "c"})
	}
	s.Prefill, s.Decode = all[:nodes/2], all[nodes/2:]
	s.Table = route.New(identities[nodes/2:], identities[:nodes/2])
	s.changes.begin(s)
	return s, prompt
}

// lookAndPick is a decision with the view of the fleet.
func lookAndPick(s *Snapshot, prompt []kvcache.Hash, ranks []int) route.Decision {
	v := s.View()
	defer v.Release()
	v.Look(Query{Fingerprint: 7, Hashes: prompt, BlockTokens: 16, Tokens: 2047})
	return s.Table.Pick(route.Request{Key: route.Key(0, prompt, nil), Uncached: 2047, MinRemote: 64}, v.View, ranks)
}

// decideAndSend is lookAndPick with the changes that a request makes until the next one: the counts
// of an earlier request are undone, its own are added, and four nodes report.
func decideAndSend(s *Snapshot, prompt []kvcache.Hash, ranks []int, last *route.Decision, turn int) {
	count := func(d route.Decision, sign int) {
		decode := s.Decode[d.Decode]
		decode.AddInFlight(int64(sign))
		l := decode.link.Load()
		l.mu.Lock()
		l.addBlocks(sign)
		l.mu.Unlock()
		for _, i := range d.Prefill[:min(1, len(d.Prefill))] {
			s.Prefill[i].AddInFlight(int64(sign))
			s.Prefill[i].queue(1023, sign*1023)
		}
	}
	if last.Decode >= 0 {
		count(*last, -1)
	}
	*last = lookAndPick(s, prompt, ranks)
	count(*last, 1)
	for i := range 4 {
		n := s.node((turn*4 + i) * 7919 % (len(s.Decode) + len(s.Prefill)))
		l := n.link.Load()
		l.mu.Lock()
		l.setHeart(l.last())
		l.mu.Unlock()
	}
}

func TestLookAndPickDoNotAllocate(t *testing.T) {
	s, prompt := largeFleet(100, 200)
	ranks := make([]int, 0, route.MaxPrefill)
	d := lookAndPick(s, prompt, ranks)
	if v := s.changes.free[0][0]; d.Decode < 0 || !v.Decode[0].Usable || v.Decode[27].Held != 2047 {
		t.Fatalf("%+v of %+v", d, v.Decode[0])
	}
	if n := testing.AllocsPerRun(100, func() { lookAndPick(s, prompt, ranks) }); n != 0 {
		t.Errorf("%g allocations", n)
	}
	turn := 0
	if n := testing.AllocsPerRun(100, func() { decideAndSend(s, prompt, ranks, &d, turn); turn++ }); n != 0 {
		t.Errorf("%g allocations with changes", n)
	}
}

// BenchmarkLookAndPick is a decision over 1,000 nodes with 10 million blocks, with the changes of
// one request and four heartbeats since the last one.
func BenchmarkLookAndPick(b *testing.B) { benchmarkLook(b, 1000, 10000) }

// BenchmarkLookAndPick10000 is the same over 10,000 nodes with as many blocks in all.
func BenchmarkLookAndPick10000(b *testing.B) { benchmarkLook(b, 10000, 1000) }

func benchmarkLook(b *testing.B, nodes, blocks int) {
	s, prompt := largeFleet(nodes, blocks)
	ranks, last := make([]int, 0, route.MaxPrefill), route.Decision{Decode: -1}
	b.ReportAllocs()
	began, turn := cpuTime(b), 0
	for b.Loop() {
		decideAndSend(s, prompt, ranks, &last, turn)
		turn++
	}
	b.ReportMetric(float64(cpuTime(b)-began)/float64(b.N), "cpu-ns/op")
}

// BenchmarkLookAndPickParallel is BenchmarkLookAndPick with a tenth of the blocks, on as many
// goroutines as -cpu gives, which share the log of changes.
func BenchmarkLookAndPickParallel(b *testing.B) {
	s, prompt := largeFleet(1000, 1000)
	b.ReportAllocs()
	b.ResetTimer()
	began := cpuTime(b)
	b.RunParallel(func(p *testing.PB) {
		ranks, last := make([]int, 0, route.MaxPrefill), route.Decision{Decode: -1}
		for turn := 0; p.Next(); turn++ {
			decideAndSend(s, prompt, ranks, &last, turn)
		}
	})
	b.ReportMetric(float64(cpuTime(b)-began)/float64(b.N), "cpu-ns/op")
}

// cpuTime is what this process has used, which other processes do not add to.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
