package model

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
)

const deepseekName = "DeepseekV3ForCausalLM"

// rawDeepseek is what config.json has of the family alone.
type rawDeepseek struct {
	QueryRank   *int     `json:"q_lora_rank"`
	Latent      *int     `json:"kv_lora_rank"`
	Rope        *int     `json:"qk_rope_head_dim"`
	Nope        *int     `json:"qk_nope_head_dim"`
	Value       *int     `json:"v_head_dim"`
	Interleaved *bool    `json:"rope_interleave"`
	Experts     *int     `json:"n_routed_experts"`
	Shared      *int     `json:"n_shared_experts"`
	Groups      *int     `json:"n_group"`
	KeepGroups  *int     `json:"topk_group"`
	Factor      *float64 `json:"routed_scaling_factor"`
	Dense       *int     `json:"first_k_dense_replace"`
	Every       *int     `json:"moe_layer_freq"`
	Scoring     *string  `json:"scoring_func"`
	Method      *string  `json:"topk_method"`
	Normalize   *bool    `json:"norm_topk_prob"`
}

// configDeepseek reads DeepSeek-V3: attention over latents and, behind the first layers, a few
// experts out of the best groups and one that all tokens share.
func configDeepseek(r *rawConfig, c *Config) error {
	var raw rawDeepseek
	if err := json.Unmarshal(r.text, &raw); err != nil {
		return fmt.Errorf("%w: config.json: %w", ErrConfig, err)
	}
	if s := or(raw.Scoring, "sigmoid"); s != "sigmoid" {
		return refuse("scoring_func", s, "sigmoid")
	}
	if s := or(raw.Method, "noaux_tc"); s != "noaux_tc" {
		return refuse("topk_method", s, "noaux_tc")
	}
	if n := or(raw.Every, 1); n != 1 {
		return refuse("moe_layer_freq", n, "1")
	}
	ffn := or(r.MoEFFN, 2048)
	shared, err := raw.shared(1, ffn)
	if err != nil {
		return err
	}
	c.MoE = MoEConfig{
		Experts: or(raw.Experts, or(r.LocalExperts, 256)), TopK: or(r.TopK, 8), FFN: ffn, Shared: shared,
		Normalize: or(raw.Normalize, true), Every: 1, FirstDense: or(raw.Dense, 3),
		Sigmoid: true, Groups: or(raw.Groups, 8), KeepGroups: or(raw.KeepGroups, 4), Factor: float32(or(raw.Factor, 2.5)),
	}
	if err := c.MoE.check(c); err != nil {
		return err
	}
	return r.latent(&raw, c)
}

// configDeepseekV2 reads DeepSeek-V2: the same attention, and experts chosen by the softmax of
// their scores, out of all or, with group_limited_greedy, out of the best groups.
func configDeepseekV2(r *rawConfig, c *Config) error {
	var raw rawDeepseek
	if err := json.Unmarshal(r.text, &raw); err != nil {
		return fmt.Errorf("%w: config.json: %w", ErrConfig, err)
	}
	if s := or(raw.Scoring, "softmax"); s != "softmax" {
		return refuse("scoring_func", s, "softmax")
	}
	if n := or(raw.Every, 1); n != 1 {
		return refuse("moe_layer_freq", n, "1")
	}
	if or(raw.Normalize, false) { // transformers does not read it, vLLM does
		return refuse("norm_topk_prob", true, "false")
	}
	shared, err := raw.shared(2, or(r.MoEFFN, 1407))
	if err != nil {
		return err
	}
	c.MoE = MoEConfig{
		Experts: or(raw.Experts, or(r.LocalExperts, 64)), TopK: or(r.TopK, 0), FFN: or(r.MoEFFN, 1407), Shared: shared,
		Every: 1, FirstDense: or(raw.Dense, 0), Factor: float32(or(raw.Factor, 1)),
	}
	switch method := or(raw.Method, "greedy"); method {
	case "greedy":
	case "group_limited_greedy":
		c.MoE.Groups, c.MoE.KeepGroups = or(raw.Groups, 1), or(raw.KeepGroups, 1)
	default:
		return refuse("topk_method", method, "greedy, group_limited_greedy")
	}
	if err := c.MoE.check(c); err != nil {
		return err
	}
	r.MaxPositions = new(int)
	*r.MaxPositions = c.MaxPositions
	yes := true
	raw.Interleaved = &yes
	return r.latent(&raw, c)
}

// shared returns the width of the experts that all tokens share.
func (r *rawDeepseek) shared(absent, ffn int) (int, error) {
	n := or(r.Shared, absent)
	if n < 1 || ffn < 1 || n > maxDim/ffn {
		return 0, fmt.Errorf("%w: config.json: n_shared_experts %d of moe_intermediate_size %d", ErrConfig, n, ffn)
	}
	return n * ffn, nil
}

// latent reads attention over latents.
func (r *rawConfig) latent(raw *rawDeepseek, c *Config) error {
	d := &latentConfig{
		QueryRank: or(raw.QueryRank, 0), Latent: or(raw.Latent, 512), Rope: or(raw.Rope, 64), Nope: or(raw.Nope, 128), Value: or(raw.Value, 128),
		Interleaved: or(raw.Interleaved, true),
	}
	if raw.QueryRank == nil && !strings.Contains(string(r.text), `"q_lora_rank"`) {
		d.QueryRank = 1536
	}
	if or(r.AttentionBias, false) {
		return refuse("attention_bias", true, "false")
	}
	c.Latent = d
	c.KVHeads, c.HeadDim, c.MaxPositions = 1, d.Latent+d.Rope, or(r.MaxPositions, 4096)
	r.HeadDim = &c.HeadDim
	if err := d.check(c); err != nil {
		return err
	}
	rope, err := r.rope(c)
	if err != nil {
		return err
	}
	scale := 1 / math.Sqrt(float64(d.Nope+d.Rope))
	if rope.Type != "default" && rope.MScaleAll > 0 {
		scale *= math.Pow(mscale(rope.Factor, rope.MScaleAll), 2)
	}
	d.Scale, c.Rope = float32(scale), rope
	return nil
}

// check bounds what the common check does not know.
func (d *latentConfig) check(c *Config) error {
	for _, n := range []struct {
		key   string
		value int
	}{
		{"kv_lora_rank", d.Latent}, {"qk_rope_head_dim", d.Rope}, {"qk_nope_head_dim", d.Nope}, {"v_head_dim", d.Value},
		{"q_lora_rank", max(d.QueryRank, 1)},
	} {
		if n.value < 1 || n.value > maxDim/64 {
			return fmt.Errorf("%w: config.json: %s is %d, not between 1 and %d", ErrConfig, n.key, n.value, maxDim/64)
		}
	}
	switch {
	case d.QueryRank < 0:
		return fmt.Errorf("%w: config.json: q_lora_rank is %d", ErrConfig, d.QueryRank)
	case d.Rope%2 != 0:
		return fmt.Errorf("%w: config.json: qk_rope_head_dim %d is odd and cannot be rotated", ErrConfig, d.Rope)
	case c.Heads < 1 || c.Heads > maxExperts || (d.Latent+d.Nope+d.Value+d.Rope) > maxDim/c.Heads:
		return fmt.Errorf("%w: config.json: %d attention heads of a latent of %d, at most %d", ErrConfig, c.Heads, d.Latent, maxExperts)
	}
	return nil
}
