package admit

import "time"

const (
	// minBusy and minTurns are the least time and number of turns for a prediction.
	minBusy  = time.Second
	minTurns = 8
	// forget is the time after which the sums are halved, if half of the turns are enough for a
	// prediction.
	forget = 30 * time.Second
)

// pace measures how fast requests are admitted, in prompt tokens, over the time in which requests
// wait: only then does the fleet determine it.
type pace struct {
	since  time.Time // the end of busy; zero: no request waits
	busy   time.Duration
	tokens float64
	turns  float64
}

func (p *pace) begin(now time.Time) { p.since = now }

func (p *pace) end(now time.Time) {
	p.advance(now)
	p.since = time.Time{}
}

func (p *pace) advance(now time.Time) {
	if p.since.IsZero() {
		return
	}
	p.busy += max(0, now.Sub(p.since))
	p.since = now
	if p.busy >= forget && p.turns >= 2*minTurns {
		p.busy /= 2
		p.tokens /= 2
		p.turns /= 2
	}
}

func (p *pace) count(now time.Time, nTokens int) {
	p.advance(now)
	p.tokens += float64(nTokens)
	p.turns++
}

// rate returns tokens per second, or false if too few turns were counted.
func (p *pace) rate(now time.Time) (float64, bool) {
	p.advance(now)
	if p.busy < minBusy || p.turns < minTurns {
		return 0, false
	}
	return p.tokens / p.busy.Seconds(), true
}

// after returns the time that nTokens take; 0: not known.
func (p *pace) after(now time.Time, nTokens float64) time.Duration {
	rate, known := p.rate(now)
	if !known {
		return 0
	}
	return time.Duration(max(0, nTokens) / rate * float64(time.Second))
}
