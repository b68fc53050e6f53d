package sample

import (
	"cmp"
	"iter"
	"math"
	"slices"
)

// Bias is added to one token's logit.
type Bias struct {
	Token int32
	Value float32
}

// Rules are a request's rules for its logits. The zero value changes nothing. Order
// and formulas are vLLM's: masks first (allowed tokens, bad words, stop tokens before
// MinTokens), then bias, then penalties.
type Rules struct {
	Allowed  []int32   // the only tokens that may be sampled; nil: all
	BadWords [][]int32 // token sequences that must not be completed
	Bias     []Bias    // several entries of one token are added up

	// Repetition divides the positive logits and multiplies the negative ones
	// of tokens in prompt or output; 0 and 1: off. (Keskar et al., CTRL, 2019.)
	Repetition float32
	Presence   float32 // subtracted for each token in the output
	Frequency  float32 // subtracted once per occurrence in the output

	MinTokens int     // output tokens before which Stops cannot be drawn
	Stops     []int32 // stop and end-of-sequence tokens
}

// empty reports whether the rules change nothing.
func (r *Rules) empty() bool {
	return r.Allowed == nil && len(r.BadWords) == 0 && len(r.Bias) == 0 && !r.penalizes() && r.MinTokens == 0
}

func (r *Rules) penalizes() bool { return r.repeats() || r.counts() }

func (r *Rules) counts() bool { return r.Presence != 0 || r.Frequency != 0 }

func (r *Rules) repeats() bool { return r.Repetition != 0 && r.Repetition != 1 }

// Mark is the state of one token whose logit may change at every step.
type Mark struct {
	Token int32
	Count int32   // occurrences in the output; 0 if no rule counts them
	Bias  float32 // added first; 0: none
	Seen  int32   // 1: in prompt or output, if a rule uses that
}

// Ban is a token that must not be sampled after the token After; -1 is after any token.
type Ban struct{ Token, After int32 }

// Controls are a choice's rules together with its tokens. The caller of Add owns them;
// Pick only reads them.
type Controls struct {
	rules   Rules
	allowed []uint64 // [vocab/64+1] bitmap; nil: all
	marks   []Mark   // ascending by token, each once
	output  []int32  // kept for BadWords and MinTokens
}

// NewControls builds the state from a prompt and the output so far, which may come
// from another node. It returns nil for rules that change nothing.
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
	for _, b := range r.Bias {
		c.marks = append(c.marks, Mark{Token: b.Token, Bias: b.Value})
	}
	if r.repeats() {
		for _, t := range prompt {
			c.marks = append(c.marks, Mark{Token: t, Seen: 1})
		}
	}
	if r.penalizes() {
		for _, t := range output {
			c.marks = append(c.marks, c.outputMark(t))
		}
	}
	slices.SortStableFunc(c.marks, func(a, b Mark) int { return cmp.Compare(a.Token, b.Token) })
	c.marks = merge(c.marks)
	return c
}

// merge combines neighbouring marks of the same token.
func merge(marks []Mark) []Mark {
	kept := marks[:0]
	for _, m := range marks {
		if n := len(kept); n > 0 && kept[n-1].Token == m.Token {
			kept[n-1] = kept[n-1].merge(m)
			continue
		}
		kept = append(kept, m)
	}
	return kept
}

// merge returns the combination of two marks of a token.
func (m Mark) merge(o Mark) Mark {
	return Mark{m.Token, m.Count + o.Count, m.Bias + o.Bias, max(m.Seen, o.Seen)}
}

// outputMark returns the mark of a token that enters the output.
func (c *Controls) outputMark(token int32) Mark {
	m := Mark{Token: token}
	if c.rules.repeats() {
		m.Seen = 1
	}
	if c.rules.counts() {
		m.Count = 1
	}
	return m
}

// Add appends a token to the output.
func (c *Controls) Add(token int32) {
	c.output = append(c.output, token)
	if !c.rules.penalizes() {
		return
	}
	at, found := slices.BinarySearchFunc(c.marks, token, func(m Mark, t int32) int { return cmp.Compare(m.Token, t) })
	if found {
		c.marks[at] = c.marks[at].merge(c.outputMark(token))
	} else {
		c.marks = slices.Insert(c.marks, at, c.outputMark(token))
	}
}

// After returns c as it will be after tokens. c does not change.
func (c *Controls) After(tokens []int32) *Controls {
	if len(tokens) == 0 {
		return c
	}
	n := *c
	n.output, n.marks = slices.Clip(c.output), slices.Clone(c.marks)
	for _, t := range tokens {
		n.Add(t)
	}
	return &n
}

// Allowed returns the bitmap of the tokens that may be sampled; nil: all may. Tokens
// beyond the bitmap may not. It is read-only.
func (c *Controls) Allowed() []uint64 { return c.allowed }

// Marks returns the marks of all tokens that have one, by token. They are read-only and
// valid until Add.
func (c *Controls) Marks() []Mark { return c.marks }

// Penalties returns those of Rules, with a repetition of 0 as 1, and the mark that the
// next token will leave.
func (c *Controls) Penalties() (repetition, presence, frequency float32, next Mark) {
	return cmp.Or(c.rules.Repetition, 1), c.rules.Presence, c.rules.Frequency, c.outputMark(-1)
}

// MaxBans returns the largest number of entries that Bans can yield.
func (c *Controls) MaxBans() int { return len(c.rules.BadWords) + len(c.rules.Stops) }

// Bans yields the tokens that must not be sampled next. If onItsWay is set, they are
// those for the position after a token that is being sampled and not yet known.
func (c *Controls) Bans(onItsWay bool) iter.Seq[Ban] {
	return func(yield func(Ban) bool) {
		length := len(c.output)
		if onItsWay {
			length++
		}
		for _, w := range c.rules.BadWords {
			n := len(w) - 1 // tokens that have to come before
			if n < 0 || length < n {
				continue
			}
			before, b := w[:n], Ban{w[n], -1}
			if onItsWay && n > 0 {
				before, b.After = w[:n-1], w[n-1]
			}
			if slices.Equal(c.output[len(c.output)-len(before):], before) && !yield(b) {
				return
			}
		}
		if length < c.rules.MinTokens {
			for _, t := range c.rules.Stops {
				if !yield(Ban{t, -1}) {
					return
				}
			}
		}
	}
}

// Excludes reports whether the rules forbid a token next: Pick returns it only if no other is left.
func (c *Controls) Excludes(token int32) bool {
	if c.allowed != nil && (int(token)>>6 >= len(c.allowed) || c.allowed[token>>6]>>(token&63)&1 == 0) {
		return true
	}
	for b := range c.Bans(false) {
		if b.Token == token {
			return true
		}
	}
	return false
}

// apply changes logits [vocab] in place. It ignores tokens beyond the vocabulary. Only
// a token's own rules change its logit, so that the order of tokens does not matter.
func (c *Controls) apply(logits []float32) {
	if c.allowed != nil {
		for i := range logits {
			if i>>6 >= len(c.allowed) || c.allowed[i>>6]>>(i&63)&1 == 0 {
				logits[i] = lowest
			}
		}
	}
	for b := range c.Bans(false) {
		if inside(logits, b.Token) {
			logits[b.Token] = lowest
		}
	}
	for i := range c.marks {
		if m := &c.marks[i]; inside(logits, m.Token) {
			logits[m.Token] = c.rules.apply(logits[m.Token], m)
		}
	}
}

// apply returns a logit changed by its token's mark. Every product is rounded before
// it is added, so that the bits are the same on every machine.
func (r *Rules) apply(v float32, m *Mark) float32 {
	v += m.Bias
	if m.Seen != 0 {
		if v > 0 {
			v /= r.Repetition
		} else {
			v = float32(v * r.Repetition)
		}
	}
	if m.Count > 0 {
		v -= float32(float32(r.Frequency*float32(m.Count)) + r.Presence)
	}
	return v
}

var lowest = float32(math.Inf(-1))

func inside(logits []float32, t int32) bool { return t >= 0 && int(t) < len(logits) }
