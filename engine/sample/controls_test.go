package sample

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// plainApply is Rules read aloud, over the whole history each time.
func plainApply(logits []float32, r Rules, prompt, output []int32) []float32 {
	out := slices.Clone(logits)
	for i := range out {
		t := int32(i)
		if r.Allowed != nil && !slices.Contains(r.Allowed, t) {
			out[i] = float32(math.Inf(-1))
		}
		for _, w := range r.BadWords {
			n := len(w) - 1
			if w[n] == t && len(output) >= n && slices.Equal(output[len(output)-n:], w[:n]) {
				out[i] = float32(math.Inf(-1))
			}
		}
		if len(output) < r.MinTokens && slices.Contains(r.Stops, t) {
			out[i] = float32(math.Inf(-1))
		}
		for _, b := range r.Bias {
			if b.Token == t {
				out[i] += b.Value
			}
		}
		if r.Repetition != 0 && (slices.Contains(prompt, t) || slices.Contains(output, t)) {
			if out[i] > 0 {
				out[i] /= r.Repetition
			} else {
				out[i] *= r.Repetition
			}
		}
		n := 0
		for _, o := range output {
			if o == t {
				n++
			}
		}
		if n > 0 {
			out[i] -= r.Frequency*float32(n) + r.Presence
		}
	}
	return out
}

func randomRules(rng *rand.Rand, vocab int) Rules {
	token := func() int32 { return int32(rng.IntN(vocab)) }
	tokens := func(n int) []int32 {
		ts := make([]int32, n)
		for i := range ts {
			ts[i] = token()
		}
		return ts
	}
	var r Rules
	if rng.IntN(3) == 0 {
		r.Allowed = tokens(1 + rng.IntN(vocab))
	}
	for range rng.IntN(4) {
		r.BadWords = append(r.BadWords, tokens(1+rng.IntN(3)))
	}
	for i := range rng.IntN(4) {
		r.Bias = append(r.Bias, Bias{Token: int32(i), Value: rng.Float32()*20 - 10})
	}
	if rng.IntN(2) == 0 {
		r.Repetition = 0.5 + rng.Float32()
	}
	if rng.IntN(2) == 0 {
		r.Presence, r.Frequency = rng.Float32()*4-2, rng.Float32()*4-2
	}
	r.MinTokens, r.Stops = rng.IntN(8), tokens(2)
	return r
}

// Controls that follow an output token by token, those rebuilt from the middle
// of it, and the plain reading agree on every logit at every position.
func TestControlsAgainstPlainReading(t *testing.T) {
	const vocab = 40
	for seed := uint64(0); seed < 400; seed++ {
		rng := rand.New(rand.NewPCG(seed, 3))
		r := randomRules(rng, vocab)
		prompt := make([]int32, rng.IntN(10))
		for i := range prompt {
			prompt[i] = int32(rng.IntN(vocab))
		}
		var output []int32
		c := NewControls(r, prompt, nil)
		if (c == nil) != r.empty() {
			t.Fatalf("seed %d: nil controls for %+v", seed, r)
		}
		for step := range 12 {
			logits := make([]float32, vocab)
			for i := range logits {
				logits[i] = float32(rng.NormFloat64() * 3)
			}
			want := plainApply(logits, r, prompt, output)
			for name, ctl := range map[string]*Controls{"followed": c, "rebuilt": NewControls(r, prompt, output)} {
				got := slices.Clone(logits)
				if ctl != nil {
					ctl.apply(got)
				}
				for i := range got {
					if got[i] != want[i] {
						t.Fatalf("seed %d step %d %s: token %d has %v, want %v under %+v", seed, step, name, i, got[i], want[i], r)
					}
				}
			}
			// Looking ahead is the same as having gone there, and changes nothing.
			ahead := []int32{int32(rng.IntN(vocab)), int32(rng.IntN(vocab))}[:rng.IntN(3)]
			if c != nil {
				want, got := plainApply(logits, r, prompt, append(slices.Clone(output), ahead...)), slices.Clone(logits)
				c.After(ahead).apply(got)
				if !slices.Equal(got, want) {
					t.Fatalf("seed %d step %d: after %v: %v, want %v under %+v", seed, step, ahead, got, want, r)
				}
			}
			next := int32(rng.IntN(vocab))
			output = append(output, next)
			if c != nil {
				c.Add(next)
			}
		}
	}
}

// What must not be drawn behind a token that is on its way is what must not be drawn
// once it is known, and its mark is the one that it leaves.
func TestControlsBehindATokenOnItsWay(t *testing.T) {
	const vocab = 12
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 5))
		r := randomRules(rng, vocab)
		c := NewControls(r, []int32{1, 2}, []int32{int32(rng.IntN(vocab)), int32(rng.IntN(vocab))}[:rng.IntN(3)])
		if c == nil {
			continue
		}
		for last := range int32(vocab) {
			after := c.After([]int32{last})
			want, got := map[int32]bool{}, map[int32]bool{}
			for b := range after.Bans(false) {
				want[b.Token] = true
			}
			n := 0
			for b := range c.Bans(true) {
				if n++; b.After < 0 || b.After == last {
					got[b.Token] = true
				}
			}
			if !maps.Equal(got, want) || n > c.MaxBans() {
				t.Fatalf("seed %d: behind %d %v are banned, want %v, under %+v", seed, last, got, want, r)
			}
			_, _, _, next := c.Penalties()
			next.Token = last
			for _, m := range c.Marks() {
				if m.Token == last {
					next = next.merge(m)
				}
			}
			marked := slices.DeleteFunc(slices.Clone(after.Marks()), func(m Mark) bool { return m.Token != last })
			if len(marked) == 0 {
				marked = []Mark{{Token: last}} // no rule looks at it
			}
			if marked[0] != next {
				t.Fatalf("seed %d: behind %d its mark is %+v, want %+v, under %+v", seed, last, next, marked[0], r)
			}
		}
	}
}

func TestControlsLeaveTheRowAlone(t *testing.T) {
	logits := []float32{1, 2, 3}
	p := Params{Controls: NewControls(Rules{Bias: []Bias{{2, -5}}}, nil, nil)}
	var s Scratch
	if got := Pick(logits, &p, 0, &s); got != 1 {
		t.Errorf("got %d, want 1: token 2 is biased away", got)
	}
	if logits[2] != 3 {
		t.Error("the device's logits were changed")
	}
	if n := testing.AllocsPerRun(100, func() { Pick(logits, &p, 0, &s) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// min_p keeps what is at least that share as probable as the best token.
func TestMinP(t *testing.T) {
	logits := make([]float32, 30)
	for i := range logits {
		logits[i] = float32(-i) / 4
	}
	p := Params{Temperature: 0.7, MinP: 0.1}
	lastKept := int32(math.Floor(-math.Log(0.1) * 0.7 * 4))
	drawn := map[int32]bool{}
	var s Scratch
	for seed := range uint64(4000) {
		p.Seed = seed
		got := Pick(logits, &p, 1, &s)
		if got > lastKept {
			t.Fatalf("seed %d: drew %d, of which min_p leaves 0 to %d", seed, got, lastKept)
		}
		drawn[got] = true
	}
	if !drawn[lastKept] {
		t.Errorf("token %d, just inside min_p, was never drawn", lastKept)
	}
}
