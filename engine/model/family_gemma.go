package model

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
)

// gemmaNorms are the names of Gemma 2's and 3's norms, which a block has on both sides of
// attention and MLP.
var gemmaNorms = strings.NewReplacer(".post_self_attn_layernorm.", ".post_attention_layernorm.",
	".post_attention_layernorm.", ".pre_feedforward_layernorm.", ".post_mlp_layernorm.", ".post_feedforward_layernorm.")

// rawGemma is what config.json has of Gemma 1 to 3 alone.
type rawGemma struct {
	Activation    *string  `json:"hidden_activation"`
	Softcap       *float64 `json:"final_logit_softcapping"`
	ScoreSoftcap  *float64 `json:"attn_logit_softcapping"`
	QueryScalar   *float64 `json:"query_pre_attn_scalar"`
	Pattern       *int     `json:"sliding_window_pattern"`
	LocalTheta    *float64 `json:"rope_local_base_freq"`
	Bidirectional *bool    `json:"use_bidirectional_attention"`
}

// configGemma reads Gemma 1: Llama's blocks with norms that multiply by 1 + weight, GELU, and
// embeddings that are scaled.
func configGemma(r *rawConfig, c *Config) error {
	_, err := r.gemma(c, gemmaSizes{Vocab: 256000, Hidden: 3072, Layers: 28, Heads: 16, KVHeads: 16, FFN: 24576, MaxPositions: 8192})
	return err
}

// gemmaSizes are what a family's config.json leaves out.
type gemmaSizes struct{ Vocab, Hidden, Layers, Heads, KVHeads, FFN, MaxPositions int }

// gemma reads what Gemma 1 to 3 share.
func (r *rawConfig) gemma(c *Config, absent gemmaSizes) (*rawGemma, error) {
	raw := &rawGemma{}
	if err := json.Unmarshal(r.text, raw); err != nil {
		return nil, fmt.Errorf("%w: config.json: %w", ErrConfig, err)
	}
	// Gemma 1's files have gelu, which means the approximation by tanh as in all of the family.
	if act := or(raw.Activation, or(r.HiddenAct, "gelu")); act != "gelu_pytorch_tanh" && act != "gelu" {
		return nil, refuse("hidden_activation", act, "gelu_pytorch_tanh")
	}
	if or(raw.Bidirectional, false) {
		return nil, refuse("use_bidirectional_attention", true, "false")
	}
	for _, d := range []struct {
		to     *int
		absent int
	}{{&c.Vocab, absent.Vocab}, {&c.Hidden, absent.Hidden}, {&c.Layers, absent.Layers}, {&c.Heads, absent.Heads}, {&c.FFN, absent.FFN}} {
		if *d.to == 0 {
			*d.to = d.absent
		}
	}
	r.NumLayers = c.Layers
	c.KVHeads, c.HeadDim, c.MaxPositions = or(r.NumKVHeads, absent.KVHeads), or(r.HeadDim, 256), or(r.MaxPositions, absent.MaxPositions)
	r.HeadDim, c.TieEmbedding = &c.HeadDim, or(r.TieWordEmbedding, true)
	r.biases(c)
	f := &c.Features
	f.GELU, f.OnePlus, f.EmbedScale = true, true, float32(math.Sqrt(float64(c.Hidden)))
	return raw, nil
}

// gemmaAttention reads what Gemma 2 and 3 have of scores and windows.
func (r *rawConfig) gemmaAttention(raw *rawGemma, c *Config, stride int) (err error) {
	scalar, softcap, scores := or(raw.QueryScalar, 256), or(raw.Softcap, 0), or(raw.ScoreSoftcap, 0)
	if !(scalar > 0 && softcap >= 0 && scores >= 0) {
		return fmt.Errorf("%w: config.json: query_pre_attn_scalar %v, final_logit_softcapping %v, attn_logit_softcapping %v", ErrConfig, scalar, softcap, scores)
	}
	f := &c.Features
	f.Norms, f.AttentionScale = normsAround, float32(1/math.Sqrt(scalar))
	f.LogitSoftcap, f.ScoreSoftcap = float32(softcap), float32(scores)
	if c.Window, err = r.slidingWindow(4096); err != nil {
		return err
	}
	if stride < 1 || stride > maxLayers {
		return fmt.Errorf("%w: config.json: sliding_window_pattern is %d", ErrConfig, stride)
	}
	c.FullLayers, err = r.fullLayers(stride)
	return err
}

// configGemma3 reads Gemma 3: norms around attention and MLP and of each head, windows in five of
// six layers, and a rotation of their own for these.
func configGemma3(r *rawConfig, c *Config) error {
	raw, err := r.gemma(c, gemmaSizes{Vocab: 262208, Hidden: 2304, Layers: 26, Heads: 8, KVHeads: 4, FFN: 9216, MaxPositions: 131072})
	if err != nil {
		return err
	}
	if c.Features.HeadNorms = eachHeadNorm; or(raw.ScoreSoftcap, 0) != 0 {
		return refuse("attn_logit_softcapping", *raw.ScoreSoftcap, "null")
	}
	if err := r.gemmaAttention(raw, c, or(raw.Pattern, 6)); err != nil {
		return err
	}
	full, local := r.RopeScaling, map[string]json.RawMessage(nil)
	if _, nested := r.RopeParameters["full_attention"]; nested {
		for kind, to := range map[string]*map[string]json.RawMessage{"full_attention": &full, "sliding_attention": &local} {
			if err := json.Unmarshal(r.RopeParameters[kind], to); r.RopeParameters[kind] != nil && err != nil {
				return fmt.Errorf("%w: config.json: rope_parameters.%s: %w", ErrConfig, kind, err)
			}
		}
	} else if r.RopeParameters != nil {
		full = r.RopeParameters
	}
	if c.Rope, _, err = r.parseRope("rope_parameters.full_attention", full, c); err != nil {
		return err
	}
	theta := or(raw.LocalTheta, 10000)
	r.RopeTheta = &theta
	c.Features.LocalRope, _, err = r.parseRope("rope_parameters.sliding_attention", local, c)
	return err
}

// configGemma2 reads Gemma 2: Gemma 1 with norms around attention and MLP, scores and logits that
// are bounded, and windows in every second layer.
func configGemma2(r *rawConfig, c *Config) error {
	raw, err := r.gemma(c, gemmaSizes{Vocab: 256000, Hidden: 2304, Layers: 26, Heads: 8, KVHeads: 4, FFN: 9216, MaxPositions: 8192})
	if err != nil {
		return err
	}
	scores, logits := or(raw.ScoreSoftcap, 50), or(raw.Softcap, 30)
	if strings.Contains(string(r.text), `"attn_logit_softcapping"`) {
		scores = or(raw.ScoreSoftcap, 0)
	}
	if strings.Contains(string(r.text), `"final_logit_softcapping"`) {
		logits = or(raw.Softcap, 0)
	}
	raw.ScoreSoftcap, raw.Softcap = &scores, &logits
	return r.gemmaAttention(raw, c, 2)
}
