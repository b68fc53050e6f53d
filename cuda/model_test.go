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
	overlap  = 0.6e-6                   // the same of nodes that overlap
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

func (w work) seconds() float64 { return max(w.bytes/bandwidth, w.instructions()) + w.between() }

// between is the time between its nodes.
func (w work) between() float64 { return float64(w.alone)*node + float64(w.nodes-w.alone)*overlap }

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

// Launches of a layer with cuBLASLt: six products, of which one is a gate's and that of the matrix
// that it gates, place, attention, two norms and an activation. Those alone are the products, and the
// two norms, place and the activation after products, which do not overlap with the previous kernel.
const launches, launchesAlone = 11, 10

// batch returns a step of rows with cuBLASLt, whose products read each matrix once.
func (s *shape) batch(rows, context int) []work {
	l := float64(s.layers)
	return []work{
		{"matrices", 2 * (l*(s.attentionWeights()+s.denseWeights()) + s.logitsWeights()), "", (launches - 1) * s.layers, launchesAlone * s.layers},
		{"attention", l * s.kvBytes() * float64(rows*context), fmt.Sprintf("attend_split<%d>", s.headDim), s.layers, 0},
		{"activations", s.activations(rows), "", 0, 0},
		{"other nodes", 0, "", fixed, 2},
	}
}

// activations are the bytes that products, norms, place and activation read and write of rows, in fp32
// and, of what products alone read, in bf16.
func (s *shape) activations(rows int) float64 {
	const result = 2
	hidden, inner, queries := float64(s.hidden), float64(s.inner), float64(s.heads*s.headDim)
	heads := float64((s.heads + 2*s.kvHeads) * s.headDim)
	each := 2*(3*4*hidden+result*hidden) + 2*4*hidden // two norms with sums, two products
	each += 3*4*heads + 4*queries + result*queries    // three products and place, attention
	each += 4*4*inner + result*inner                  // two products, activation
	return each * float64(rows*s.layers)
}

// draw is the time of drawing by slices, which one block a slice bounds.
func draw() float64 {
	return sliceKB * float64(budgetOf(loopBudgets, "rule")+budgetOf(loopBudgets, "weigh")+budgetOf(loopBudgets, "edge")) / oneBlock
}

func total(all []work) (seconds float64, nodes int) {
	for _, w := range all {
		seconds += w.seconds()
		nodes += w.nodes
	}
	return seconds + draw() + hostCopy, nodes
}

// prefill returns the seconds of a prompt, whose kernels do not overlap because it is no graph.
func (s *shape) prefill(tokens int) float64 {
	l, n := float64(s.layers), float64(tokens)
	products := 2 * n * l * (s.attentionWeights() + s.denseWeights()) / matmul
	return products + s.chunks(tokens) + s.activations(tokens)/bandwidth + float64(launches*s.layers)*node
}

// chunks is the time of a prompt's attention by attend_tiles. A warp computes tiles of 16 rows and 32
// positions, and copies a quarter of K and V. Its instructions, of which mma.sync are some, bound it,
// and so do tensor cores.
func (s *shape) chunks(tokens int) float64 {
	tiles := float64(s.layers*s.heads*tokens) / 16 * float64(tokens/2+16) / 32
	kb := float64(2*32*s.headDim*kvRow) / 4 / 1024
	instructions := kb * float64(budgetOf(loopBudgets, fmt.Sprintf("attend_tiles<%d>", s.headDim)))
	products := float64(2 * 2 * 16 * 32 * s.headDim / mma)
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
		seconds, _ := total(llama8B.batch(64, 1024))
		return seconds / 64
	}},
	{"Llama 8B, a prompt of 2,000 tokens", 35347, func() float64 { return llama8B.prefill(2000) / 2000 }},
}

func ofDecode(s *shape) float64 {
	seconds, _ := total(s.decode(100))
	return seconds
}

// writeMeasured writes what was measured next to the prediction of the same arithmetic.
func writeMeasured(page *bytes.Buffer) {
	bandwidth = h100
	defer func() { bandwidth = h200 }()
	page.WriteString("\n## An H100 as predicted and as measured\n\n" +
		"The same arithmetic with 3.35 TB/s instead of 4.3. Measured on an H100 80GB HBM3 on 2026-11-26, at\n" +
		"213fa5eb, with all kernels that were switches then: [gpu.md](../bench/results/gpu.md). That code had\n" +
		"norms of one row within products of bf16, and two launches a layer less than the prediction.\n\n" +
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
		"H800](https://arxiv.org/abs/2501.12084), section 6.2). A node that may overlap with the previous one\n" +
		"costs 0.6 us; prompts run without a graph, and so without overlap.\n\n" +
		"| row | prediction | aim | launches a step |\n|---|---|---|---|\n")
	row := func(name string, speed, aim float64, launches string) {
		fmt.Fprintf(&page, "| %s | %.0f tok/s | %.0f | %s |\n", name, speed, aim, launches)
	}
	aims := map[string]float64{llama1B.name: 1000, llama8B.name: 245, int4Llama8B.name: 600, oss20B.name: 400, oss120B.name: 300}
	most := map[string]int{llama1B.name: 138, llama8B.name: 266, int4Llama8B.name: 202, oss20B.name: 250, oss120B.name: 370}
	if n := 4 * budgetOf(loopBudgets, "attend_tiles<128>"); n > 500 {
		t.Errorf("attend_tiles takes %d instructions for 16 rows, 32 positions and 128 columns, at most 500 are aimed at", n)
	}
	shapes := []*shape{&llama1B, &llama8B, &int4Llama8B, &oss20B, &oss120B}
	for _, s := range shapes {
		seconds, nodes := total(s.decode(100))
		row(s.name+", one row", 1/seconds, aims[s.name], fmt.Sprint(nodes))
		if nodes > most[s.name] || 1/seconds < aims[s.name] {
			t.Errorf("%s: %d launches a token of at most %d; %.0f tok/s of %.0f", s.name, nodes, most[s.name], 1/seconds, aims[s.name])
		}
	}
	seconds, nodes := total(llama8B.batch(64, 1024))
	row("Llama 8B, 64 rows of 1,024 positions", 64/seconds, 7000, fmt.Sprint(nodes))
	if 64/seconds < 7000 {
		t.Errorf("64 rows: %.0f tok/s", 64/seconds)
	}
	speed := 2048 / llama8B.prefill(2048)
	row("Llama 8B, a prompt of 2,048 tokens", speed, 33000, "")
	if speed < 33000 {
		t.Errorf("a prompt: %.0f tok/s", speed)
	}
	page.WriteString("\n## One row, by part\n\n| model | part | MB | us | bound by |\n|---|---|---|---|---|\n")
	for _, s := range shapes {
		for _, w := range s.decode(100) {
			by := "bandwidth"
			if w.instructions() > w.bytes/bandwidth {
				by = "instructions"
			}
			if w.between() > w.bytes/bandwidth {
				by = "nodes"
			}
			fmt.Fprintf(&page, "| %s | %s | %.1f | %.0f | %s |\n", s.name, w.what, w.bytes/1e6, w.seconds()*1e6, by)
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
