package engine

import (
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
)

const (
	// leastScoreTime is the time that scoring may always add to a step, so that
	// small models do not score one row a step.
	leastScoreTime = 5 * time.Millisecond
	// idleScoreTime is the time that it may add while no other request decodes. A
	// request that arrives then waits no longer than this.
	idleScoreTime = 100 * time.Millisecond
	// firstScoreRows is the number of rows before the first measurement.
	firstScoreRows = 4
)

// scorePace bounds the prompt rows that a step scores, so that scoring at most
// doubles the time between two tokens of other requests. It averages the times of
// the last few steps.
type scorePace struct {
	step     time.Duration // time of a step that only decodes; 0 before the first
	row      time.Duration // time that one scored row adds to its step; 0 before the first
	decoding bool          // the last step had requests other than scored ones
}

// limit returns the most prompt rows that the next step may score, at least 1.
func (p *scorePace) limit() int {
	if p.row == 0 {
		return firstScoreRows
	}
	room := idleScoreTime
	if p.decoding {
		room = max(p.step, leastScoreTime)
	}
	return max(1, int(room/p.row))
}

// record records a step. took is the time from the device's start until its results
// were emitted.
func (p *scorePace) record(b scheduler.Batch, took time.Duration) {
	scored, chunks := 0, false
	p.decoding = false
	for i := range b.Seqs {
		q := &b.Seqs[i]
		scored += q.ScoreTo - q.ScoreFrom
		switch {
		case q.ScoreFrom < q.ScoreTo:
		case q.Sample && len(q.Tokens)-q.Drafts == 1:
			p.decoding = true
		default:
			chunks = true
		}
	}
	switch {
	case chunks: // the time depends on the chunks
	case scored == 0 && p.decoding:
		p.step = average(p.step, took)
	case scored > 0:
		alone := p.step
		if !p.decoding {
			alone = 0
		}
		p.row = average(p.row, max(time.Microsecond, (took-alone)/time.Duration(scored)))
	}
}

// average returns the mean of now and before, which has weight 3. before 0 means that there is
// none.
func average(before, now time.Duration) time.Duration {
	if before == 0 {
		return now
	}
	return (3*before + now) / 4
}
