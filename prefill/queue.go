package prefill

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/prefill/line"
)

// now returns the time of the line.
func (n *Node) now() time.Duration { return time.Since(n.start) }

// enqueue adds a job to the line. The caller holds n.mu.
func (n *Node) enqueue(j *job) {
	n.tickets++
	j.ticket = n.tickets
	n.jobs[j.key] = j
	n.byTicket[j.ticket] = j
	n.line.Add(j.ticket, len(j.asked.Tokens), int(j.asked.Priority))
}

// admit starts jobs while the engine is about to have room. The caller holds n.mu.
func (n *Node) admit() {
	for {
		ticket, ok := n.line.Next(n.now())
		if !ok {
			return
		}
		j := n.byTicket[ticket]
		j.admitted = true
		ctx, cancel := context.WithCancelCause(context.Background())
		j.stop = cancel
		n.Owners.Add(1)
		go n.run(ctx, j)
	}
}

// order ranks the engine's jobs before a step, and starts others in place of those that the last
// step has computed. It runs on the step goroutine.
func (n *Node) order(work []scheduler.Work) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.line.Order(work)
	n.admit()
}

// stepAside lets others pass a job whose decode node has no room yet.
func (n *Node) stepAside(k key) {
	n.mu.Lock()
	defer n.mu.Unlock()
	j := n.jobs[k]
	if j == nil || !n.line.StepAside(j.ticket, n.now()) {
		return
	}
	j.span.Event("stepped aside", time.Now())
	n.admit()
}

// update changes the line and starts the jobs that may start then.
func (n *Node) update(change func(*line.Line)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change(n.line)
	n.admit()
}

// cancel ends a job from outside. A waiting job leaves the line. An admitted job is stopped and
// sends its answer itself.
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
	n.remove(j, why)
	n.mu.Unlock()
	n.answer(j, why, nil)
}

// cancelAll cancels the jobs whose keys match.
func (n *Node) cancelAll(match func(key) bool, why error) {
	n.mu.Lock()
	keys := slices.Collect(maps.Keys(n.jobs))
	n.mu.Unlock()
	for _, k := range keys {
		if match(k) {
			n.cancel(k, why)
		}
	}
}

// remove removes a job. The caller holds n.mu.
func (n *Node) remove(j *job, err error) {
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
	delete(n.byTicket, j.ticket)
	j.timer.Stop()
	n.line.Remove(j.ticket)
	n.admit()
	n.Ended()
}

// Positions sends the positions of waiting jobs to their decode nodes until ctx ends, so that a
// long wait is not taken for silence.
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
		waiting := make([]*job, 0, n.line.Waiting())
		for _, ticket := range n.line.AppendWaiting(nil) {
			waiting = append(waiting, n.byTicket[ticket])
		}
		n.mu.Unlock()
		for i, j := range waiting {
			if j.vector != nil { // gateways see the queue in heartbeats
				continue
			}
			// If a position is not sent, the next one follows.
			if err := j.key.conn.Send(rpc.FrameQueued, j.key.stream, &nodepb.Queued{Position: uint32(i + 1)}); err != nil {
				n.log.Debug("position not sent", "request", j.asked.RequestId, "err", err)
			}
		}
	}
}

// Check verifies the counts of the node and its line: each job that the node accepted is present or
// has ended, and jobs that wait in the line are not admitted.
func (n *Node) Check() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.line.Check(); err != nil {
		return err
	}
	admitted := 0
	for _, j := range n.jobs {
		if j.admitted {
			admitted++
		}
	}
	if c := n.count; admitted+n.line.Waiting() != len(n.jobs) || n.line.Asking() > admitted || len(n.byTicket) != len(n.jobs) ||
		c.Accepted != uint64(len(n.jobs))+c.Done+c.Cancelled+c.Failed {
		return fmt.Errorf("%w: %d jobs, %d by ticket, %d admitted, %d asking, %d waiting; %+v",
			errBroken, len(n.jobs), len(n.byTicket), admitted, n.line.Asking(), n.line.Waiting(), c)
	}
	return nil
}
