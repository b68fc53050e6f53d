package sample

import (
	"maps"
	"math"
	"slices"
)

// Bias is added to one token's logit.
type Bias struct {
	Token int32
	Value float32
}

// Rules are what a request asks of its logits. The zero value asks nothing.
// Orders and formulas are vLLM's: masks first (allowed tokens, bad words, stop
// tokens before MinTokens), then bias, then penalties.
type Rules struct {
	Allowed  []int32   // only these; nil: all
	BadWords [][]int32 // token sequences that must not be completed
	Bias     []Bias

	// Repetition divides the positive logits and multiplies the negative ones
	// of tokens in prompt or output; 0 and 1: off. (Keskar et al., CTRL, 2019.)
	Repetition float32
	Presence   float32 // subtracted for each token in the output
	Frequency  float32 // subtracted once per occurrence in the output

	MinTokens int     // output tokens before which Stops cannot be drawn
	Stops     []int32 // stop and end-of-sequence tokens
}

// empty says whether the rules change nothing.
func (r *Rules) empty() bool {
	return r.Allowed == nil && len(r.BadWords) == 0 && len(r.Bias) == 0 && !r.penalizes() && r.MinTokens == 0
}

func (r *Rules) penalizes() bool { return r.repeats() || r.Presence != 0 || r.Frequency != 0 }

func (r *Rules) repeats() bool { return r.Repetition != 0 && r.Repetition != 1 }

// Controls are a choice's rules together with the tokens they look at. They are
// owned by whoever calls Add; Pick only reads them.
type Controls struct {
	rules   Rules
	allowed []uint64 // [vocab/64+1] bitmap; nil: all
	seen    []int32  // tokens of prompt and output, each once, ascending
	counts  map[int32]int32
	output  []int32 // kept for BadWords and MinTokens
}

// NewControls starts from a prompt and the output so far, which may come from
// another node: the state is rebuilt from it. It returns nil for rules that
// change nothing.
func NewControls(r Rules, prompt, output []int32) *Controls {
	if r.empty() {
		return nil
	}
	c := &Controls{rules: r, output: slices.Clone(output)}
	if r.Allowed != nil {
		c.allowed = []uint64{}
		for _, t := range r.Allowed {
			for int(t)>>6 >= len(c.allowed) {
				c.allowed = append(c.allowed, 0)
			}
			c.allowed[t>>6] |= 1 << (t & 63)
		}
	}
	if r.repeats() {
		c.seen = append(append(c.seen, prompt...), output...)
		slices.Sort(c.seen)
		c.seen = slices.Compact(c.seen)
	}
	if r.Presence != 0 || r.Frequency != 0 {
		c.counts = make(map[int32]int32)
		for _, t := range output {
			c.counts[t]++
		}
	}
	return c
}

// Add follows the output by one token.
func (c *Controls) Add(token int32) {
	c.output = append(c.output, token)
	if c.counts != nil {
		c.counts[token]++
	}
	if c.rules.repeats() {
		if at, found := slices.BinarySearch(c.seen, token); !found {
			c.seen = slices.Insert(c.seen, at, token)
		}
	}
}

// After is c as it will be when these tokens have followed; c stays as it is.
func (c *Controls) After(tokens []int32) *Controls {
	if len(tokens) == 0 {
		return c
	}
	n := *c
	n.output, n.seen, n.counts = slices.Clip(c.output), slices.Clone(c.seen), maps.Clone(c.counts)
	for _, t := range tokens {
		n.Add(t)
	}
	return &n
}

// apply changes logits [vocab] in place. Tokens beyond the vocabulary are
// passed over. Each logit is changed by its own token's rules alone, so the
// order in which tokens are visited decides nothing.
func (c *Controls) apply(logits []float32) {
	if c.allowed != nil {
		for i := range logits {
			if i>>6 >= len(c.allowed) || c.allowed[i>>6]>>(i&63)&1 == 0 {
				logits[i] = lowest
			}
		}
	}
	for _, w := range c.rules.BadWords {
		if n := len(w) - 1; n >= 0 && len(c.output) >= n && slices.Equal(c.output[len(c.output)-n:], w[:n]) {
			mask(logits, w[n])
		}
	}
	if len(c.output) < c.rules.MinTokens {
		for _, t := range c.rules.Stops {
			mask(logits, t)
		}
	}
	for _, b := range c.rules.Bias {
		if inside(logits, b.Token) {
			logits[b.Token] += b.Value
		}
	}
	for _, t := range c.seen {
		if !inside(logits, t) {
			continue
		}
		if logits[t] > 0 {
			logits[t] /= c.rules.Repetition
		} else {
			logits[t] *= c.rules.Repetition
		}
	}
	for t, n := range c.counts {
		if inside(logits, t) {
			// The product is rounded before the sum on every machine.
			logits[t] -= float32(c.rules.Frequency*float32(n)) + c.rules.Presence
		}
	}
}

var lowest = float32(math.Inf(-1))

func inside(logits []float32, t int32) bool { return t >= 0 && int(t) < len(logits) }

func mask(logits []float32, t int32) {
	if inside(logits, t) {
		logits[t] = lowest
	}
}
