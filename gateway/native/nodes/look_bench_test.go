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
	s := &Snapshot{blocks: NewBlocks()}
	s.blocks.index.Grow(nodes)
	var all []*Node
	var identities []route.Node
	for i := range nodes {
		id := fmt.Sprintf("10.0.%d.%d:7102", i/256, i%256)
		n := &Node{Name: id, breaker: breaker.New(breaker.Options{Failures: breakerFailures})}
		n.member.Store(&Member{ID: id, RPC: id, Fingerprint: 7, Class: "c", Ready: true})
		l := newLink(new(rpc.Conn), nil)
		l.heart.Store(&heartbeat{Report: route.Report{Running: r.IntN(60), Queued: r.IntN(8000), Rate: 9000 + 1000*r.Float64()}})
		n.link.Store(l)
		s.blocks.slots[id] = i
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
	return s, prompt
}

// lookAndPick is a decision with the look at what is known of every node.
func lookAndPick(s *Snapshot, v *route.View, prompt []kvcache.Hash, ranks []int) route.Decision {
	s.Look(v, Query{Fingerprint: 7, Hashes: prompt, BlockTokens: 16, Tokens: 2047})
	return s.Table.Pick(route.Request{Key: route.Key(0, prompt, nil), Uncached: 2047, MinRemote: 64}, *v, ranks)
}

func TestLookAndPickDoNotAllocate(t *testing.T) {
	s, prompt := largeFleet(100, 200)
	v, ranks := new(route.View), make([]int, 0, route.MaxPrefill)
	if d := lookAndPick(s, v, prompt, ranks); d.Decode < 0 || !v.Decode[0].Usable || v.Decode[27].Held != 2047 {
		t.Fatalf("%+v of %+v", d, v.Decode[0])
	}
	if n := testing.AllocsPerRun(100, func() { lookAndPick(s, v, prompt, ranks) }); n != 0 {
		t.Errorf("%g allocations", n)
	}
}

// BenchmarkLookAndPick is a decision over 1,000 nodes with 10 million blocks.
func BenchmarkLookAndPick(b *testing.B) {
	s, prompt := largeFleet(1000, 10000)
	v, ranks := new(route.View), make([]int, 0, route.MaxPrefill)
	b.ReportAllocs()
	began := cpuTime(b)
	for b.Loop() {
		lookAndPick(s, v, prompt, ranks)
	}
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
