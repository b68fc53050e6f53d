package route

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

func fleet(n int, class string) []Node {
	nodes := make([]Node, n)
	for i := range nodes {
		nodes[i] = Node{Name: fmt.Sprintf("10.0.%d.%d:7000", i/250, i%250), Class: class}
	}
	return nodes
}

func idle(n int) []State {
	s := make([]State, n)
	for i := range s {
		s[i].Usable = true
	}
	return s
}

// check verifies a decision against the rules, computed the slow way.
func check(t *testing.T, seed uint64, tb *Table, r Request, v View, d Decision) {
	t.Helper()
	usable, sum := 0, 0
	for _, s := range v.Decode {
		if s.Usable {
			usable++
			sum += max(0, int(s.Load))
		}
	}
	if usable == 0 {
		if d.Decode != -1 || d.Reason != ReasonNoDecode || len(d.Prefill) != 0 {
			t.Fatalf("seed %d: nobody usable, yet %+v", seed, d)
		}
		return
	}
	if d.Decode < 0 || !v.Decode[d.Decode].Usable {
		t.Fatalf("seed %d: unusable decode node in %+v", seed, d)
	}
	if after := max(0, int(v.Decode[d.Decode].Load)) + 1; float64(after) > math.Ceil(LoadBound*float64(sum+1)/float64(usable)) {
		t.Fatalf("seed %d: node %d gets load %d of %d over %d", seed, d.Decode, after, sum+1, usable)
	}
	if r.Uncached < r.MinRemote {
		if len(d.Prefill) != 0 || d.PrefillReason != ReasonShort {
			t.Fatalf("seed %d: %d uncached of %d wanted: %+v", seed, r.Uncached, r.MinRemote, d)
		}
		return
	}
	class, candidates := tb.decode.nodes[d.Decode].Class, 0
	for i, s := range v.Prefill {
		if s.Usable && tb.prefill.nodes[i].Class == class {
			candidates++
		}
	}
	if len(d.Prefill) != min(candidates, MaxPrefill) {
		t.Fatalf("seed %d: %d prefill nodes of %d", seed, len(d.Prefill), candidates)
	}
	if (len(d.Prefill) > 0) != (d.PrefillReason == ReasonRemote) {
		t.Fatalf("seed %d: %+v", seed, d)
	}
	seen := map[int]bool{}
	for _, p := range d.Prefill {
		if seen[p] || !v.Prefill[p].Usable || tb.prefill.nodes[p].Class != class {
			t.Fatalf("seed %d: prefill node %d in %+v", seed, p, d)
		}
		seen[p] = true
	}
}

// Random fleets, views and requests keep the rules, and a second gateway that
// lists the same nodes in another order chooses the same ones.
func TestRandomFleets(t *testing.T) {
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 2))
		classes := []string{"avx512", "avx2"}
		decode, prefill := fleet(r.IntN(12), ""), fleet(r.IntN(8), "")
		for i := range decode {
			decode[i].Class = classes[r.IntN(2)]
		}
		for i := range prefill {
			prefill[i].Class = classes[r.IntN(2)]
		}
		tb := New(decode, prefill)
		permD, permP := r.Perm(len(decode)), r.Perm(len(prefill))
		other := New(permute(decode, permD), permute(prefill, permP))
		for range 20 {
			v := View{Decode: idle(len(decode)), Prefill: idle(len(prefill))}
			for _, s := range [][]State{v.Decode, v.Prefill} {
				for i := range s {
					s[i] = State{Usable: r.IntN(4) > 0, Load: r.Int32N(6) - 1}
				}
			}
			req := Request{Key: kvcache.Hash(r.Uint64()), Uncached: r.IntN(100), MinRemote: r.IntN(100)}
			d := tb.Pick(req, v, nil)
			check(t, seed, tb, req, v, d)
			d2 := other.Pick(req, View{Decode: permute(v.Decode, permD), Prefill: permute(v.Prefill, permP)}, nil)
			if d.Reason != d2.Reason || d.PrefillReason != d2.PrefillReason || (d.Decode >= 0) != (d2.Decode >= 0) {
				t.Fatalf("seed %d: gateways disagree: %+v, %+v", seed, d, d2)
			}
			if d.Decode >= 0 && permD[d2.Decode] != d.Decode {
				t.Fatalf("seed %d: decode %d and %d", seed, d.Decode, permD[d2.Decode])
			}
			for i := range d.Prefill {
				if permP[d2.Prefill[i]] != d.Prefill[i] {
					t.Fatalf("seed %d: prefill lists differ: %v, %v by %v", seed, d.Prefill, d2.Prefill, permP)
				}
			}
		}
	}
}

func permute[T any](in []T, perm []int) []T {
	out := make([]T, len(in))
	for i, p := range perm {
		out[i] = in[p]
	}
	return out
}

// What the chosen decode node is known to hold counts as computed.
func TestHeldPrefixStaysOnDecode(t *testing.T) {
	tb := New(fleet(4, ""), fleet(2, ""))
	v := View{Decode: idle(4), Prefill: idle(2)}
	req := Request{Key: 42, Uncached: 100, MinRemote: 64}
	chosen := tb.Pick(req, v, nil).Decode
	for _, c := range []struct {
		node   int
		tokens int32
		want   Reason
	}{{chosen, 36, ReasonRemote}, {chosen, 37, ReasonShort}} {
		v.Decode[c.node].Held = c.tokens
		if d := tb.Pick(req, v, nil); d.Decode != chosen || d.PrefillReason != c.want {
			t.Errorf("node %d holds %d of 100 tokens (chosen %d): %+v, want %s", c.node, c.tokens, chosen, d, c.want)
		}
	}
}

// Distinct prompts on an idle fleet spread, and with loads that add up every
// node ends near the mean.
func TestBalance(t *testing.T) {
	const n, keys = 8, 4000
	tb := New(fleet(n, ""), nil)
	counts, v := make([]int, n), View{Decode: idle(n)}
	r := rand.New(rand.NewPCG(3, 3))
	for range keys {
		d := tb.Pick(Request{Key: kvcache.Hash(r.Uint64())}, View{Decode: idle(n)}, nil)
		counts[d.Decode]++
		v.Decode[tb.Pick(Request{Key: kvcache.Hash(r.Uint64())}, v, nil).Decode].Load++
	}
	for i, c := range counts {
		if c < keys/n/2 || c > keys/n*3/2 {
			t.Errorf("idle: node %d has %d of %d", i, c, keys)
		}
		if l := v.Decode[i].Load; float64(l) > math.Ceil(LoadBound*keys/n) || l < keys/n/2 {
			t.Errorf("loaded: node %d has %d of %d", i, l, keys)
		}
	}
}

// One hot prefix never drowns a node, and its overflow goes to the same next
// node each time.
func TestHotPrefixSpills(t *testing.T) {
	const n = 5
	tb := New(fleet(n, ""), nil)
	v := View{Decode: idle(n)}
	var order []int
	for i := range 500 {
		d := tb.Pick(Request{Key: 42}, v, nil)
		if !slices.Contains(order, d.Decode) {
			order = append(order, d.Decode)
		}
		v.Decode[d.Decode].Load++
		if l := v.Decode[d.Decode].Load; float64(l) > math.Ceil(LoadBound*float64(i+1)/n) {
			t.Fatalf("request %d: node %d has %d", i, d.Decode, l)
		}
	}
	if home := tb.Pick(Request{Key: 42}, View{Decode: idle(n)}, nil); home.Decode != order[0] || home.Reason != ReasonPrefix {
		t.Fatalf("home %+v, first served by %d", home, order[0])
	}
}

// Losing a node moves its own keys and no others; whether it is marked unusable
// or has left the ring makes no difference.
func TestNodeLossMovesOnlyItsKeys(t *testing.T) {
	const n = 7
	nodes := fleet(n, "")
	tb := New(nodes, nil)
	for lost := range nodes {
		without := New(slices.Delete(slices.Clone(nodes), lost, lost+1), nil)
		v := View{Decode: idle(n)}
		v.Decode[lost].Usable = false
		moved := map[int]int{}
		r := rand.New(rand.NewPCG(uint64(lost), 4))
		for range 1500 {
			req := Request{Key: kvcache.Hash(r.Uint64())}
			before := tb.Pick(req, View{Decode: idle(n)}, nil)
			after := tb.Pick(req, v, nil)
			if got := without.decode.nodes[without.Pick(req, View{Decode: idle(n - 1)}, nil).Decode]; got != nodes[after.Decode] {
				t.Fatalf("lost %d: unusable gives %v, gone gives %v", lost, nodes[after.Decode], got)
			}
			if before.Decode != lost {
				if after.Decode != before.Decode || after.Reason != ReasonPrefix {
					t.Fatalf("lost %d: key of node %d moved: %+v", lost, before.Decode, after)
				}
				continue
			}
			if after.Reason != ReasonHealth {
				t.Fatalf("lost %d: reason %s", lost, after.Reason)
			}
			moved[after.Decode]++
		}
		if len(moved) < 3 {
			t.Fatalf("node %d's keys all went to %v: virtual nodes should spread them", lost, moved)
		}
	}
}

// Prompts that begin alike for the longest key have one key; a growing
// conversation changes its key twice at most; salts keep keys apart.
func TestKey(t *testing.T) {
	const block = kvcache.DefaultBlockTokens
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 5))
		tokens := make([]int32, 40*block)
		for i := range tokens {
			tokens[i] = r.Int32N(1000)
		}
		key := func(salt string, ts []int32) kvcache.Hash {
			root := kvcache.Root("m", "", salt)
			return Key(root, kvcache.AppendHashes(nil, root, ts, block), ts)
		}
		changes, last := 0, key("", tokens[:block])
		for n := block; n <= len(tokens); n += 1 + r.IntN(block) {
			if k := key("", tokens[:n]); k != last {
				changes, last = changes+1, k
			}
		}
		if changes > 2 {
			t.Fatalf("seed %d: %d changes", seed, changes)
		}
		fork := slices.Clone(tokens)
		fork[16*block+r.IntN(24*block)]++
		if key("", fork) != key("", tokens) {
			t.Fatalf("seed %d: equal first 16 blocks, different keys", seed)
		}
		fork[r.IntN(16*block)] += 1000
		if key("", fork) == key("", tokens) {
			t.Fatalf("seed %d: different first blocks, equal keys", seed)
		}
		short := tokens[:r.IntN(block)]
		if key("", short) == key("s", short) || key("", tokens) == key("s", tokens) {
			t.Fatalf("seed %d: the salt does not reach the key", seed)
		}
	}
}

func TestPickDoesNotAllocate(t *testing.T) {
	tb := New(fleet(100, ""), fleet(50, ""))
	v := View{Decode: idle(100), Prefill: idle(50)}
	dst := make([]int, 0, MaxPrefill)
	key := kvcache.Hash(0)
	if n := testing.AllocsPerRun(200, func() {
		key++
		tb.Pick(Request{Key: key, Uncached: 1}, v, dst)
	}); n != 0 {
		t.Fatalf("%g allocations", n)
	}
}

func BenchmarkPick1000(b *testing.B) {
	tb := New(fleet(1000, ""), fleet(1000, ""))
	v := View{Decode: idle(1000), Prefill: idle(1000)}
	dst := make([]int, 0, MaxPrefill)
	b.ReportAllocs()
	for i := range b.N {
		tb.Pick(Request{Key: kvcache.Hash(i), Uncached: 1}, v, dst)
	}
}
