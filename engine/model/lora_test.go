package model

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
)

var adapterNames = []string{"all", "attention", "mlp"} // as testdata/make_lora.py made them

func openAdapter(t testing.TB, name string) *Adapter {
	t.Helper()
	a, err := OpenAdapter(filepath.Join("testdata", "lora", name))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// withAdapters is the model of the adapters, with all of them in places 1, 2, ….
func withAdapters(t testing.TB, kernels string, rank int) *Model {
	t.Helper()
	m := loadBare(t, openCheckpoint(t, "gqa-tied"), cpu.Options{Threads: 2, Limits: testLimits, Kernels: kernels, Mapped: true})
	if bytes, err := m.Adapters(len(adapterNames)+1, rank); err != nil || bytes < 1 {
		t.Fatalf("%d bytes, %v", bytes, err)
	}
	for i, name := range adapterNames {
		if err := m.LoadAdapter(i+1, openAdapter(t, name)); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// together computes the next token rows of several sequences in one step and
// returns the logits behind the last of each.
func together(t testing.TB, m *Model, all []*sequence, adapters []int32, n []int) [][]float32 {
	t.Helper()
	step := &backend.Step{}
	for i, s := range all {
		span := backend.Span{Row: int32(len(step.Tokens)), Tokens: int32(n[i]), Start: int32(s.done), Adapter: adapters[i], Tables: s.tables}
		for p := s.done; p < s.done+n[i]; p++ {
			step.Tokens, step.Positions = append(step.Tokens, s.tokens[p]), append(step.Positions, int32(p))
		}
		s.done += n[i]
		step.Spans = append(step.Spans, span)
		step.Outputs = append(step.Outputs, backend.Output{Row: int32(len(step.Tokens) - 1), Position: int32(s.done)})
	}
	step.Sampled = make([]int32, len(step.Outputs))
	if err := m.Step(step, nil); err != nil {
		t.Fatal(err)
	}
	flat, vocab := m.backend.Download(nil, m.Logits()), m.VocabSize()
	var logits [][]float32
	for i := range all {
		logits = append(logits, flat[i*vocab:(i+1)*vocab])
	}
	return logits
}

func sameTables(m *Model, tokens []int32, place int) *sequence {
	s := newSequence(m, tokens, 1)
	for g := range s.tables {
		s.tables[g] = s.tables[g][:testLimits.Blocks/2]
		for i := range s.tables[g] {
			s.tables[g][i] = int32(place*len(s.tables[g]) + i)
		}
	}
	return s
}

// Three adapters and a request without one in each step compute what PEFT computes
// with each adapter merged into the weights; each sequence has the same bits alone,
// and whatever the largest rank is.
func TestAdaptersAreMergedWeights(t *testing.T) {
	names := append([]string{filepath.Join("..", "gqa-tied")}, adapterNames...)
	for _, kernels := range kernelsToTest() {
		t.Run(kernels, func(t *testing.T) {
			worst := 0.0
			m, wide := withAdapters(t, kernels, 8), withAdapters(t, kernels, 64)
			for c := range 3 { // prompts of 1, 17 and 64 tokens
				var all []*sequence
				var want []golden
				var adapters []int32
				for place, name := range names {
					g := readGoldensOf(t, filepath.Join("lora", name))
					at := c
					if place == 0 { // other lengths
						at = []int{0, 5, 7}[c]
					}
					want = append(want, g.Cases[at])
					all = append(all, sameTables(m, g.Cases[at].Prompt, place))
					adapters = append(adapters, int32(place))
				}
				for done := 0; done < len(want[1].Prompt); { // chunks of 16, and the rest
					n := make([]int, len(all))
					for i := range all {
						n[i] = min(16, len(want[i].Prompt)-done)
					}
					batch := together(t, m, all, adapters, n)
					for i, logits := range batch {
						if all[i].done == len(want[i].Prompt) {
							last := want[i].Logits[len(want[i].Logits)-1]
							for j, v := range logits {
								worst = max(worst, math.Abs(float64(v)-float64(last[j])))
							}
						}
					}
					done += 16
				}
				for i := range all {
					for run, other := range map[string]*Model{"alone": m, "of another rank": wide} {
						s := sameTables(other, want[i].Prompt, 3-i%4)
						alone := together(t, other, []*sequence{s}, adapters[i:i+1], []int{len(want[i].Prompt)})[0]
						last := want[i].Logits[len(want[i].Logits)-1]
						for j, v := range alone {
							worst = max(worst, math.Abs(float64(v)-float64(last[j])))
						}
						again := sameTables(m, want[i].Prompt, 3-i%4)
						for j, v := range together(t, m, []*sequence{again}, adapters[i:i+1], []int{len(want[i].Prompt)})[0] {
							if math.Float32bits(v) != math.Float32bits(alone[j]) {
								t.Fatalf("prompt of %d, adapter %d: logit %d is %g, %s %g", len(want[i].Prompt), i, j, v, run, alone[j])
							}
						}
					}
				}
			}
			t.Logf("worst error of a logit %.2g", worst)
			if !(worst <= tolerance) {
				t.Errorf("a logit is off by %g, at most %g is allowed", worst, tolerance)
			}
		})
	}
}

// A place that is loaded anew computes the new adapter, and a request without an
// adapter what it computes without any.
func TestAdapterPlaces(t *testing.T) {
	for _, kernels := range kernelsToTest() {
		m := withAdapters(t, kernels, 8)
		g := readGoldensOf(t, filepath.Join("lora", "all")).Cases[1]
		at := func(place int32) []float32 {
			return append([]float32(nil), together(t, m, []*sequence{sameTables(m, g.Prompt, 0)}, []int32{place}, []int{len(g.Prompt)})[0]...)
		}
		base, first, third := at(0), at(1), at(3)
		if err := m.LoadAdapter(1, openAdapter(t, "mlp")); err != nil {
			t.Fatal(err)
		}
		changed := 0
		for i, v := range at(1) {
			if v != third[i] {
				t.Fatalf("%s: place 1 computes %g, place 3 with the same adapter %g", kernels, v, third[i])
			}
			if v != first[i] && v != base[i] {
				changed++
			}
		}
		if changed < len(base)/2 {
			t.Errorf("%s: %d of %d logits changed", kernels, changed, len(base))
		}
		plain := load(t, openCheckpoint(t, "gqa-tied"), kernels, nil)
		for i, v := range together(t, plain, []*sequence{sameTables(plain, g.Prompt, 0)}, []int32{0}, []int{len(g.Prompt)})[0] {
			if v != base[i] {
				t.Fatalf("%s: without an adapter %g, in a model without any %g", kernels, base[i], v)
			}
		}
		step := &backend.Step{Tokens: []int32{1}, Positions: []int32{0}, Spans: []backend.Span{{Tokens: 1, Adapter: 4, Tables: [][]int32{{0}}}}}
		if err := m.Step(step, nil); !errors.Is(err, backend.ErrShape) {
			t.Errorf("%s: an adapter that is not loaded: %v", kernels, err)
		}
	}
}

func TestAdapterRefusals(t *testing.T) {
	config, err := os.ReadFile("testdata/lora/all/adapter_config.json")
	if err != nil {
		t.Fatal(err)
	}
	for says, keys := range map[string]map[string]any{
		"peft_type is IA3":                         {"peft_type": "IA3"},
		"use_dora is true; supported: false":       {"use_dora": true},
		"modules_to_save is [lm_head]":             {"modules_to_save": []string{"lm_head"}},
		"bias is all; supported: none":             {"bias": "all"},
		"r is 0; supported: 1 to 512":              {"r": 0},
		"rank_pattern and alpha_pattern is given":  {"rank_pattern": map[string]int{"q_proj": 2}},
		"fan_in_fan_out is true; supported: false": {"fan_in_fan_out": true},
	} {
		if _, _, err := parseAdapter(withKeys(t, config, keys)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("err = %v, want %q", err, says)
		}
	}
	for key, value := range map[string]any{"use_qalora": true, "alora_invocation_tokens": []int{1}, "trainable_token_indices": []int{3}} {
		if _, _, err := parseAdapter(withKeys(t, config, map[string]any{key: value})); err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%s: err = %v", key, err)
		}
	}
	if factor, _, err := parseAdapter(withKeys(t, config, map[string]any{"use_rslora": true, "r": 16, "lora_alpha": 8})); err != nil || factor != 2 {
		t.Errorf("rslora: factor %v, %v", factor, err)
	}
	if _, err := OpenAdapter(t.TempDir()); !errors.Is(err, ErrAdapter) || !strings.Contains(err.Error(), "adapter_config.json") {
		t.Errorf("an empty folder: %v", err)
	}
	m := withAdapters(t, cpu.Portable, 8)
	wrong := openAdapter(t, "mlp")
	wrong.parts["model.layers.0.mlp.experts.0.up_proj.weight"] = wrong.parts["model.layers.0.mlp.up_proj.weight"]
	if err := m.LoadAdapter(1, wrong); !errors.Is(err, ErrAdapter) || !strings.Contains(err.Error(), "mlp.experts.0.up_proj") {
		t.Errorf("a part for an expert: %v", err)
	}
	narrow := loadBare(t, openCheckpoint(t, "gqa-tied"), cpu.Options{Threads: 1, Limits: testLimits, Kernels: cpu.Portable})
	if _, err := narrow.Adapters(1, 4); err != nil {
		t.Fatal(err)
	}
	if err := narrow.LoadAdapter(1, openAdapter(t, "attention")); !errors.Is(err, ErrAdapter) || !strings.Contains(err.Error(), "rank 8, at most 4") {
		t.Errorf("a rank that is too large: %v", err)
	}
	if err := load(t, openCheckpoint(t, "mha"), cpu.Portable, nil).LoadAdapter(1, openAdapter(t, "all")); !errors.Is(err, ErrAdapter) {
		t.Errorf("a model without room for adapters: %v", err)
	}
	if other := openAdapter(t, "all"); other.Digest == wrong.Digest || other.Digest != openAdapter(t, "all").Digest {
		t.Error("digests do not tell adapters apart")
	}
}

// FuzzAdapterConfig: any text is read or refused.
func FuzzAdapterConfig(f *testing.F) {
	text, err := os.ReadFile("testdata/lora/attention/adapter_config.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Fuzz(func(t *testing.T, text []byte) {
		if _, c, err := parseAdapter(text); err == nil && (c.Rank < 1 || !json.Valid(text)) {
			t.Errorf("%s gives rank %d", text, c.Rank)
		}
	})
}
