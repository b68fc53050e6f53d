package model

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/safetensors"
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
		"rank_pattern is [0 for ":                  {"rank_pattern": map[string]int{"q_proj": 0}},
		`"q(" is no expression that is read here`:  {"alpha_pattern": map[string]int{"q(": 2}},
		"want numbers by name":                     {"rank_pattern": []int{4}},
		"fan_in_fan_out is true; supported: false": {"fan_in_fan_out": true},
	} {
		if _, err := parseAdapter(withKeys(t, config, keys)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("err = %v, want %q", err, says)
		}
	}
	for key, value := range map[string]any{"use_qalora": true, "alora_invocation_tokens": []int{1}, "trainable_token_indices": []int{3}} {
		if _, err := parseAdapter(withKeys(t, config, map[string]any{key: value})); err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%s: err = %v", key, err)
		}
	}
	c, err := parseAdapter(withKeys(t, config, map[string]any{"use_rslora": true, "r": 16, "lora_alpha": 8}))
	if _, factor := c.of("x"); err != nil || factor != 2 {
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

// writeAdapter makes a folder of an adapter for the first q_proj and up_proj of
// gqa-tied, of the ranks given; change may spoil its tensors.
func writeAdapter(t *testing.T, keys map[string]any, ranks map[string]int, change func(map[string]safetensors.Tensor)) string {
	t.Helper()
	config, err := os.ReadFile("testdata/lora/all/adapter_config.json")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]safetensors.Tensor{}
	add := func(name string, shape ...int) {
		x := safetensors.Tensor{DType: "F32", Shape: shape}
		for i := range shape[0] * shape[1] {
			x.Data = binary.LittleEndian.AppendUint32(x.Data, math.Float32bits(float32(i%7-3)/8))
		}
		all["base_model.model.model.layers.0."+name+".weight"] = x
	}
	shapes := openAdapter(t, "all").parts
	for name, rank := range ranks {
		p := shapes["model.layers.0."+name+".weight"]
		add(name+".lora_A", rank, p.in)
		add(name+".lora_B", p.out, rank)
	}
	if change != nil {
		change(all)
	}
	dir := t.TempDir()
	for file, text := range map[string][]byte{"adapter_config.json": withKeys(t, config, keys), "adapter_model.safetensors": encode(t, all)} {
		if err := os.WriteFile(filepath.Join(dir, file), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// Ranks and alphas by name are PEFT's: the first pattern that a name ends with
// decides, else r and lora_alpha.
func TestAdapterPatterns(t *testing.T) {
	const q, up = "self_attn.q_proj", "mlp.up_proj"
	keys := map[string]any{"r": 4, "lora_alpha": 8, "use_rslora": false,
		"rank_pattern":  json.RawMessage(`{"model.layers.1.mlp.up_proj": 8, "mlp\\.up_proj": 2, "up_proj": 1, "roj": 3}`),
		"alpha_pattern": map[string]float64{"q_proj": 1}}
	a, err := OpenAdapter(writeAdapter(t, keys, map[string]int{q: 4, up: 2}, nil))
	if err != nil {
		t.Fatal(err)
	}
	plain := map[string]any{"r": 4, "lora_alpha": 8, "use_rslora": false}
	same, err := OpenAdapter(writeAdapter(t, plain, map[string]int{q: 4}, nil))
	if err != nil {
		t.Fatal(err)
	}
	part := func(a *Adapter, name string) *adapterPart { return a.parts["model.layers.0."+name+".weight"] }
	if p := part(a, up); p.rank != 2 || p.b[0] == 0 || a.Rank != 4 {
		t.Errorf("%s is of rank %d, the adapter of %d", up, p.rank, a.Rank)
	}
	// Alpha 1 instead of 8 on rank 4.
	if got, all := part(a, q), part(same, q); len(got.b) != len(all.b) || sumAbs(got.b)*8 != sumAbs(all.b) || sumAbs(got.b) == 0 {
		t.Errorf("with alpha 1 B sums to %g, with 8 to %g", sumAbs(got.b), sumAbs(all.b))
	}
	if a.Digest == same.Digest {
		t.Error("digests do not tell patterns apart")
	}
}

func sumAbs(x []float32) (sum float64) {
	for _, v := range x {
		sum += math.Abs(float64(v))
	}
	return sum
}

// What a file's tensors cannot be is refused with the tensor's name.
func TestAdapterTensorRefusals(t *testing.T) {
	const a, b = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
	put := func(name string, v float32) func(map[string]safetensors.Tensor) {
		return func(all map[string]safetensors.Tensor) {
			binary.LittleEndian.PutUint32(all[name].Data[8:], math.Float32bits(v))
		}
	}
	for says, c := range map[string]struct {
		rank   int
		change func(map[string]safetensors.Tensor)
	}{
		"rank 8, adapter_config.json has 4 for it": {8, nil},
		"lora_A.weight: number 2 is NaN":           {4, put(a, float32(math.NaN()))},
		"lora_B.weight: number 2 is -Inf":          {4, put(b, float32(math.Inf(-1)))},
		"q_proj has lora_A without lora_B":         {4, func(all map[string]safetensors.Tensor) { delete(all, b) }},
		"q_proj has lora_B without lora_A":         {4, func(all map[string]safetensors.Tensor) { delete(all, a) }},
		"is no lora_A or lora_B": {4, func(all map[string]safetensors.Tensor) {
			all["base_model.model.model.embed_tokens.lora_embedding_A"] = all[a]
		}},
		"has no tensors": {4, func(all map[string]safetensors.Tensor) { clear(all) }},
	} {
		dir := writeAdapter(t, map[string]any{"r": 4}, map[string]int{"self_attn.q_proj": c.rank}, c.change)
		if _, err := OpenAdapter(dir); !errors.Is(err, ErrAdapter) || !strings.Contains(err.Error(), says) {
			t.Errorf("err = %v, want %q", err, says)
		}
	}
	m := withAdapters(t, cpu.Portable, 8)
	wide, err := OpenAdapter(writeAdapter(t, map[string]any{"r": 4}, map[string]int{"self_attn.q_proj": 4}, func(all map[string]safetensors.Tensor) {
		all[a] = safetensors.Tensor{DType: "F32", Shape: []int{4, 2}, Data: make([]byte, 32)}
	}))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.LoadAdapter(1, wide); !errors.Is(err, ErrAdapter) || !strings.Contains(err.Error(), "q_proj.weight is [") || !strings.Contains(err.Error(), ", 2] in the adapter") {
		t.Errorf("another width: %v", err)
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
		if c, err := parseAdapter(text); err == nil && (c.Rank < 1 || !json.Valid(text)) {
			t.Errorf("%s gives rank %d", text, c.Rank)
		}
	})
}
