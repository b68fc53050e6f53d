package model

import (
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// familyLimits are the limits of steps that take a family's longest prompt whole.
var familyLimits = backend.Limits{Tokens: 608, Outputs: 8, Seqs: 4, Blocks: 40}

// families are the checkpoints of FAMILIES in testdata/make_goldens.py, with the features that
// each has. A feature switched off moves logits far beyond the tolerance.
var families = map[string][]string{
	"qwen2":             {"biases of queries", "window", "windows everywhere", "stretch"},
	"mixtral":           {"window", "normalised experts"},
	"ministral":         {"window", "windows everywhere", "stretch"},
	"llama-dynamic":     {"biases of queries", "output bias", "biases of the MLP", "long context"},
	"gemma":             {"1 + weight", "GELU", "embedding scale"},
	"deepseek-v2":       {"shared experts", "factor of experts", "stretch", "experts of all groups", "sharper scores"},
	"deepseek-v2-lite":  {"shared experts", "factor of experts", "neighbours of latents"},
	"gemma3-multimodal": {"rotation of windows", "window"},
	"mistral3":          {},
	"qwen2.5-vl":        {"biases of queries"},
	"qwen3-vl":          {},
	"qwen3-next":        {"1 + weight", "rotating part", "shared experts", "normalised experts"},
	"qwen3.5":           {"1 + weight", "rotating part"},
	"qwen3.5-moe":       {"1 + weight", "rotating part", "shared experts", "normalised experts"},
	"gemma2":            {"1 + weight", "GELU", "embedding scale", "attention scale", "softcap of scores", "softcap of logits", "window", "windows everywhere"},
	"ministral3":        {"growth of queries", "stretch"},
	"gemma3":            {"1 + weight", "GELU", "embedding scale", "attention scale", "softcap of logits", "window", "windows everywhere", "rotation of windows", "stretch"},
	"olmo2":             {},
	"phi3":              {"window", "long context", "rotating part", "factor on cosines"},
	"granite":           {"biases of queries", "output bias", "biases of the MLP", "embedding scale", "residual scale", "attention scale", "logit scale"},
	"granitemoe":        {"embedding scale", "residual scale", "attention scale", "logit scale", "normalised experts"},
	"granite4":          {"embedding scale", "residual scale", "attention scale", "logit scale", "shared experts"},
	"granite4-dense":    {"embedding scale", "residual scale", "attention scale", "logit scale", "layers without rotation"},
	"glm":               {"biases of queries", "rotating part", "neighbours"},
	"glm4":              {"biases of queries", "rotating part", "neighbours"},
	"glm4-moe":          {"biases of queries", "rotating part", "shared experts", "factor of experts", "logistic scores"},
	"minimax-m2":        {"rotating part", "logistic scores"},
	"smollm3":           {"layers without rotation", "window", "windows everywhere", "stretch"},
}

// switches turn off one feature each.
var switches = map[string]func(c *Config){
	"biases of queries":       func(c *Config) { c.Features.QKVBias = false },
	"output bias":             func(c *Config) { c.Features.OutputBias = false },
	"biases of the MLP":       func(c *Config) { c.Features.MLPBias = false },
	"window":                  func(c *Config) { c.Window = 0 },
	"windows everywhere":      func(c *Config) { c.FullLayers = nil },
	"theta":                   func(c *Config) { c.Rope.Theta *= 1.05 },
	"epsilon":                 func(c *Config) { c.Eps = 1e-3 },
	"stretch":                 func(c *Config) { c.Rope.Type = "default" },
	"long context":            func(c *Config) { c.Rope.Stretched = false },
	"factor on cosines":       func(c *Config) { c.Rope.Attention = 1 },
	"rotation of windows":     func(c *Config) { c.Features.LocalRope.Type = "" },
	"layers without rotation": func(c *Config) { c.Features.NoRope = nil },
	"rotating part":           func(c *Config) { c.Features.RotaryDim = c.HeadDim; c.Rope.Short, c.Rope.Long = ones8, ones8 },
	"neighbours":              func(c *Config) { c.Features.Interleaved = false },
	"1 + weight":              func(c *Config) { c.Features.OnePlus = false },
	"GELU":                    func(c *Config) { c.Features.GELU = false },
	"embedding scale":         func(c *Config) { c.Features.EmbedScale = 0 },
	"residual scale":          func(c *Config) { c.Features.ResidualScale = 0 },
	"attention scale":         func(c *Config) { c.Features.AttentionScale = 0 },
	"logit scale":             func(c *Config) { c.Features.LogitScale = 0 },
	"softcap of scores":       func(c *Config) { c.Features.ScoreSoftcap = 0 },
	"growth of queries":       func(c *Config) { c.Features.QueryGrowth = 0 },
	"softcap of logits":       func(c *Config) { c.Features.LogitSoftcap = 0 },
	"normalised experts":      func(c *Config) { c.MoE.Normalize = false },
	"shared experts":          func(c *Config) { c.MoE.Shared = 0 },
	"factor of experts":       func(c *Config) { c.MoE.Factor = 1 },
	"experts of all groups":   func(c *Config) { c.MoE.KeepGroups = c.MoE.Groups },
	"sharper scores":          func(c *Config) { c.Latent.Scale = float32(1 / math.Sqrt(float64(c.Latent.Nope+c.Latent.Rope))) },
	"neighbours of latents":   func(c *Config) { c.Latent.Interleaved = !c.Latent.Interleaved },
	"logistic scores":         func(c *Config) { c.MoE.Sigmoid, c.MoE.Groups = false, 0 },
}

var ones8 = []float64{1, 1, 1, 1, 1, 1, 1, 1}

// lenient ignores the tensors that a feature switched off leaves over.
type lenient struct{ *decoder }

func (lenient) ignore(string) bool { return true }

// loadFamily loads a checkpoint on a CPU backend within familyLimits.
func loadFamily(t testing.TB, src *Source, kernels string, o Options, wrap func(backend.Backend) backend.Backend) *Model {
	t.Helper()
	dev, err := cpu.New(cpu.Options{Threads: 1, Limits: familyLimits, Kernels: kernels, Mapped: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dev.Close() })
	var b backend.Backend = dev
	if wrap != nil {
		b = wrap(dev)
	}
	m, err := Load(src, b, familyLimits, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.AllocKV(kvWithin(&m.config, familyLimits)); err != nil {
		t.Fatal(err)
	}
	return m
}

// worstOf returns the worst error of a logit over prompts of at most so many tokens.
func worstOf(t testing.TB, m *Model, g goldens, most int) (worst float64) {
	t.Helper()
	for i := range g.Cases {
		if c := &g.Cases[i]; len(c.Prompt) <= most {
			off, _ := newSequenceWithin(m, familyLimits, c.Prompt, uint64(i)).compare(t, c, func() int { return most })
			worst = max(worst, off)
		}
	}
	return worst
}

// Each family computes what transformers computes, in one step or in chunks with equal bits, on
// several ranks, with quantized weights and with adapters.
func TestFamilies(t *testing.T) {
	for name := range families {
		t.Run(name, func(t *testing.T) {
			src, g := openCheckpoint(t, name), readGoldensOf(t, name)
			if last := g.Cases[len(g.Cases)-1]; len(last.Prompt) < 600 {
				t.Fatalf("the longest prompt has %d tokens", len(last.Prompt))
			}
			familyGoldens(t, src, g)
			for _, kernels := range kernelsToTest() {
				if off := worstOf(t, loadFamily(t, src, kernels, Options{}, nil), g, 18); off > tolerance {
					t.Errorf("%s: a logit is off by %g", kernels, off)
				}
			}
			familyShards(t, src, g)
			familyQuantized(t, src, g)
			familyAdapter(t, name, g)
			familyBytes(t, src)
		})
	}
}

// The goldens of each family see each feature, each norm and each gate.
func TestGoldensSeeFamilies(t *testing.T) {
	for name, features := range families {
		t.Run(name, func(t *testing.T) {
			src, g := openCheckpoint(t, name), readGoldensOf(t, name)
			familyFeatures(t, name, g, features)
			familyNorms(t, src, g)
			familyGates(t, src, g)
		})
	}
}

func familyGoldens(t *testing.T, src *Source, g goldens) {
	m := loadFamily(t, src, cpu.Auto, Options{}, nil)
	sums, r := map[uint64]bool{}, rand.New(rand.NewPCG(1, 2))
	for _, chunks := range []func() int{func() int { return familyLimits.Tokens }, func() int { return 1 + r.IntN(200) }} {
		worst, compared, sum := 0.0, 0, xxhash.New()
		for i := range g.Cases {
			c := &g.Cases[i]
			s := newSequenceWithin(m, familyLimits, c.Prompt, uint64(i))
			s.sum = sum
			off, next := s.compare(t, c, chunks)
			worst = max(worst, off)
			compared += s.greedy(t, c, next)
		}
		sums[sum.Sum64()] = true
		t.Logf("worst error of a logit %.2g, %d greedy tokens compared", worst, compared)
		if worst > tolerance {
			t.Errorf("a logit is off by %g, at most %g is allowed", worst, tolerance)
		}
		if all := len(g.Cases) * len(g.Cases[0].Greedy); all > 0 && compared < all*8/10 {
			t.Errorf("only %d of %d greedy tokens were far enough apart to compare", compared, all)
		}
	}
	if len(sums) > 1 {
		t.Error("the bits of the logits depend on how prompts are cut")
	}
}

// familyFeatures switches off one feature after the other.
func familyFeatures(t *testing.T, name string, g goldens, features []string) {
	all := append([]string{"epsilon"}, features...)
	if !slices.Contains(features, "layers without rotation") {
		all = append(all, "theta")
	}
	for _, feature := range all {
		off, ok := switches[feature]
		if !ok {
			t.Fatalf("no switch of %q", feature)
		}
		src := openCheckpoint(t, name)
		off(&src.Config)
		arch := *architectures[src.Config.Architecture]
		arch.network = func(c *Config) network { return lenient{newDecoder(c).(*decoder)} }
		kept := architectures[src.Config.Architecture]
		architectures[src.Config.Architecture] = &arch
		m := loadFamily(t, src, cpu.Auto, Options{}, nil)
		architectures[src.Config.Architecture] = kept
		if worst := worstOf(t, m, g, familyLimits.Tokens); !(worst > 10*tolerance) {
			t.Errorf("without %s the worst error is %g: the goldens do not see it", feature, worst)
		}
	}
}

// familyNorms leaves out one norm after the other.
func familyNorms(t *testing.T, src *Source, g goldens) {
	c := &g.Cases[1]
	for drop, norms := 0, 1; drop < norms; drop++ {
		b := &dropNorm{drop: drop, raw: map[backend.Buf]backend.Buf{}}
		m := loadFamily(t, src, cpu.Auto, Options{}, func(dev backend.Backend) backend.Backend { b.Backend = dev; return b })
		off, _ := newSequenceWithin(m, familyLimits, c.Prompt, 1).compare(t, c, func() int { return familyLimits.Tokens })
		if norms = b.calls; !(off > 10*tolerance) {
			t.Errorf("without norm %d of %d the worst error is %g: the goldens do not see it", drop, norms, off)
		}
	}
}

// dropGate leaves out the drop-th gate of a forward pass.
type dropGate struct {
	backend.Backend
	drop, calls int
}

func (b *dropGate) Gate(dst, gate, x backend.Buf) {
	if b.calls++; b.calls-1 != b.drop {
		b.Backend.Gate(dst, gate, x)
	}
}

// familyGates leaves out one gate after the other.
func familyGates(t *testing.T, src *Source, g goldens) {
	c := &g.Cases[1]
	for drop, gates := 0, 1; drop < gates; drop++ {
		b := &dropGate{drop: drop}
		m := loadFamily(t, src, cpu.Auto, Options{}, func(dev backend.Backend) backend.Backend { b.Backend = dev; return b })
		off, _ := newSequenceWithin(m, familyLimits, c.Prompt, 1).compare(t, c, func() int { return familyLimits.Tokens })
		if gates = b.calls; gates > 0 && !(off > 10*tolerance) {
			t.Errorf("without gate %d of %d the worst error is %g: the goldens do not see it", drop, gates, off)
		}
	}
}

// unsharedFamilies are the families that ranks cannot share, and why.
var unsharedFamilies = map[string]string{
	"olmo2":      "norms all heads of a token together",
	"minimax-m2": "norms all heads of a token together",
}

func familyShards(t *testing.T, src *Source, g goldens) {
	if _, err := (Shard{0, 2}).Of(&src.Config); err != nil {
		if why := unsharedFamilies[src.Name]; why == "" || !strings.Contains(err.Error(), why) {
			t.Error(err)
		}
		return
	}
	m, r := loadShardedWithin(t, src, 2, cpu.Auto, AsStored, familyLimits), rand.New(rand.NewPCG(3, 4))
	for i := range g.Cases {
		c := &g.Cases[i]
		s := newSequenceWithin(m.Model, familyLimits, c.Prompt, uint64(i))
		off, next := s.compare(t, c, func() int { return 1 + r.IntN(300) })
		if s.greedy(t, c, next); off > tolerance {
			t.Errorf("two ranks: a logit is off by %g, at most %g is allowed", off, tolerance)
		}
	}
}

// familyQuantized holds weights in 8 and 4 bits to the rounded weights in float32.
func familyQuantized(t *testing.T, src *Source, g goldens) {
	for _, q := range []Quantization{INT8, INT4} {
		reference := &roundedLoad{asked: map[string]backend.DType{}}
		exact := loadFamily(t, src, cpu.Auto, Options{Quantization: q}, func(b backend.Backend) backend.Backend { reference.Backend = b; return reference })
		rounded := loadFamily(t, src, cpu.Auto, Options{Quantization: q}, nil)
		var off, all float64
		for i := range g.Cases[:2] {
			c := &g.Cases[i]
			a, _ := newSequenceWithin(exact, familyLimits, c.Prompt, 1).step(t, len(c.Prompt), c.Positions)
			b, _ := newSequenceWithin(rounded, familyLimits, c.Prompt, 1).step(t, len(c.Prompt), c.Positions)
			for i := range a {
				for j, v := range a[i] {
					off += (float64(v) - float64(b[i][j])) * (float64(v) - float64(b[i][j]))
					all += float64(v) * float64(v)
				}
			}
		}
		bound := 0.15
		if src.Config.MoE.Experts > 0 { // rounding may choose other experts
			bound = 0.3
		}
		if share := math.Sqrt(off / all); !(share <= bound) {
			t.Errorf("%s: logits are off by %.4f of their size", q, share)
		}
		for name, as := range reference.asked {
			// The matrices of beta and alpha, whose few rows decide how long a state lasts, stay.
			if strings.HasSuffix(name, "in_proj_a.weight") || strings.HasSuffix(name, "in_proj_b.weight") || strings.HasSuffix(name, "in_proj_ba.weight") {
				if as != 0 {
					t.Errorf("%s is %s", name, as)
				}
				continue
			}
			if strings.Contains(name, "_proj") && !strings.Contains(name, "bias") && as != q.dtype() {
				t.Errorf("%s is %s", name, as)
			}
		}
	}
}

// familyAdapter holds an adapter of all matrices to weights into which it is merged.
func familyAdapter(t *testing.T, name string, g goldens) {
	const rank = 3
	src, r := openCheckpoint(t, name), rand.New(rand.NewPCG(5, 6))
	m := loadFamily(t, src, cpu.Auto, Options{}, nil)
	if _, err := m.Adapters(1, 4); err != nil {
		t.Fatal(err)
	}
	a := &Adapter{parts: map[string]*adapterPart{}}
	merged := memoryCopy(t, name, nil, func(all map[string]safetensors.Tensor) {
		for tensor, to := range all {
			target, _ := src.Config.weightName(tensor)
			b := m.adapt[target]
			if b == nil {
				continue
			}
			p := &adapterPart{rank: rank, out: b[0].shape[0], in: b[0].shape[1]}
			for range rank * p.in {
				p.a = append(p.a, 0.1*float32(r.NormFloat64()))
			}
			for range p.out * rank {
				p.b = append(p.b, 0.1*float32(r.NormFloat64()))
			}
			a.parts[tensor] = p
			values, err := floats(&to)
			if err != nil {
				t.Fatal(err)
			}
			for i := range values {
				for k := range rank {
					values[i] += p.b[i/p.in*rank+k] * p.a[k*p.in+i%p.in]
				}
			}
			to.DType, to.Data = "F32", bytesOf(values)
			all[tensor] = to
		}
	})
	if len(a.parts) < 4 {
		t.Fatalf("adapters have parts for %d matrices", len(a.parts))
	}
	if err := m.LoadAdapter(1, a); err != nil {
		t.Fatal(err)
	}
	other, err := OpenFS(merged, name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	want := loadFamily(t, other, cpu.Auto, Options{}, nil)
	c := g.Cases[1]
	s, w := newSequenceWithin(m, familyLimits, c.Prompt, 1), newSequenceWithin(want, familyLimits, c.Prompt, 1)
	s.tables[0] = s.tables[0][:familyLimits.Blocks]
	got := together(t, m, []*sequence{trim(s)}, []int32{1}, []int{len(c.Prompt)})[0]
	plain := together(t, m, []*sequence{trim(newSequenceWithin(m, familyLimits, c.Prompt, 1))}, []int32{0}, []int{len(c.Prompt)})[0]
	exact := together(t, want, []*sequence{trim(w)}, []int32{0}, []int{len(c.Prompt)})[0]
	var off, moved float64
	for i := range got {
		off = max(off, math.Abs(float64(got[i])-float64(exact[i])))
		moved = max(moved, math.Abs(float64(got[i])-float64(plain[i])))
	}
	if off > tolerance || moved < 100*tolerance {
		t.Errorf("with an adapter a logit is %g off from merged weights; the adapter moves logits by %g", off, moved)
	}
}

// trim cuts a sequence's tables to what its tokens take.
func trim(s *sequence) *sequence {
	for i, spec := range s.groups {
		s.tables[i] = s.tables[i][:(len(s.tokens)+spec.BlockTokens-1)/spec.BlockTokens]
	}
	return s
}

// familyBytes holds what a config says of memory to what loading takes.
func familyBytes(t *testing.T, src *Source) {
	for _, q := range []Quantization{AsStored, INT8} {
		for _, shard := range []Shard{{}, {Rank: 1, Ranks: 2}} {
			want, err := src.RankBytes(q, shard)
			if err != nil {
				continue // refused, see familyShards
			}
			host, err := cpu.New(cpu.Options{Limits: testLimits, Threads: 1})
			if err != nil {
				t.Fatal(err)
			}
			held := &weighing{Backend: host}
			if _, err := Load(src, held, testLimits, Options{Quantization: q, Shard: shard}); err != nil {
				t.Fatal(err)
			}
			host.Close()
			slack := want / 50
			if src.Config.Latent != nil { // whose narrow matrices per head are filled up
				slack = want / 20
			}
			if max(held.bytes-want, want-held.bytes) > slack {
				t.Errorf("%s, rank %d of %d: %d bytes, said %d", q, shard.Rank, shard.Ranks, held.bytes, want)
			}
		}
	}
}

// Every checkpoint that the script makes is tested.
func TestFamiliesAreAll(t *testing.T) {
	for name := range families {
		if !slices.Contains(goldenFolders(t), name) {
			t.Errorf("testdata has no %s", name)
		}
	}
	for _, name := range goldenFolders(t) {
		if families[name] == nil && !slices.Contains(checkpoints, name) && !slices.Contains(longCheckpoints, name) {
			t.Errorf("nothing reads testdata/%s", name)
		}
	}
}

// goldenFolders returns the checkpoints in testdata.
func goldenFolders(t *testing.T) (names []string) {
	t.Helper()
	folders, err := filepath.Glob("testdata/*/config.json")
	if err != nil || len(folders) == 0 {
		t.Fatal(folders, err)
	}
	for _, f := range folders {
		names = append(names, filepath.Base(filepath.Dir(f)))
	}
	return names
}
