package scheduler

import "time"

// leastStepTokens is what a step may always have. With fewer rows the kernels read
// each weight for too few tokens at once.
const leastStepTokens = 64

// Pace bounds the tokens of a step so that it takes about a target, which bounds how
// long a prompt waits that arrives meanwhile and comes first. Steps that take longer
// shrink the bound. Steps that fill it and take less let it grow. Its bound is for LimitTokens.
type Pace struct {
	target time.Duration // 0: no bound
	most   int           // tokens of a step without a bound by time
	limit  int
}

// NewPace returns a pace whose bound is most tokens, and at first that. Target 0 means that steps
// may take any time.
func NewPace(target time.Duration, most int) Pace {
	return Pace{target: target, most: most, limit: most}
}

// Limit returns the most tokens of the next step; 0: there is no target.
func (p *Pace) Limit() int {
	if p.target == 0 {
		return 0
	}
	return p.limit
}

// Record records a step of so many tokens.
func (p *Pace) Record(tokens int, took time.Duration) {
	switch {
	case p.target == 0 || tokens == 0:
	case took > p.target:
		p.limit = min(p.limit, max(leastStepTokens, int(float64(tokens)*float64(p.target)/float64(took))))
	case tokens >= p.limit-p.limit/8: // shorter steps do not predict longer ones
		p.limit = min(p.most, max(p.limit+1, int(float64(p.limit)*min(2, float64(p.target)/float64(max(1, took))))))
	}
}
