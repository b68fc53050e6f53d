package model

import (
	"encoding/json"
	"fmt"
)

// configGLM reads GLM-4: Llama's blocks, of which half the columns of a head rotate, neighbours
// together, with biases of queries, keys and values.
func configGLM(r *rawConfig, c *Config) error {
	c.KVHeads, c.HeadDim, c.MaxPositions = or(r.NumKVHeads, 2), or(r.HeadDim, 128), or(r.MaxPositions, 131072)
	r.HeadDim, c.Eps = &c.HeadDim, float32(or(r.RMSNormEps, 1.5625e-7))
	c.Features.QKVBias, c.Features.Interleaved = or(r.AttentionBias, true), true
	return nil
}

// configGLM4 reads GLM-4-0414: the same with norms around attention and MLP.
func configGLM4(r *rawConfig, c *Config) error {
	c.Features.Norms = normsAround
	return configGLM(r, c)
}

// configGLM4MoE reads GLM-4.5: half the columns of a head rotate, and behind the first layers the
// MLP is a few experts out of many and one that all tokens share.
func configGLM4MoE(r *rawConfig, c *Config) error {
	var raw struct {
		rawDeepseek
		HeadNorms bool `json:"use_qk_norm"`
	}
	if err := json.Unmarshal(r.text, &raw); err != nil {
		return fmt.Errorf("%w: config.json: %w", ErrConfig, err)
	}
	c.KVHeads, c.MaxPositions, c.Eps = or(r.NumKVHeads, 8), or(r.MaxPositions, 131072), float32(or(r.RMSNormEps, 1e-5))
	if c.Features.QKVBias = or(r.AttentionBias, false); raw.HeadNorms {
		c.Features.HeadNorms = eachHeadNorm
	}
	shared, err := raw.shared(1, or(r.MoEFFN, 1408))
	if err != nil {
		return err
	}
	c.MoE = MoEConfig{
		Experts: or(raw.Experts, or(r.LocalExperts, 128)), TopK: or(r.TopK, 8), FFN: or(r.MoEFFN, 1408), Shared: shared,
		Normalize: or(raw.Normalize, true), Every: 1, FirstDense: or(raw.Dense, 1),
		Sigmoid: true, Groups: or(raw.Groups, 1), KeepGroups: or(raw.KeepGroups, 1), Factor: float32(or(raw.Factor, 1)),
	}
	return c.MoE.check(c)
}
