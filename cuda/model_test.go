package cuda

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"testing"
)

var update = flag.Bool("update", false, "write cuda/model.md")

// Bytes a second where 32 KB are in flight on a multiprocessor. bandwidth is that of the prediction.
var (
	h200      = 4.3e12 * 0.92
	h100      = 3.35e12 * 0.92 // of HBM3; measured: 3.11 TB/s by PyTorch's sum, 3.12 by gemv of a vocabulary
	bandwidth = h200
)

// Constants of the prediction, which were chosen before any GPU had run this code.
const (
	issue    = 4 * 1.755e9 * 132 * 0.75 // instructions of warps a second
	oneBlock = issue / 132              // of one multiprocessor
	node     = 1.3e-6                   // seconds between the ends of dependent nodes of a graph, besides their work
	overlap  = 0.6e-6                   // the same of nodes that overlap, with pdl
	hostCopy = 3e-6                     // of a step's memory
	matmul   = 788e12 * 0.85            // operations a second of cuBLASLt
	mma      = 2 * 16 * 8 * 16          // operations of one mma.sync
	// mmaSync is the number of mma.sync a second. Each takes 4 cycles of a tensor core at the peak of
	// wgmma, 4,096 operations a cycle and multiprocessor. mma.sync reaches 62.9 % of that on Hopper by
	// Luo et al., arXiv 2501.12084, section 6.2.
	mmaSync = 4 * 1.755e9 * 132 / 4 * 0.629
	kvRow   = 2               // bytes of a number of KV
	sliceKB = 8192 * 4 / 1024 // of a block that draws
	fixed   = 10              // nodes of a step outside of its layers: embed, angles, rows, a norm, logits, four of a draw, finish
)

// shape is a model: sizes of a layer. Experts are MXFP4 and everything else is bf16; with int4, the
// matrices of layers are int4 and that of the vocabulary is int8.
type shape struct {
	name                                    string
	layers, hidden, heads, kvHeads, headDim int
	inner, experts, topK, vocab             int
	int4                                    bool
}

var (
	llama1B     = shape{"Llama 1B", 16, 2048, 32, 8, 64, 8192, 0, 0, 128256, false}
	llama8B     = shape{"Llama 8B", 32, 4096, 32, 8, 128, 14336, 0, 0, 128256, false}
	int4Llama8B = shape{"Llama 8B int4", 32, 4096, 32, 8, 128, 14336, 0, 0, 128256, true}
	oss20B      = shape{"GPT-OSS 20B", 24, 2880, 64, 8, 64, 2880, 32, 4, 201088, false}
	oss120B     = shape{"GPT-OSS 120B", 36, 2880, 64, 8, 64, 2880, 128, 4, 201088, false}
)

// attentionWeights, denseWeights and logitsWeights are numbers; expertBytes are of one row's experts.
func (s *shape) attentionWeights() float64 {
	return float64(s.hidden * (2*s.heads + 2*s.kvHeads) * s.headDim)
}
func (s *shape) denseWeights() float64 {
	if s.experts > 0 {
		return float64(s.hidden * s.experts)
	}
	return float64(3 * s.hidden * s.inner)
}
func (s *shape) expertBytes() float64   { return float64(3*s.hidden*s.inner*s.topK) * 17 / 32 }
func (s *shape) logitsWeights() float64 { return float64(s.hidden * s.vocab) }
func (s *shape) kvBytes() float64       { return float64(2*s.kvHeads*s.headDim) * kvRow } // of a position and layer

// work is part of a step: what it reads, by which kernel, and its nodes.
type work struct {
	what   string
	bytes  float64
	kernel string // whose budget of instructions a KB bounds it; empty: cuBLASLt
	nodes  int
	alone  int // nodes that do not overlap with the previous one: those of cuBLASLt, and those after them
}

// perByte are the bytes that a warp reads, with activations, for each byte of work: of gemv of one
// row of int8, two groups of 16 numbers, their scales, and 16 activations.
var perByte = map[string]float64{"gemv<4,1,0>": 100. / 36}

func (w work) seconds(pdl bool) float64 {
	t := max(w.bytes/bandwidth, w.instructions())
	if pdl {
		return t + float64(w.alone)*node + float64(w.nodes-w.alone)*overlap
	}
	return t + float64(w.nodes)*node
}

// instructions is the time that its instructions take.
func (w work) instructions() float64 {
	if w.kernel == "" {
		return 0
	}
	return w.bytes * max(1, perByte[w.kernel]) / 1024 * float64(budgetOf(loopBudgets, w.kernel)) / issue
}

// decode returns a step of one row. Norms of bf16 products are kernels of their own.
func (s *shape) decode(context int) []work {
	l := float64(s.layers)
	attention := fmt.Sprintf("attend_split<%d>", s.headDim)
	size, product, gated := 2., "gemv<1,1,0>", "gemv<1,1,1>" // bytes of a weight
	logits, vocab, norm := 2., "gemv<1,1,0>", 1
	if s.int4 {
		norm = 0
		size, product, gated, logits, vocab = 18./32, "few_int4", "few_int4", 34./32, "gemv<4,1,0>"
	}
	all := []work{
		{"attention's matrices", size * l * s.attentionWeights(), product, (norm + 2) * s.layers, 0},
		{"place and attention", l * s.kvBytes() * float64(context), attention, 2 * s.layers, 0},
	}
	if s.experts > 0 {
		// norm, router, and the choice of experts. The sum of experts is part of their last product.
		all = append(all, work{"router", 2 * l * s.denseWeights(), "gemv<1,1,0>", 3 * s.layers, 0},
			work{"experts", l * s.expertBytes(), "few_mxfp4", 2 * s.layers, 0})
	} else {
		all = append(all, work{"MLP", size * l * s.denseWeights(), gated, (norm + 2) * s.layers, 0})
	}
	return append(all, work{"logits", logits * s.logitsWeights(), vocab, 0, 0}, work{"other nodes", 0, "", fixed, 0})
}

// launches are of a layer with cuBLASLt: seven products, place, attention, two norms, an activation
// and four conversions to bf16. With halves, nothing is converted, and a gate and the matrix that it
// gates are one product. alone counts the products, and the two norms, place and the activation
// after products, which do not overlap with the previous kernel.
func launches(halves bool) (all, alone int) {
	if halves {
		return 11, 10
	}
	return 16, 11
}

// batch returns a step of rows with cuBLASLt, whose products read each matrix once.
func (s *shape) batch(rows, context int, halves bool) []work {
	l := float64(s.layers)
	each, alone := launches(halves)
	return []work{
		{"matrices", 2 * (l*(s.attentionWeights()+s.denseWeights()) + s.logitsWeights()), "", (each - 1) * s.layers, alone * s.layers},
		{"attention", l * s.kvBytes() * float64(rows*context), fmt.Sprintf("attend_split<%d>", s.headDim), s.layers, 0},
		{"activations", s.activations(rows, halves), "", 0, 0},
		{"other nodes", 0, "", fixed, 2},
	}
}

// activations are the bytes that products, norms, place, activation and conversions read and write of
// rows, in fp32 and bf16. With halves, what products alone read is written in bf16; else it is written
// in fp32, read again and written in bf16.
func (s *shape) activations(rows int, halves bool) float64 {
	hidden, inner, queries := float64(s.hidden), float64(s.inner), float64(s.heads*s.headDim)
	heads, result := float64((s.heads+2*s.kvHeads)*s.headDim), 4.0+4+2
	if halves {
		result = 2
	}
	each := 2*(3*4*hidden+result*hidden) + 2*4*hidden // two norms with sums, two products
	each += 3*4*heads + 4*queries + result*queries    // three products and place, attention
	each += 4*4*inner + result*inner                  // two products, activation
	return each * float64(rows*s.layers)
}

// draw is the time of drawing by slices, which one block a slice bounds.
func draw() float64 {
	return sliceKB * float64(budgetOf(loopBudgets, "rule")+budgetOf(loopBudgets, "weigh")+budgetOf(loopBudgets, "edge")) / oneBlock
}

func total(all []work, pdl bool) (seconds float64, nodes int) {
	for _, w := range all {
		seconds += w.seconds(pdl)
		nodes += w.nodes
	}
	return seconds + draw() + hostCopy, nodes
}

// prefill returns the seconds of a prompt.
func (s *shape) prefill(tokens int, halves bool) float64 {
	l, n := float64(s.layers), float64(tokens)
	products := 2 * n * l * (s.attentionWeights() + s.denseWeights()) / matmul
	each, _ := launches(halves)
	return products + s.chunks(tokens, 1) + s.activations(tokens, halves)/bandwidth + float64(each*s.layers)*node
}

// chunks is the time of a prompt's attention by attend_tiles, with queries and weights of as many
// parts. A warp computes tiles of 16 rows and 32 positions, and copies a quarter of K and V. Its
// instructions, of which mma.sync are some, bound it, and so do tensor cores.
func (s *shape) chunks(tokens, parts int) float64 {
	tiles := float64(s.layers*s.heads*tokens) / 16 * float64(tokens/2+16) / 32
	kb := float64(2*32*s.headDim*kvRow) / 4 / 1024
	instructions := kb * float64(budgetOf(loopBudgets, fmt.Sprintf("attend_tiles<%d,%d>", s.headDim, parts)))
	products := float64(parts * 2 * 2 * 16 * 32 * s.headDim / mma)
	return tiles * max(instructions/issue, products/mmaSync)
}

// measured are tokens a second of an H100; see bench/results/gpu.md.
var measured = []struct {
	what    string
	speed   float64
	seconds func() float64 // predicted, of a token
}{
	{"Llama 1B, one row", 844, func() float64 { return ofDecode(&llama1B) }},
	{"Llama 8B, one row", 178, func() float64 { return ofDecode(&llama8B) }},
	{"GPT-OSS 20B, one row", 415, func() float64 { return ofDecode(&oss20B) }},
	{"Llama 8B, 64 rows of 1,024 positions", 5566, func() float64 {
		seconds, _ := total(llama8B.batch(64, 1024, true), true)
		return seconds / 64
	}},
	{"Llama 8B, a prompt of 2,000 tokens", 35347, func() float64 { return llama8B.prefill(2000, true) / 2000 }},
}

func ofDecode(s *shape) float64 {
	seconds, _ := total(s.decode(100), true)
	return seconds
}

// writeMeasured writes what was measured next to the prediction of the same arithmetic.
func writeMeasured(page *bytes.Buffer) {
	bandwidth = h100
	defer func() { bandwidth = h200 }()
	page.WriteString("\n## An H100 as predicted and as measured\n\n" +
		"The same arithmetic with 3.35 TB/s instead of 4.3, with `pdl`. Measured on an H100 80GB HBM3 on\n" +
		"2026-11-26, at 213fa5eb with `TD_KERNELS=all` and `TD_DRAWS=slices`:\n" +
		"[gpu.md](../bench/results/gpu.md). That code had norms of one row within products of bf16, and two\n" +
		"launches a layer less than the prediction.\n\n" +
		"| row | predicted | measured | measured of predicted |\n|---|---|---|---|\n")
	for _, m := range measured {
		predicted := 1 / m.seconds()
		fmt.Fprintf(page, "| %s | %.0f tok/s | %.0f tok/s | %.0f %% |\n", m.what, predicted, m.speed, 100*m.speed/predicted)
	}
}

// TestModelPage holds cuda/model.md, which -update writes: a prediction of an H200's speed by the
// budgets of instructions, which the compiled kernels keep, and by the nodes of a token.
func TestModelPage(t *testing.T) {
	var page bytes.Buffer
	page.WriteString("# A prediction of speeds\n\n<!-- Written by `go test ./cuda -run TestModelPage -update`. -->\n\n" +
		"This page is arithmetic for an H200 by constants that were chosen before any GPU had run the\n" +
		"code. An H100 was [measured](#an-h100-as-predicted-and-as-measured). The constants: 4.3 TB/s times\n" +
		"0.92, 4 instructions a cycle at 1.755 GHz on each of 132 multiprocessors times 0.75, 1.3 us for a\n" +
		"node of a graph, 3 us for a step's copy, and 788 TFLOP/s times 0.85 for cuBLASLt. The\n" +
		"instructions of a kernel are its budget (`budget.go`), which the compiled code keeps. Each mma.sync\n" +
		"is one of them. Attention of prompts is also bound by tensor cores, with 6.4 cycles for each\n" +
		"mma.sync: 4 at the peak of wgmma, of which mma.sync reaches 62.9 % on Hopper ([published for an\n" +
		"H800](https://arxiv.org/abs/2501.12084), section 6.2). With `pdl`, which is the default, a node that\n" +
		"may overlap with the previous one costs 0.6 us; prompts run without a graph, and so without `pdl`.\n" +
		"Attention of prompts is `chunk16`.\n\n" +
		"| row | prediction without `pdl` | with `pdl` | aim | launches a step |\n|---|---|---|---|---|\n")
	row := func(name string, speed, overlapping, aim float64, launches string) {
		fmt.Fprintf(&page, "| %s | %.0f tok/s | %.0f tok/s | %.0f | %s |\n", name, speed, overlapping, aim, launches)
	}
	aims := map[string]float64{llama1B.name: 1000, llama8B.name: 245, int4Llama8B.name: 600, oss20B.name: 400, oss120B.name: 300}
	most := map[string]int{llama1B.name: 138, llama8B.name: 266, int4Llama8B.name: 202, oss20B.name: 250, oss120B.name: 370}
	if n := 4 * budgetOf(loopBudgets, "attend_tiles<128,2>"); n > 700 {
		t.Errorf("attend_tiles takes %d instructions for 16 rows, 32 positions and 128 columns, at most 700 are aimed at", n)
	}
	shapes := []*shape{&llama1B, &llama8B, &int4Llama8B, &oss20B, &oss120B}
	for _, s := range shapes {
		seconds, nodes := total(s.decode(100), false)
		overlapping, _ := total(s.decode(100), true)
		row(s.name+", one row", 1/seconds, 1/overlapping, aims[s.name], fmt.Sprint(nodes))
		if nodes > most[s.name] || 1/overlapping < aims[s.name] {
			t.Errorf("%s: %d launches a token of at most %d; %.0f tok/s of %.0f", s.name, nodes, most[s.name], 1/overlapping, aims[s.name])
		}
	}
	seconds, nodes := total(llama8B.batch(64, 1024, true), false)
	overlapping, _ := total(llama8B.batch(64, 1024, true), true)
	row("Llama 8B, 64 rows of 1,024 positions", 64/seconds, 64/overlapping, 7000, fmt.Sprint(nodes))
	if 64/seconds < 7000 {
		t.Errorf("64 rows: %.0f tok/s", 64/seconds)
	}
	speed := 2048 / llama8B.prefill(2048, true)
	row("Llama 8B, a prompt of 2,048 tokens", speed, speed, 33000, "")
	if speed < 33000 {
		t.Errorf("a prompt: %.0f tok/s", speed)
	}
	page.WriteString("\n## Results in bf16, of Llama 8B with cuBLASLt\n\n" +
		"`halves` writes what only products read in bf16, `pairs` computes a gate and the matrix that it\n" +
		"gates by one call. MB are the activations that kernels read and write in a step.\n\n" +
		"| step | kernels | launches a layer | MB | prediction without `pdl` |\n|---|---|---|---|---|\n")
	for _, halves := range []bool{false, true} {
		kernels := map[bool]string{false: "without", true: "`halves`, `pairs`"}[halves]
		seconds, _ := total(llama8B.batch(64, 1024, halves), false)
		each, _ := launches(halves)
		fmt.Fprintf(&page, "| 64 rows | %s | %d | %.0f | %.0f tok/s |\n", kernels, each, llama8B.activations(64, halves)/1e6, 64/seconds)
		fmt.Fprintf(&page, "| a prompt of 2,048 tokens | %s | %d | %.0f | %.0f tok/s |\n", kernels, each, llama8B.activations(2048, halves)/1e6, 2048/llama8B.prefill(2048, halves))
	}
	page.WriteString("\n## Attention of a prompt of Llama 8B\n\n| tokens | `chunk`, ms | `chunk16`, ms |\n|---|---|---|\n")
	for _, n := range []int{2048, 8192} {
		fmt.Fprintf(&page, "| %d | %.1f | %.1f |\n", n, llama8B.chunks(n, 2)*1e3, llama8B.chunks(n, 1)*1e3)
	}
	page.WriteString("\n## One row, by part, without `pdl`\n\n| model | part | MB | us | bound by |\n|---|---|---|---|---|\n")
	for _, s := range shapes {
		for _, w := range s.decode(100) {
			by := "bandwidth"
			if w.instructions() > w.bytes/bandwidth {
				by = "instructions"
			}
			if float64(w.nodes)*node > w.bytes/bandwidth {
				by = "nodes"
			}
			fmt.Fprintf(&page, "| %s | %s | %.1f | %.0f | %s |\n", s.name, w.what, w.bytes/1e6, w.seconds(false)*1e6, by)
		}
	}
	writeMeasured(&page)
	if *update {
		if err := os.WriteFile("model.md", page.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile("model.md")
	if err != nil || !bytes.Equal(have, page.Bytes()) {
		t.Errorf("cuda/model.md differs from the counts: %v; write it with -update", err)
	}
}
