package fleet

import (
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/prefill/line"
)

const (
	// maxEvents bounds the block events that a node keeps for the next step.
	maxEvents = 1 << 14
	// rateWindow is the number of prompt tokens over which a node's measured rate is
	// averaged, as in engine/stats.go.
	rateWindow = 4096
)

// node is a node of either role: one scheduler and its running step.
type node struct {
	f        *fleet
	at       int // index in its role
	computes bool
	s        *scheduler.Scheduler
	requests map[scheduler.RequestID]*Request
	lastID   scheduler.RequestID
	batch    scheduler.Batch
	stepping bool
	began    time.Duration
	busy     time.Duration
	rate     float64 // prompt tokens per second
	steps    int
	results  []scheduler.Result
	sampled  [][]int32 // one-token slices for results

	line    *line.Line // prefill: jobs that are not computed yet
	jobs    map[line.ID]*Request
	tickets line.ID // tickets given so far

	awaiting map[scheduler.RequestID]func(scheduler.Reservation, error) // decode: grants that wait for room
}

// newNode makes the i-th node: decode nodes come first.
func (f *fleet) newNode(i int) (*node, error) {
	n := &node{
		f: f, at: i, requests: map[scheduler.RequestID]*Request{}, line: line.New(f.o.RunAhead), jobs: map[line.ID]*Request{},
		awaiting: map[scheduler.RequestID]func(scheduler.Reservation, error){},
	}
	if i >= f.o.Decode {
		n.at, n.computes = i-f.o.Decode, true
	}
	var err error
	n.s, err = scheduler.New(scheduler.Config{
		Pool:             kvcache.Config{Blocks: f.o.Blocks, BlockTokens: f.o.BlockTokens, MaxEvents: maxEvents},
		MaxBatchedTokens: f.o.BatchedTokens, MaxSeqs: f.o.MaxSeqs, MaxQueued: len(f.result.Requests) + 1<<20,
	})
	if err != nil {
		return nil, err
	}
	if n.computes {
		n.s.OrderBy(func(work []scheduler.Work) {
			n.line.Order(work)
			n.admit()
		})
	}
	n.sampled = make([][]int32, f.o.MaxSeqs)
	for i := range n.sampled {
		n.sampled[i] = make([]int32, 1)
	}
	return n, nil
}

// add adds a request to the scheduler and returns its id and its cached tokens.
func (n *node) add(r *Request, q scheduler.Request) (scheduler.RequestID, int, error) {
	n.lastID++
	q.ID = n.lastID
	cached, err := n.s.Add(q, n.f.clock.now)
	if err == nil {
		n.requests[q.ID] = r
	}
	return q.ID, cached, err
}

// start begins the next step, unless a step is running or there is nothing to compute.
func (n *node) start() {
	n.reserveWaiting()
	for !n.stepping {
		n.batch = n.s.Schedule(n.f.clock.now)
		if len(n.batch.Seqs) > 0 {
			n.stepping, n.began = true, n.f.clock.now
			took := n.f.o.Steps.Step(shape(&n.batch), n.f.o.Blocks*n.f.o.BlockTokens)
			n.busy += took
			n.steps++
			n.f.clock.at(n.f.clock.now+took, n.endStep)
			return
		}
		ended := n.s.Update(n.batch, nil)
		n.end(ended)
		if len(ended) == 0 {
			return
		}
	}
}

// endStep samples the step's tokens, publishes block events and starts the next step.
func (n *node) endStep() {
	n.stepping = false
	n.results = n.results[:0]
	chunk := 0
	for i := range n.batch.Seqs {
		q := &n.batch.Seqs[i]
		if len(q.Tokens) > 1 {
			chunk += len(q.Tokens)
		}
		if !q.Sample {
			continue
		}
		r := n.requests[q.ID]
		n.f.emit(r)
		token := n.sampled[len(n.results)]
		token[0] = 1<<30 | int32(q.ID&0xfffffff) // occurs in no prompt
		n.results = append(n.results, scheduler.Result{Tokens: token, Finished: r.emitted >= r.Output})
	}
	if chunk > 0 {
		rate := float64(chunk) / (n.f.clock.now - n.began).Seconds()
		if n.rate == 0 {
			n.rate = rate
		}
		n.rate += (rate - n.rate) * min(1, float64(chunk)/rateWindow)
	}
	n.end(n.s.Update(n.batch, n.results))
	n.publish()
	n.start()
}

// end handles the requests that a step has ended.
func (n *node) end(ids []scheduler.RequestID) {
	for _, id := range ids {
		r := n.requests[id]
		delete(n.requests, id)
		if n.computes {
			n.f.computed(n, r)
		} else {
			n.f.finished(r)
		}
	}
}

// publish sends the node's block events to the gateway.
func (n *node) publish() {
	var gap bool
	if n.f.events, gap = n.s.Events(n.f.events[:0]); gap {
		n.f.fail(fmt.Errorf("node %d has more than %d block events in a step", n.at, maxEvents))
	}
	n.f.gateway.blocks(n, n.f.events)
}
