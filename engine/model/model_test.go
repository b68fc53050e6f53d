package model

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// memoryCopy is a committed checkpoint as files in memory: its config, changed,
// and its tensors, changed, in one file.
func memoryCopy(t testing.TB, name string, config map[string]any, tensors func(map[string]safetensors.Tensor)) fstest.MapFS {
	t.Helper()
	dir := filepath.Join("testdata", name)
	text, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := safetensors.OpenFS(os.DirFS(dir))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]safetensors.Tensor{}
	for _, n := range c.Names() {
		all[n], _ = c.Tensor(n)
	}
	if tensors != nil {
		tensors(all)
	}
	return fstest.MapFS{
		"config.json":       {Data: withKeys(t, text, config)},
		"model.safetensors": {Data: encode(t, all)},
	}
}

// encode writes a safetensors file.
func encode(t testing.TB, all map[string]safetensors.Tensor) []byte {
	t.Helper()
	type entry struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	header, data := map[string]entry{}, []byte{}
	for _, n := range slices.Sorted(maps.Keys(all)) {
		header[n] = entry{all[n].DType, all[n].Shape, [2]int{len(data), len(data) + len(all[n].Data)}}
		data = append(data, all[n].Data...)
	}
	encoded, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(encoded))), encoded...)
	return append(file, data...)
}

// withKeys sets keys of a JSON object, or removes those whose value is absent.
func withKeys(t testing.TB, text []byte, keys map[string]any) []byte {
	t.Helper()
	all := map[string]any{}
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	for k, v := range keys {
		all[k] = v
		if v == absent {
			delete(all, k)
		}
	}
	out, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

var absent = new(struct{ _ int })

// tryLoad opens and loads files in memory.
func tryLoad(t testing.TB, files fstest.MapFS, o Options) (*Model, error) {
	t.Helper()
	src, err := OpenFS(files, "memory")
	if err != nil {
		return nil, err
	}
	dev, err := cpu.New(cpu.Options{Threads: 1, Limits: testLimits, Kernels: cpu.Portable})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(dev.Close(), src.Close()); err != nil {
			t.Error(err)
		}
	})
	return Load(src, dev, testLimits, o)
}

func TestLoadRefuses(t *testing.T) {
	type tensors = map[string]safetensors.Tensor
	for name, c := range map[string]struct {
		config map[string]any
		change func(tensors)
		says   []string
	}{
		"missing":    {nil, func(m tensors) { delete(m, "model.layers.1.mlp.up_proj.weight") }, []string{"model.layers.1.mlp.up_proj.weight is missing"}},
		"unexpected": {nil, func(m tensors) { m["model.layers.0.self_attn.q_proj.bias"] = m["model.norm.weight"] }, []string{"model.layers.0.self_attn.q_proj.bias is unexpected"}},
		"shape":      {map[string]any{"intermediate_size": 161}, nil, []string{"model.layers.0.mlp.gate_proj.weight: want shape [161 64], got [160 64]", "model.layers.1.mlp.down_proj.weight: want shape [64 161], got [64 160]"}},
		"layers":     {map[string]any{"num_hidden_layers": 3}, nil, []string{"model.layers.2.input_layernorm.weight is missing", "and 1 more"}},
		"fewer":      {map[string]any{"num_hidden_layers": 1}, nil, []string{"model.layers.1.input_layernorm.weight is unexpected"}},
		"untied":     {nil, func(m tensors) { delete(m, "lm_head.weight") }, []string{"lm_head.weight is missing"}},
		"dtype": {nil, func(m tensors) {
			x := m["model.norm.weight"]
			x.DType, x.Data = "I16", x.Data[:len(x.Data)/2]
			m["model.norm.weight"] = x
		}, []string{"model.norm.weight: dtype I16"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := tryLoad(t, memoryCopy(t, "mha", c.config, c.change), Options{})
			if !errors.Is(err, ErrWeights) {
				t.Fatalf("err = %v, want ErrWeights", err)
			}
			for _, says := range c.says {
				if !strings.Contains(err.Error(), says) {
					t.Errorf("err = %v, want %q", err, says)
				}
			}
		})
	}
	if _, err := tryLoad(t, fstest.MapFS{"config.json": memoryCopy(t, "mha", nil, nil)["config.json"]}, Options{}); !errors.Is(err, safetensors.ErrNoWeights) {
		t.Errorf("no weights: err = %v", err)
	}
}

// Tensors that are there for nothing do not stop a load.
func TestLoadIgnores(t *testing.T) {
	files := memoryCopy(t, "mha", nil, func(m map[string]safetensors.Tensor) {
		m["model.layers.0.self_attn.rotary_emb.inv_freq"] = m["model.norm.weight"]
	})
	if _, err := tryLoad(t, files, Options{}); err != nil {
		t.Error(err)
	}
	files = memoryCopy(t, "gqa-tied", nil, func(m map[string]safetensors.Tensor) { m["lm_head.weight"] = m["model.embed_tokens.weight"] })
	if _, err := tryLoad(t, files, Options{}); err != nil {
		t.Error(err)
	}
}

func TestLoadReportsProgress(t *testing.T) {
	var calls, last, total int64
	m, err := tryLoad(t, memoryCopy(t, "mha", nil, nil), Options{Progress: func(d, all int64) {
		if d <= last || d > all {
			t.Errorf("progress went from %d to %d of %d", last, d, all)
		}
		calls, last, total = calls+1, d, all
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := int64(4 * (2*256*64 + 64 + m.Config().Layers*(2*64+4*64*64+3*64*160)))
	if calls != 21 || last != total || total != want {
		t.Errorf("%d calls up to %d of %d bytes, want 21 up to %d", calls, last, total, want)
	}
}

// A step reports each layer, in order, and a step without outputs is allowed.
func TestStepMarks(t *testing.T) {
	m := load(t, openCheckpoint(t, "gqa-tied"), cpu.Portable, nil)
	var marks []int
	step := &backend.Step{Tokens: []int32{5, 6, 7}, Positions: []int32{0, 1, 2},
		Spans: []backend.Span{{Tokens: 3, Tables: [][]int32{{1}}}}}
	for range 2 { // recorded, then repeated
		marks = marks[:0]
		if err := m.Step(step, func(layer int) { marks = append(marks, layer) }); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(marks, []int{0, 1, 2}) {
			t.Errorf("marks = %v, want one per layer in order", marks)
		}
	}
	step.Tokens = make([]int32, testLimits.Tokens+1)
	if err := m.Step(step, nil); !errors.Is(err, backend.ErrShape) {
		t.Errorf("a step above the limits: err = %v", err)
	}
}

func TestStepDoesNotAllocate(t *testing.T) {
	m := load(t, openCheckpoint(t, "mha"), cpu.Portable, nil)
	step := &backend.Step{Tokens: []int32{5}, Positions: []int32{0},
		Spans:   []backend.Span{{Tokens: 1, Tables: [][]int32{{1}}}},
		Outputs: []backend.Output{{Position: 1}}, Sampled: make([]int32, 1)}
	run := func() {
		if err := m.Step(step, nil); err != nil {
			t.Fatal(err)
		}
	}
	run()
	if n := testing.AllocsPerRun(20, run); n != 0 {
		t.Errorf("%v allocations per step", n)
	}
}

// recorder counts the plans that a model asks for.
type recorder struct {
	backend.Backend
	keys map[backend.Key]bool
}

func (r *recorder) Replay(key backend.Key, step *backend.Step, _ func(), _ func(int)) error {
	if key.Tokens < len(step.Tokens) || key.Outputs < len(step.Outputs) {
		return backend.ErrShape
	}
	r.keys[key] = true
	return nil
}

func TestStepBuckets(t *testing.T) {
	r := &recorder{keys: map[backend.Key]bool{}}
	m := load(t, openCheckpoint(t, "mha"), cpu.Portable, func(b backend.Backend) backend.Backend { r.Backend = b; return r })
	for n := 1; n <= testLimits.Tokens; n++ {
		for o := range testLimits.Outputs + 1 {
			if err := m.Step(&backend.Step{Tokens: make([]int32, n), Outputs: make([]backend.Output, o)}, nil); err != nil {
				t.Fatalf("%d tokens, %d outputs: %v", n, o, err)
			}
		}
	}
	if len(r.keys) != 12*5 { // tokens 1 2 4 8 16 24 32 48 64 96 128 160, outputs 0 1 2 4 8
		t.Errorf("%d plans: %v", len(r.keys), r.keys)
	}
	for key := range r.keys {
		if key.Tokens > testLimits.Tokens || key.Outputs > testLimits.Outputs {
			t.Errorf("plan %+v is above the limits", key)
		}
	}
}

// StepBytes is what Load allocates.
func TestStepBytes(t *testing.T) {
	c := openCheckpoint(t, "headdim").Config
	both := 3*96 + 128 + 2*192  // x, normed and delta; attn; gate and up
	tokens := both + 128 + 2*64 // q; k and v
	if got, want := c.StepBytes(backend.Limits{Tokens: 100, Outputs: 3}), int64(4*(100*tokens+3*(both+320))); got != want {
		t.Errorf("StepBytes = %d, want %d", got, want)
	}
}

// fingerprints010 are those that version 0.1.0 computes.
var fingerprints010 = map[string]uint64{
	"deepseek":          0x82fca0ec2ecfb475,
	"deepseek-fp8":      0x46e312d80d6c8a97,
	"deepseek-plain":    0xfc857ad9c80f43c1,
	"gemma4-moe":        0x9c66170ee3eb2647,
	"gemma4-multimodal": 0x4502fd2b353271d2,
	"gemma4-ple":        0xc06c9f1c1e1418f6,
	"gpt-oss":           0x97f404ddc1f650a9,
	"gpt-oss-mxfp4":     0x0879599c1ac02f38,
	"gqa-tied":          0xd7fb3ff6c6062814,
	"headdim":           0x54bb3343996b3b1a,
	"mha":               0x6c5c88fe8a99422f,
	"mistral-full":      0xfea604475a115e77,
	"mistral-window":    0xa84e09e00e233d04,
	"qwen3":             0xe49394d73193cb53,
	"qwen3-moe":         0x190f0eb8744e373f,
	"qwen3-moe-plain":   0x57808d5f34c9f9b7,
}

// Nodes of version 0.1.0 and of this one serve one model: an upgrade moves streams between them.
func TestFingerprintsOfVersionBefore(t *testing.T) {
	for name, want := range fingerprints010 {
		if got, err := openCheckpoint(t, name).Fingerprint(); err != nil || got != want {
			t.Errorf("%s has fingerprint %016x, %v; 0.1.0 computes %016x", name, got, err, want)
		}
	}
}

func TestFingerprint(t *testing.T) {
	of := func(files fstest.MapFS) uint64 {
		t.Helper()
		src, err := OpenFS(files, "memory")
		if err != nil {
			t.Fatal(err)
		}
		f, err := src.Fingerprint()
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	base, err := openCheckpoint(t, "headdim").Fingerprint()
	if err != nil {
		t.Fatal(err)
	}
	newSpelling := map[string]any{
		"rope_theta": absent, "rope_scaling": absent, "torch_dtype": absent, "dtype": "bfloat16", "transformers_version": "x",
		"rope_parameters": map[string]any{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
			"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
	}
	if got := of(memoryCopy(t, "headdim", newSpelling, nil)); got != base {
		t.Errorf("one file and the other spelling of the config: %x, shards and the old one %x", got, base)
	}
	seen := map[uint64]string{base: "base"}
	note := func(what string, f uint64) {
		if before, ok := seen[f]; ok {
			t.Errorf("%s and %s share a fingerprint", what, before)
		}
		seen[f] = what
	}
	note("another theta", of(memoryCopy(t, "headdim", map[string]any{"rope_theta": 500001.0}, nil)))
	note("another epsilon", of(memoryCopy(t, "headdim", map[string]any{"rms_norm_eps": 1.1e-5}, nil)))
	for _, name := range []string{"model.norm.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"} {
		note("one bit of "+name, of(memoryCopy(t, "headdim", nil, func(m map[string]safetensors.Tensor) {
			x := m[name]
			x.Data = slices.Clone(x.Data)
			x.Data[len(x.Data)/2] ^= 1
			m[name] = x
		})))
	}
	note("two tensors exchanged", of(memoryCopy(t, "headdim", nil, func(m map[string]safetensors.Tensor) {
		a, b := "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
		m[a], m[b] = m[b], m[a]
	})))
}

// A layer without experts, an expert without a matrix: by name.
func TestLoadExperts(t *testing.T) {
	_, err := tryLoad(t, memoryCopy(t, "qwen3-moe", nil, func(m map[string]safetensors.Tensor) {
		delete(m, "model.layers.2.mlp.experts.7.up_proj.weight")
	}), Options{})
	if !errors.Is(err, ErrWeights) || !strings.Contains(err.Error(), "model.layers.2.mlp.experts.7.up_proj.weight is missing") {
		t.Errorf("err = %v", err)
	}
	_, err = tryLoad(t, memoryCopy(t, "qwen3-moe", map[string]any{"mlp_only_layers": []int{}}, nil), Options{})
	if !errors.Is(err, ErrWeights) || !strings.Contains(err.Error(), "model.layers.1.mlp.gate.weight is missing") {
		t.Errorf("err = %v", err)
	}
	base, err := openCheckpoint(t, "qwen3-moe").Fingerprint()
	if err != nil {
		t.Fatal(err)
	}
	src, err := OpenFS(memoryCopy(t, "qwen3-moe", map[string]any{"norm_topk_prob": false}, nil), "memory")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := src.Fingerprint(); err != nil || got == base {
		t.Errorf("another normalisation has fingerprint %x, %v; the same as without", got, err)
	}
}

func TestDigestSamples(t *testing.T) {
	data := make([]byte, 3_000_001)
	base := digest(data, false)
	for _, at := range []int{0, len(data) - 1, (len(data) - pageBytes) / (sampledPages - 1) * 7} {
		data[at] ^= 1
		if digest(data, false) == base {
			t.Errorf("a change at %d is not seen", at)
		}
		data[at] ^= 1
	}
	if digest(data[:len(data)-1], false) == base {
		t.Error("the length is not seen")
	}
	data[pageBytes] ^= 1 // between two sampled pages
	if digest(data, false) != base || digest(data, true) == digest(make([]byte, len(data)), true) {
		t.Error("a whole digest must see every byte, a sampled one need not")
	}
}
