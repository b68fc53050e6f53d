package kvcache

import "fmt"

// Group is the layers of one attention kind and one KV shape, which share block
// tables. A place is a block's index in a table. The block holds the KV of tokens
// [place × BlockTokens, (place+1) × BlockTokens).
type Group struct {
	// BlockTokens is a multiple of Config.BlockTokens; 0 means Config.BlockTokens. A
	// page holds more tokens of layers that need fewer bytes for one.
	BlockTokens int
	// Window is how many positions a token attends to, its own included; 0 is all.
	Window int

	// Every, if not 0, makes it a group of states, of which one replaces all tokens before. The
	// block at a place holds the state after the tokens computed so far, of those before the end
	// of the place. It moves on to the next place, unless the end of its place is a multiple of
	// Every or chosen by the caller: then it stays as it is, and the next place begins with a
	// copy. Every is a multiple of BlockTokens, and Window is 2.
	Every int
}

// First returns the first place that is still read once tokens [0, computed) have
// their KV. The places before it have fallen out of the window.
func (g Group) First(computed int) int {
	if g.Window == 0 {
		return 0
	}
	return max(0, computed-g.Window+1) / g.BlockTokens
}

// End returns the number of places that nTokens tokens take.
func (g Group) End(nTokens int) int { return (nTokens + g.BlockTokens - 1) / g.BlockTokens }

// Touched returns the most blocks that a run of n tokens can occupy, wherever it
// begins within a block.
func (g Group) Touched(n int) int {
	if n < 2 {
		return n
	}
	places := (n-2)/g.BlockTokens + 2
	if g.Every > 0 { // the first one, those every Every tokens, one that is chosen, and the last one
		return min(places, (n-2)/g.Every+4)
	}
	return places
}

// Peak returns the most blocks that a sequence holds at once while it is computed
// from its first token to nTokens in steps of at most chunk tokens. A window keeps
// what the next step reads and what that step writes.
func (g Group) Peak(nTokens, chunk int) int {
	if g.Window == 0 {
		return g.End(nTokens)
	}
	return min(g.End(nTokens), g.Touched(g.Window-1+min(nTokens, chunk)))
}

// Peak returns the most blocks of all groups together.
func Peak(groups []Group, nTokens, chunk int) int {
	sum := 0
	for _, g := range groups {
		sum += g.Peak(nTokens, chunk)
	}
	return sum
}

// resolve fills in the groups' defaults and returns the least number of tokens
// at which blocks of all groups end together.
func resolve(groups []Group, unit int) (all []Group, align int, err error) {
	if len(groups) == 0 {
		groups = []Group{{}}
	}
	align = unit
	for i, g := range groups {
		if g.BlockTokens == 0 {
			g.BlockTokens = unit
		}
		if g.BlockTokens < unit || g.BlockTokens%unit != 0 || g.Window < 0 || g.BlockTokens > maxAlign ||
			g.Every != 0 && (g.Every < 0 || g.Every%g.BlockTokens != 0 || g.Window != 2) {
			return nil, 0, fmt.Errorf("%w: group %d has blocks of %d tokens (a multiple of %d, at most %d), a window of %d and states every %d tokens",
				ErrConfig, i, g.BlockTokens, unit, maxAlign, g.Window, g.Every)
		}
		a, b := align, g.BlockTokens
		for b != 0 {
			a, b = b, a%b
		}
		if align = align / a * g.BlockTokens; align > maxAlign {
			return nil, 0, fmt.Errorf("%w: blocks of all groups end together only every %d tokens, at most %d", ErrConfig, align, maxAlign)
		}
		all = append(all, g)
	}
	return all, align, nil
}

// maxAlign bounds how coarse prefix hits can get.
const maxAlign = 1 << 16
