package model

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
)

// ropeKeys are the keys of a rotation's parameters by rope_type, in addition to those that all
// types have. They are held in the fields that targets returns.
var ropeKeys = map[string][]string{
	"default":  {"mrope_section", "mrope_interleaved"},
	"linear":   {"factor"},
	"dynamic":  {"factor", "original_max_position_embeddings"},
	"llama3":   {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
	"yarn":     {"factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings"},
	"longrope": {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"},
}

// ropeNames are other names of a type. Text has one position for each token, so that the three
// positions of mrope are equal.
var ropeNames = map[string]string{"su": "longrope", "mrope": "default"}

// ropeTypes lists the types that are supported.
const ropeTypes = "default, dynamic, linear, llama3, longrope, yarn"

// rope reads the rotation in either spelling: rope_parameters, or rope_theta with rope_scaling.
// A longer context than max_position_embeddings that it makes is set in c.
func (r *rawConfig) rope(c *Config) (RopeConfig, error) {
	key, params := "rope_scaling", r.RopeScaling
	if r.RopeParameters != nil {
		key, params = "rope_parameters", r.RopeParameters
	}
	rope, partial, err := r.parseRope(key, params, c)
	if err != nil {
		return rope, err
	}
	if partial != 1 && r.arch.partial == 0 {
		return rope, fmt.Errorf("%w: config.json: %s: partial_rotary_factor is %v; supported: 1", ErrUnsupported, key, partial)
	}
	if dim := int(float64(c.HeadDim) * partial); partial != 1 && dim != c.HeadDim {
		if dim < 2 || dim > c.HeadDim || dim%2 != 0 {
			return rope, fmt.Errorf("%w: config.json: partial_rotary_factor %v of head_dim %d are %d columns, which cannot be rotated", ErrConfig, partial, c.HeadDim, dim)
		}
		c.Features.RotaryDim = dim
	}
	if rope.Type == "longrope" && (len(rope.Short) != c.rotary()/2 || len(rope.Long) != c.rotary()/2) {
		return rope, fmt.Errorf("%w: config.json: %s: %d short_factor and %d long_factor for %d pairs of columns", ErrConfig, key, len(rope.Short), len(rope.Long), c.rotary()/2)
	}
	switch rope.Type {
	case "linear", "dynamic":
		c.MaxPositions = int(min(float64(c.MaxPositions)*rope.Factor, maxDim))
	case "yarn":
		c.MaxPositions = max(c.MaxPositions, int(min(rope.Original*rope.Factor, maxDim)))
	}
	rope.setContext(c.MaxPositions)
	return rope, nil
}

// parseRope reads a rotation's parameters, and the share of a head's columns that rotate.
func (r *rawConfig) parseRope(key string, params map[string]json.RawMessage, c *Config) (RopeConfig, float64, error) {
	rope := RopeConfig{Theta: or(r.RopeTheta, max(r.arch.theta, 0)), Type: "default"}
	if rope.Theta == 0 && r.RopeTheta == nil {
		rope.Theta = 10000
	}
	partial := 1.0
	if r.arch.partial > 0 {
		partial = r.arch.partial
	}
	partial = or(r.PartialRotary, partial)
	refuse := func(format string, args ...any) (RopeConfig, float64, error) {
		return rope, 1, fmt.Errorf("config.json: %s: "+format, append([]any{key}, args...)...)
	}
	for _, name := range []string{"rope_type", "type"} { // type is the older name
		if text, ok := params[name]; ok && string(text) != "null" {
			if err := json.Unmarshal(text, &rope.Type); err != nil {
				return refuse("%s: %w: %w", name, ErrConfig, err)
			}
			break
		}
	}
	if name, ok := ropeNames[rope.Type]; ok {
		rope.Type = name
	}
	keys, ok := ropeKeys[rope.Type]
	if !ok {
		return refuse("%w: rope_type is %q; supported: %s", ErrUnsupported, rope.Type, ropeTypes)
	}
	fast, slow, whole, theta := 32.0, 1.0, true, rope.Theta
	targets := map[string]any{
		"rope_theta": &theta, "factor": &rope.Factor, "low_freq_factor": &rope.LowFreq, "high_freq_factor": &rope.HighFreq,
		"original_max_position_embeddings": &rope.Original, "partial_rotary_factor": &partial,
		"beta_fast": &fast, "beta_slow": &slow, "truncate": &whole, "attention_factor": &rope.Attention,
		"mscale": &rope.MScale, "mscale_all_dim": &rope.MScaleAll, "short_factor": &rope.Short, "long_factor": &rope.Long,
		"mrope_section": new([]int), "mrope_interleaved": new(bool), "type": new(string), "rope_type": new(string),
	}
	everywhere := append([]string{"rope_theta", "partial_rotary_factor", "type", "rope_type"}, r.arch.ropeKeys...)
	maps.Copy(targets, r.ropeExtra(c))
	for _, name := range slices.Sorted(maps.Keys(params)) {
		if !slices.Contains(keys, name) && !slices.Contains(everywhere, name) {
			return rope, 1, fmt.Errorf("%w: config.json: %s has %q, which rope_type %s does not use", ErrUnsupported, key, name, rope.Type)
		}
		if err := json.Unmarshal(params[name], targets[name]); err != nil {
			return rope, 1, fmt.Errorf("%w: config.json: %s: %s: %w", ErrConfig, key, name, err)
		}
	}
	rope.Theta = theta
	if rope.Type == "yarn" {
		rope.BetaFast, rope.BetaSlow, rope.Whole = fast, slow, whole
	}
	if slices.Contains(keys, "original_max_position_embeddings") && rope.Type != "llama3" {
		given := rope.Original != 0
		if r.OriginalPositions != nil {
			rope.Original, given = *r.OriginalPositions, true
		} else if !given || rope.Type == "dynamic" {
			rope.Original = float64(c.MaxPositions)
		}
		if rope.Factor == 0 && rope.Type != "dynamic" && given && rope.Original > 0 {
			rope.Factor = float64(c.MaxPositions) / rope.Original
		}
	}
	if err := rope.check(); err != nil {
		return refuse("%w", err)
	}
	return rope, partial, nil
}

// ropeExtra returns the keys that an architecture has among its rotation's parameters.
func (r *rawConfig) ropeExtra(c *Config) map[string]any {
	return map[string]any{"llama_4_scaling_beta": &c.Features.QueryGrowth, "max_position_embeddings": new(float64)}
}
