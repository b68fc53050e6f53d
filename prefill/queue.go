package prefill

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// A job whose decode node has no room yet steps aside: until its grant comes, its tokens
// do not count as ahead of the engine, so that jobs for other decode nodes are
// computed. After so many of them, or so long, it steps back into its place, and
// none passes any more.
const (
	maxPassed = 16
	maxAside  = 2 * time.Second
)

// enqueue files a job behind those of its priority; n.mu is held.
func (n *Node) enqueue(j *job) {
	n.jobs[j.key] = j
	n.arrivals++
	j.arrival = n.arrivals
	at, _ := slices.BinarySearchFunc(n.queue, j, func(q, j *job) int {
		if q.priority <= j.priority { // lower runs first, equals in order of arrival
			return -1
		}
		return 1
	})
	n.queue = slices.Insert(n.queue, at, j)
}

// admit starts jobs while the engine is about to have room; n.mu is held. A
// job larger than the whole bound starts when nothing else is ahead.
func (n *Node) admit() {
	for len(n.queue) > 0 {
		j := n.queue[0]
		if n.ahead > 0 && n.ahead+len(j.tokens) > n.o.RunAheadTokens {
			return
		}
		n.queue = slices.Delete(n.queue, 0, 1)
		j.ahead = len(j.tokens)
		n.ahead += j.ahead
		j.admitted, j.asking = true, true
		n.asking++
		ctx, cancel := context.WithCancelCause(context.Background())
		j.stop = cancel
		n.wg.Add(1)
		go n.run(ctx, j)
	}
}

// stepAside lets others pass a job that waits for its grant, as its decode node says.
func (n *Node) stepAside(k key) {
	n.mu.Lock()
	defer n.mu.Unlock()
	j := n.jobs[k]
	if j == nil || !j.asking || j.patience != nil {
		return // nothing asked, or aside once already
	}
	j.span.Event("stepped aside", time.Now())
	j.aside = true
	n.aside++
	j.patience = time.AfterFunc(maxAside, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.stepBack(j)
	})
	n.ahead -= j.ahead
	j.ahead = 0
	n.admit()
}

// stepBack ends that: the job's tokens count again; n.mu is held.
func (n *Node) stepBack(j *job) {
	if !j.aside {
		return
	}
	j.patience.Stop()
	j.aside = false
	n.aside--
	j.ahead = len(j.tokens)
	n.ahead += j.ahead
}

// grantEnded takes note that a job waits for its grant no more, because it has it or
// has failed. One that has it passes those before it that are aside.
func (n *Node) grantEnded(j *job, granted bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	j.asking = false
	n.asking--
	n.stepBack(j)
	if !granted || n.aside == 0 {
		return
	}
	for _, other := range n.jobs {
		if other.aside && other.arrival < j.arrival {
			if other.passed++; other.passed >= maxPassed {
				n.stepBack(other)
			}
		}
	}
}

// cachedHere takes note that so many of a job's tokens need no computing.
func (n *Node) cachedHere(j *job, cached int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	cached = min(cached, j.ahead)
	j.ahead -= cached
	n.ahead -= cached
	if cached > 0 {
		n.admit()
	}
}

// computed says that a job no longer waits for the engine, so that the next can
// ask for its grant.
func (n *Node) computed(j *job) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ahead -= j.ahead
	j.ahead = 0
	n.admit()
}

// cancel ends a job from outside: a waiting one leaves the queue, an admitted
// one is stopped and answers for itself.
func (n *Node) cancel(k key, why error) {
	n.mu.Lock()
	j := n.jobs[k]
	if j == nil {
		n.mu.Unlock()
		return
	}
	if j.admitted {
		j.stop(why)
		n.mu.Unlock()
		return
	}
	if i := slices.Index(n.queue, j); i >= 0 {
		n.queue = slices.Delete(n.queue, i, i+1)
	}
	n.forget(j, why)
	n.mu.Unlock()
	n.answer(j, why, nil)
}

// forget takes a job off the books; n.mu is held.
func (n *Node) forget(j *job, err error) {
	switch {
	case err == nil:
		n.count.Done++
	case unwanted(err):
		n.count.Cancelled++
	default:
		n.count.Failed++
	}
	j.endSpan(err)
	delete(n.jobs, j.key)
	j.timer.Stop()
	n.stepBack(j)
	n.ahead -= j.ahead
	j.ahead = 0
	n.admit()
	n.draining.Left(len(n.jobs))
}

// Positions tells waiting jobs' decode nodes where they stand, until ctx ends,
// so that slowness is not taken for silence.
func (n *Node) Positions(ctx context.Context) {
	tick := time.NewTicker(n.o.QueuedInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		n.mu.Lock()
		waiting := slices.Clone(n.queue)
		n.mu.Unlock()
		for i, j := range waiting {
			// One that does not get through is followed by the next.
			if err := j.key.conn.Send(rpc.FrameQueued, j.key.stream, &nodepb.Queued{Position: uint32(i + 1)}); err != nil {
				n.log.Debug("position not sent", "request", j.request, "err", err)
			}
		}
	}
}

// Check verifies the node's conservation laws: each job it took is here or has
// ended, those that wait are not admitted, and the tokens ahead of the engine are
// the jobs' own.
func (n *Node) Check() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	ahead, admitted, aside := 0, 0, 0
	for _, j := range n.jobs {
		ahead += j.ahead
		if j.aside {
			aside++
		}
		if j.aside && (j.ahead > 0 || !j.asking || j.passed >= maxPassed) {
			return fmt.Errorf("%w: a job is aside with %d tokens ahead, asking %v, passed by %d", errBroken, j.ahead, j.asking, j.passed)
		}
		if j.admitted {
			admitted++
		}
	}
	if c := n.count; ahead != n.ahead || admitted+len(n.queue) != len(n.jobs) || n.asking < 0 || n.asking > admitted || n.aside != aside || c.Accepted != uint64(len(n.jobs))+c.Done+c.Cancelled+c.Failed {
		return fmt.Errorf("%w: %d tokens ahead, jobs say %d; %d jobs, %d admitted, %d asking, %d queued; %+v",
			errBroken, n.ahead, ahead, len(n.jobs), admitted, n.asking, len(n.queue), c)
	}
	return nil
}
