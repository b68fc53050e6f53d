package cuda

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"testing"
)

var update = flag.Bool("update", false, "write cuda/model.md")

// Constants of the prediction. None has been measured on this code.
const (
	bandwidth = 4.3e12 * 0.92            // bytes a second of an H200, where 32 KB are in flight on a multiprocessor
	issue     = 4 * 1.755e9 * 132 * 0.75 // instructions of warps a second
	oneBlock  = issue / 132              // of one multiprocessor
	node      = 1.3e-6                   // seconds between the ends of dependent nodes of a graph, besides their work
	overlap   = 0.6e-6                   // the same of nodes that overlap, with pdl
	hostCopy  = 3e-6                     // of a step's memory
	matmul    = 788e12 * 0.85            // operations a second of cuBLASLt
	mmaSync   = 989e12 * 0.62            // operations a second of mma.sync, whose rate is published as part of wgmma's
	kvRow     = 2                        // bytes of a number of KV
	sliceKB   = 8192 * 4 / 1024          // of a block that draws
	fixed     = 10                       // nodes of a step outside of its layers: embed, angles, rows, a norm, logits, four of a draw, finish
)

// shape is a model: sizes of a layer, of which experts are MXFP4 and everything else is bf16.
type shape struct {
	name                                    string
	layers, hidden, heads, kvHeads, headDim int
	inner, experts, topK, vocab             int
}

var (
	llama1B = shape{"Llama 1B", 16, 2048, 32, 8, 64, 8192, 0, 0, 128256}
	llama8B = shape{"Llama 8B", 32, 4096, 32, 8, 128, 14336, 0, 0, 128256}
	oss20B  = shape{"GPT-OSS 20B", 24, 2880, 64, 8, 64, 2880, 32, 4, 201088}
	oss120B = shape{"GPT-OSS 120B", 36, 2880, 64, 8, 64, 2880, 128, 4, 201088}
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

func (w work) seconds(pdl bool) float64 {
	t := w.bytes / bandwidth
	if w.kernel != "" {
		t = max(t, w.bytes/1024*float64(budgetOf(loopBudgets, w.kernel))/issue)
	}
	if pdl {
		return t + float64(w.alone)*node + float64(w.nodes-w.alone)*overlap
	}
	return t + float64(w.nodes)*node
}

// decode returns a step of one row, by the kernels of TD_KERNELS=all and TD_DRAWS=slices.
func (s *shape) decode(context int) []work {
	l := float64(s.layers)
	attention := fmt.Sprintf("attend_split<%d>", s.headDim)
	all := []work{
		{"attention's matrices", 2 * l * s.attentionWeights(), "gemv<1,1,0,1>", 2 * s.layers, 0},
		{"place and attention", l * s.kvBytes() * float64(context), attention, 2 * s.layers, 0},
	}
	if s.experts > 0 {
		// norm, router, and the choice of experts. The sum of experts is part of their last product, and
		// the next layer's norm of its first one.
		all = append(all, work{"router", 2 * l * s.denseWeights(), "gemv<1,1,0,0>", 3 * s.layers, 0},
			work{"experts", l * s.expertBytes(), "few_mxfp4", 2 * s.layers, 0})
	} else {
		all = append(all, work{"MLP", 2 * l * s.denseWeights(), "gemv<1,1,1,1>", 2 * s.layers, 0})
	}
	return append(all, work{"logits", 2 * s.logitsWeights(), "gemv<1,1,0,0>", 0, 0}, work{"other nodes", 0, "", fixed, 0})
}

// batch returns a step of rows with cuBLASLt, whose products read each matrix once. Of a layer's
// other nodes the two norms, place and the activation are behind products.
func (s *shape) batch(rows, context int) []work {
	l := float64(s.layers)
	return []work{
		{"matrices", 2 * (l*(s.attentionWeights()+s.denseWeights()) + s.logitsWeights()), "", 7 * s.layers, 7 * s.layers},
		{"attention", l * s.kvBytes() * float64(rows*context), fmt.Sprintf("attend_split<%d>", s.headDim), s.layers, 0},
		{"activations", s.activations(rows), "", 8 * s.layers, 4 * s.layers},
		{"other nodes", 0, "", fixed, 2},
	}
}

// activations are the bytes that products, norms, place, activation and narrowing read and write of
// rows, in fp32 and bf16.
func (s *shape) activations(rows int) float64 {
	hidden, inner, heads := float64(s.hidden), float64(s.inner), float64((s.heads+2*s.kvHeads)*s.headDim)
	each := 2*(4*4*hidden+6*hidden) + 2*4*hidden + 6*hidden // two norms with sums, their narrowing, two results, o's rows
	each += 4*heads*3 + 2*4*hidden + 4*inner*(2+3) + 6*inner
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
func (s *shape) prefill(tokens int) float64 {
	l, n := float64(s.layers), float64(tokens)
	products := 2 * n * l * (s.attentionWeights() + s.denseWeights()) / matmul
	return products + s.chunks(tokens, 2) + s.activations(tokens)/bandwidth + float64(16*s.layers)*node
}

// chunks is the time of a prompt's attention by attend_tiles, with queries and weights of as many
// parts. A warp computes tiles of 16 rows and 32 positions, and copies a quarter of K and V.
func (s *shape) chunks(tokens, parts int) float64 {
	tiles := float64(s.layers*s.heads*tokens) / 16 * float64(tokens/2+16) / 32
	kb := float64(2*32*s.headDim*kvRow) / 4 / 1024
	instructions := kb * float64(budgetOf(loopBudgets, fmt.Sprintf("attend_tiles<%d,%d>", s.headDim, parts)))
	operations := float64(parts * 2 * 2 * 16 * 32 * s.headDim)
	return tiles * max(instructions/issue, operations/mmaSync)
}

// TestModelPage holds cuda/model.md, which -update writes: a prediction of an H200's speed by the
// budgets of instructions, which the compiled kernels keep, and by the nodes of a token.
func TestModelPage(t *testing.T) {
	var page bytes.Buffer
	page.WriteString("# A prediction of speeds\n\n<!-- Written by `go test ./cuda -run TestModelPage -update`. -->\n\n" +
		"No GPU has run this code. This page is arithmetic for an H200 by fixed constants: 4.3 TB/s times\n" +
		"0.92, 4 instructions a cycle at 1.755 GHz on each of 132 multiprocessors times 0.75, 1.3 us for a\n" +
		"node of a graph, 3 us for a step's copy, and 788 TFLOP/s times 0.85 for cuBLASLt. The\n" +
		"instructions of a kernel are its budget (`budget.go`), which the compiled code keeps. Attention of\n" +
		"prompts is bound by mma.sync at 0.62 of 989 TFLOP/s, or by its instructions. The kernels are those\n" +
		"of `TD_KERNELS=all` and `TD_DRAWS=slices`, without `chunk16`. With `pdl`, a node that may overlap\n" +
		"with the previous one costs 0.6 us; prompts run without a graph, and so without `pdl`. A\n" +
		"measurement replaces a row as soon as there is one.\n\n" +
		"| row | prediction without `pdl` | with `pdl` | aim | launches a step |\n|---|---|---|---|---|\n")
	row := func(name string, speed, overlapping, aim float64, launches string) {
		fmt.Fprintf(&page, "| %s | %.0f tok/s | %.0f tok/s | %.0f | %s |\n", name, speed, overlapping, aim, launches)
		if speed < aim {
			t.Logf("%s: %.0f tok/s are predicted, %.0f are aimed at", name, speed, aim)
		}
	}
	aims := map[string]float64{llama1B.name: 1000, llama8B.name: 245, oss20B.name: 400, oss120B.name: 300}
	launches := map[string]int{llama1B.name: 106, llama8B.name: 202, oss20B.name: 226, oss120B.name: 334}
	if n := 4 * budgetOf(loopBudgets, "attend_tiles<128,2>"); n > 700 {
		t.Errorf("attend_tiles takes %d instructions for 16 rows, 32 positions and 128 columns, at most 700 are aimed at", n)
	}
	shapes := []*shape{&llama1B, &llama8B, &oss20B, &oss120B}
	for _, s := range shapes {
		seconds, nodes := total(s.decode(100), false)
		overlapping, _ := total(s.decode(100), true)
		row(s.name+", one row", 1/seconds, 1/overlapping, aims[s.name], fmt.Sprint(nodes))
		if nodes > launches[s.name] || 1/seconds < aims[s.name] {
			t.Errorf("%s: %d launches a token of at most %d; %.0f tok/s of %.0f", s.name, nodes, launches[s.name], 1/seconds, aims[s.name])
		}
	}
	seconds, nodes := total(llama8B.batch(64, 1024), false)
	overlapping, _ := total(llama8B.batch(64, 1024), true)
	row("Llama 8B, 64 rows of 1,024 positions", 64/seconds, 64/overlapping, 7000, fmt.Sprint(nodes))
	if 64/seconds < 7000 {
		t.Errorf("64 rows: %.0f tok/s", 64/seconds)
	}
	speed := 2048 / llama8B.prefill(2048)
	row("Llama 8B, a prompt of 2,048 tokens", speed, speed, 33000, "")
	if speed < 33000 {
		t.Errorf("a prompt: %.0f tok/s", speed)
	}
	page.WriteString("\n## Attention of a prompt of Llama 8B\n\n| tokens | `chunk`, ms | `chunk16`, ms |\n|---|---|---|\n")
	for _, n := range []int{2048, 8192} {
		fmt.Fprintf(&page, "| %d | %.1f | %.1f |\n", n, llama8B.chunks(n, 2)*1e3, llama8B.chunks(n, 1)*1e3)
	}
	page.WriteString("\n## One row, by part, without `pdl`\n\n| model | part | MB | us | bound by |\n|---|---|---|---|---|\n")
	for _, s := range shapes {
		for _, w := range s.decode(100) {
			by := "bandwidth"
			if w.kernel != "" && w.bytes/1024*float64(budgetOf(loopBudgets, w.kernel))/issue > w.bytes/bandwidth {
				by = "instructions"
			}
			if float64(w.nodes)*node > w.bytes/bandwidth {
				by = "nodes"
			}
			fmt.Fprintf(&page, "| %s | %s | %.1f | %.0f | %s |\n", s.name, w.what, w.bytes/1e6, w.seconds(false)*1e6, by)
		}
	}
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
