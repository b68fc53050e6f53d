package memory

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
)

// kind is the layers that store the same shape and have the same window.
type kind struct {
	backend.KVShape
	layers []int // by number

	blockTokens int // of an arrangement; 0 of states
}

// kinds groups layers: those without a window first, then in order of appearance.
func kinds(layers []backend.KVShape) []kind {
	var all []kind
	for i, l := range layers {
		at := slices.IndexFunc(all, func(k kind) bool { return k.KVShape == l })
		if at < 0 {
			at, all = len(all), append(all, kind{KVShape: l})
		}
		all[at].layers = append(all[at].layers, i)
	}
	slices.SortStableFunc(all, func(a, b kind) int { return cmp.Compare(min(a.Window, 1), min(b.Window, 1)) })
	return all
}

// Bounds of the search for an arrangement.
const (
	maxBlockTokens = 256  // of any group: one attention segment of the kernels
	maxAlign       = 512  // tokens at which blocks of all groups end together: prefix hits are multiples
	maxScale       = 4    // blocks of the largest shape hold up to this many times Need.BlockTokens
	pricedStep     = 2048 // tokens of a step, only for the price
	slack          = 100  // an arrangement with fewer groups may cost one part in slack more
)

// Arrange lays a model's KV layers out over equal blocks: how many layers share a
// block table, and how many tokens a page holds of each shape. The price of an
// arrangement is the bytes that one sequence of Context tokens holds at its peak.
// Arrange returns the cheapest arrangement, and of nearly equal ones that with the
// fewest block tables. It uses no input that may differ between nodes of one model.
func Arrange(n Need) (best backend.KVSpec) {
	all := kinds(n.Layers)
	most := 0
	for _, k := range all {
		most = max(most, len(k.layers))
	}
	type priced struct { // without its layers, of which there may be thousands
		regions, scale int
		pow2           bool
		groups         int
		bytes          int64
	}
	var candidates []priced
	least := int64(-1)
	for scale := 1; scale <= maxScale; scale++ {
		for regions := most; regions >= 1; regions-- {
			for _, pow2 := range [...]bool{true, false} {
				spec, ok := arrange(all, n, regions, scale, pow2)
				if !ok {
					continue
				}
				bytes := int64(kvcache.Peak(Groups(spec), cmp.Or(n.Context, n.MaxModelLen), pricedStep)) * int64(spec.BlockBytes())
				candidates = append(candidates, priced{regions, scale, pow2, len(spec.Groups), bytes})
				if least < 0 || bytes < least {
					least = bytes
				}
			}
		}
	}
	var cheap priced
	for _, c := range candidates {
		if c.bytes <= least+least/slack && (cheap.groups == 0 || c.groups < cheap.groups) {
			cheap = c
		}
	}
	best, _ = arrange(all, n, cheap.regions, cheap.scale, cheap.pow2)
	return best
}

// arrange makes blocks of so many regions. Their pages hold scale times BlockTokens
// of the shape that needs the most bytes for a token, and as many tokens of other
// shapes as fit. With pow2 that is a power of two times BlockTokens, so that blocks
// of all groups end together after few tokens.
func arrange(all []kind, n Need, regions, scale int, pow2 bool) (s backend.KVSpec, ok bool) {
	s = backend.KVSpec{Regions: regions, Layers: make([]backend.KVPlace, len(n.Layers)), DType: n.DType}
	for _, k := range all {
		if k.State > 0 {
			s.PageBytes = max(s.PageBytes, shape(k).PageBytes(n.DType))
			continue
		}
		s.PageBytes = max(s.PageBytes, scale*n.BlockTokens*shape(k).TokenBytes(n.DType))
	}
	together := n.BlockTokens // tokens at which blocks of keys and values end together
	for i := range all {
		if k := &all[i]; k.State == 0 {
			units := s.PageBytes / (n.BlockTokens * shape(*k).TokenBytes(n.DType))
			units = max(1, min(units, maxBlockTokens/n.BlockTokens))
			if pow2 {
				units = 1 << (bits.Len(uint(units)) - 1)
			}
			k.blockTokens = n.BlockTokens * units
			together = leastMultiple(together, k.blockTokens)
		}
	}
	for _, k := range all {
		g := shape(k)
		if g.BlockTokens = k.blockTokens; k.State > 0 { // a state can be kept wherever a prefix can end
			g.BlockTokens, g.Every = together, roundUp(cmp.Or(n.StateTokens, DefaultStateTokens), together)
		}
		for i, layer := range k.layers {
			if i%regions == 0 {
				s.Groups = append(s.Groups, g)
			}
			at := len(s.Groups) - 1
			s.Layers[layer] = backend.KVPlace{Group: at, Region: s.Groups[at].Layers}
			s.Groups[at].Layers++
		}
	}
	if n.BlockTokens*scale > maxBlockTokens {
		return s, false
	}
	p, err := kvcache.NewPool(kvcache.Config{Blocks: 1, BlockTokens: n.BlockTokens, MaxEvents: 1, Groups: Groups(s)})
	return s, err == nil && (p.Align() <= maxAlign || pow2 && scale == 1)
}

func shape(k kind) backend.KVGroup {
	return backend.KVGroup{KVHeads: k.KVHeads, HeadDim: k.HeadDim, Latent: k.Latent, State: k.State, Window: k.Window}
}

// leastMultiple returns the least common multiple of two positive numbers.
func leastMultiple(a, b int) int {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}

// roundUp returns the least multiple of unit that is at least n.
func roundUp(n, unit int) int { return (n + unit - 1) / unit * unit }

// Groups returns a store's groups for the block pool.
func Groups(s backend.KVSpec) []kvcache.Group {
	groups := make([]kvcache.Group, len(s.Groups))
	for i, g := range s.Groups {
		groups[i] = kvcache.Group{BlockTokens: g.BlockTokens, Window: g.Window, Every: g.Every}
	}
	return groups
}

// vllmArrangement returns the arrangement of vLLM's hybrid manager. A group has as many layers
// as the rarest kind, unless the kinds have nearly the same size. Every group is padded
// to that, and blocks of the largest shape hold BlockTokens.
func vllmArrangement(n Need) (backend.KVSpec, bool) {
	all := kinds(n.Layers)
	least, most := len(n.Layers), 0
	for _, k := range all {
		least, most = min(least, len(k.layers)), max(most, len(k.layers))
	}
	if 4*most < 5*least {
		least = most
	}
	return arrange(all, n, least, 1, true)
}
