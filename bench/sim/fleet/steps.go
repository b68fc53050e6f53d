package fleet

import (
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
)

// A node whose batch only decodes repeats its step until a request ends, a block is full, or
// another event reaches the node. Such steps are planned ahead: their ends are computed, and only
// the last one is an alarm. An event that reads or changes the node first repeats the steps that
// have ended (look, change). So the result of a run is the same as with an alarm for each step.
//
// A step's end publishes the block events since the last end, those of the step's own allocations
// included. So the end of a step that begins with block events is an alarm.

// Numbers of steps that are planned at once. A plan that is cut short has cost more than it saved.
const (
	firstPlan = 8
	maxPlan   = 256
)

// look returns the scheduler for a caller that only reads.
func (n *node) look() *scheduler.Scheduler {
	n.catchUp()
	return n.s
}

// change returns the scheduler for a caller that may change what the next step does. The running
// step is the last one of its plan. Reports do not have the change before that step has ended,
// because the engine makes it then.
func (n *node) change() *scheduler.Scheduler {
	n.catchUp()
	if n.stepping && !n.changed {
		n.changed, n.before = true, n.s.Stats()
	}
	return n.changeNow()
}

// stats returns the state that a report has.
func (n *node) stats() scheduler.Stats {
	if n.catchUp(); n.stepping && n.changed {
		return n.before
	}
	return n.s.Stats()
}

// changeNow is change for a caller whose change was made before the running step.
func (n *node) changeNow() *scheduler.Scheduler {
	n.catchUp()
	if !n.stepping || n.next == len(n.ends)-1 && n.steady == 0 {
		return n.s
	}
	n.steady = 0
	if last := len(n.ends) - 1; n.next < last {
		n.ends = n.ends[:n.next+1]
		n.setAlarm()
	}
	return n.s
}

// setAlarm sets the alarm of the last planned step, in place of an earlier one.
func (n *node) setAlarm() {
	n.plan++
	n.f.clock.stepEnds(n, n.ends[len(n.ends)-1])
}

// begin plans the step of a batch, and repetitions of it.
func (n *node) begin() {
	now := n.f.clock.now
	n.shape = shape(&n.batch)
	n.seqs = n.seqs[:0]
	for i := range n.batch.Seqs {
		n.seqs = append(n.seqs, n.attempts.get(uint64(n.batch.Seqs[i].ID)))
	}
	n.stepping, n.began, n.length, n.steady, n.changed = true, now, firstPlan, n.repeats(), false
	n.ends, n.next = n.ends[:0], 0
	more := min(n.steady, n.length)
	if n.s.HasEvents() {
		more = 0 // stepEnd publishes them, and plans the repetitions
	}
	n.steady -= more
	n.planAhead(now, n.shape, 1+more)
	n.stepBegins(now)
	n.releaseChunks(false)
}

// repeats returns how often the running step may be repeated.
func (n *node) repeats() int {
	if n.f.o.Stepwise || n.shape.Chunk > 0 {
		return 0
	}
	most := n.s.Steady()
	for i := 0; i < len(n.batch.Seqs) && most > 0; i++ {
		a := n.seqs[i]
		switch {
		case a == nil || !a.streams(): // its tokens are not received
		case a.claimedOf != nil: // the first token changes what its gateway counts
			return 0
		default:
			most = min(most, a.r.Output-a.r.emitted-1)
		}
	}
	return max(0, most)
}

// planAhead appends the end of a step of the shape that begins at a time, and of repetitions of it,
// and sets the alarm.
func (n *node) planAhead(at time.Duration, s Shape, steps int) {
	for range steps {
		at += n.kind.Steps.Step(s, n.kind.Blocks*n.f.o.BlockTokens)
		n.ends = append(n.ends, at)
		s.ContextSum += s.Streams
	}
	n.setAlarm()
}

// stepBegins counts the step that begins at a time.
func (n *node) stepBegins(at time.Duration) {
	n.busy += n.ends[n.next] - at
	n.steps++
	if n.kind.Steps.Count != nil {
		n.kind.Steps.Count(n.shape)
	}
}

// catchUp repeats the planned steps that have ended.
func (n *node) catchUp() {
	if !n.stepping {
		return
	}
	ended := 0
	for last := len(n.ends) - 1; n.next+ended < last && n.f.clock.past(n, n.ends[n.next+ended]); {
		ended++
	}
	n.repeat(ended)
}

// stepEnd handles the alarm of the last planned step.
func (n *node) stepEnd() {
	n.repeat(len(n.ends) - 1 - n.next)
	if n.steady == 0 {
		n.endStep()
		return
	}
	n.length = min(2*n.length, maxPlan)
	more := min(n.steady, n.length)
	n.steady -= more
	n.ends, n.next = append(n.ends[:0], n.ends[n.next]), 0
	following := n.shape
	following.ContextSum += n.shape.Streams
	n.planAhead(n.ends[0], following, more)
	n.repeat(1)
	n.publish()
}

// repeat ends so many planned steps, each of which another one follows.
func (n *node) repeat(steps int) {
	if steps == 0 {
		return
	}
	f, ends := n.f, n.ends[n.next:n.next+steps]
	n.s.Repeat(steps)
	streams := 0
	for _, a := range n.seqs {
		if a != nil && a.streams() {
			f.emitAll(a.r, ends)
			streams++
		}
	}
	for i := 1; i < steps; i++ {
		f.result.gaps.add(ends[i]-ends[i-1], streams)
	}
	f.result.Tokens += steps * streams
	if streams > 0 {
		f.progress = max(f.progress, ends[steps-1])
	}
	for _, end := range ends {
		n.next++
		n.shape.ContextSum += n.shape.Streams
		n.stepBegins(end)
	}
}

// emitAll counts the tokens that a request gets at the ends of steps, after its first one. repeat
// counts the gaps between the steps.
func (f *fleet) emitAll(r *Request, ends []time.Duration) {
	f.result.gaps.add(ends[0]+f.o.Emit-r.Last, 1)
	for _, end := range ends {
		if f.o.KeepGaps {
			r.Gaps = append(r.Gaps, end+f.o.Emit-r.Last)
		}
		r.Last = end + f.o.Emit
		r.choice.Token()
	}
	r.emitted += len(ends)
}
