package route

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// TestPoliciesAgainstModel compares the policies that do not predict with their
// definitions over the usable nodes in the order of names.
func TestPoliciesAgainstModel(t *testing.T) {
	lesser := 0 // draws whose second node had less load
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 6))
		nodes := permute(fleet(9, ""), rng.Perm(9))
		tb := New(nodes, nil)
		v := View{Decode: idle(9)}
		var usable []int
		for i := range v.Decode {
			v.Decode[i] = State{Usable: rng.IntN(4) > 0, Load: rng.Int32N(4)}
			if v.Decode[i].Usable {
				usable = append(usable, i)
			}
		}
		if len(usable) == 0 {
			continue
		}
		slices.SortFunc(usable, func(a, b int) int { return strings.Compare(nodes[a].Name, nodes[b].Name) })
		n := uint64(len(usable))
		low, high := rng.Uint32(), rng.Uint32()
		r := Request{Key: kvcache.Hash(rng.Uint64()), Uncached: 1, Turn: rng.Uint64(), Draw: uint64(high)<<32 | uint64(low)}

		two := usable[uint64(low)%n]
		if second := usable[uint64(high)%n]; v.Decode[second].Load < v.Decode[two].Load {
			two = second
			lesser++
		}
		least := slices.MinFunc(usable, func(a, b int) int { return int(v.Decode[a].Load - v.Decode[b].Load) })
		for policy, want := range map[Policy]int{PowerOfTwo: two, LeastLoad: least, RoundRobin: usable[r.Turn%n]} {
			r.Policy = policy
			if d := tb.Pick(r, v, nil); d.Decode != want || d.Reason != ReasonPolicy {
				t.Fatalf("seed %d: %s chose node %d (%s), want %d; usable in order: %v, states %+v", seed, policy, d.Decode, d.Reason, want, usable, v.Decode)
			}
		}
	}
	if lesser < 30 {
		t.Errorf("the second node of a draw had less load only %d times", lesser)
	}
}

// Consistent hashing, of the prompt or of the session, depends on the key alone while
// loads are equal.
func TestHashedPoliciesFollowTheKey(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 8))
		tb, v := New(fleet(9, ""), nil), View{Decode: idle(9)}
		chosen := map[int]bool{}
		for range 40 {
			r := Request{Key: kvcache.Hash(rng.Uint64()), Uncached: 1}
			home, _ := (&side{ring: &tb.decode, states: v.Decode, most: -1}).home(r.Key)
			chosen[home] = true
			for _, r.Policy = range []Policy{ConsistentHash, Session} {
				r.Turn, r.Draw = rng.Uint64(), rng.Uint64()
				if d := tb.Pick(r, v, nil); d.Decode != home || d.Reason != ReasonPrefix {
					t.Fatalf("seed %d: %s chose node %d (%s), want %d, the key's home", seed, r.Policy, d.Decode, d.Reason, home)
				}
			}
		}
		if len(chosen) < 5 {
			t.Errorf("seed %d: 40 keys have %d homes of 9 nodes", seed, len(chosen))
		}
	}
}

// TestUnknownRateIsTheAssumedOne verifies that a node without a measured rate is
// chosen exactly as one that was measured at unknownRate.
func TestUnknownRateIsTheAssumedOne(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 7))
		tb := New(fleet(5, ""), fleet(4*rng.IntN(2), ""))
		unknown := View{Decode: states(5, 0), Prefill: states(len(tb.prefill.nodes), 0)}
		for _, side := range [][]State{unknown.Decode, unknown.Prefill} {
			for i := range side {
				side[i].Load, side[i].Queued, side[i].Held = rng.Int32N(3), rng.Int32N(3000), rng.Int32N(900)
				if rng.IntN(2) == 0 {
					side[i].Rate = 1000 + 9000*rng.Float64()
				}
			}
		}
		known := View{Decode: slices.Clone(unknown.Decode), Prefill: slices.Clone(unknown.Prefill)}
		for _, side := range [][]State{known.Decode, known.Prefill} {
			sum, n := 0.0, 0
			for i := range side {
				if side[i].Rate > 0 {
					sum, n = sum+side[i].Rate, n+1
				}
			}
			assumed := unknownRate
			if n > 0 {
				assumed = max(1, math.Round(sum/float64(n)))
			}
			for i := range side {
				if side[i].Rate == 0 {
					side[i].Rate = assumed
				}
			}
		}
		// At MinRemote 1 prefill is never local, so that what is known of the rates
		// decides nothing else.
		r := Request{Key: kvcache.Hash(rng.Uint64()), Uncached: 1000, MinRemote: 1}
		a, b := tb.Pick(r, unknown, nil), tb.Pick(r, known, nil)
		if a.Decode != b.Decode || a.Reason != b.Reason || !slices.Equal(a.Prefill, b.Prefill) {
			t.Fatalf("seed %d: %+v with unknown rates, %+v with the assumed one for each; view %+v", seed, a, b, unknown)
		}
	}
}
