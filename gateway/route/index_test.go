package route

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// Random prefixes come and go as caches hold them, next to a naive copy.
func TestIndexAgainstNaive(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		nodes := 1 + r.IntN(9)
		x, naive := NewIndex(), make([]map[kvcache.Hash]bool, nodes)
		x.Grow(nodes)
		for i := range naive {
			naive[i] = map[kvcache.Hash]bool{}
		}
		prompts := make([][]kvcache.Hash, 12)
		for i := range prompts {
			if i > 0 {
				from := prompts[r.IntN(i)]
				prompts[i] = slices.Clone(from[:r.IntN(len(from)+1)])
			}
			for range 1 + r.IntN(40) {
				prompts[i] = append(prompts[i], kvcache.Hash(r.Uint64()))
			}
		}
		for range 300 {
			n, p := r.IntN(nodes), prompts[r.IntN(len(prompts))]
			upTo := r.IntN(len(p) + 1)
			switch r.IntN(10) {
			case 0:
				for i := range IndexShards {
					x.Clear(n, i)
				}
				clear(naive[n])
			case 1, 2, 3: // from the end, with all that follow, in any prompt
				for _, q := range prompts {
					for i := len(q) - 1; i >= 0 && (i >= upTo || len(p) <= i || q[i] != p[i]); i-- {
						x.Remove(n, q[i])
						delete(naive[n], q[i])
					}
				}
			default:
				for _, h := range p[:upTo] {
					x.Add(n, h)
					naive[n][h] = true
				}
			}
			p = prompts[r.IntN(len(prompts))]
			got := make([]int32, nodes)
			x.Match(p, got)
			for i := range nodes {
				want := int32(0)
				for int(want) < len(p) && naive[i][p[want]] {
					want++
				}
				if got[i] != want || x.Count(i) != len(naive[i]) {
					t.Fatalf("seed %d: node %d holds %d of %d blocks, and %d in all; want %d, %d", seed, i, got[i], len(p), x.Count(i), want, len(naive[i]))
				}
			}
		}
		if len(x.free) > len(x.lists) {
			t.Fatalf("seed %d: %d of %d lists are free", seed, len(x.free), len(x.lists))
		}
	}
}

// bigFleet is 1,000 nodes with 10,000 blocks each: 64 that all hold, 32 that 30
// hold, and own ones; and a prompt of 2,048 tokens that one of them holds.
func bigFleet(nodes, blocks int) (*Table, View, *Index, []kvcache.Hash) {
	r := rand.New(rand.NewPCG(1, 1))
	prefill := fleet(nodes/2, "c")
	decode := fleet(nodes, "c")[nodes/2:]
	prompt := make([]kvcache.Hash, 128)
	for i := range prompt {
		prompt[i] = kvcache.Hash(r.Uint64())
	}
	x := NewIndex()
	x.Grow(nodes)
	v := View{Decode: make([]State, len(decode)), Prefill: make([]State, len(prefill))}
	for n := range nodes {
		upTo := 64
		switch {
		case n == 77:
			upTo = 128
		case n%33 == 0:
			upTo = 96
		}
		for _, h := range prompt[:upTo] {
			x.Add(n, h)
		}
		for range blocks - upTo {
			x.Add(n, kvcache.Hash(r.Uint64()))
		}
	}
	for _, s := range [][]State{v.Decode, v.Prefill} {
		for i := range s {
			s[i] = State{Usable: true, Load: r.Int32N(60), Queued: r.Int32N(8000), Rate: 9000 + 1000*r.Float64()}
		}
	}
	return New(decode, prefill), v, x, prompt
}

// decide is all of a decision: what is cached where, and the choice.
func decide(t *Table, v View, x *Index, prompt []kvcache.Hash, match []int32, dst []int) Decision {
	clear(match)
	x.Match(prompt, match)
	for i := range v.Prefill {
		v.Prefill[i].Held = 16 * match[i]
	}
	for i := range v.Decode {
		v.Decode[i].Held = 16 * match[len(v.Prefill)+i]
	}
	return t.Pick(Request{Key: Key(0, prompt, nil), Uncached: 2047, MinRemote: 64}, v, dst)
}

func TestDecisionDoesNotAllocate(t *testing.T) {
	tb, v, x, prompt := bigFleet(100, 200)
	match, dst := make([]int32, 100), make([]int, 0, MaxPrefill)
	if n := testing.AllocsPerRun(100, func() { decide(tb, v, x, prompt, match, dst) }); n != 0 {
		t.Errorf("%g allocations", n)
	}
}

// BenchmarkDecision reports CPU per decision over 1,000 nodes with 10 million blocks, and the bytes
// of the index and the ring per million blocks.
func BenchmarkDecision(b *testing.B) { benchmarkDecision(b, 1000, 10000) }

// BenchmarkDecision10000 is the same over 10,000 nodes with as many blocks in all.
func BenchmarkDecision10000(b *testing.B) { benchmarkDecision(b, 10000, 1000) }

func benchmarkDecision(b *testing.B, nodes, blocks int) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	tb, v, x, prompt := bigFleet(nodes, blocks)
	runtime.GC()
	runtime.ReadMemStats(&after)
	match, dst := make([]int32, nodes), make([]int, 0, MaxPrefill)
	b.ReportAllocs()
	began := cpuTime(b)
	for b.Loop() {
		decide(tb, v, x, prompt, match, dst)
	}
	b.ReportMetric(float64(cpuTime(b)-began)/float64(b.N), "cpu-ns/op")
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(nodes*blocks)*1e6, "B/Mblocks")
	runtime.KeepAlive(x)
}

// cpuTime is what this process has used, which other processes do not add to.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// A node whose blocks hold three times the tokens tells of every third hash.
func TestIndexOfLargerBlocks(t *testing.T) {
	x := NewIndex()
	x.Grow(1)
	hashes := []kvcache.Hash{11, 12, 13, 14, 15, 16, 17, 18, 19, 20}
	for _, i := range []int{2, 5} {
		x.Add(0, hashes[i])
	}
	for n, want := range []int32{0, 0, 0, 3, 3, 3, 6, 6, 6, 6, 6} {
		got := make([]int32, 1)
		if x.Match(hashes[:n], got); got[0] != want {
			t.Errorf("%d of %d hashes, want %d", got[0], n, want)
		}
	}
}
