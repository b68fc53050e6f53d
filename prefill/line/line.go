// Package line decides in which order a prefill node computes its jobs: which job asks for its
// grant next, and which jobs get a step's tokens first.
//
// A job takes its place when it arrives. From the end of the line it passes each job of its
// priority that has more work left and whose allowance covers the newcomer's work, and stops at the
// first job that it cannot pass. Each pass is charged to the allowance of the job that was passed.
// So the least work left goes first, and a job that was passed often enough keeps its place: this
// is the ageing. Jobs ask for their grants and get the tokens of a step in the order of the line,
// so that short prompts are computed in one step with a part of a long one. A job whose decode node
// has no room steps aside: it keeps its place, and others may be computed, but only so many and for
// so long.
//
// Invariant: later jobs of the same priority are put before a job with at most Bound(its tokens)
// tokens in all. While no job of a better priority arrives, a job so ends at most the time of those
// tokens and of one step later than in order of arrival.
//
// The package has no clock, sends nothing and computes nothing.
package line

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/lengths"
)

const (
	// LineBound is how many tokens of later jobs may be computed before a job, in addition to as
	// many as the job has itself. A prompt waits for at most its own length and one step of the
	// default size (2048) longer than in order of arrival: a short prompt for about a step, a long
	// one for twice its own time.
	LineBound = 2048
	// shortShare is the part of the run-ahead, 1/shortShare, that short jobs may ask for in
	// addition to it.
	shortShare = 8
	// MaxPassed is how many later jobs get their grants before a job that is aside.
	MaxPassed = 16
	// MaxAside is how long a job may be aside.
	MaxAside = 2 * time.Second
)

// Bound returns how many tokens of later jobs may be computed before a job of so many tokens.
func Bound(tokens int) int { return LineBound + tokens }

// ErrBroken reports an inconsistent line.
var ErrBroken = errors.New("line: state is inconsistent")

// ID names a job among those that are in the line.
type ID = uint64

// state is the progress of a job.
type state uint8

const (
	waiting state = iota // has not asked for its grant
	asking               // has asked and has no grant
	granted              // may be computed
)

// job is a job in the line.
type job struct {
	id        ID
	tokens    int
	left      int // of tokens, those to compute
	priority  int
	arrival   uint64
	state     state
	allowance int           // tokens of later jobs that may still be put before it
	aside     bool          // is asking, and others may be computed meanwhile
	returned  bool          // was aside and came back without a grant
	until     time.Duration // end of aside
	passed    int           // grants of later jobs while aside
	place     int           // in the last Order
}

// Line is the state machine. Make it with New. It is not safe for concurrent use.
type Line struct {
	runAhead int
	order    []*job
	asked    []*job // jobs that do not wait, in order of asking
	byID     map[ID]*job
	arrivals uint64
}

// New returns an empty line. The jobs that have asked for their grants lack at most runAhead
// tokens, not counting those that are aside and the one that lacks the most. So one long prompt
// does not keep others from being computed next to it. Several long prompts would. So a job also
// asks if those that lack no more than it does, and the job itself, lack at most an eighth of
// runAhead.
func New(runAhead int) *Line { return &Line{runAhead: runAhead, byID: map[ID]*job{}} }

// Add gives a job its place. Jobs of a lower priority value go first. The id must not be in the
// line.
func (l *Line) Add(id ID, tokens, priority int) {
	l.arrivals++
	at := l.place(tokens, priority)
	for _, p := range l.order[at:] {
		if p.priority == priority {
			p.allowance -= tokens
		}
	}
	j := &job{id: id, tokens: tokens, left: tokens, priority: priority, arrival: l.arrivals, allowance: Bound(tokens)}
	l.byID[id] = j
	l.order = slices.Insert(l.order, at, j)
}

// place returns where in the order a new job belongs.
func (l *Line) place(tokens, priority int) int {
	at := len(l.order)
	for ; at > 0; at-- {
		p := l.order[at-1]
		if p.priority < priority || p.priority == priority && (p.left <= tokens || p.allowance < tokens) {
			break
		}
	}
	return at
}

// Next returns the job that is to ask for its grant now, and counts it as asking; false: none
// waits, or enough have asked.
func (l *Line) Next(now time.Duration) (ID, bool) {
	at := slices.IndexFunc(l.order, func(j *job) bool { return j.state == waiting })
	if at < 0 {
		return 0, false
	}
	j := l.order[at]
	total, most, shorter := j.left, j.left, j.left
	for _, a := range l.asked {
		if a.aside && now >= a.until {
			a.stepBack()
		}
		if a.aside {
			continue
		}
		total += a.left
		if a.left <= j.left || a.returned {
			shorter += a.left
		}
		if !a.returned { // such a job keeps those behind it from passing for longer
			most = max(most, a.left)
		}
	}
	if total-most > l.runAhead && shorter > l.runAhead/shortShare {
		return 0, false
	}
	j.state = asking
	l.asked = append(l.asked, j)
	return j.id, true
}

// StepAside lets others be computed while a job waits for room on its decode node. It reports
// whether the job steps aside, which it does once.
func (l *Line) StepAside(id ID, now time.Duration) bool {
	j := l.byID[id]
	if j == nil || j.state != asking || j.aside || j.returned {
		return false
	}
	j.aside, j.until = true, now+MaxAside
	return true
}

// stepBack ends that. The job's tokens count again, and no new job is put before it.
func (j *job) stepBack() { j.aside, j.returned, j.allowance = false, true, 0 }

// Grant records that a job has its grant. The job passes those before it that are aside.
func (l *Line) Grant(id ID) {
	j := l.byID[id]
	if j == nil || j.state != asking {
		return
	}
	j.aside, j.state = false, granted
	for _, a := range l.asked {
		if a.aside && a.arrival < j.arrival {
			if a.passed++; a.passed >= MaxPassed {
				a.stepBack()
			}
		}
	}
}

// Cached records how many tokens of a job need not be computed.
func (l *Line) Cached(id ID, tokens int) {
	if j := l.byID[id]; j != nil {
		j.left = min(j.left, max(0, j.tokens-tokens))
	}
}

// Order sorts a scheduler's work, whose tickets are ids, into the order of the line, and records
// how many tokens are left. Work that is not in the line goes last. It is for
// scheduler.Scheduler.OrderBy.
func (l *Line) Order(work []scheduler.Work) {
	for i, j := range l.order {
		j.place = i
	}
	place := func(w *scheduler.Work) int {
		if j := l.byID[w.Ticket]; j != nil {
			return j.place
		}
		return math.MaxInt
	}
	for i := range work {
		if j := l.byID[work[i].Ticket]; j != nil {
			j.left = min(j.left, work[i].Left)
		}
	}
	slices.SortStableFunc(work, func(a, b scheduler.Work) int { return cmp.Compare(place(&a), place(&b)) })
}

// Remove removes a job that is computed or has ended otherwise.
func (l *Line) Remove(id ID) {
	j := l.byID[id]
	if j == nil {
		return
	}
	delete(l.byID, id)
	l.order = slices.DeleteFunc(l.order, func(o *job) bool { return o == j })
	if j.state != waiting {
		l.asked = slices.DeleteFunc(l.asked, func(o *job) bool { return o == j })
	}
}

// Waiting returns how many jobs have not asked for their grants.
func (l *Line) Waiting() int { return len(l.order) - len(l.asked) }

// WaitingTokens returns how many tokens these jobs have.
func (l *Line) WaitingTokens() (n int) {
	for _, j := range l.order {
		if j.state == waiting {
			n += j.left
		}
	}
	return n
}

// Lengths returns, for the longest prompt of each class, the tokens that would be computed before
// it if it arrived now with priority 0: those of jobs with as little left, and of all jobs before
// one that was passed often enough.
func (l *Line) Lengths() (q lengths.Queue) {
	for class, tokens := range lengths.Bounds {
		for _, j := range l.order[:l.place(tokens, 0)] {
			q[class] += j.left
		}
	}
	return q
}

// AppendWaiting appends the jobs that have not asked for their grants, in order.
func (l *Line) AppendWaiting(dst []ID) []ID {
	for _, j := range l.order {
		if j.state == waiting {
			dst = append(dst, j.id)
		}
	}
	return dst
}

// Asking returns how many jobs have asked and have no grant, including those aside.
func (l *Line) Asking() (n int) {
	for _, j := range l.asked {
		if j.state == asking {
			n++
		}
	}
	return n
}

// Aside returns how many jobs are aside.
func (l *Line) Aside() (n int) {
	for _, j := range l.asked {
		if j.aside {
			n++
		}
	}
	return n
}

// Len returns how many jobs are in the line.
func (l *Line) Len() int { return len(l.order) }

// Check verifies the line: each job is in order once, better priorities first, with an allowance
// within its bound, and the jobs that have asked are those that do not wait.
func (l *Line) Check() error {
	asked := 0
	for i, j := range l.order {
		if j.state != waiting {
			asked++
		}
		switch {
		case l.byID[j.id] != j:
			return fmt.Errorf("%w: job %d is in the line and not known", ErrBroken, j.id)
		case i > 0 && l.order[i-1].priority > j.priority:
			return fmt.Errorf("%w: job %d of priority %d is behind one of %d", ErrBroken, j.id, j.priority, l.order[i-1].priority)
		case j.allowance < 0 || j.allowance > Bound(j.tokens) || j.left < 0 || j.left > j.tokens:
			return fmt.Errorf("%w: job %d of %d tokens has %d left and an allowance of %d", ErrBroken, j.id, j.tokens, j.left, j.allowance)
		case j.aside && (j.state != asking || j.returned || j.passed >= MaxPassed):
			return fmt.Errorf("%w: job %d is aside in state %d, returned %v, passed by %d", ErrBroken, j.id, j.state, j.returned, j.passed)
		}
	}
	for _, j := range l.asked {
		if j.state == waiting || l.byID[j.id] != j {
			return fmt.Errorf("%w: job %d has asked in state %d", ErrBroken, j.id, j.state)
		}
	}
	if len(l.byID) != len(l.order) || asked != len(l.asked) {
		return fmt.Errorf("%w: %d jobs in the line, %d known; %d have asked, counted %d", ErrBroken, len(l.order), len(l.byID), asked, len(l.asked))
	}
	return nil
}
