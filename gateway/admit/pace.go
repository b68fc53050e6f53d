package admit

import "time"

const (
	// minBusy and minTurns are what a prediction needs to have seen.
	minBusy  = time.Second
	minTurns = 8
	// forget halves what is remembered when it is of so much time, and of enough
	// turns that there is something to go by afterwards.
	forget = 30 * time.Second
)

// pace measures how fast requests get their turn, in prompt tokens, over the time
// in which somebody waits: only then is it the fleet that sets it.
type pace struct {
	since  time.Time // up to which busy counts; zero: nobody waits
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

func (p *pace) took(now time.Time, nTokens int) {
	p.advance(now)
	p.tokens += float64(nTokens)
	p.turns++
}

// rate is in tokens per second; false: too little has been seen.
func (p *pace) rate(now time.Time) (float64, bool) {
	p.advance(now)
	if p.busy < minBusy || p.turns < minTurns {
		return 0, false
	}
	return p.tokens / p.busy.Seconds(), true
}

// after is how long so many tokens take; 0: not known.
func (p *pace) after(now time.Time, nTokens float64) time.Duration {
	rate, known := p.rate(now)
	if !known {
		return 0
	}
	return time.Duration(max(0, nTokens) / rate * float64(time.Second))
}
