package pools

import (
	"math"
	"slices"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/deploy/planner"
)

// A fleet of many nodes behaves as several smaller ones with their parts of the load. So a large
// fleet is simulated as a slice: nodes of both roles in nearly its proportions, and a part of the
// requests. The slice has a little less room for bursts, and one node that dies is a larger part of
// it. Loads whose prompts have much in common are not sliced, because each slice would compute the
// common parts again.

const (
	// sliceNodes is the most nodes of a slice. Its pools have the proportions of the fleet's within
	// half a percent (TestSlice).
	sliceNodes = 128
	// mostShared is the share of prompt tokens that earlier prompts also begin with from which on
	// fleets are not sliced.
	mostShared = .02
)

// slice returns the numbers of nodes with which a fleet is simulated, and their part of the load.
func (r *run) slice(f planner.Fleet) (prefill, decode int, share float64) {
	total := f.Nodes()
	if !r.sliced || total <= sliceNodes {
		return f.Prefill, f.Decode, 1
	}
	if f.Prefill == 0 {
		return 0, sliceNodes, sliceNodes / float64(total)
	}
	least := math.Inf(1)
	for n := sliceNodes; n > sliceNodes/2; n-- {
		p := min(max(1, int(math.Round(float64(n)*float64(f.Prefill)/float64(total)))), n-1)
		ofPrefill, ofDecode := float64(p)/float64(f.Prefill), float64(n-p)/float64(f.Decode)
		if off := math.Abs(ofPrefill/ofDecode - 1); off < least {
			least, prefill, decode, share = off, p, n-p, (ofPrefill+ofDecode)/2
		}
	}
	return prefill, decode, min(1, share)
}

// thinned returns a share of the requests, chosen as by chance, so that the times between them vary
// as before.
func thinned(trace []sim.Request, share float64) []sim.Request {
	if share >= 1 {
		return trace
	}
	var list []sim.Request
	for i := range trace {
		if place := float64(spread(uint64(i))>>11) / (1 << 53); place < share {
			list = append(list, trace[i])
		}
	}
	if len(list) == 0 {
		list = trace[:1]
	}
	return list
}

// lengthen draws a longer load if fleets will be slices, so that slices have half as many requests
// as whole fleets would have: a fleet that cannot keep up needs some time to show it.
func (r *run) lengthen() {
	list := requests(r.trace)
	if r.sliced = sharedOf(list) < mostShared; !r.sliced || len(r.Loads) == 0 {
		return
	}
	nodes := math.MaxInt
	for _, k := range r.profiles {
		n := k.node(0)
		d := planner.Describe(&n, list, r.BatchedTokens[0], slices.Max(r.BatchedTokens))
		nodes = min(nodes, d.Bounds(&n, 0).Nodes)
	}
	r.longer = max(1, min(float64(nodes)/sliceNodes/2, maxLonger))
	if r.longer == 1 {
		return
	}
	short := *r
	r.trace, r.tenants, r.dropped = nil, nil, 0
	if r.readLoad() != nil { // it has requests that are too long for a node, or is too large
		r.trace, r.tenants, r.dropped, r.block = short.trace, short.tenants, short.dropped, short.block
	}
	r.longer = max(1, float64(len(r.trace))/float64(len(short.trace)))
}

// maxLonger bounds the factor of lengthen.
const maxLonger = 16

// spread spreads the bits of a number (the finalizer of SplitMix64).
func spread(x uint64) uint64 {
	x = (x + 0x9e3779b97f4a7c15) ^ (x+0x9e3779b97f4a7c15)>>30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// sharedOf returns the share of prompt tokens that earlier prompts also begin with.
func sharedOf(list []planner.Request) float64 {
	cached, prompts := 0, 0
	for i := range list {
		cached, prompts = cached+list[i].Cached, prompts+list[i].Prompt
	}
	return float64(cached) / float64(max(1, prompts))
}
