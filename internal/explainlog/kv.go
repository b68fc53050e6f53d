package explainlog

import (
	"fmt"
	"math"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/memory"
)

// shape is the KV layers of a model: every stride-th layer sees all positions, the others have a
// window. The figures are those of the models' config.json.
type shape struct {
	name           string // part of the model's name, in lower case
	layers, stride int
	windowed, full backend.KVShape
}

// shapes lists models whose KV the arithmetic can follow without their config.json. The first one
// that matches a name counts.
var shapes = []shape{
	alternating("gpt-oss-120b", 36, 2, 128, 8, 64),
	alternating("gpt-oss-20b", 24, 2, 128, 8, 64),
	{"gemma-4-26b", 30, 6, backend.KVShape{Window: 1024, KVHeads: 8, HeadDim: 256}, backend.KVShape{KVHeads: 2, HeadDim: 512}},
	{"gemma-4-31b", 60, 6, backend.KVShape{Window: 1024, KVHeads: 16, HeadDim: 256}, backend.KVShape{KVHeads: 4, HeadDim: 512}},
	uniform("llama-3.2-1b", 16, 8, 64),
	uniform("llama-3.2-3b", 28, 8, 128),
	uniform("llama-3.1-8b", 32, 8, 128),
	uniform("llama-3-8b", 32, 8, 128),
	uniform("llama-3.1-70b", 80, 8, 128),
	uniform("llama-3-70b", 80, 8, 128),
	uniform("llama-3.3-70b", 80, 8, 128),
	uniform("llama-3.1-405b", 126, 8, 128),
	uniform("llama-2-7b", 32, 32, 128),
	uniform("llama-2-13b", 40, 40, 128),
	uniform("llama-2-70b", 80, 8, 128),
	uniform("distill-llama-8b", 32, 8, 128),
	uniform("distill-llama-70b", 80, 8, 128),
	uniform("distill-qwen-1.5b", 28, 2, 128),
	uniform("distill-qwen-7b", 28, 4, 128),
	uniform("distill-qwen-14b", 48, 8, 128),
	uniform("distill-qwen-32b", 64, 8, 128),
	uniform("qwen3-235b-a22b", 94, 4, 128),
	uniform("qwen3-30b-a3b", 48, 4, 128),
	uniform("qwen3-coder-30b-a3b", 48, 4, 128),
	uniform("qwen3-32b", 64, 8, 128),
	uniform("qwen3-14b", 40, 8, 128),
	uniform("qwen3-8b", 36, 8, 128),
	uniform("qwen3-4b", 36, 8, 128),
	uniform("qwen3-1.7b", 28, 8, 128),
	uniform("qwen3-0.6b", 28, 8, 128),
	uniform("qwen2.5-72b", 80, 8, 128),
	uniform("qwen2.5-32b", 64, 8, 128),
	uniform("qwen2.5-14b", 48, 8, 128),
	uniform("qwen2.5-7b", 28, 4, 128),
	uniform("qwen2.5-3b", 36, 2, 128),
	uniform("qwen2.5-1.5b", 28, 2, 128),
	uniform("qwen2.5-0.5b", 24, 2, 64),
	uniform("mistral-7b-instruct-v0.3", 32, 8, 128),
	uniform("mistral-small-24b", 40, 8, 128),
	uniform("mixtral-8x7b", 32, 8, 128),
	uniform("mixtral-8x22b", 56, 8, 128),
	uniform("phi-4-mini", 32, 8, 128),
	latent("deepseek-v3", 61),
	latent("deepseek-r1", 61),
	latent("kimi-k2", 61),
}

func uniform(name string, layers, kvHeads, headDim int) shape {
	return shape{name: name, layers: layers, stride: 1, full: backend.KVShape{KVHeads: kvHeads, HeadDim: headDim}}
}

// latent is a model with multi-head latent attention: 512 values and 64 rotated ones for a token.
func latent(name string, layers int) shape {
	return shape{name: name, layers: layers, stride: 1, full: backend.KVShape{KVHeads: 1, HeadDim: 576, Latent: 512}}
}

func alternating(name string, layers, stride, window, kvHeads, headDim int) shape {
	return shape{name: name, layers: layers, stride: stride,
		windowed: backend.KVShape{Window: window, KVHeads: kvHeads, HeadDim: headDim}, full: backend.KVShape{KVHeads: kvHeads, HeadDim: headDim}}
}

// known returns the KV layers of a model by its name.
func known(model string) ([]backend.KVShape, bool) {
	model = strings.ToLower(model)
	for _, k := range shapes {
		if !strings.Contains(model, k.name) {
			continue
		}
		var all []backend.KVShape
		for i := range k.layers {
			if (i+1)%k.stride == 0 {
				all = append(all, k.full)
			} else {
				all = append(all, k.windowed)
			}
		}
		return all, true
	}
	return nil, false
}

// planned is the last plan with what it follows from. Every line of rates needs that of its run.
type planned struct {
	planKey
	plan memory.Plan
	unit int
	ok   bool
}

type planKey struct {
	model, kvType, dtype             string
	tp, maxLen, batched, blockTokens int
	kv                               float64
}

// plan returns how the run's KV memory is spent, and the least tokens of a block. It fails for
// models that shapes does not list, and for KV types that the engine does not have.
func (s *state) plan() (memory.Plan, int, bool) {
	last, key := s.planned, planKey{s.model, s.kvType, s.dtype, s.tp, s.maxLen, s.batched, s.blockTokens, s.mem.kv}
	if last.planKey != key {
		last.planKey = key
		last.plan, last.unit, last.ok = s.newPlan()
	}
	return last.plan, last.unit, last.ok
}

func (s *state) newPlan() (memory.Plan, int, bool) {
	layers, ok := known(s.model)
	for i := range layers { // each GPU has its share of the heads, and a whole one at least
		layers[i].KVHeads = max(1, layers[i].KVHeads/max(1, s.tp))
	}
	if !ok || s.kvType != "" && s.kvType != "auto" && s.kvType != "bfloat16" || s.dtype != "" && s.dtype != "bfloat16" && s.dtype != "float16" || s.maxLen == 0 || s.mem.kv == 0 {
		return memory.Plan{}, 0, false
	}
	batched := s.batched
	if batched == 0 {
		batched = 2048
	}
	p, err := memory.Fit(memory.Need{
		Budget: int64((s.mem.kv + 0.005) * (1 << 30)), Layers: layers, BlockTokens: s.blockTokens, DType: backend.BF16,
		MaxModelLen: s.maxLen, MaxBatchedTokens: batched,
	})
	if err != nil || len(p.KV.Groups) == 0 {
		return memory.Plan{}, 0, false
	}
	unit := p.KV.Groups[0].BlockTokens
	for _, g := range p.KV.Groups {
		unit = min(unit, g.BlockTokens)
	}
	return p, unit, true
}

// kvTokensNote follows KV memory to tokens.
func (s *state) kvTokensNote(n *note) {
	if s.mem.kv == 0 || s.kvTokens == 0 {
		return
	}
	per := s.mem.kv * (1 << 30) / float64(s.kvTokens)
	n.math("%s GiB ÷ %s tokens = %.1f KiB a token", gib(s.mem.kv), thousands(s.kvTokens), per/1024)
	p, unit, ok := s.plan()
	if !ok {
		n.math("a layer stores 2 (K and V) x KV heads x head size x bytes of the type for each token; sum over the layers, to compare")
		n.change("`tandem plan memory CONFIG --kv-memory %sGiB%s` derives the figure from the model's config.json.", gib(s.mem.kv), s.planFlags())
		return
	}
	groups := len(p.KV.Groups)
	blocks := s.kvTokens / unit * groups
	for i, g := range p.KV.Groups {
		if i > 0 && g == p.KV.Groups[i-1] {
			continue
		}
		same := 0
		for _, o := range p.KV.Groups {
			if o == g {
				same++
			}
		}
		all := "all positions"
		if g.Window > 0 {
			all = fmt.Sprintf("a window of %s", thousands(g.Window))
		}
		n.math("%d KV %s of %s, %s, %d tokens a block", same, plural(same, "group"), groupLayers(g), all, g.BlockTokens)
	}
	bytes := float64(p.KV.BlockBytes())
	n.math("a block is %s KiB: %s GiB ÷ %s KiB = about %s blocks", kib(bytes), gib(s.mem.kv), kib(bytes), thousands(int(s.mem.kv*(1<<30)/bytes)))
	got := int((s.mem.kv+0.005)*(1<<30)/bytes) / groups * unit
	low := int((s.mem.kv-0.005)*(1<<30)/bytes) / groups * unit
	n.math("%s blocks ÷ %d %s x %d tokens = %s tokens", thousands(blocks), groups, plural(groups, "group"), unit, thousands(s.kvTokens))
	if s.kvTokens < low || s.kvTokens > got {
		n.math("the memory gives %s to %s tokens, the log has %s: it counts in another way, or the model is another", thousands(low), thousands(got), thousands(s.kvTokens))
	} else {
		n.math("as logged: the memory, which is rounded to 0.01 GiB, gives %s to %s", thousands(low), thousands(got))
	}
	s.kvBlocks = blocks
}

func (s *state) planFlags() string {
	text := ""
	if s.maxLen > 0 {
		text += fmt.Sprintf(" --max-model-len %d", s.maxLen)
	}
	if s.batched > 0 {
		text += fmt.Sprintf(" --max-num-batched-tokens %d", s.batched)
	}
	return text
}

func groupLayers(g backend.KVGroup) string {
	if g.Latent > 0 {
		return fmt.Sprintf("%d layers x %d x 2 bytes (one latent for all heads)", g.Layers, g.HeadDim)
	}
	return fmt.Sprintf("%d layers x 2 x %d KV heads x %d x 2 bytes", g.Layers, g.KVHeads, g.HeadDim)
}

func plural(n int, what string) string {
	if n == 1 {
		return what
	}
	return what + "s"
}

// kvConcurrencyNote follows tokens to requests of full length.
func (s *state) kvConcurrencyNote(n *note) {
	if s.kvTokens == 0 || s.maxLen == 0 {
		return
	}
	plain := float64(s.kvTokens) / float64(s.maxLen)
	p, _, ok := s.plan()
	switch {
	case ok && p.Peak > 0 && s.kvBlocks > 0:
		if len(p.KV.Groups) > 1 {
			batched := s.batched
			for i, g := range p.KV.Groups {
				if i > 0 && g == p.KV.Groups[i-1] {
					continue
				}
				if g.Window > 0 {
					if batched == 0 {
						batched = 2048
					}
					held := min(g.Window-1+batched, s.maxLen)
					n.math("a group with a window holds its last %s - 1 tokens and a step's %s: %s tokens = %s blocks and one for the shift", thousands(g.Window), thousands(batched), thousands(held), thousands(ceil(held, g.BlockTokens)))
				} else {
					n.math("a group without one holds all %s tokens: ÷ %d = %s blocks", thousands(s.maxLen), g.BlockTokens, thousands(ceil(s.maxLen, g.BlockTokens)))
				}
			}
		}
		s.derived = float64(s.kvBlocks) / float64(p.Peak)
		n.math("%s blocks ÷ %s blocks of one request = %.2f requests", thousands(s.kvBlocks), thousands(p.Peak), s.derived)
	default:
		s.derived = plain
		n.math("%s tokens ÷ %s = %.2f requests", thousands(s.kvTokens), thousands(s.maxLen), plain)
	}
	if s.concurrency == 0 {
		return
	}
	if off := math.Abs(s.derived - s.concurrency); off < 0.0051 {
		n.math("as logged: %.2f", s.concurrency)
	} else if s.concurrency > plain*1.02 {
		n.math("the log has %.2f: some layers keep a window of positions or a fixed state, so that a full request holds %.0f %% of %s tokens' worth", s.concurrency, 100*plain/s.concurrency, thousands(s.maxLen))
		n.change("`tandem plan memory CONFIG --kv-memory %sGiB%s` derives it with the model's windows.", gib(s.mem.kv), s.planFlags())
	} else {
		n.math("the log has %.2f", s.concurrency)
	}
	switch {
	case s.concurrency < 1:
		n.find(Problem, "Not even one request of full length fits the KV cache.", "Lower --max-model-len, raise --gpu-memory-utilization, or use --kv-cache-dtype fp8.")
	case s.concurrency < 2:
		n.find(Warning, fmt.Sprintf("Only %.2f requests of full length fit: two long ones already preempt each other.", s.concurrency),
			"Lower --max-model-len, raise --gpu-memory-utilization, quantize weights or KV (--kv-cache-dtype fp8), or use more GPUs.")
	}
}

func ceil(a, b int) int { return (a + b - 1) / b }

func gib(x float64) string {
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.4f", x), "0"), ".")
}

func kib(bytes float64) string {
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.1f", bytes/1024), "0"), ".")
}
