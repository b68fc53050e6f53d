package profile

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
)

// gpu is the peak numbers of a GPU: dense, without sparsity, from its vendor.
type gpu struct {
	name, device string
	memory       float64 // GiB
	bandwidth    float64 // of memory, bytes per second
	flops        float64 // per second in bfloat16
	link         float64 // to its peers in one machine, bytes per second and direction
	watts        float64
	price        float64 // US dollars per hour on demand, May 2026; 0: not known
}

// gpus are the GPUs that Named knows.
var gpus = []gpu{
	{"l4", "NVIDIA L4", 24, 0.300e12, 121e12, 32e9, 72, 0},
	{"l40s", "NVIDIA L40S", 45, 0.864e12, 362e12, 32e9, 350, 1},
	{"a100", "NVIDIA A100 SXM", 80, 2.039e12, 312e12, 300e9, 400, 1.9},
	{"h100", "NVIDIA H100 SXM", 80, 3.35e12, 989e12, 450e9, 700, 2.95},
	{"h200", "NVIDIA H200 SXM", 141, 4.8e12, 989e12, 450e9, 700, 3.80},
	{"b200", "NVIDIA B200 SXM", 180, 7.7e12, 2250e12, 900e9, 1000, 0},
	{"b300", "NVIDIA B300 SXM", 268, 7.75e12, 2250e12, 900e9, 1100, 0},
	{"gb200", "NVIDIA GB200", 185, 8.0e12, 2500e12, 900e9, 1200, 0},
	{"rtxpro6000", "NVIDIA RTX PRO 6000", 96, 1.79e12, 468e12, 64e9, 600, 0},
	{"mi300x", "AMD Instinct MI300X", 192, 5.3e12, 1307e12, 448e9, 750, 0},
}

// llm is a model in bfloat16.
type llm struct {
	name                               string
	layers, hidden, heads, kvHeads, hd int
	params                             float64
	experts, chosen                    int     // of a mixture of experts; 0: dense
	expertParams                       float64 // of params, those of all experts
	maxLen                             int
}

// llms are the models that Named knows.
var llms = []llm{
	{name: "llama-1b", layers: 16, hidden: 2048, heads: 32, kvHeads: 8, hd: 64, params: 1.236e9, maxLen: 131072},
	{name: "llama-3b", layers: 28, hidden: 3072, heads: 24, kvHeads: 8, hd: 128, params: 3.213e9, maxLen: 131072},
	{name: "llama-8b", layers: 32, hidden: 4096, heads: 32, kvHeads: 8, hd: 128, params: 8.03e9, maxLen: 131072},
	{name: "llama-70b", layers: 80, hidden: 8192, heads: 64, kvHeads: 8, hd: 128, params: 70.55e9, maxLen: 131072},
	{name: "qwen3-8b", layers: 36, hidden: 4096, heads: 32, kvHeads: 8, hd: 128, params: 8.19e9, maxLen: 40960},
	{name: "qwen3-32b", layers: 64, hidden: 5120, heads: 64, kvHeads: 8, hd: 128, params: 32.76e9, maxLen: 40960},
	{name: "mixtral-8x7b", layers: 32, hidden: 4096, heads: 32, kvHeads: 8, hd: 128, params: 46.7e9, experts: 8, chosen: 2, expertParams: 45.1e9, maxLen: 32768},
}

// Shares of the peak numbers that kernels reach, and durations, such that the results for an 8B
// model on H100 and H200 agree with measurements of vLLM 0.24.0 (aiconfigurator-core 0.12.0).
const (
	weightShare    = 0.71 // of the bandwidth, while weights are read; launches included
	kvShare        = 0.92 // of the bandwidth, while KV is read
	flopShare      = 0.80 // of the operations of matrices
	attentionShare = 0.66 // of the operations of attention
	seqShare       = 0.54 // of a prompt token's time, for one sequence that decodes
	floorShare     = 1.3  // of the time to read the weights, for the shortest chunk
	chunkFixed     = 1e-3 // seconds
	reduceLatency  = 7.5e-6
	memoryShare    = 0.9 // of a GPU's memory that the node uses
	estimateError  = 0.25
	elementBytes   = 2.0 // bfloat16
	blockTokens    = 16
	maxTP          = 8 // GPUs of one machine
)

// estimateName matches the name of an estimate: GPUs, if several, the GPU and the model.
var estimateName = regexp.MustCompile(`^(?:(\d+)x)?([a-z0-9]+):([^/\\]+)$`)

// Named returns the estimate of a name such as h200:llama-8b or 4xh100:llama-70b. It returns false
// if the name has another form.
func Named(name string) (p *Profile, known bool, err error) {
	parts := estimateName.FindStringSubmatch(strings.ToLower(name))
	if parts == nil {
		return nil, false, nil
	}
	tp, device, model := 1, parts[2], parts[3]
	if parts[1] != "" {
		if tp, err = strconv.Atoi(parts[1]); err != nil || tp < 1 || tp > maxTP {
			return nil, true, fmt.Errorf("%w: %s: %s GPUs: write 1 to %d, such as 4xh100:llama-70b", ErrProfile, name, parts[1], maxTP)
		}
	}
	for _, g := range gpus {
		if g.name != device {
			continue
		}
		for _, m := range llms {
			if m.name == model {
				p, err := roofline(name, &g, &m, tp)
				return p, true, err
			}
		}
		return nil, true, fmt.Errorf("%w: %s: no model is called %q: write one of %s, or a profile's file", ErrProfile, name, model, Models())
	}
	return nil, true, fmt.Errorf("%w: %s: no GPU is called %q: write one of %s, or a profile's file", ErrProfile, name, device, GPUs())
}

// GPUs returns the names of GPUs.
func GPUs() string { return names(gpus, func(g gpu) string { return g.name }) }

// Models returns the names of models.
func Models() string { return names(llms, func(m llm) string { return m.name }) }

func names[T any](of []T, name func(T) string) string {
	all := make([]string, len(of))
	for i := range of {
		all[i] = name(of[i])
	}
	return strings.Join(all, ", ")
}

// roofline estimates step times from peak numbers. With tensor parallelism each GPU reads and
// computes its share, and each layer has two all-reduces.
func roofline(name string, g *gpu, m *llm, tp int) (*Profile, error) {
	n := float64(tp)
	weights := elementBytes * m.params
	kv := 2 * elementBytes * float64(m.layers*m.kvHeads*m.hd)
	free := n*memoryShare*g.memory*(1<<30) - weights
	blocks := int(free / (kv * blockTokens))
	if blocks*blockTokens < 1024 {
		return nil, fmt.Errorf("%w: %s: %.0f GiB of weights leave no KV memory in %.0f GiB: use more GPUs, such as %dx%s:%s",
			ErrProfile, name, weights/(1<<30), n*memoryShare*g.memory, min(maxTP, 2*tp), g.name, m.name)
	}
	active := m.params
	if m.experts > 0 {
		active -= m.expertParams * (1 - float64(m.chosen)/float64(m.experts))
	}
	read := func(params float64) float64 { return elementBytes * params / n / (g.bandwidth * weightShare) }
	reduce, latency := 0.0, 0.0 // of a token, and of a step
	if tp > 1 {
		reduce = float64(2*m.layers) * 2 * (n - 1) / n * float64(m.hidden) * elementBytes / g.link
		latency = float64(2*m.layers) * reduceLatency
	}
	compute := 2 * active / n / (g.flops * flopShare)
	p := &Profile{
		Version: Version,
		Node:    Node{Name: name, Device: g.device, TP: tp, Price: n * g.price, Watts: n * g.watts},
		Model:   Model{Name: m.name, Layers: m.layers, Weights: weights, KVBytes: kv, MaxLen: m.maxLen},
		Memory:  Memory{Blocks: blocks, BlockTokens: blockTokens},
		Step: Step{
			Source: Estimate, Error: estimateError,
			Decode: Decode{Fixed: read(m.params) + latency, PerCtx: kv / n / (g.bandwidth * kvShare), PerSeq: seqShare*compute + reduce},
			Prefill: Prefill{
				Floor: floorShare*read(m.params) + latency, Fixed: chunkFixed + latency, PerToken: compute + reduce,
				PerPair: 4 * float64(m.layers*m.heads*m.hd) / n / (g.flops * attentionShare),
			},
			Mixed:    Mixed{Gamma: 1},
			Overhead: Overhead{Between: 120e-6, Emit: 60e-6},
		},
		Transfer: Transfer{Setup: 2e-3, BytesPerSecond: 11.8e9, PerLayer: true, Checksum: true},
		Gateway:  DefaultGateway(),
		Start:    Start{Process: 0.4, Load: 2 + weights/1e9, Warm: 6},
	}
	if m.experts > 0 {
		p.Step.Decode.Points = expertPoints(&p.Step.Decode, m, blocks*blockTokens, read)
	}
	return p, nil
}

// expertPoints returns decode points of a mixture of experts, whose steps read the experts that
// some sequence has chosen. Few sequences read few of them.
func expertPoints(d *Decode, m *llm, poolTokens int, read func(params float64) float64) (points [][]float64) {
	all := read(m.expertParams)
	for seqs := 1.0; seqs <= 512; seqs *= 2 {
		idle := all * math.Pow(1-float64(m.chosen)/float64(m.experts), seqs)
		for _, ctx := range []float64{1, float64(min(m.maxLen, poolTokens))} {
			points = append(points, []float64{seqs, ctx, d.Fixed - idle + d.PerSeq*seqs + d.PerCtx*seqs*ctx})
		}
	}
	return points
}
