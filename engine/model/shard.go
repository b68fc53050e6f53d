package model

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/backend"
)

// Shard is the part of a model that one of several tensor-parallel ranks computes. The zero value
// is the whole model. Heads, also those of states, the width of MLPs and experts, and the
// vocabulary are split. Every rank has all norms, routers and latents.
type Shard struct{ Rank, Ranks int }

// part is a rank's range [from, from+n) of a dimension of size of.
type part struct{ of, from, n int }

func whole(n int) part { return part{of: n, n: n} }

func (p part) whole() bool { return p.n == p.of }

// times returns the part of a dimension whose every index has k elements.
func (p part) times(k int) part { return part{p.of * k, p.from * k, p.n * k} }

// parts are the dimensions that are split across ranks.
type parts struct {
	heads, kvHeads, fullKVHeads part // full: of Gemma's layers without a window
	keyHeads                    part // of states, each with its value heads
	ffn, expert, shared         part
	vocab, pleVocab             part
}

// dims returns this rank's parts of the dimensions that are split; the whole with one rank.
func (c *Config) dims() parts {
	if c.parts != nil {
		return *c.parts
	}
	p := parts{heads: whole(c.Heads), kvHeads: whole(c.KVHeads), ffn: whole(c.FFN), expert: whole(c.MoE.FFN), shared: whole(c.MoE.Shared), vocab: whole(c.Vocab)}
	if c.Gemma4 != nil {
		p.fullKVHeads, p.pleVocab = whole(c.Gemma4.FullKVHeads), whole(c.Gemma4.PLEVocab)
	}
	if c.Delta != nil {
		p.keyHeads = whole(c.Delta.KeyHeads)
	}
	return p
}

// Of returns the config of a rank's part. Its sizes are the part's, except the vocabulary, whose
// logits every rank gathers. A dimension that cannot be split is refused.
func (s Shard) Of(c *Config) (Config, error) {
	local := *c
	if s.Ranks <= 1 {
		return local, nil
	}
	if c.parts != nil || s.Rank < 0 || s.Rank >= s.Ranks {
		return local, fmt.Errorf("%w: rank %d of %d", ErrConfig, s.Rank, s.Ranks)
	}
	p := c.dims()
	if c.Features.HeadNorms == allHeadsNorms {
		return local, fmt.Errorf("%w: %s norms all heads of a token together, which %d ranks cannot share", ErrUnsupported, c.Architecture, s.Ranks)
	}
	if c.Delta != nil && c.Delta.KeyHeads%s.Ranks != 0 {
		return local, fmt.Errorf("%w: %d key heads of states (linear_num_key_heads) cannot be shared by %d ranks", ErrUnsupported, c.Delta.KeyHeads, s.Ranks)
	}
	if c.Heads%s.Ranks != 0 {
		return local, fmt.Errorf("%w: %d attention heads (num_attention_heads) cannot be shared by %d ranks", ErrUnsupported, c.Heads, s.Ranks)
	}
	var err error
	cut := func(dim *part, unit int, what string) {
		if err == nil && dim.of > 0 {
			*dim, err = s.cut(dim.of, unit, what)
		}
	}
	cut(&p.heads, 1, "num_attention_heads")
	cut(&p.keyHeads, 1, "linear_num_key_heads")
	cut(&p.ffn, s.unit(c, c.FFN), "intermediate_size")
	cut(&p.expert, s.unit(c, c.MoE.FFN), "moe_intermediate_size")
	cut(&p.shared, s.unit(c, c.MoE.Shared), "the width of the shared experts")
	cut(&p.vocab, 1, "vocab_size")
	cut(&p.pleVocab, 1, "vocab_size_per_layer_input")
	if c.Latent == nil && err == nil { // whose one latent all heads read
		if p.kvHeads, err = s.kvHeads(c.KVHeads); err == nil && c.Gemma4 != nil {
			p.fullKVHeads, err = s.kvHeads(c.Gemma4.FullKVHeads)
		}
	}
	if err != nil {
		return local, err
	}
	local.parts, local.shard = &p, s
	local.Heads, local.KVHeads, local.FFN, local.MoE.FFN, local.MoE.Shared = p.heads.n, p.kvHeads.n, p.ffn.n, p.expert.n, p.shared.n
	if c.Gemma4 != nil {
		g := *c.Gemma4
		g.FullKVHeads, g.PLEVocab = p.fullKVHeads.n, p.pleVocab.n
		local.Gemma4 = &g
	}
	if c.Delta != nil {
		d := *c.Delta
		d.KeyHeads, d.ValueHeads = p.keyHeads.n, p.keyHeads.n*(d.ValueHeads/d.KeyHeads)
		local.Delta = &d
	}
	return local, nil
}

// unit returns the size of the pieces that a width is split in. Groups of quantized weights that
// share a scale stay on one rank.
func (s Shard) unit(c *Config, width int) int {
	const group = 32
	if c.MXFP4 || width%group == 0 && width/group >= s.Ranks {
		return group
	}
	return 1
}

func (s Shard) cut(of, unit int, what string) (part, error) {
	if of/unit < s.Ranks {
		return part{}, fmt.Errorf("%w: %s %d in pieces of %d cannot be shared by %d ranks", ErrUnsupported, what, of, unit, s.Ranks)
	}
	from, end := backend.Cut(of, unit, s.Rank, s.Ranks)
	return part{of, from, end - from}, nil
}

// kvHeads splits key and value heads. With fewer heads than ranks, several ranks have each head.
func (s Shard) kvHeads(of int) (part, error) {
	if of%s.Ranks != 0 && s.Ranks%of != 0 {
		return part{}, fmt.Errorf("%w: %d key and value heads (num_key_value_heads) cannot be shared by %d ranks: neither is a multiple of the other", ErrUnsupported, of, s.Ranks)
	}
	return part{of, s.Rank * of / s.Ranks, max(1, of/s.Ranks)}, nil
}

// once returns a bias that is added to a sum over ranks: only rank 0 has it.
func (c *Config) once(bias backend.Weight) backend.Weight {
	if c.shard.Rank > 0 {
		return backend.NoWeight
	}
	return bias
}

// each is once for experts.
func (c *Config) each(biases []backend.Weight) []backend.Weight {
	if c.shard.Rank > 0 {
		return nil
	}
	return biases
}
