// Package memory computes how many KV blocks fit in a budget, and how a model's
// layers share them. Blocks get what the budget leaves after weights and step
// buffers, divided by the bytes of a block. The package returns the derivation as
// text, so that an operator can check every number.
//
// Invariant: weights, step buffers and the blocks of a Plan never exceed the
// budget. One block more would, unless a named cap was reached first.
//
// The package does not measure memory and does not allocate it.
package memory

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
)

// ErrBudget means that the budget is too small for what it must hold.
var ErrBudget = errors.New("memory: budget too small")

// DefaultStateTokens is a trade-off: Qwen3-Next's state is as large as the keys and values of 3,200
// tokens, and a prefix is found again only up to a kept state.
const DefaultStateTokens = 1024

// Need is what has to fit. Sizes are in bytes.
type Need struct {
	Budget  int64 // for weights, step buffers and KV together
	Weights int64 // as the backend holds them
	Step    int64 // activation buffers of the largest step

	Layers      []backend.KVShape // what each KV layer stores
	BlockTokens int               // tokens per block of the shape that needs the most bytes
	DType       backend.DType     // of the KV

	// StateTokens is the number of tokens between the kept states of a sequence, of layers that
	// have one. It is rounded up to where blocks of keys and values end. 0 means
	// DefaultStateTokens.
	StateTokens int

	// Context is the number of tokens that the model was made for. It prices
	// arrangements, so that all nodes arrange alike whatever their own bounds are. 0
	// means MaxModelLen.
	Context int

	MaxModelLen      int // tokens of the longest sequence, which must fit alone
	MaxBatchedTokens int // tokens of a step: a window holds what the step writes too
	MaxBlocks        int // cap on the blocks; 0: none
}

// Plan is how the budget is spent.
type Plan struct {
	KV          backend.KVSpec // with the number of blocks that fit
	Tokens      int            // tokens that the blocks hold if every group gets as many
	Peak        int            // blocks of one sequence of MaxModelLen tokens
	Concurrency float64        // number of such sequences at once
	Bytes       int64          // of all blocks
	Lines       []string       // the derivation
}

func (n *Need) check() error {
	bad := len(n.Layers) < 1 || n.Budget < 0 || n.Weights < 0 || n.Step < 0 || n.BlockTokens < 1 || n.BlockTokens > maxBlockTokens ||
		n.MaxModelLen < 1 || n.Context < 0 || n.MaxBatchedTokens < 1 || n.MaxBlocks < 0 || n.StateTokens < 0 || !n.DType.KV()
	for _, l := range n.Layers {
		if l.State > 0 {
			bad = bad || l.Window != 2
			continue
		}
		bad = bad || l.State < 0 || l.Window < 0 || l.KVHeads < 1 || l.HeadDim < 1 || l.Latent < 0 || l.Latent > l.HeadDim
	}
	if bad {
		return fmt.Errorf("%w: missing or invalid sizes: %+v", ErrBudget, *n)
	}
	return nil
}

// Fit plans the most blocks that fit.
func Fit(n Need) (Plan, error) {
	if err := n.check(); err != nil {
		return Plan{}, err
	}
	p := Plan{KV: Arrange(n)}
	left := max(n.Budget-n.Weights-n.Step, 0)
	fit, capped, err := p.fit(&n, left)
	if err != nil {
		return p, err
	}
	p.KV.Blocks = int(fit)
	p.Bytes = fit * int64(p.KV.BlockBytes())
	p.count(&n)
	p.explain(&n, left, capped)
	return p, nil
}

// fit returns the number of blocks, and which cap was reached.
func (p *Plan) fit(n *Need, left int64) (fit int64, capped string, err error) {
	blockBytes := int64(p.KV.BlockBytes())
	groups := Groups(p.KV)
	p.Peak = kvcache.Peak(groups, n.MaxModelLen, n.MaxBatchedTokens)
	if fit = left / blockBytes; fit < int64(p.Peak) {
		return 0, "", fmt.Errorf("%w: a sequence of %d tokens needs %d blocks, %s; %s is left of %s after weights (%s) and step buffers (%s), enough for %d blocks: give more memory or a shorter --max-model-len",
			ErrBudget, n.MaxModelLen, p.Peak, Bytes(int64(p.Peak)*blockBytes), Bytes(left), Bytes(n.Budget), Bytes(n.Weights), Bytes(n.Step), fit)
	}
	widest := 0
	for _, g := range groups {
		widest = max(widest, g.BlockTokens)
	}
	if most := int64(math.MaxInt32 / widest); fit > most {
		fit, capped = most, fmt.Sprintf("capped at %d: slots are numbered in 31 bits", most)
	}
	if n.MaxBlocks > 0 && fit > int64(n.MaxBlocks) {
		fit = int64(max(n.MaxBlocks, p.Peak))
		capped = fmt.Sprintf("capped at %d: more would never be used", fit)
	}
	return fit, capped, nil
}

// count computes the capacity as vLLM does: tokens if every group has an equal share,
// and sequences by what one of them holds at its peak.
func (p *Plan) count(n *Need) {
	p.Tokens = p.KV.Blocks / len(p.KV.Groups) * p.unit()
	if every, blocks := p.perState(); every > 0 {
		p.Tokens = p.KV.Blocks * every / blocks
	}
	p.Concurrency = float64(p.KV.Blocks) / float64(p.Peak)
}

// perState returns the number of tokens between two kept states, and how many blocks they and the
// second state take; 0 without states.
func (p *Plan) perState() (every, blocks int) {
	for _, g := range p.KV.Groups {
		if g.State > 0 {
			every = g.Every
		}
	}
	for _, g := range Groups(p.KV) {
		if g.Every > 0 {
			blocks++
		} else {
			blocks += g.End(every)
		}
	}
	return every, blocks
}

// unit returns the tokens of the smallest block.
func (p *Plan) unit() int {
	unit := maxBlockTokens
	for _, g := range p.KV.Groups {
		unit = min(unit, g.BlockTokens)
	}
	return unit
}

// explain writes the derivation.
func (p *Plan) explain(n *Need, left int64, capped string) {
	line := func(what, format string, args ...any) {
		p.Lines = append(p.Lines, fmt.Sprintf("%-14s", what)+fmt.Sprintf(format, args...))
	}
	if n.Weights > 0 || n.Step > 0 {
		line("budget", "%s", Bytes(n.Budget))
		line("weights", "-%s", Bytes(n.Weights))
		line("step buffers", "-%s", Bytes(n.Step))
	}
	line("left for KV", "%s", Bytes(left))
	for i, same := 0, 0; i < len(p.KV.Groups); i += same {
		g, name := p.KV.Groups[i], fmt.Sprintf("group %d", i)
		for same = 1; i+same < len(p.KV.Groups) && p.KV.Groups[i+same] == g; same++ {
			name = fmt.Sprintf("groups %d-%d", i, i+same)
		}
		page, layers := g.PageBytes(p.KV.DType), fmt.Sprint(g.Layers)
		if same > 1 {
			layers = fmt.Sprintf("%d x %d", same, g.Layers)
		}
		if g.State > 0 {
			line(name, "%s parts of states, kept every %d tokens: %d x 4 bytes (float32) = %s a page%s", layers, g.Every, g.State, Bytes(int64(page)), p.unused(g, page))
			continue
		}
		what := fmt.Sprintf("2 (K and V) x %d KV heads x %d", g.KVHeads, g.HeadDim)
		if g.Latent > 0 {
			what = fmt.Sprintf("a latent of %d and %d rotated", g.Latent, g.HeadDim-g.Latent)
		}
		line(name, "%s layers%s: %s x %d bytes (%s) x %d tokens = %s a page%s", layers, window(g.Window),
			what, p.KV.DType.Size(), p.KV.DType, g.BlockTokens, Bytes(int64(page)), p.unused(g, page))
	}
	line("one block", "%d pages of %s = %s", p.KV.Regions, Bytes(int64(p.KV.PageBytes)), Bytes(int64(p.KV.BlockBytes())))
	line("blocks", "%s / %s = %d fit", Bytes(left), Bytes(int64(p.KV.BlockBytes())), left/int64(p.KV.BlockBytes()))
	if capped != "" {
		line("", "%s", capped)
	}
	if every, blocks := p.perState(); every > 0 {
		line("KV cache", "%d blocks (%s) / %d blocks x %d tokens = %s tokens, with a state kept after each %d", p.KV.Blocks, Bytes(p.Bytes), blocks, every, thousands(p.Tokens), every)
	} else {
		line("KV cache", "%d blocks (%s) / %d %s x %d tokens = %s tokens", p.KV.Blocks, Bytes(p.Bytes), len(p.KV.Groups), plural(len(p.KV.Groups), "group"), p.unit(), thousands(p.Tokens))
	}
	line("one sequence", "of %s tokens: %s = %d blocks at most", thousands(n.MaxModelLen), p.sequence(n), p.Peak)
	line("at once", "%d / %d = %.2fx of %s tokens", p.KV.Blocks, p.Peak, p.Concurrency, thousands(n.MaxModelLen))
	p.compare(n, left, line)
}

// unused returns the part of a block that a group leaves empty, as text.
func (p *Plan) unused(g backend.KVGroup, page int) string {
	empty := p.KV.BlockBytes() - g.Layers*page
	if empty == 0 {
		return ""
	}
	return fmt.Sprintf(", %s of a block stay empty", Bytes(int64(empty)))
}

// sequence returns the blocks of the longest sequence as text, summed over equal groups.
func (p *Plan) sequence(n *Need) string {
	var parts []string
	groups := Groups(p.KV)
	for i := 0; i < len(groups); {
		g, same := groups[i], 0
		for i < len(groups) && groups[i] == g {
			same++
			i++
		}
		part := fmt.Sprintf("%d", g.Peak(n.MaxModelLen, n.MaxBatchedTokens))
		if same > 1 {
			part = fmt.Sprintf("%d groups x %s", same, part)
		}
		if g.Every > 0 {
			part += fmt.Sprintf(" (the states that a step of %d starts from, keeps and ends with)", min(n.MaxModelLen, n.MaxBatchedTokens))
		} else if g.Window > 0 && g.Peak(n.MaxModelLen, n.MaxBatchedTokens) < g.End(n.MaxModelLen) {
			part += fmt.Sprintf(" (%d of the window + %d of a step, anywhere in blocks of %d)", g.Window-1, min(n.MaxModelLen, n.MaxBatchedTokens), g.BlockTokens)
		} else {
			part += fmt.Sprintf(" (all, in blocks of %d)", g.BlockTokens)
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, " + ")
}

// compare adds what vLLM's hybrid manager makes of the same memory, if the model has
// several kinds of layers and no states.
func (p *Plan) compare(n *Need, left int64, line func(what, format string, args ...any)) {
	if every, _ := p.perState(); len(p.KV.Groups) == 1 || every > 0 {
		return
	}
	spec, ok := vllmArrangement(*n)
	if !ok {
		line("vLLM", "pads the pages of these layers, whose sizes do not divide each other, or refuses them")
		return
	}
	blocks := left / int64(spec.BlockBytes())
	peak := int64(0)
	for _, g := range Groups(spec) {
		most := int64(g.End(n.MaxModelLen))
		if g.Window > 0 {
			most = int64(g.End(min(n.MaxModelLen, g.Window-1+n.MaxBatchedTokens))) + 1
		}
		peak += most
	}
	line("vLLM", "%d blocks of %d pages, %d groups: %s tokens, %.2fx", blocks, spec.Regions, len(spec.Groups),
		thousands(int(blocks)/len(spec.Groups)*n.BlockTokens), float64(blocks)/float64(peak))
	ours, theirs := int64(p.Peak)*int64(p.KV.BlockBytes()), peak*int64(spec.BlockBytes())
	switch {
	case ours == theirs:
		line("", "the same: both give each group %d layers and leave nothing of a block empty", spec.Regions)
	case spec.Regions == p.KV.Regions && spec.PageBytes == p.KV.PageBytes:
		line("", "%s instead of %s for one sequence: a window's run of tokens is counted as the blocks it can touch, not as one more than it fills", Bytes(ours), Bytes(theirs))
	default:
		line("", "%s instead of %s for one sequence: groups of %d layers instead of %d leave less of a block empty", Bytes(ours), Bytes(theirs), p.KV.Regions, spec.Regions)
	}
}

func window(w int) string {
	if w == 0 {
		return ""
	}
	return fmt.Sprintf(" with a window of %d", w)
}

func plural(n int, what string) string {
	if n == 1 {
		return what
	}
	return what + "s"
}

// thousands formats 131072 as 131,072.
func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// Bytes formats a size with the unit that leaves at most four digits before the point.
// Whole numbers have no decimals.
func Bytes(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	v, unit := float64(n), 0
	for math.Abs(v) >= 1024 && unit < len(units)-1 {
		v /= 1024
		unit++
	}
	if v == math.Trunc(v) {
		return fmt.Sprintf("%.0f %s", v, units[unit])
	}
	return fmt.Sprintf("%.2f %s", v, units[unit])
}
