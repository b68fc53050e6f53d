package model

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	plan "github.com/tandem-serving/tandem/engine/memory"
)

// tolerance is how far a float32 logit may be from that of transformers.
const tolerance = 1e-4

const blockTokens = 16

// checkpoints are the folders that testdata/make_goldens.py made.
var checkpoints = []string{"mha", "gqa-tied", "headdim", "mistral-window", "mistral-full", "qwen3", "qwen3-moe", "qwen3-moe-plain", "gpt-oss", "gpt-oss-mxfp4", "gemma4-moe", "gemma4-ple", "deepseek", "deepseek-plain", "deepseek-fp8", "gemma4-multimodal"}

// llamas are those of checkpoints whose network is Llama's.
var llamas = []string{"mha", "gqa-tied", "headdim", "mistral-window", "mistral-full"}

// goldens are what transformers computed for one of them.
type goldens struct {
	Cases []golden   `json:"cases"`
	Texts []struct { // of files with a tokenizer
		Text string
		IDs  []int32
	} `json:"texts"`
}

type golden struct {
	Prompt    []int32     `json:"prompt"`
	Positions []int       `json:"positions"` // whose logits were kept
	Logits    [][]float32 `json:"logits"`
	Greedy    []int32     `json:"greedy"`
	Gaps      []float64   `json:"gaps"` // best logit less the second, per greedy token
}

func readGoldens(t testing.TB, name string) goldens {
	t.Helper()
	g := readGoldensOf(t, name)
	if len(g.Cases) < 9 {
		t.Fatalf("%s: %d goldens", name, len(g.Cases))
	}
	return g
}

func readGoldensOf(t testing.TB, name string) goldens {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name, "goldens.json.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var g goldens
	if err := json.NewDecoder(z).Decode(&g); err != nil {
		t.Fatal(err)
	}
	return g
}

func openCheckpoint(t testing.TB, name string) *Source {
	t.Helper()
	src, err := OpenDir(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := src.Close(); err != nil {
			t.Error(err)
		}
	})
	return src
}

var testLimits = backend.Limits{Tokens: 160, Outputs: 8, Seqs: 4, Blocks: 16}

// load loads a checkpoint on a CPU backend; wrap, when set, may stand between.
func load(t testing.TB, src *Source, kernels string, wrap func(backend.Backend) backend.Backend) *Model {
	t.Helper()
	return loadOn(t, src, cpu.Options{Threads: 1, Limits: testLimits, Kernels: kernels, Mapped: true}, wrap)
}

// loadBare loads a checkpoint on a CPU backend, with nothing between.
func loadBare(t testing.TB, src *Source, o cpu.Options) *Model {
	t.Helper()
	return loadOn(t, src, o, nil)
}

func loadOn(t testing.TB, src *Source, o cpu.Options, wrap func(backend.Backend) backend.Backend) *Model {
	t.Helper()
	dev, err := cpu.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	var b backend.Backend = dev
	if wrap != nil {
		b = wrap(dev)
	}
	m, err := Load(src, b, o.Limits, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.AllocKV(kvWithin(&m.config, o.Limits)); err != nil {
		t.Fatal(err)
	}
	return m
}

// testKV is the store of a model within testLimits.
func testKV(c *Config) backend.KVSpec { return kvWithin(c, testLimits) }

// kvWithin is the store of a model, with twice the blocks that a sequence of the
// longest table takes.
func kvWithin(c *Config, limits backend.Limits) backend.KVSpec {
	kv := plan.Arrange(plan.Need{
		Layers: c.KVLayers(), BlockTokens: blockTokens, DType: backend.F32,
		MaxModelLen: limits.Blocks * blockTokens, MaxBatchedTokens: limits.Tokens, StateTokens: 4 * blockTokens,
	})
	kv.Blocks = 2 * limits.Blocks * len(kv.Groups)
	return kv
}

// sequence feeds one sequence to a model through a block table of its own.
type sequence struct {
	m      *Model
	tokens []int32
	done   int // tokens whose KV is stored
	groups []backend.KVGroup
	tables [][]int32      // per group, in no order, so that a table that is not read shows
	sum    *xxhash.Digest // of all logits seen, when set
}

func newSequence(m *Model, prompt []int32, seed uint64) *sequence {
	return newSequenceWithin(m, testLimits, prompt, seed)
}

func newSequenceWithin(m *Model, limits backend.Limits, prompt []int32, seed uint64) *sequence {
	kv := kvWithin(&m.config, limits)
	s := &sequence{m: m, tokens: slices.Clone(prompt), groups: kv.Groups}
	perm := rand.New(rand.NewPCG(seed, 7)).Perm(kv.Blocks)
	for range kv.Groups {
		var table []int32
		for _, b := range perm[:limits.Blocks] {
			table = append(table, int32(b))
		}
		s.tables, perm = append(s.tables, table), perm[limits.Blocks:]
	}
	return s
}

// step computes the next n tokens, and returns the logits and the greedy tokens
// of those positions among want that are in this step.
func (s *sequence) step(t testing.TB, n int, want []int) (logits [][]float32, sampled []int32) {
	t.Helper()
	span := backend.Span{Tokens: int32(n), Start: int32(s.done)}
	for g, spec := range s.groups {
		if spec.Window > 0 { // what fell out of the window is gone
			for place := range max(0, s.done-spec.Window+1) / spec.BlockTokens {
				s.tables[g][place] = -1
			}
		}
		span.Tables = append(span.Tables, s.tables[g][:(s.done+n+spec.BlockTokens-1)/spec.BlockTokens])
	}
	step := &backend.Step{Spans: []backend.Span{span}}
	for p := s.done; p < s.done+n; p++ {
		step.Tokens = append(step.Tokens, s.tokens[p])
		step.Positions = append(step.Positions, int32(p))
	}
	for _, p := range want {
		if p >= s.done && p < s.done+n {
			step.Outputs = append(step.Outputs, backend.Output{Row: int32(p - s.done), Position: int32(p + 1)})
		}
	}
	step.Sampled = make([]int32, len(step.Outputs))
	if err := s.m.Step(step, nil); err != nil {
		t.Fatal(err)
	}
	s.done += n
	vocab := s.m.VocabSize()
	flat := s.m.backend.Download(make([]float32, len(step.Outputs)*vocab), s.m.Logits())
	for _, v := range flat {
		if s.sum != nil {
			_, _ = s.sum.Write(binary.LittleEndian.AppendUint32(nil, math.Float32bits(v)))
		}
	}
	for i := range step.Outputs {
		logits = append(logits, flat[i*vocab:(i+1)*vocab])
	}
	return logits, step.Sampled
}

// compare runs a golden's prompt in chunks and returns the worst error of a
// logit and the sampled token after the prompt.
func (s *sequence) compare(t testing.TB, g *golden, chunks func() int) (worst float64, next int32) {
	t.Helper()
	for s.done < len(g.Prompt) {
		first := slices.IndexFunc(g.Positions, func(p int) bool { return p >= s.done })
		logits, sampled := s.step(t, min(chunks(), len(g.Prompt)-s.done), g.Positions)
		for i, row := range logits {
			for j, v := range row {
				worst = max(worst, math.Abs(float64(v)-float64(g.Logits[first+i][j])))
				if v != v {
					worst = math.Inf(1)
				}
			}
			next = sampled[i]
		}
	}
	return worst, next
}

// rounds is how often a seeded test runs: once, or longer with TANDEM_SOAK=1.
func rounds(t testing.TB) uint64 {
	t.Helper()
	if os.Getenv("TANDEM_SOAK") == "1" {
		return 20
	}
	return 1
}

// chunkings are the ways a prompt is cut.
func chunkings(seed uint64) map[string]func() int {
	r := rand.New(rand.NewPCG(seed, 3))
	return map[string]func() int{
		"whole":  func() int { return testLimits.Tokens },
		"blocks": func() int { return blockTokens },
		"random": func() int { return 1 + r.IntN(40) },
		"single": func() int { return 1 },
	}
}

// kernelsToTest returns all but those that differ only in products with quantized weights. A build
// with C kernels leaves the portable ones to the build without, where they are the only ones: the
// step portable of make test. Short tests have the fastest one, with which package cpu compares the
// others.
func kernelsToTest() []string {
	variants := cpu.Variants()
	all := slices.DeleteFunc(slices.Clone(variants), func(v string) bool {
		return strings.HasSuffix(v, "vnni") || v == cpu.Portable && len(variants) > 1
	})
	if testing.Short() {
		return all[:1]
	}
	return all
}

// The forward pass is that of transformers: logits, and greedy tokens wherever
// the two best logits are further apart than the error may be.
func TestGoldens(t *testing.T) {
	for _, name := range checkpoints {
		src, want := openCheckpoint(t, name), readGoldens(t, name)
		for _, kernels := range kernelsToTest() {
			m := load(t, src, kernels, nil)
			for seed := range rounds(t) {
				sums := map[uint64]string{} // of all logits' bits, and how they were computed
				for how, chunks := range chunkings(seed) {
					t.Run(fmt.Sprintf("%s/%s/%s", name, kernels, how), func(t *testing.T) {
						worst, compared, sum := 0.0, 0, xxhash.New()
						for i := range want.Cases {
							g := &want.Cases[i]
							s := newSequence(m, g.Prompt, seed+uint64(i))
							s.sum = sum
							off, next := s.compare(t, g, chunks)
							worst = max(worst, off)
							compared += s.greedy(t, g, next)
						}
						t.Logf("worst error of a logit %.2g, %d greedy tokens compared", worst, compared)
						if worst > tolerance {
							t.Errorf("seed %d: a logit is off by %g, at most %g is allowed", seed, worst, tolerance)
						}
						if all := len(want.Cases) * len(want.Cases[0].Greedy); compared < all*9/10 {
							t.Errorf("only %d of %d greedy tokens were far enough apart to compare", compared, all)
						}
						sums[sum.Sum64()] = how
						if len(sums) > 1 {
							t.Errorf("seed %d: the bits of the logits depend on how prompts are cut: %v", seed, sums)
						}
					})
				}
			}
		}
	}
}

// greedy continues after the prompt, one token a step, and counts the tokens
// compared: up to the first whose gap could be closed by the allowed error.
func (s *sequence) greedy(t testing.TB, g *golden, next int32) int {
	t.Helper()
	for i, want := range g.Greedy {
		if g.Gaps[i] <= 2*tolerance {
			return i
		}
		if next != want {
			t.Errorf("prompt of %d: greedy token %d is %d, transformers says %d (gap %g)", len(g.Prompt), i, next, want, g.Gaps[i])
			return i
		}
		s.tokens = append(s.tokens, next)
		_, sampled := s.step(t, 1, []int{len(s.tokens) - 1})
		next = sampled[0]
	}
	return len(g.Greedy)
}

// noLastNorm is a backend that hands the output projection the residual stream
// as it was before the last norm.
type noLastNorm struct {
	backend.Backend
	net *decoder
}

func (b *noLastNorm) Linear(dst, x backend.Buf, w, bias backend.Weight) {
	if dst == b.net.scores {
		x = b.net.outputs.x
	}
	b.Backend.Linear(dst, x, w, bias)
}

// dropHeadNorm is a backend without the norm of query heads, or of key heads.
type dropHeadNorm struct {
	backend.Backend
	drop, calls int
}

func (b *dropHeadNorm) HeadNorm(dst, x backend.Buf, heads, headDim int, w backend.Weight, eps float32) {
	if b.calls++; (b.calls-1)%2 != b.drop {
		b.Backend.HeadNorm(dst, x, heads, headDim, w, eps)
	}
}

// dropping is a backend that leaves out what its functions take away.
type dropping struct {
	backend.Backend
	attention func(*backend.AttentionSpec)
	moe       func(*backend.MoESpec)
	bias      bool // of every product
	scalars   bool // of layers
	softcap   bool
	scale     bool // by constants
	post      bool // norms in place: behind attention and MLPs
	values    bool // norms without a weight
	shared    bool // sums of two buffers
}

func (b *dropping) Add(x, add backend.Buf, scale backend.Weight) {
	if b.scalars {
		scale = backend.NoWeight
	}
	if b.shared {
		return
	}
	b.Backend.Add(x, add, scale)
}

func (b *dropping) Softcap(x backend.Buf, limit float32) {
	if !b.softcap {
		b.Backend.Softcap(x, limit)
	}
}

func (b *dropping) Scale(x backend.Buf, by float32) {
	if !b.scale {
		b.Backend.Scale(x, by)
	}
}

func (b *dropping) RMSNorm(dst, x backend.Buf, w backend.Weight, eps float32) {
	if !b.post || dst != x {
		b.Backend.RMSNorm(dst, x, w, eps)
	}
}

func (b *dropping) HeadNorm(dst, x backend.Buf, heads, headDim int, w backend.Weight, eps float32) {
	if !b.values || w != backend.NoWeight || dst != x {
		b.Backend.HeadNorm(dst, x, heads, headDim, w, eps)
	}
}

func (b *dropping) Attention(dst, q backend.Buf, a backend.AttentionSpec) {
	if b.attention != nil {
		b.attention(&a)
	}
	b.Backend.Attention(dst, q, a)
}

func (b *dropping) MoE(dst, x, router backend.Buf, m backend.MoESpec) {
	if b.moe != nil {
		b.moe(&m)
	}
	b.Backend.MoE(dst, x, router, m)
}

func (b *dropping) Linear(dst, x backend.Buf, w, bias backend.Weight) {
	if b.bias {
		bias = backend.NoWeight
	}
	b.Backend.Linear(dst, x, w, bias)
}

// The comparison above sees what it is there to see: each fault, alone, moves
// some logit far beyond the tolerance.
func TestGoldensSeeFaults(t *testing.T) {
	worstOf := func(t *testing.T, name string, m *Model) float64 {
		worst, want := 0.0, readGoldens(t, name)
		for i := range want.Cases {
			g := &want.Cases[i]
			off, _ := newSequence(m, g.Prompt, 1).compare(t, g, func() int { return testLimits.Tokens })
			worst = max(worst, off)
		}
		return worst
	}
	config := func(change func(c *Config)) func(*testing.T, *Source) *Model {
		return func(t *testing.T, src *Source) *Model {
			change(&src.Config)
			return load(t, src, cpu.Variants()[0], nil)
		}
	}
	without := func(call int) func(*testing.T, *Source) *Model { // of the two head norms of a layer
		return func(t *testing.T, src *Source) *Model {
			return load(t, src, cpu.Variants()[0], func(b backend.Backend) backend.Backend { return &dropHeadNorm{Backend: b, drop: call} })
		}
	}
	drop := func(d dropping) func(*testing.T, *Source) *Model {
		return func(t *testing.T, src *Source) *Model {
			return load(t, src, cpu.Variants()[0], func(b backend.Backend) backend.Backend { d.Backend = b; return &d })
		}
	}
	oss, gemma := []string{"gpt-oss", "gpt-oss-mxfp4"}, []string{"gemma4-moe", "gemma4-ple"}
	deepseeks := []string{"deepseek", "deepseek-plain"}
	sigmoid := func(change func(s *backend.SigmoidRouter)) func(*testing.T, *Source) *Model {
		return drop(dropping{moe: func(m *backend.MoESpec) {
			s := *m.Sigmoid
			change(&s)
			m.Sigmoid = &s
		}})
	}
	faults := map[string]struct {
		names []string
		load  func(t *testing.T, src *Source) *Model
	}{
		"no rope scaling":               {[]string{"gqa-tied", "headdim"}, config(func(c *Config) { c.Rope.Type = "default" })},
		"another scaling range":         {[]string{"gqa-tied", "headdim"}, config(func(c *Config) { c.Rope.HighFreq *= 2 })},
		"another theta":                 {checkpoints, config(func(c *Config) { c.Rope.Theta *= 1.01 })},
		"another epsilon":               {checkpoints, config(func(c *Config) { c.Eps = 1e-3 })},
		"no window":                     {[]string{"mistral-window"}, config(func(c *Config) { c.Window = 0 })},
		"a window of one more":          {[]string{"mistral-window"}, config(func(c *Config) { c.Window++ })},
		"a window where none is":        {[]string{"mistral-full", "qwen3"}, config(func(c *Config) { c.Window = 100 })},
		"router weights not normalised": {[]string{"qwen3-moe"}, config(func(c *Config) { c.MoE.Normalize = false })},
		"router weights normalised":     {[]string{"qwen3-moe-plain"}, config(func(c *Config) { c.MoE.Normalize = true })},
		"an expert fewer":               {[]string{"qwen3-moe", "qwen3-moe-plain"}, config(func(c *Config) { c.MoE.TopK-- })},
		"no norm of query heads":        {[]string{"qwen3", "qwen3-moe"}, without(0)},
		"no norm of key heads":          {[]string{"qwen3", "qwen3-moe"}, without(1)},
		"no layer scalars":              {gemma, drop(dropping{scalars: true})},
		"no softcap":                    {gemma, drop(dropping{softcap: true})},
		"no constant factors":           {gemma, drop(dropping{scale: true})},
		"no norms behind":               {gemma, drop(dropping{post: true})},
		"no norms of values":            {gemma, drop(dropping{values: true})},
		"scaled scores":                 {gemma, drop(dropping{attention: func(a *backend.AttentionSpec) { a.Scale = 0.25 }})},
		"no scale per expert":           {gemma[:1], drop(dropping{moe: func(m *backend.MoESpec) { m.Scale = nil }})},
		"experts with SiLU":             {gemma[:1], drop(dropping{moe: func(m *backend.MoESpec) { m.Act = backend.SiLU }})},
		"windows of one fewer":          {gemma, config(func(c *Config) { c.Window-- })},
		"full heads all turn":           {gemma, config(func(c *Config) { c.Gemma4.FullRope.Partial = 1 })},
		"another theta in full":         {gemma, config(func(c *Config) { c.Gemma4.FullRope.Theta *= 2 })},
		"shared by the one before": {gemma[1:], drop(dropping{attention: func(a *backend.AttentionSpec) {
			if a.Layer == 1 {
				a.Layer = 0
			}
		}})},
		"no norms of waist and latent": {deepseeks, drop(dropping{post: true})},
		"no factor on experts":         {deepseeks, sigmoid(func(s *backend.SigmoidRouter) { s.Factor = 1 })},
		"experts of all groups":        {deepseeks, sigmoid(func(s *backend.SigmoidRouter) { s.Keep = s.Groups })},
		"experts in other groups":      {deepseeks, sigmoid(func(s *backend.SigmoidRouter) { s.Groups, s.Keep = 2, 1 })},
		"another normalisation":        {deepseeks, config(func(c *Config) { c.MoE.Normalize = !c.MoE.Normalize })},
		"pairs that turn otherwise":    {deepseeks, config(func(c *Config) { c.Latent.Interleaved = !c.Latent.Interleaved })},
		"scores less sharp":            {deepseeks, drop(dropping{attention: func(a *backend.AttentionSpec) { a.Scale *= 0.9 }})},
		"no factor on scores":          {deepseeks[:1], drop(dropping{attention: func(a *backend.AttentionSpec) { a.Scale = float32(1 / math.Sqrt(24)) }})},
		"no quotient on cosines":       {deepseeks[:1], config(func(c *Config) { c.Rope.Attention = 1 })},
		"no stretch of a latent's key": {deepseeks[:1], config(func(c *Config) { c.Rope.Factor = 1 })},
		"no shared experts":            {deepseeks, drop(dropping{shared: true})},
		"no bias of the choice": {deepseeks, func(t *testing.T, src *Source) *Model {
			m := load(t, src, cpu.Variants()[0], nil)
			none, err := m.backend.Load(backend.Tensor{Name: "zeros", DType: backend.F32, Shape: []int{src.Config.MoE.Experts}, Data: make([]byte, 4*src.Config.MoE.Experts)})
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range m.net.(*decoder).Layers {
				if l.MoE != nil {
					l.MoE.Choice.Bias = none
				}
			}
			return m
		}},
		"no scale of the router": {gemma[:1], func(t *testing.T, src *Source) *Model {
			m := load(t, src, cpu.Variants()[0], nil)
			for _, l := range m.net.(*gemma4).layers {
				l.MoE.Scale = ones(t, m, src.Config.Hidden)
			}
			return m
		}},
		"no sinks":             {oss, drop(dropping{attention: func(a *backend.AttentionSpec) { a.Sinks = nil }})},
		"no biases":            {oss, drop(dropping{bias: true})},
		"no biases of experts": {oss, drop(dropping{moe: func(m *backend.MoESpec) { m.GateBias, m.UpBias, m.DownBias = nil, nil, nil }})},
		"gate and up swapped":  {oss, drop(dropping{moe: func(m *backend.MoESpec) { m.Gate, m.Up = m.Up, m.Gate }})},
		"another activation":   {oss, drop(dropping{moe: func(m *backend.MoESpec) { m.Act = backend.SiLU }})},
		"weights over all":     {oss, drop(dropping{moe: func(m *backend.MoESpec) { m.Normalize = false }})},
		"windows everywhere":   {oss, config(func(c *Config) { c.FullLayers = nil })},
		"windows nowhere":      {oss, config(func(c *Config) { c.Window = 0 })},
		"windows of one more":  {oss, config(func(c *Config) { c.Window++ })},
		"layers change places": {oss, config(func(c *Config) { c.FullLayers[0], c.FullLayers[1] = true, false })},
		"ramp at whole pairs":  {oss, config(func(c *Config) { c.Rope.Whole = true })},
		"no factor on cosines": {oss, config(func(c *Config) { c.Rope.Attention = 1 })},
		"no stretch":           {oss, config(func(c *Config) { c.Rope.Factor = 1 })},
		"experts swapped": {[]string{"qwen3-moe"}, func(t *testing.T, src *Source) *Model {
			m := load(t, src, cpu.Variants()[0], nil)
			e := m.net.(*decoder).Layers[0].MoE.Experts
			e[0], e[1] = e[1], e[0]
			return m
		}},
		"no last norm": {llamas, func(t *testing.T, src *Source) *Model {
			a := &noLastNorm{}
			m := load(t, src, cpu.Variants()[0], func(b backend.Backend) backend.Backend { a.Backend = b; return a })
			a.net = m.net.(*decoder)
			return m
		}},
		"last norm without weight": {llamas, func(t *testing.T, src *Source) *Model {
			m := load(t, src, cpu.Variants()[0], nil)
			m.net.(*decoder).Norm = ones(t, m, src.Config.Hidden)
			return m
		}},
		"layers swapped": {llamas, func(t *testing.T, src *Source) *Model {
			m := load(t, src, cpu.Variants()[0], nil)
			layers := m.net.(*decoder).Layers
			layers[0].MLP.Down, layers[1].MLP.Down = layers[1].MLP.Down, layers[0].MLP.Down
			return m
		}},
	}
	for fault, f := range faults {
		for _, name := range f.names {
			t.Run(fault+"/"+name, func(t *testing.T) {
				worst := worstOf(t, name, f.load(t, openCheckpoint(t, name)))
				t.Logf("worst error of a logit %.2g", worst)
				if !(worst > 10*tolerance) {
					t.Errorf("the comparison does not see it: worst error %g", worst)
				}
			})
		}
	}
}

// ones is a weight that changes nothing.
func ones(t *testing.T, m *Model, n int) backend.Weight {
	t.Helper()
	w, err := m.backend.Load(backend.Tensor{Name: "ones", DType: backend.F32, Shape: []int{n}, Data: bytes.Repeat([]byte{0, 0, 0x80, 0x3f}, n)})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// dropNorm is a backend without the norm of one call of a forward pass: what reads
// it gets what went in.
type dropNorm struct {
	backend.Backend
	drop, calls int
	raw         map[backend.Buf]backend.Buf // what to read instead
}

// norm counts a call that norms x into dst, and says whether it is the one.
func (b *dropNorm) norm(dst, x backend.Buf) bool {
	b.calls++
	delete(b.raw, dst)
	if b.calls-1 != b.drop {
		return false
	}
	if dst != x {
		b.raw[dst] = x
	}
	return true
}

func (b *dropNorm) from(x backend.Buf) backend.Buf {
	if raw, ok := b.raw[x]; ok {
		return raw
	}
	return x
}

func (b *dropNorm) RMSNorm(dst, x backend.Buf, w backend.Weight, eps float32) {
	if !b.norm(dst, x) {
		b.Backend.RMSNorm(dst, x, w, eps)
	}
}

func (b *dropNorm) AddRMSNorm(dst, x, add backend.Buf, w backend.Weight, eps float32) {
	b.norm(dst, x)
	b.Backend.AddRMSNorm(dst, x, add, w, eps)
}

func (b *dropNorm) HeadNorm(dst, x backend.Buf, heads, headDim int, w backend.Weight, eps float32) {
	if dst != x || !b.norm(dst, x) { // keys that are values too keep theirs
		b.Backend.HeadNorm(dst, x, heads, headDim, w, eps)
	}
}

func (b *dropNorm) Linear(dst, x backend.Buf, w, bias backend.Weight) {
	b.Backend.Linear(dst, b.from(x), w, bias)
}

func (b *dropNorm) MoE(dst, x, router backend.Buf, m backend.MoESpec) {
	b.Backend.MoE(dst, b.from(x), router, m)
}

// Every norm of every architecture is missed when it is left out.
func TestGoldensSeeEachNorm(t *testing.T) {
	for _, name := range checkpoints {
		src, g := openCheckpoint(t, name), readGoldens(t, name).Cases[3]
		least, norms := math.Inf(1), 1
		for drop := 0; drop < norms; drop++ {
			b := &dropNorm{drop: drop, raw: map[backend.Buf]backend.Buf{}}
			m := load(t, src, cpu.Variants()[0], func(dev backend.Backend) backend.Backend { b.Backend = dev; return b })
			off, _ := newSequence(m, g.Prompt, 1).compare(t, &g, func() int { return testLimits.Tokens })
			least, norms = min(least, off), b.calls
			if !(off > 10*tolerance) {
				t.Errorf("%s: nobody misses norm %d of %d: worst error %g", name, drop, norms, off)
			}
		}
		t.Logf("%s: without one of %d norms some logit is off by %.2g at least", name, norms, least)
		if norms < 2*src.Config.Layers {
			t.Errorf("%s: only %d norms in %d layers", name, norms, src.Config.Layers)
		}
	}
}

// TestGoldens also holds the bits of one chunking against another's. This is
// that check with a reduction that depends on the rows of a step.
func TestChunkBitsSeeFaults(t *testing.T) {
	src, want := openCheckpoint(t, "mha"), readGoldens(t, "mha")
	for _, fault := range []bool{false, true} {
		m := loadOn(t, src, cpu.Options{Threads: 1, Limits: testLimits, Kernels: cpu.Portable, FaultBatchOrder: fault}, nil)
		sums := map[uint64]bool{}
		for _, chunk := range []int{1, testLimits.Tokens} {
			sum := xxhash.New()
			for i := range want.Cases {
				s := newSequence(m, want.Cases[i].Prompt, 1)
				s.sum = sum
				s.compare(t, &want.Cases[i], func() int { return chunk })
			}
			sums[sum.Sum64()] = true
		}
		if (len(sums) > 1) != fault {
			t.Errorf("batch-dependent reduction %v: %d different results", fault, len(sums))
		}
	}
}
