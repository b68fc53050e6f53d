package fleet

import (
	"fmt"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/gateway/exchange/choice"
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
	kind     *Kind
	up       bool
	draining bool
	epoch    int // number of its deaths; events of an earlier epoch are ignored

	s        *scheduler.Scheduler // used by others through look and change
	lastID   scheduler.RequestID
	batch    scheduler.Batch
	seqs     []*attempt // of the batch's Seqs; nil: a job, or one of no attempt
	stepping bool
	began    time.Duration   // of the first step of the plan
	shape    Shape           // of the running step
	ends     []time.Duration // of the planned steps; the last is an alarm of the clock
	next     int             // index of the running step's end
	steady   int             // repetitions that may follow the planned steps
	length   int             // of the next plan
	plan     int             // number of the plan; alarms of earlier ones are void
	order    uint64          // of the ends of steps, among nodes
	busy     time.Duration   // with all of the running step
	rate     float64         // prompt tokens per second
	pace     scheduler.Pace  // of a prefill node
	steps    int
	results  []scheduler.Result
	changed  bool // within the running step; then before has the state before that
	before   scheduler.Stats
	past     counts // of earlier epochs

	attempts window[attempt]              // decode, by the scheduler's ids
	awaiting map[scheduler.RequestID]*ask // whose grants wait for room

	line      *line.Line  // prefill: jobs that are not computed yet
	jobs      window[ask] // these, and those with KV under way, by ticket
	computing window[ask] // by the scheduler's ids
	tickets   line.ID     // tickets given so far
	transfers []*transfer // that have bytes to send over its link
}

// counts are a node's counters.
type counts struct{ preemptions, queries, hits uint64 }

// counts returns the counters of all epochs.
func (n *node) counts() counts {
	st := n.look().Stats()
	return counts{n.past.preemptions + st.Preemptions, n.past.queries + st.PrefixQueries, n.past.hits + st.PrefixHits}
}

// name returns the node's name in events and errors.
func (n *node) name() string { return Target{Prefill: n.computes, Node: n.at}.String() }

// newNode makes the i-th node of a role.
func (f *fleet) newNode(i int, computes bool) (*node, error) {
	n := &node{f: f, at: i, computes: computes, kind: f.decodeKind, order: uint64(len(f.decode) + len(f.prefill))}
	if computes {
		n.kind = f.prefillKind
	}
	return n, n.reset()
}

// reset gives the node an empty scheduler and line.
func (n *node) reset() error {
	o := &n.f.o
	n.attempts, n.awaiting = window[attempt]{}, map[scheduler.RequestID]*ask{}
	n.line, n.jobs, n.computing = line.New(o.RunAhead), window[ask]{}, window[ask]{}
	n.pace = scheduler.NewPace(0, o.BatchedTokens)
	if n.computes {
		n.pace = scheduler.NewPace(o.StepTime, o.BatchedTokens)
	}
	var err error
	n.s, err = scheduler.New(scheduler.Config{
		Pool:             kvcache.Config{Blocks: n.kind.Blocks, BlockTokens: o.BlockTokens, MaxEvents: maxEvents},
		MaxBatchedTokens: o.BatchedTokens, MaxSeqs: o.MaxSeqs, MaxQueued: len(n.f.result.Requests) + 1<<20, MaxModelLen: o.MaxModelLen,
	})
	if err == nil && n.computes {
		n.s.OrderBy(func(work []scheduler.Work) {
			n.line.Order(work)
			n.admit()
		})
	}
	return err
}

// add adds a request to the scheduler and returns its id and its cached tokens. A held request does
// not change the next step.
func (n *node) add(q scheduler.Request) (scheduler.RequestID, int, error) {
	n.lastID++
	q.ID = n.lastID
	s := n.look()
	if !q.Hold {
		s = n.change()
	}
	cached, err := s.Add(q, n.f.clock.now)
	return q.ID, cached, err
}

// afterStep runs what its caller waits for, which the engine does between two steps. It is for
// runners that do not change the step after the running one.
func (n *node) afterStep(r runner) {
	if n.look(); n.stepping {
		n.f.clock.runAt(n.ends[n.next], r)
		return
	}
	r.run()
}

// start begins the next step, unless a step is running or there is nothing to compute.
func (n *node) start() {
	if !n.up {
		return
	}
	n.change()
	n.reserveWaiting()
	for !n.stepping {
		n.batch = n.s.Schedule(n.f.clock.now)
		if len(n.batch.Seqs) > 0 {
			n.begin()
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
	n.releaseChunks(true)
	n.results = n.results[:0]
	prompt := 0
	for i := range n.batch.Seqs {
		q := &n.batch.Seqs[i]
		prompt += promptTokens(q, n.seqs[i])
		if !q.Sample {
			continue
		}
		finished := false
		if a := n.seqs[i]; a != nil && a.streams() {
			n.f.emit(a.r)
			finished = a.r.emitted >= a.r.Output
		}
		n.results = append(n.results, scheduler.Result{Tokens: n.f.tokens[:1], Finished: finished})
	}
	if prompt > 0 {
		rate := float64(n.batch.Tokens) / (n.f.clock.now - n.began).Seconds()
		if n.rate == 0 {
			n.rate = rate
		}
		n.rate += (rate - n.rate) * min(1, float64(prompt)/rateWindow)
		n.f.rateChanged(n)
	}
	n.pace.Record(n.batch.Tokens, n.f.clock.now-n.began)
	n.s.LimitTokens(n.pace.Limit())
	n.end(n.s.Update(n.batch, n.results))
	n.publish()
	n.start()
}

// promptTokens returns how many tokens of its prompt a sequence computes in a step. a is the
// sequence's attempt as of the step's start; nil: a job has it, whose tokens are all of a prompt.
func promptTokens(q *scheduler.Seq, a *attempt) int {
	if a == nil {
		return len(q.Tokens)
	}
	return max(0, min(q.Start+len(q.Tokens), a.tokens)-q.Start)
}

// end handles the requests that a step has ended.
func (n *node) end(ids []scheduler.RequestID) {
	for _, id := range ids {
		if n.computes {
			k := n.computing.get(uint64(id))
			n.computing.remove(uint64(id))
			n.f.computed(k)
			continue
		}
		a := n.attempts.get(uint64(id))
		n.attempts.remove(uint64(id))
		a.added = false
		if !a.over {
			n.f.finished(a)
		}
	}
}

// publish sends the node's block events to the gateways, except those of blocks that no gateway
// will look up.
func (n *node) publish() {
	f := n.f
	var gap bool
	if f.events, gap = n.s.Events(f.events[:0]); gap {
		f.fail(fmt.Errorf("%s has more than %d block events in a step", n.name(), maxEvents))
	}
	f.result.publish(n, f.events)
	if f.o.NoEvents {
		return
	}
	f.events = slices.DeleteFunc(f.events, func(e kvcache.Event) bool { return !f.common.mayHave(e.Hash) })
	if len(f.events) == 0 {
		return
	}
	if f.o.ReportDelay == 0 {
		f.changed(n, f.events)
		return
	}
	events, epoch := slices.Clone(f.events), n.epoch
	f.clock.at(f.clock.now+f.o.ReportDelay, func() {
		if n.epoch == epoch {
			f.changed(n, events)
		}
	})
}

// kill ends the node's process. Its gateways and peers notice when their connections break.
func (n *node) kill() {
	if !n.up {
		return
	}
	f := n.f
	f.check(n)
	n.past = n.counts()
	n.up, n.draining = false, false
	n.epoch++
	if n.stepping {
		n.busy -= n.ends[n.next] - f.clock.now
		n.stepping = false
		n.plan++
	}
	f.result.Killed++
	f.afterMessage(func() { f.setUsable(n, false) })
	n.dropAttempts(choice.Failure{Lost: true})
	n.dropJobs()
	n.rate = 0
	if err := n.reset(); err != nil {
		f.fail(err)
	}
}

// dropAttempts ends all attempts of a decode node, which fail at their gateways.
func (n *node) dropAttempts(why choice.Failure) {
	for _, a := range n.attempts.values() {
		n.remove(a)
		n.f.failLater(a, why)
	}
}

// dropJobs ends all jobs of a prefill node. Their decode nodes ask the next one.
func (n *node) dropJobs() {
	for _, pushing := range []bool{false, true} {
		for _, k := range n.jobs.values() {
			if k.pushing == pushing {
				n.removeJob(k)
				n.f.afterMessage(func() { n.f.askFailed(k) })
			}
		}
	}
}

// launch makes the node ready after the time of a start, or ends its drain.
func (n *node) launch() {
	f := n.f
	if n.up {
		n.draining = false
		f.setUsableLater(n)
		return
	}
	epoch := n.epoch
	f.clock.at(f.clock.now+n.kind.Start, func() {
		if n.up || n.epoch != epoch {
			return
		}
		n.up = true
		f.result.Started++
		f.setUsableLater(n)
		n.beat()
	})
}

// drain makes the node take no new work. Streams that run after the timeout move to other nodes.
func (n *node) drain(timeout time.Duration) {
	if !n.up || n.draining {
		return
	}
	f, epoch := n.f, n.epoch
	n.draining = true
	f.result.Drained++
	f.afterMessage(func() {
		if n.draining {
			f.setUsable(n, false)
		}
	})
	f.clock.at(f.clock.now+timeout, func() {
		if n.epoch != epoch || !n.draining {
			return
		}
		n.dropAttempts(choice.Failure{Refused: true, HandedOver: true, Drained: true, Untouched: true})
		n.dropJobs()
		n.start()
	})
}
