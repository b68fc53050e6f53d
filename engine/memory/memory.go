// Package memory computes how many KV blocks fit in a budget: what the budget
// leaves after weights and step buffers, divided by the bytes of a block. It
// returns the derivation as text, so that an operator can check every number.
//
// Invariant: weights, step buffers and the blocks of a Plan never exceed the
// budget, and one block more would, unless a named cap was reached first.
//
// The package does not measure memory and does not allocate it.
package memory

import (
	"errors"
	"fmt"
	"math"

	"github.com/tandem-serving/tandem/engine/backend"
)

// ErrBudget says that the budget does not hold what it must.
var ErrBudget = errors.New("memory: budget too small")

// Need is what has to fit. Sizes are in bytes.
type Need struct {
	Budget  int64          // for weights, step buffers and KV together
	Weights int64          // as the backend holds them
	Step    int64          // activation buffers of the largest step
	KV      backend.KVSpec // of which Blocks is what is asked for and ignored

	MaxModelLen int // tokens of the longest sequence, which must fit alone
	MaxBlocks   int // more are of no use; 0: no cap
}

// Plan is how the budget is spent.
type Plan struct {
	Blocks int
	Tokens int   // that the blocks hold
	Bytes  int64 // of all blocks over all layers
	Lines  []string
}

// Fit plans the most blocks that fit.
func Fit(n Need) (Plan, error) {
	if n.Budget < 0 || n.Weights < 0 || n.Step < 0 || n.KV.BlockTokens < 1 || n.KV.BlockBytes() < 1 || n.MaxModelLen < 1 || n.MaxBlocks < 0 {
		return Plan{}, fmt.Errorf("%w: a need without sizes: %+v", ErrBudget, n)
	}
	var p Plan
	say := func(format string, args ...any) { p.Lines = append(p.Lines, fmt.Sprintf(format, args...)) }
	blockBytes := int64(n.KV.BlockBytes())
	left := n.Budget - n.Weights - n.Step
	say("budget        %s", Bytes(n.Budget))
	say("weights      -%s", Bytes(n.Weights))
	say("step buffers -%s", Bytes(n.Step))
	say("left for KV   %s", Bytes(left))
	say("one block     2 (K and V) x %d layers x %d KV heads x %d x %d bytes (%s) x %d tokens = %s",
		n.KV.Layers, n.KV.KVHeads, n.KV.HeadDim, n.KV.DType.Size(), n.KV.DType, n.KV.BlockTokens, Bytes(blockBytes))

	longest := (n.MaxModelLen + n.KV.BlockTokens - 1) / n.KV.BlockTokens
	fit := max(left, 0) / blockBytes
	if fit < int64(longest) {
		return p, fmt.Errorf("%w: a sequence of %d tokens needs %d blocks, %s; %s is left of %s after weights (%s) and step buffers (%s), enough for %d tokens: give more memory or a shorter --max-model-len",
			ErrBudget, n.MaxModelLen, longest, Bytes(int64(longest)*blockBytes), Bytes(max(left, 0)), Bytes(n.Budget), Bytes(n.Weights), Bytes(n.Step), fit*int64(n.KV.BlockTokens))
	}
	say("blocks        %d fit", fit)
	if most := int64(math.MaxInt32 / n.KV.BlockTokens); fit > most {
		fit = most
		say("              capped at %d: slots are numbered in 31 bits", most)
	}
	if n.MaxBlocks > 0 && fit > int64(n.MaxBlocks) {
		fit = int64(max(n.MaxBlocks, longest))
		say("              capped at %d: more would never be used", fit)
	}
	p.Blocks = int(fit)
	p.Tokens = p.Blocks * n.KV.BlockTokens
	p.Bytes = fit * blockBytes
	say("KV            %d blocks = %d tokens = %s", p.Blocks, p.Tokens, Bytes(p.Bytes))
	say("at once       %.1f sequences of %d tokens", float64(p.Blocks)/float64(longest), n.MaxModelLen)
	return p, nil
}

// Bytes writes a size with the unit in which it has at most four digits before
// the point; whole numbers stay whole.
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
