// Package sim runs the real router over a simulated fleet of prefill nodes in virtual
// time. It shows the effect of a policy on hit rates and on the time to the first token,
// in seconds instead of days.
//
// A node computes one prompt after the other, in order of arrival, at a fixed rate,
// without the blocks that its cache held when it began. Then the prompt's blocks enter
// its cache, the least recently used ones leave, and gateways receive both as events. A
// gateway knows what a real one knows: the blocks in received events, and the tokens that
// it has sent and that have not been computed. With several gateways it knows the tokens
// of the others from the nodes' last heartbeats. Requests arrive at the gateways in turn.
//
// Invariant: the same trace, options and seed give the same result. Every request is
// served once, and the tokens computed and found add up to those of the trace.
//
// The package does not model decoding, transfers, batches, or failures. bench/sim/fleet
// models all but the last.
package sim

import (
	"container/heap"
	"container/list"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
)

// errOptions means that no fleet can have such options.
var errOptions = errors.New("sim: bad options")

// Options describe the fleet and the traffic.
type Options struct {
	Policy      route.Policy
	Nodes       int
	BlockTokens int     // of the trace's blocks
	CacheBlocks int     // of each node
	Rate        float64 // prompt tokens per second and node
	Stretch     float64 // factor on the times between arrivals
	Seed        uint64
	Gateways    int           // 0: one
	Heartbeat   time.Duration // between two reports of a node; 0: none
	// EventDelay is the delay of block events to the first gateway. Each further gateway
	// receives them later by the same time.
	EventDelay time.Duration
}

// Result is the outcome of a run.
type Result struct {
	Hit      float64 // share of prompt tokens found in a cache
	Computed int64   // prompt tokens that were not
	Mean     time.Duration
	P50, P99 time.Duration
	Alike    float64 // share of requests for which all gateways would have chosen the same node
}

// fleet is the simulation's state.
type fleet struct {
	o        Options
	table    *route.Table
	gateways []*gateway
	nodes    []node
	ends     ends
	beat     int // the node whose heartbeat is next
	beatAt   time.Duration
	draw     *rand.Rand
	turn     uint64
	dst      []int
	alike    int
}

// gateway is the state of one gateway.
type gateway struct {
	view     route.View
	index    *route.Index
	match    []int32
	own      []route.Sent // Requests and Queued: what it has sent
	reported []route.Sent // the same, from the nodes' last heartbeats
	events   []blockEvent // in flight, in order of arrival
}

// blockEvent is a change of a node's cache on its way to a gateway.
type blockEvent struct {
	at    time.Duration
	node  int
	block kvcache.Hash
	gone  bool
}

// node is one prefill node.
type node struct {
	queue []*job // the first is being computed
	lru   *list.List
	at    map[kvcache.Hash]*list.Element
}

type job struct {
	*Request
	node    int
	by      *gateway
	claimed int // tokens that the router expects to be computed
	end     time.Duration
}

// ends is the jobs being computed, by their end and then their node.
type ends []*job

func (e ends) Len() int { return len(e) }
func (e ends) Less(i, j int) bool {
	return e[i].end < e[j].end || e[i].end == e[j].end && e[i].node < e[j].node
}
func (e ends) Swap(i, j int) { e[i], e[j] = e[j], e[i] }

// Push and Pop implement heap.Interface.
func (e *ends) Push(x any) { *e = append(*e, x.(*job)) }

// Pop implements heap.Interface.
func (e *ends) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// Run plays a trace, which must be in order of arrival.
func Run(trace []Request, o Options) (Result, error) {
	if o.Nodes < 1 || o.BlockTokens < 1 || o.CacheBlocks < 1 || !(o.Rate > 0) || !(o.Stretch > 0) || len(trace) == 0 {
		return Result{}, fmt.Errorf("%w: %+v and %d requests", errOptions, o, len(trace))
	}
	f := newFleet(o)
	var r Result
	var waits []time.Duration
	var asked int64
	finish := func() {
		j := heap.Pop(&f.ends).(*job)
		waits = append(waits, j.end-f.arrival(j.Request))
		r.Computed += f.done(j)
	}
	for i := range trace {
		q := &trace[i]
		for {
			end := len(f.ends) > 0 && f.ends[0].end <= f.arrival(q)
			if beat := o.Heartbeat > 0 && f.beatAt <= f.arrival(q); beat && !(end && f.ends[0].end < f.beatAt) {
				f.heartbeat()
			} else if end {
				finish()
			} else {
				break
			}
		}
		asked += int64(q.Tokens)
		f.send(q)
	}
	for len(f.ends) > 0 {
		finish()
	}
	slices.Sort(waits)
	for _, w := range waits {
		r.Mean += w / time.Duration(len(waits))
	}
	r.P50, r.P99 = waits[len(waits)/2], waits[len(waits)*99/100]
	r.Hit = 1 - float64(r.Computed)/float64(asked)
	r.Alike = float64(f.alike) / float64(len(trace))
	return r, nil
}

func newFleet(o Options) *fleet {
	f := &fleet{o: o, draw: rand.New(rand.NewPCG(o.Seed, 1))}
	var names []route.Node
	for i := range o.Nodes {
		names = append(names, route.Node{Name: fmt.Sprintf("10.0.0.%d:7101", i)})
		f.nodes = append(f.nodes, node{lru: list.New(), at: map[kvcache.Hash]*list.Element{}})
	}
	f.table = route.New([]route.Node{{Name: "decode"}}, names)
	for range max(1, o.Gateways) {
		g := &gateway{index: route.NewIndex(), match: make([]int32, o.Nodes), own: make([]route.Sent, o.Nodes), reported: make([]route.Sent, o.Nodes)}
		g.index.Grow(o.Nodes)
		g.view = route.View{Decode: []route.State{{Usable: true}}, Prefill: make([]route.State, o.Nodes)}
		f.gateways = append(f.gateways, g)
	}
	return f
}

// heartbeat reports the load of the next node to every gateway.
func (f *fleet) heartbeat() {
	var s route.Sent
	for _, g := range f.gateways {
		s.Requests, s.Queued = s.Requests+g.own[f.beat].Requests, s.Queued+g.own[f.beat].Queued
	}
	for _, g := range f.gateways {
		g.reported[f.beat] = s
	}
	f.beat = (f.beat + 1) % len(f.nodes)
	f.beatAt += f.o.Heartbeat / time.Duration(len(f.nodes))
}

// applyEvents applies the events that have arrived by now.
func (g *gateway) applyEvents(now time.Duration) {
	arrived := 0
	for ; arrived < len(g.events) && g.events[arrived].at <= now; arrived++ {
		if n := &g.events[arrived]; n.gone {
			g.index.Remove(n.node, n.block)
		} else {
			g.index.Add(n.node, n.block)
		}
	}
	g.events = g.events[arrived:]
}

// publish sends a change of a node's cache to every gateway.
func (f *fleet) publish(now time.Duration, node int, block kvcache.Hash, gone bool) {
	for i, g := range f.gateways {
		g.events = append(g.events, blockEvent{now + time.Duration(i+1)*f.o.EventDelay, node, block, gone})
	}
}

func (f *fleet) arrival(q *Request) time.Duration {
	return time.Duration(float64(q.At) * f.o.Stretch)
}

// pick returns where a gateway sends a request, or would send it.
func (f *fleet) pick(g *gateway, q *Request, draw uint64) (node, claimed int) {
	g.applyEvents(f.arrival(q))
	clear(g.match)
	g.index.Match(q.Blocks, g.match)
	for i, n := range g.match {
		g.view.Prefill[i] = route.State{
			Usable: true, Rate: f.o.Rate, Held: int32(min(int(n)*f.o.BlockTokens, q.Tokens-1)),
			Load: route.Count(max(g.own[i].Requests, g.reported[i].Requests)), Queued: route.Count(max(g.own[i].Queued, g.reported[i].Queued)),
		}
	}
	d := f.table.Pick(route.Request{Policy: f.o.Policy, Key: q.Blocks[0], Uncached: q.Tokens, MinRemote: 1, Turn: f.turn, Draw: draw, Shared: len(f.gateways) > 1}, g.view, f.dst[:0])
	f.dst = d.Prefill
	return d.Prefill[0], q.Tokens - int(g.view.Prefill[d.Prefill[0]].Held)
}

// send routes a request that arrives.
func (f *fleet) send(q *Request) {
	f.turn++
	draw, g := f.draw.Uint64(), f.gateways[f.turn%uint64(len(f.gateways))]
	j := &job{Request: q, by: g}
	j.node, j.claimed = f.pick(g, q, draw)
	alike := true
	for _, other := range f.gateways {
		if other != g { // each draws its own random number
			at, _ := f.pick(other, q, f.draw.Uint64())
			alike = alike && at == j.node
		}
	}
	if alike {
		f.alike++
	}
	g.own[j.node].Requests++
	g.own[j.node].Queued += j.claimed
	n := &f.nodes[j.node]
	if n.queue = append(n.queue, j); len(n.queue) == 1 {
		f.begin(j, f.arrival(q))
	}
}

// missing returns how many of the prompt's tokens the node's cache lacks.
func (f *fleet) missing(j *job) int {
	n, have := &f.nodes[j.node], 0
	for have < len(j.Blocks) && n.at[j.Blocks[have]] != nil {
		have++
	}
	return max(1, j.Tokens-have*f.o.BlockTokens)
}

// begin starts a job that is first in its queue.
func (f *fleet) begin(j *job, now time.Duration) {
	j.end = now + time.Duration(float64(f.missing(j))/f.o.Rate*float64(time.Second))
	heap.Push(&f.ends, j)
}

// done ends a job and returns the tokens that it computed.
func (f *fleet) done(j *job) int64 {
	computed := f.missing(j) // the node's cache has not changed since the job began
	f.keep(j)
	s := &j.by.own[j.node]
	s.Requests--
	s.Queued -= j.claimed
	n := &f.nodes[j.node]
	n.queue = n.queue[1:]
	if len(n.queue) > 0 {
		f.begin(n.queue[0], j.end)
	}
	return int64(computed)
}

// keep puts a prompt's blocks into the node's cache, with the first block as the most
// recently used, and publishes the changes.
func (f *fleet) keep(j *job) {
	n := &f.nodes[j.node]
	for _, h := range slices.Backward(j.Blocks) {
		if e := n.at[h]; e != nil {
			n.lru.MoveToFront(e)
			continue
		}
		n.at[h] = n.lru.PushFront(h)
		f.publish(j.end, j.node, h, false)
	}
	for n.lru.Len() > f.o.CacheBlocks {
		h := n.lru.Remove(n.lru.Back()).(kvcache.Hash)
		delete(n.at, h)
		f.publish(j.end, j.node, h, true)
	}
}

// OneCache returns the share of prompt tokens that a single cache of so many blocks, as
// large as those of all nodes together, would have found.
func OneCache(trace []Request, blocks, blockTokens int) float64 {
	f := newFleet(Options{Nodes: 1, BlockTokens: blockTokens, CacheBlocks: blocks, Rate: 1, Stretch: 1})
	var asked, computed int64
	for i := range trace {
		j := &job{Request: &trace[i]}
		computed += int64(f.missing(j))
		asked += int64(j.Tokens)
		f.keep(j)
	}
	return 1 - float64(computed)/float64(asked)
}

// Stretch returns the factor on arrival times at which the nodes are busy for the share
// load of the time under round robin; load 1 is saturation.
func Stretch(trace []Request, o Options, load float64) (float64, error) {
	o.Policy, o.Stretch = route.RoundRobin, 1
	span := (trace[len(trace)-1].At - trace[0].At).Seconds()
	for range 4 { // Computed depends a little on the factor
		r, err := Run(trace, o)
		if err != nil {
			return 0, err
		}
		o.Stretch = float64(r.Computed) / o.Rate / float64(o.Nodes) / span / load
	}
	return o.Stretch, nil
}
