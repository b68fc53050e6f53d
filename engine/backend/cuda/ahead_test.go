//go:build cgo && linux

package cuda

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/sample"
)

// aheadRows are sequences that decode together, one token a step each.
type aheadRows struct {
	spec   backend.KVSpec
	tokens []int32 // of the next step
	pos    int32
	params []sample.Params
	mask   func(row, position int32) []uint64 // nil: none
}

// drew records the token of a row.
func (a *aheadRows) drew(row, token int32) {
	if a.tokens[row] = token; a.params[row].Controls != nil {
		a.params[row].Controls.Add(token)
	}
}

// step returns the next step of the given rows. src, if not nil, is the outputs of the step
// before that are its tokens.
func (a *aheadRows) step(who, src []int32) *backend.Step {
	s := &backend.Step{Sampled: make([]int32, len(who))}
	for i, w := range who {
		token := a.tokens[w]
		if src != nil {
			token = -1 - src[i]
		}
		s.Tokens, s.Positions = append(s.Tokens, token), append(s.Positions, a.pos)
		span := backend.Span{Row: int32(i), Tokens: 1, Start: a.pos}
		for g, group := range a.spec.Groups {
			table := make([]int32, int(a.pos)/group.BlockTokens+1)
			for p := range table {
				table[p] = (w*int32(len(a.spec.Groups))+int32(g))*int32(modelLimits.Blocks) + int32(p)
			}
			span.Tables = append(span.Tables, table)
		}
		s.Spans = append(s.Spans, span)
		out := backend.Output{Row: int32(i), Position: a.pos + 1, Params: a.params[w]}
		if out.Params.Controls != nil {
			out.LogProbs = 3
		}
		if a.mask != nil {
			out.Params.Mask = a.mask(w, a.pos+1)
		}
		s.Outputs = append(s.Outputs, out)
	}
	a.pos++
	return s
}

// Steps that start from the device's own tokens, of rows that come and go, draw what
// they draw one after the other, however late the device is.
func TestStepsAhead(t *testing.T) {
	src, err := model.OpenDir("../../model/testdata/gqa-tied")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { src.Close() })
	rng := rand.New(rand.NewPCG(3, 3))
	who := make([][]int32, stepsAhead) // rows of each step, each from the rows before
	for i := range who {
		if who[i] = []int32{0, 1, 2, 3, 4}; i > 0 && i%6 != 0 {
			who[i] = slices.DeleteFunc(slices.Clone(who[i-1]), func(int32) bool { return rng.IntN(6) == 0 })
		}
		if len(who[i]) == 0 {
			who[i] = []int32{0}
		}
	}
	run := func(late string, draws int32, ahead bool) (all [][]int32) {
		t.Setenv("TANDEM_TWIN_LATE", late)
		m := sit(t, src, openGPU(t, Options{Limits: modelLimits, draws: draws}), backend.F32)
		a := &aheadRows{spec: kvSpec(src, backend.F32), tokens: []int32{5, 6, 7, 8, 9}}
		for i := range 5 {
			a.params = append(a.params, sample.Params{Seed: uint64(i), Temperature: float32(i%2) * 0.9})
		}
		a.params[2].Controls = sample.NewControls(sample.Rules{Frequency: 2, Repetition: 1.8, MinTokens: 5, Stops: []int32{3}}, []int32{7, 8}, nil)
		a.params[3].Controls = sample.NewControls(sample.Rules{Presence: 3, Allowed: []int32{4, 9, 11, 40, 41, 60}, BadWords: [][]int32{{4, 9}, {11, 11}, {9, 9, 4}}}, nil, nil)
		a.mask = func(row, position int32) []uint64 { // another one in each step, of rows with and without rules
			if row < 3 {
				return nil
			}
			return randomMask(rand.New(rand.NewPCG(uint64(row), uint64(position))), 96, 0.4)
		}
		var flying [][]int32 // rows of the steps that were started
		land := func() {
			sampled := make([]int32, len(flying[0]))
			if err := m.Finish(sampled); err != nil {
				t.Fatal(err)
			}
			for i, w := range flying[0] {
				a.drew(w, sampled[i])
			}
			flying, all = flying[1:], append(all, sampled)
		}
		for i, rows := range who {
			if !ahead {
				s := a.step(rows, nil)
				if err := m.Step(s, nil); err != nil {
					t.Fatal(err)
				}
				for i, w := range rows {
					a.drew(w, s.Sampled[i])
				}
				all = append(all, s.Sampled)
				continue
			}
			var src []int32
			if i%6 != 0 { // else a row is back whose token the host has
				for _, w := range rows {
					src = append(src, int32(slices.Index(who[i-1], w)))
				}
				if slices.Contains(src, -1) {
					src = nil
				}
			}
			if src == nil {
				for len(flying) > 0 {
					land()
				}
			}
			if err := m.Start(a.step(rows, src)); err != nil {
				t.Fatal(err)
			}
			if flying = append(flying, rows); len(flying) == 2 {
				land()
			}
		}
		for len(flying) > 0 {
			land()
		}
		return all
	}
	want := run("0", drawsAlone, false)
	for late, draws := range map[string]int32{"1": drawsAlone, "77": drawsSlices} {
		if got := run(late, draws, true); !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("late %s: draws are %v, one after the other %v", late, got, want)
		}
	}
}

// What cannot be started ahead is refused, and changes nothing.
func TestStepsAheadRefused(t *testing.T) {
	src, err := model.OpenDir("../../model/testdata/gqa-tied")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { src.Close() })
	t.Setenv("TANDEM_TWIN_LATE", "9")
	m := sit(t, src, openGPU(t, Options{Limits: modelLimits}), backend.F32)
	a := &aheadRows{spec: kvSpec(src, backend.F32), tokens: []int32{5, 6}, params: make([]sample.Params, 2)}
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, backend.ErrShape) {
			t.Errorf("%s: %v", what, err)
		}
	}
	rows := []int32{0, 1}
	refused("an end of nothing", m.Finish(make([]int32, 2)))
	refused("tokens of a step that there was not", m.Start(a.step(rows, []int32{0, 1})))
	a.pos = 0
	ruled := a.step(rows, nil)
	ruled.Outputs[1].Params.Controls = tooManyRules()
	refused("more rules than the device takes", m.Start(ruled))
	a.pos = 0
	if err := m.Start(a.step(rows, nil)); err != nil {
		t.Fatal(err)
	}
	refused("an output that there was not", m.Start(a.step(rows, []int32{0, 2})))
	a.pos = 1
	refused("a step that waits", m.Step(a.step(rows, nil), nil))
	a.pos = 1
	if err := m.Start(a.step(rows, []int32{1, 0})); err != nil {
		t.Fatal(err)
	}
	refused("a third", m.Start(a.step(rows, []int32{0, 1})))
	for range 2 {
		if err := m.Finish(make([]int32, 2)); err != nil {
			t.Error(err)
		}
	}
}

// tooManyRules are such as the host draws by.
func tooManyRules() *sample.Controls {
	r := sample.Rules{Presence: 1}
	for i := range int32(ruleWords) {
		r.BadWords = append(r.BadWords, []int32{i % 90, i % 80})
	}
	return sample.NewControls(r, nil, nil)
}
