package model

import (
	"cmp"
	"fmt"
	"slices"
)

// ggufArchitecture is how the files of one general.architecture are read.
type ggufArchitecture struct {
	name   string            // in architectures
	paired bool              // see Config.Paired
	latent bool              // attention is over latents
	names  map[string]string // of modules, where they are not those of ggufNames
	also   func(f *ggufFile, c map[string]any) error
}

// ggufArchitectures are the values of general.architecture that are read.
var ggufArchitectures = map[string]ggufArchitecture{
	"deepseek2":  {name: deepseekName, latent: true, names: deepseekNames, also: ggufDeepseek2},
	"gemma":      {name: "GemmaForCausalLM", also: ggufGemma},
	"gemma2":     {name: "Gemma2ForCausalLM", also: ggufGemma2},
	"gemma3":     {name: "Gemma3ForCausalLM", also: ggufGemma3},
	"glm4":       {name: "Glm4ForCausalLM", also: ggufGLM4},
	"glm4moe":    {name: "Glm4MoeForCausalLM", also: ggufGLM4MoE, names: map[string]string{"post_attention_norm": "post_attention_layernorm"}},
	"gpt-oss":    {name: gptOSSName, also: ggufGPTOSS, names: map[string]string{"post_attention_norm": "post_attention_layernorm"}},
	"granite":    {name: "GraniteForCausalLM", paired: true, also: ggufGranite},
	"granitemoe": {name: "GraniteMoeForCausalLM", paired: true, also: ggufGraniteMoE},
	"llama":      {name: "LlamaForCausalLM", paired: true, also: ggufLlama},
	"mistral3":   {name: "Ministral3ForCausalLM", paired: true, also: ggufMistral3},
	"olmo2":      {name: "Olmo2ForCausalLM", also: ggufOLMo2},
	"phi3":       {name: "Phi3ForCausalLM", also: ggufPhi3},
	"qwen2":      {name: "Qwen2ForCausalLM"},
	"qwen3":      {name: "Qwen3ForCausalLM"},
	"qwen3moe":   {name: "Qwen3MoeForCausalLM", also: ggufQwen3MoE},
	"smollm3":    {name: "SmolLM3ForCausalLM", paired: true, also: (*ggufFile).biases},
}

// ggufExpertKeys are the keys of experts, as most architectures have them in config.json.
var ggufExpertKeys = map[string]string{"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size"}

// ints sets keys of config.json to integers of the file, which must have them.
func (f *ggufFile) ints(c map[string]any, keys map[string]string) error {
	for key, name := range keys {
		n, ok := f.Int(f.arch + "." + key)
		if !ok {
			return fmt.Errorf("%w: %s.%s is missing, or not one integer", ErrConfig, f.arch, key)
		}
		c[name] = n
	}
	return nil
}

// floats sets keys of config.json to numbers of the file, where it has them.
func (f *ggufFile) floats(c map[string]any, keys map[string]string) {
	for key, name := range keys {
		if n, ok := f.Float(f.arch + "." + key); ok {
			c[name] = n
		}
	}
}

// has reports whether the first layer has a tensor.
func (f *ggufFile) has(tensor string) bool {
	_, ok := f.tensors["blk.0."+tensor]
	return ok
}

// biases sets the keys of biases, which the metadata do not have, by the tensors.
func (f *ggufFile) biases(c map[string]any) error {
	c["attention_bias"], c["mlp_bias"] = f.has("attn_q.bias"), f.has("ffn_up.bias")
	return nil
}

// window sets the keys of a window. Every stride-th layer has none, unless the file has a pattern.
func (f *ggufFile) window(c map[string]any, window int64, stride int) error {
	key := f.arch + ".attention.sliding_window"
	if n, ok := f.Int(key); ok {
		window = n
	}
	layers := c["num_hidden_layers"].(int64)
	if layers < 1 || layers > maxLayers {
		return fmt.Errorf("%w: %s.block_count is %d, not between 1 and %d", ErrConfig, f.arch, layers, maxLayers)
	}
	kinds := slices.Repeat([]string{"full_attention"}, int(layers))
	c["layer_types"], c["sliding_window"] = kinds, nil
	if window == 0 {
		return nil
	}
	c["sliding_window"] = window
	n, one := f.File.Int(key + "_pattern")
	all := f.Ints(key + "_pattern")
	f.typed(key+"_pattern", one || all != nil, "an integer, or an array of them")
	if one {
		if n < 0 || n > maxLayers {
			return fmt.Errorf("%w: %s_pattern is %d", ErrConfig, key, n)
		}
		stride = int(n)
	}
	if all != nil && len(all) != len(kinds) {
		return fmt.Errorf("%w: %s_pattern has %d values for %d layers", ErrConfig, key, len(all), len(kinds))
	}
	for i := range kinds {
		if all == nil && (stride == 0 || (i+1)%stride != 0) || all != nil && all[i] != 0 {
			kinds[i] = "sliding_attention"
		}
	}
	return nil
}

// ggufLlama reads what Mixtral and Mistral have beyond Llama: experts and a window.
func ggufLlama(f *ggufFile, c map[string]any) error {
	if n, ok := f.Int("llama.expert_count"); ok && n > 0 {
		used, _ := f.Int("llama.expert_used_count")
		c["architectures"], c["num_local_experts"], c["num_experts_per_tok"] = []string{"MixtralForCausalLM"}, n, used
		return nil
	}
	if n, ok := f.Int("llama.attention.sliding_window"); ok && n > 0 {
		c["architectures"], c["sliding_window"] = []string{"MistralForCausalLM"}, n
	}
	return f.biases(c)
}

func ggufQwen3MoE(f *ggufFile, c map[string]any) error {
	c["norm_topk_prob"] = true
	return f.ints(c, ggufExpertKeys)
}

// ggufGemma reads Gemma 1. The norms of its files have the 1 that transformers adds to a weight.
func ggufGemma(f *ggufFile, c map[string]any) error {
	c["hidden_activation"] = "gelu_pytorch_tanh"
	return f.biases(c)
}

// gemmaScale sets the factor of scores, which the files do not have. It is that of the size of a
// head, except in the largest model, where it is that of the columns for each head.
func (f *ggufFile) gemmaScale(c map[string]any, layersOfLargest int64) {
	heads := c["num_attention_heads"].(int64)
	if c["query_pre_attn_scalar"] = c["head_dim"]; c["num_hidden_layers"] == layersOfLargest && heads > 0 {
		c["query_pre_attn_scalar"] = c["hidden_size"].(int64) / heads
	}
}

func ggufGemma2(f *ggufFile, c map[string]any) error {
	f.gemmaScale(c, 46)
	f.floats(c, map[string]string{"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"})
	if err := f.window(c, 4096, 2); err != nil {
		return err
	}
	return ggufGemma(f, c)
}

func ggufGemma3(f *ggufFile, c map[string]any) error {
	f.gemmaScale(c, 62)
	f.floats(c, map[string]string{"final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq"})
	if err := f.window(c, 0, 6); err != nil {
		return err
	}
	return ggufGemma(f, c)
}

func ggufGLM4(f *ggufFile, c map[string]any) error {
	if n := f.Ints("glm4.rope.dimension_sections"); slices.ContainsFunc(n, func(n int64) bool { return n != 0 }) {
		return fmt.Errorf("%w: glm4.rope.dimension_sections is %v; supported: none", ErrUnsupported, n)
	}
	if n, ok := f.Int("glm4.nextn_predict_layers"); ok && n != 0 {
		return fmt.Errorf("%w: glm4.nextn_predict_layers is %d; supported: 0", ErrUnsupported, n)
	}
	return f.biases(c)
}

func ggufGLM4MoE(f *ggufFile, c map[string]any) error {
	if n, ok := f.Int("glm4moe.nextn_predict_layers"); ok { // which are not computed
		c["num_hidden_layers"] = c["num_hidden_layers"].(int64) - n
	}
	c["use_qk_norm"] = f.has("attn_q_norm.weight")
	f.floats(c, map[string]string{"expert_weights_scale": "routed_scaling_factor"})
	for key, name := range map[string]string{"expert_group_count": "n_group", "expert_group_used_count": "topk_group", "leading_dense_block_count": "first_k_dense_replace"} {
		if n, ok := f.Int("glm4moe." + key); ok {
			c[name] = n
		}
	}
	if norm, ok := f.Bool("glm4moe.expert_weights_norm"); ok {
		c["norm_topk_prob"] = norm
	}
	if n, ok := f.Int("glm4moe.expert_gating_func"); ok && n != 2 {
		return fmt.Errorf("%w: glm4moe.expert_gating_func is %d; supported: 2, the logistic function", ErrUnsupported, n)
	}
	keys := map[string]string{"expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts"}
	if err := f.ints(c, keys); err != nil {
		return err
	}
	return f.biases(c)
}

// ggufGPTOSS reads GPT-OSS. The files have neither how its yarn ends nor all of its end tokens:
// both are as the model was published.
func ggufGPTOSS(f *ggufFile, c map[string]any) error {
	c["attention_bias"] = true
	if yarn, ok := c["rope_scaling"].(map[string]any); ok && yarn["rope_type"] == "yarn" {
		yarn["truncate"] = false
	}
	if c["head_dim"] == nil && c["num_attention_heads"].(int64) > 0 {
		c["head_dim"] = c["hidden_size"].(int64) / c["num_attention_heads"].(int64)
	}
	if err := f.ints(c, map[string]string{
		"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window",
	}); err != nil {
		return err
	}
	if n, ok := f.Int("gpt-oss.expert_gating_func"); ok && n != 3 {
		return fmt.Errorf("%w: gpt-oss.expert_gating_func is %d; supported: 3, the softmax of the chosen scores", ErrUnsupported, n)
	}
	if theta, ok := f.Float("gpt-oss.rope.freq_base_swa"); ok && theta != c["rope_theta"] {
		return fmt.Errorf("%w: gpt-oss.rope.freq_base_swa is %g, rope.freq_base %v; supported: equal ones", ErrUnsupported, theta, c["rope_theta"])
	}
	f.endTokens(c, "<|return|>", "<|endoftext|>", "<|call|>")
	return f.window(c, 0, 2)
}

// endTokens adds tokens to those that end a text, where the vocabulary has them.
func (f *ggufFile) endTokens(c map[string]any, texts ...string) {
	ends := c["eos_token_id"].([]int32)
	for id, token := range f.Strings("tokenizer.ggml.tokens") {
		if slices.Contains(texts, token) && !slices.Contains(ends, int32(id)) {
			ends = append(ends, int32(id))
		}
	}
	c["eos_token_id"] = ends
}

func ggufGranite(f *ggufFile, c map[string]any) error {
	if tuned, ok := f.Bool(f.arch + ".rope.scaling.finetuned"); ok && !tuned {
		return fmt.Errorf("%w: %s.rope.scaling.finetuned is false, which means no rotation; supported: true", ErrUnsupported, f.arch)
	}
	f.floats(c, map[string]string{
		"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
	})
	return f.biases(c)
}

func ggufGraniteMoE(f *ggufFile, c map[string]any) error {
	if err := f.ints(c, map[string]string{"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}); err != nil {
		return err
	}
	if n, ok := f.Int("granitemoe.expert_shared_feed_forward_length"); ok && n > 0 {
		c["architectures"], c["shared_intermediate_size"] = []string{"GraniteMoeSharedForCausalLM"}, n
	}
	return ggufGranite(f, c)
}

// ggufMistral3 reads Ministral 3, and the text of Mistral 3, whose queries do not grow.
func ggufMistral3(f *ggufFile, c map[string]any) error {
	if n, ok := f.Int("mistral3.expert_count"); ok && n != 0 {
		return fmt.Errorf("%w: mistral3.expert_count is %d; supported: 0", ErrUnsupported, n)
	}
	if n, ok := f.Int("mistral3.attention.sliding_window"); ok && n != 0 {
		c["sliding_window"] = n
	}
	if c["rope_theta"] == nil {
		c["rope_theta"] = 10000
	}
	yarn, err := f.yarn(c, map[string]string{"attention.temperature_scale": "llama_4_scaling_beta", "rope.scaling.yarn_log_multiplier": "mscale_all_dim"})
	if err == nil && yarn["mscale_all_dim"] != nil {
		yarn["mscale"] = 1
	}
	return err
}

// yarn sets keys of yarn to numbers of the file that are not zero. Without yarn there must be none.
func (f *ggufFile) yarn(c map[string]any, keys map[string]string) (map[string]any, error) {
	rope, _ := c["rope_scaling"].(map[string]any)
	for key, name := range keys {
		n, ok := f.Float(f.arch + "." + key)
		switch {
		case !ok || n == 0:
		case rope["rope_type"] != "yarn" || n < 0:
			return nil, fmt.Errorf("%w: %s.%s is %g; supported: positive numbers, with rope.scaling.type yarn", ErrUnsupported, f.arch, key, n)
		default:
			rope[name] = n
		}
	}
	return rope, nil
}

func ggufOLMo2(f *ggufFile, c map[string]any) error {
	if n, ok := f.Int("olmo2.attention.sliding_window"); ok && n > 0 { // OLMo 3
		return fmt.Errorf("%w: olmo2.attention.sliding_window is %d; supported: none", ErrUnsupported, n)
	}
	return f.biases(c)
}

func ggufPhi3(f *ggufFile, c map[string]any) error {
	if n, ok := f.Int("phi3.attention.sliding_window"); ok && n > 0 {
		c["sliding_window"] = n
	}
	if original, ok := f.Int("phi3.rope.scaling.original_context_length"); ok {
		c["original_max_position_embeddings"] = original
	}
	return nil
}

// splitLatents reports whether keys and values of latents have tensors of their own. Files made
// before April 2025 have one tensor, and other sizes in their metadata.
func (f *ggufFile) splitLatents() bool { return f.has("attn_k_b.weight") }

// latentSizes sets the sizes of latents and of the heads' keys and values.
func (f *ggufFile) latentSizes(_ ggufArchitecture, c map[string]any) error {
	delete(c, "head_dim")
	of := ""
	if f.splitLatents() { // the others are those of the latents
		of = "_mla"
	}
	sizes := map[string]any{}
	if err := cmp.Or(
		f.ints(c, map[string]string{"attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim", "attention.value_length" + of: "v_head_dim"}),
		f.ints(sizes, map[string]string{"attention.key_length" + of: "key"}),
	); err != nil {
		return err
	}
	c["qk_nope_head_dim"] = sizes["key"].(int64) - c["qk_rope_head_dim"].(int64)
	c["q_lora_rank"] = nil
	if n, ok := f.Int(f.arch + ".attention.q_lora_rank"); ok && n != 0 {
		c["q_lora_rank"] = n
	}
	return nil
}

// deepseekNames are modules of attention over latents.
var deepseekNames = map[string]string{
	"attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
	"attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
	"attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
}

// ggufDeepseek2 reads DeepSeek-V2 and V3, which differ in how experts are chosen. Files without
// groups of experts have one.
func ggufDeepseek2(f *ggufFile, c map[string]any) error {
	if n, ok := f.Float("deepseek2.attention.temperature_scale"); ok && n != 0 {
		return fmt.Errorf("%w: deepseek2.attention.temperature_scale is %g; supported: 0", ErrUnsupported, n)
	}
	if n, ok := f.Int("deepseek2.nextn_predict_layers"); ok { // which are not computed
		c["num_hidden_layers"] = c["num_hidden_layers"].(int64) - n
	}
	c["n_group"], c["topk_group"], c["first_k_dense_replace"], c["routed_scaling_factor"] = int64(1), 1, 0, 1
	f.floats(c, map[string]string{"expert_weights_scale": "routed_scaling_factor"})
	for key, name := range map[string]string{"expert_group_count": "n_group", "expert_group_used_count": "topk_group", "leading_dense_block_count": "first_k_dense_replace"} {
		if n, ok := f.Int("deepseek2." + key); ok {
			c[name] = n
		}
	}
	if err := f.ints(c, map[string]string{
		"expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
	}); err != nil {
		return err
	}
	if pre, _ := f.String("tokenizer.ggml.pre"); pre == "kimi-k2" {
		f.endTokens(c, "<|im_end|>")
	}
	norm, _ := f.Bool("deepseek2.expert_weights_norm")
	gate, _ := f.Int("deepseek2.expert_gating_func")
	_, biased := f.tensors[fmt.Sprintf("blk.%v.exp_probs_b.bias", c["first_k_dense_replace"])]
	switch {
	case gate == 2 || gate == 0 && biased:
		c["norm_topk_prob"] = norm
	case gate > 1 || gate < 0:
		return fmt.Errorf("%w: deepseek2.expert_gating_func is %d; supported: 1, the softmax, and 2, the logistic function", ErrUnsupported, gate)
	case norm:
		return fmt.Errorf("%w: deepseek2.expert_weights_norm is true with the softmax; supported: false", ErrUnsupported)
	default:
		c["architectures"] = []string{"DeepseekV2ForCausalLM"}
		if c["topk_method"] = "greedy"; c["n_group"] != int64(1) {
			c["topk_method"] = "group_limited_greedy"
		}
	}
	yarn, err := f.yarn(c, map[string]string{"rope.scaling.yarn_log_multiplier": "mscale_all_dim"})
	if err == nil && yarn["mscale_all_dim"] != nil { // a tenth of it, and mscale is equal
		all := 10 * yarn["mscale_all_dim"].(float64)
		yarn["mscale"], yarn["mscale_all_dim"] = all, all
	}
	return err
}
