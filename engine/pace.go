package engine

import (
	"time"

	"github.com/tandem-serving/tandem/engine/scheduler"
)

const (
	// leastScoreTime is the time that scoring may add to a step whatever the step
	// takes, so that small models do not score one row a step.
	leastScoreTime = 5 * time.Millisecond
	// idleScoreTime is the time that it may add while no other request decodes. A
	// request that arrives then waits no longer than this.
	idleScoreTime = 100 * time.Millisecond
	// firstScoreRows is the number of rows before the first has been measured.
	firstScoreRows = 4
)

// scorePace bounds the prompt rows that a step scores, so that scoring at most
// doubles the time between two tokens of other requests. It averages what the last
// few steps took.
type scorePace struct {
	step     time.Duration // of a step that only decodes; 0 before the first
	row      time.Duration // that one scored row adds to its step; 0 before the first
	decoding bool          // requests besides scored ones were in the last step
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

// ended takes account of a step: its whole time, from the device's start until its
// results were handed out.
func (p *scorePace) ended(b scheduler.Batch, took time.Duration) {
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
	case chunks: // how long it takes depends on the chunks
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

// leastStepTokens is what a step may have whatever the time: fewer rows keep the
// kernels from reading each weight for many tokens at once.
const leastStepTokens = 64

// stepPace bounds the tokens of a step so that it takes about target: a prompt that
// arrives meanwhile and is to be computed first waits no longer. Steps that take longer
// shrink it, and steps that fill it and take less let it grow.
type stepPace struct {
	target time.Duration // 0: no bound
	most   int           // tokens of a step, without one
	limit  int
}

func newStepPace(target time.Duration, most int) stepPace {
	return stepPace{target: target, most: most, limit: most}
}

// ended takes account of a step of so many tokens.
func (p *stepPace) ended(tokens int, took time.Duration) {
	switch {
	case p.target == 0 || tokens == 0:
	case took > p.target:
		p.limit = min(p.limit, max(leastStepTokens, int(float64(tokens)*float64(p.target)/float64(took))))
	case tokens >= p.limit-p.limit/8: // the others say nothing of longer ones
		p.limit = min(p.most, max(p.limit+1, int(float64(p.limit)*min(2, float64(p.target)/float64(max(1, took))))))
	}
}

// average returns the mean with three parts of what was before; 0: nothing was.
func average(before, now time.Duration) time.Duration {
	if before == 0 {
		return now
	}
	return (3*before + now) / 4
}
