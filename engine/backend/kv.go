package backend

import (
	"fmt"
	"slices"
)

// KVSpec is the shape of the paged KV store. Layers of one attention kind and one
// shape form a group, and all groups share one pool of equal blocks. A block is one
// page in each region. Each layer of a group uses another region, and its pages are
// those of its region that the group's block tables name.
type KVSpec struct {
	Blocks    int       // pages per region
	Regions   int       // the most layers of a group
	PageBytes int       // of one page: room for BlockTokens of every group
	Groups    []KVGroup // by number
	Layers    []KVPlace // group and region of each KV layer
	DType     DType
}

// KVGroup is what the layers of a group have in common.
type KVGroup struct {
	BlockTokens int // tokens per block, at most 256 without a State
	KVHeads     int
	HeadDim     int
	Latent      int // see KVShape
	State       int // see KVShape
	Every       int // tokens between states that are kept; 0 without a State
	Window      int // positions that a token attends to; 0: all
	Layers      int // number of layers, at most KVSpec.Regions
}

// KVShape is what one KV layer of a model stores, and how much of it is read.
type KVShape struct {
	Window  int // positions that a token attends to, its own included; 0: all
	KVHeads int
	HeadDim int

	// Latent, if not 0, means that values are the first Latent columns of the keys,
	// which are stored once, for a single head.
	Latent int

	// State, if not 0, is the number of floats of a state, which a layer keeps instead of keys and
	// values. A block holds one, whatever the type of KV is. Window is then 2, because a token
	// reads the state after the token before it. The other fields are 0. See DeltaSpec.
	State int
}

// KVPlace is the group and the region of a KV layer.
type KVPlace struct{ Group, Region int }

// TokenBytes returns the bytes that one layer of the group stores of a token: K and V,
// or the latent that both are made of.
func (g KVGroup) TokenBytes(t DType) int {
	if g.Latent > 0 {
		return g.HeadDim * t.Size()
	}
	return 2 * g.KVHeads * g.HeadDim * t.Size()
}

// PageBytes returns the bytes that one layer of the group stores in a block.
func (g KVGroup) PageBytes(t DType) int {
	if g.State > 0 {
		return g.State * F32.Size()
	}
	return g.BlockTokens * g.TokenBytes(t)
}

// ValueDim returns the width of a head's values.
func (g KVGroup) ValueDim() int {
	if g.Latent > 0 {
		return g.Latent
	}
	return g.HeadDim
}

// BlockBytes returns the bytes of one block over all regions.
func (s KVSpec) BlockBytes() int { return s.Regions * s.PageBytes }

// TokenBytes returns the bytes that a token takes in all layers. A state counts for the tokens
// between two kept ones.
func (s KVSpec) TokenBytes() (n float64) {
	for _, g := range s.Groups {
		if g.State > 0 {
			n += float64(g.Layers*g.PageBytes(s.DType)) / float64(g.Every)
		} else {
			n += float64(g.Layers * g.TokenBytes(s.DType))
		}
	}
	return n
}

// UniformKV returns the store of a model whose layers are all of one kind: a single
// group, and a region per layer.
func UniformKV(layers, blocks, blockTokens, kvHeads, headDim int, dtype DType) KVSpec {
	g := KVGroup{BlockTokens: blockTokens, KVHeads: kvHeads, HeadDim: headDim, Layers: layers}
	s := KVSpec{Blocks: blocks, Regions: layers, PageBytes: blockTokens * g.TokenBytes(dtype), Groups: []KVGroup{g}, DType: dtype}
	for i := range layers {
		s.Layers = append(s.Layers, KVPlace{Region: i})
	}
	return s
}

// KV reports whether KV is stored in the type. Of FP8, a byte is a key or value divided by the
// scale of its layer and head (Backend.ScaleKV), as E4M3.
func (d DType) KV() bool { return d == F32 || d == BF16 || d == FP8 }

// KVScales checks the scales of a layer's keys and values, one for each head or one for all, and
// returns one for each head.
func (s KVSpec) KVScales(layer int, k, v []float32) (perHeadK, perHeadV []float32, err error) {
	if s.DType != FP8 || layer < 0 || layer >= len(s.Layers) {
		return nil, nil, fmt.Errorf("%w: scales of KV layer %d of %d in %v", ErrShape, layer, len(s.Layers), s.DType)
	}
	heads := s.Groups[s.Layers[layer].Group].KVHeads
	spread := func(scales []float32) ([]float32, error) {
		all := make([]float32, heads)
		for i := range all {
			if len(scales) != heads && len(scales) != 1 {
				return nil, fmt.Errorf("%w: %d scales of KV layer %d with %d heads", ErrShape, len(scales), layer, heads)
			}
			if all[i] = scales[i%len(scales)]; !(all[i] >= leastKVScale && all[i] <= 1/float32(leastKVScale)) {
				return nil, fmt.Errorf("%w: KV layer %d has the scale %v", ErrShape, layer, all[i])
			}
		}
		return all, nil
	}
	if perHeadK, err = spread(k); err == nil {
		perHeadV, err = spread(v)
	}
	return perHeadK, perHeadV, err
}

// leastKVScale and its inverse bound the scales of KV, so that no product with one overflows.
const leastKVScale = 1.0 / (1 << 40)

// Valid reports whether the numbers of a spec fit together.
func (s KVSpec) Valid() bool {
	if s.Blocks < 1 || s.Regions < 1 || s.PageBytes < 1 || len(s.Layers) < 1 || !s.DType.KV() {
		return false
	}
	for _, g := range s.Groups {
		if g.State == 0 && (g.KVHeads < 1 || g.HeadDim < 1) ||
			g.State != 0 && (g.State < 0 || g.Window != 2 || g.KVHeads != 0 || g.HeadDim != 0 || s.PageBytes%F32.Size() != 0) {
			return false
		}
		if g.BlockTokens < 1 || g.Window < 0 || g.Latent < 0 || g.Latent > g.HeadDim || g.Latent > 0 && g.KVHeads != 1 || g.Layers < 1 || g.Layers > s.Regions ||
			g.PageBytes(s.DType) > s.PageBytes {
			return false
		}
	}
	return !slices.ContainsFunc(s.Layers, func(p KVPlace) bool {
		return p.Group < 0 || p.Group >= len(s.Groups) || p.Region < 0 || p.Region >= s.Groups[p.Group].Layers
	})
}
