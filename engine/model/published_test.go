package model

import "testing"

// Configs as the hub has them are read, with what they leave out.
func TestPublishedConfigs(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want func(c *Config) bool
	}{
		"Qwen2.5-7B": {`{"architectures":["Qwen2ForCausalLM"],"model_type":"qwen2","hidden_size":3584,"intermediate_size":18944,"max_position_embeddings":131072,
			"max_window_layers":28,"num_attention_heads":28,"num_hidden_layers":28,"num_key_value_heads":4,"rms_norm_eps":1e-06,"rope_theta":1000000.0,
			"sliding_window":131072,"tie_word_embeddings":false,"torch_dtype":"bfloat16","use_sliding_window":false,"vocab_size":152064,"use_mrope":false}`,
			func(c *Config) bool { return c.Features.QKVBias && c.Window == 0 && c.HeadDim == 128 }},
		"Qwen2.5 with its recipe for long contexts": {`{"architectures":["Qwen2ForCausalLM"],"hidden_size":3584,"intermediate_size":18944,"max_position_embeddings":32768,
			"num_attention_heads":28,"num_hidden_layers":28,"num_key_value_heads":4,"vocab_size":152064,"rope_theta":1000000.0,
			"rope_scaling":{"factor":4.0,"original_max_position_embeddings":32768,"type":"yarn"}}`,
			func(c *Config) bool { return c.MaxPositions == 131072 && c.Rope.Type == "yarn" && c.Rope.Whole }},
		"Mixtral-8x7B": {`{"architectures":["MixtralForCausalLM"],"hidden_size":4096,"intermediate_size":14336,"max_position_embeddings":32768,"model_type":"mixtral",
			"num_attention_heads":32,"num_experts_per_tok":2,"num_hidden_layers":32,"num_key_value_heads":8,"num_local_experts":8,"rope_theta":1000000.0,
			"sliding_window":null,"vocab_size":32000}`,
			func(c *Config) bool { return c.MoE.Experts == 8 && c.MoE.FFN == 14336 && c.Window == 0 }},
		"gemma-2b": {`{"architectures":["GemmaForCausalLM"],"head_dim":256,"hidden_act":"gelu","hidden_activation":null,"hidden_size":2048,"intermediate_size":16384,
			"max_position_embeddings":8192,"model_type":"gemma","num_attention_heads":8,"num_hidden_layers":18,"num_key_value_heads":1,"vocab_size":256000}`,
			func(c *Config) bool { return c.TieEmbedding && c.Features.GELU && c.Features.OnePlus }},
		"gemma-2-9b": {`{"architectures":["Gemma2ForCausalLM"],"attn_logit_softcapping":50.0,"cache_implementation":"hybrid","final_logit_softcapping":30.0,"head_dim":256,
			"hidden_act":"gelu_pytorch_tanh","hidden_activation":"gelu_pytorch_tanh","hidden_size":3584,"intermediate_size":14336,"max_position_embeddings":8192,
			"model_type":"gemma2","num_attention_heads":16,"num_hidden_layers":42,"num_key_value_heads":8,"query_pre_attn_scalar":256,"sliding_window":4096,
			"sliding_window_size":4096,"vocab_size":256000}`,
			func(c *Config) bool { return c.window(0) == 4096 && c.window(1) == 0 && c.Features.ScoreSoftcap == 50 }},
		"gemma-3-4b": {`{"architectures":["Gemma3ForConditionalGeneration"],"boi_token_index":255999,"eos_token_id":[1,106],"model_type":"gemma3","mm_tokens_per_image":256,
			"text_config":{"hidden_size":2560,"intermediate_size":10240,"model_type":"gemma3_text","num_hidden_layers":34,
			"rope_scaling":{"factor":8.0,"rope_type":"linear"},"sliding_window":1024},"torch_dtype":"bfloat16","vision_config":{"hidden_size":1152}}`,
			func(c *Config) bool {
				return c.Wrapped && c.Vocab == 262208 && c.Heads == 8 && c.KVHeads == 4 && c.window(4) == 1024 && c.window(5) == 0 &&
					c.Rope.Type == "linear" && c.Rope.Theta == 1e6 && c.Features.LocalRope.Theta == 1e4 && c.MaxPositions == 131072
			}},
		"Phi-4-mini": {`{"architectures":["Phi3ForCausalLM"],"attention_bias":false,"full_attn_mod":1,"hidden_act":"silu","hidden_size":32,"intermediate_size":64,
			"interpolate_factor":1,"lm_head_bias":false,"max_position_embeddings":131072,"mlp_bias":false,"model_type":"phi3","num_attention_heads":2,
			"num_hidden_layers":2,"num_key_value_heads":1,"original_max_position_embeddings":4096,"partial_rotary_factor":0.75,
			"rope_scaling":{"long_factor":[1,1.1,1.2,1.3,1.4,1.5],"short_factor":[1,1,1,1,1,1],"type":"longrope"},"rope_theta":10000.0,"sliding_window":262144,
			"tie_word_embeddings":true,"vocab_size":200064}`,
			func(c *Config) bool { return c.Features.RotaryDim == 12 && c.Rope.Stretched && c.Rope.Factor == 32 }},
		"OLMo-2": {`{"architectures":["Olmo2ForCausalLM"],"attention_bias":false,"hidden_size":4096,"intermediate_size":11008,"max_position_embeddings":4096,
			"model_type":"olmo2","num_attention_heads":32,"num_hidden_layers":32,"num_key_value_heads":32,"rms_norm_eps":1e-06,"rope_scaling":null,
			"rope_theta":500000,"vocab_size":100352}`, func(c *Config) bool { return c.Features.Norms == normsBehind }},
		"granite-3.1-8b": {`{"architectures":["GraniteForCausalLM"],"attention_bias":false,"attention_multiplier":0.0078125,"embedding_multiplier":12.0,
			"hidden_size":4096,"intermediate_size":12800,"logits_scaling":16.0,"max_position_embeddings":131072,"mlp_bias":false,"model_type":"granite",
			"num_attention_heads":32,"num_hidden_layers":40,"num_key_value_heads":8,"residual_multiplier":0.22,"rope_scaling":null,"rope_theta":10000000.0,
			"tie_word_embeddings":true,"vocab_size":49155}`, func(c *Config) bool { return c.Features.LogitScale == 0.0625 }},
		"GLM-4.5-Air": {`{"architectures":["Glm4MoeForCausalLM"],"attention_bias":true,"head_dim":128,"hidden_size":4096,"partial_rotary_factor":0.5,
			"intermediate_size":10944,"max_position_embeddings":131072,"model_type":"glm4_moe","moe_intermediate_size":1408,"norm_topk_prob":true,
			"num_attention_heads":96,"n_group":1,"topk_group":1,"n_routed_experts":128,"n_shared_experts":1,"routed_scaling_factor":1.0,"num_experts_per_tok":8,
			"first_k_dense_replace":1,"num_hidden_layers":46,"num_key_value_heads":8,"rms_norm_eps":1e-05,"rope_scaling":null,"rope_theta":1000000,
			"num_nextn_predict_layers":1,"tie_word_embeddings":false,"use_qk_norm":false,"vocab_size":151552}`,
			func(c *Config) bool {
				return c.Features.RotaryDim == 64 && c.Features.HeadNorms == noHeadNorms && c.MoE.Shared == 1408
			}},
		"Kimi-K2": {`{"architectures":["DeepseekV3ForCausalLM"],"auto_map":{"AutoModel":"modeling_deepseek.DeepseekV3Model"},"aux_loss_alpha":0.001,"ep_size":1,
			"first_k_dense_replace":1,"hidden_act":"silu","hidden_size":7168,"intermediate_size":18432,"kv_lora_rank":512,"max_position_embeddings":131072,
			"model_type":"kimi_k2","moe_intermediate_size":2048,"moe_layer_freq":1,"n_group":1,"n_routed_experts":384,"n_shared_experts":1,"norm_topk_prob":true,
			"num_attention_heads":64,"num_experts_per_tok":8,"num_hidden_layers":61,"num_key_value_heads":64,"num_nextn_predict_layers":0,"q_lora_rank":1536,
			"qk_nope_head_dim":128,"qk_rope_head_dim":64,"quantization_config":{"activation_scheme":"dynamic","fmt":"e4m3","quant_method":"fp8","weight_block_size":[128,128]},
			"rope_scaling":{"beta_fast":1.0,"beta_slow":1.0,"factor":32.0,"mscale":1.0,"mscale_all_dim":1.0,"original_max_position_embeddings":4096,"type":"yarn"},
			"rope_theta":50000.0,"routed_scaling_factor":2.827,"scoring_func":"sigmoid","seq_aux":true,"topk_group":1,"topk_method":"noaux_tc",
			"v_head_dim":128,"vocab_size":163840}`, func(c *Config) bool { return c.MoE.Experts == 384 && c.FP8 != nil && c.Rope.BetaFast == 1 }},
		"Kimi-K2, by its type alone": {`{"model_type":"kimi_k2","hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,"num_attention_heads":4,"vocab_size":100}`,
			func(c *Config) bool { return c.Architecture == deepseekName }},
		"DeepSeek-V2-Lite": {`{"architectures":["DeepseekV2ForCausalLM"],"first_k_dense_replace":1,"hidden_size":2048,"intermediate_size":10944,"kv_lora_rank":512,
			"max_position_embeddings":163840,"model_type":"deepseek_v2","moe_intermediate_size":1408,"moe_layer_freq":1,"n_group":1,"n_routed_experts":64,
			"n_shared_experts":2,"norm_topk_prob":false,"num_attention_heads":16,"num_experts_per_tok":6,"num_hidden_layers":27,"num_key_value_heads":16,
			"q_lora_rank":null,"qk_nope_head_dim":128,"qk_rope_head_dim":64,"rope_scaling":{"beta_fast":32,"beta_slow":1,"factor":40,"mscale":0.707,
			"mscale_all_dim":0.707,"original_max_position_embeddings":4096,"type":"yarn"},"rope_theta":10000,"routed_scaling_factor":1.0,
			"scoring_func":"softmax","topk_group":1,"topk_method":"greedy","v_head_dim":128,"vocab_size":102400}`,
			func(c *Config) bool { return c.Latent.QueryRank == 0 && !c.MoE.Sigmoid && c.MoE.Groups == 0 }},
		"MiniMax-M2": {`{"architectures":["MiniMaxM2ForCausalLM"],"attn_type_list":[1,1],"head_dim":128,"hidden_act":"silu","hidden_size":3072,"intermediate_size":1536,
			"max_position_embeddings":196608,"model_type":"minimax_m2","mtp_transformer_layers":1,"num_attention_heads":48,"num_experts_per_tok":8,
			"num_hidden_layers":62,"num_key_value_heads":8,"num_local_experts":256,"num_mtp_modules":3,"qk_norm_type":"per_layer","rms_norm_eps":1e-06,
			"rope_theta":5000000,"rotary_dim":64,"scoring_func":"sigmoid","shared_intermediate_size":0,"tie_word_embeddings":false,"use_qk_norm":true,
			"use_routing_bias":true,"vocab_size":200064}`, func(c *Config) bool { return c.Features.RotaryDim == 64 && c.MoE.Sigmoid }},
		"SmolLM3-3B": {`{"architectures":["SmolLM3ForCausalLM"],"attention_bias":false,"hidden_size":2048,"intermediate_size":11008,
			"layer_types":["full_attention","full_attention","full_attention","full_attention"],"max_position_embeddings":65536,"max_window_layers":28,
			"mlp_bias":false,"model_type":"smollm3","no_rope_layer_interval":4,"no_rope_layers":[1,1,1,0],"num_attention_heads":16,"num_hidden_layers":4,
			"num_key_value_heads":4,"rope_scaling":null,"rope_theta":5000000.0,"sliding_window":null,"use_sliding_window":false,"vocab_size":128256}`,
			func(c *Config) bool { return c.TieEmbedding && c.Features.NoRope[3] && !c.Features.NoRope[0] }},
		"Qwen2.5-VL, older": {`{"architectures":["Qwen2_5_VLForConditionalGeneration"],"hidden_size":2048,"intermediate_size":11008,"max_position_embeddings":128000,
			"max_window_layers":70,"model_type":"qwen2_5_vl","num_attention_heads":16,"num_hidden_layers":36,"num_key_value_heads":2,"rms_norm_eps":1e-06,
			"rope_theta":1000000.0,"rope_scaling":{"type":"mrope","mrope_section":[16,24,24]},"sliding_window":32768,"tie_word_embeddings":true,
			"use_sliding_window":false,"vision_config":{"depth":32},"vocab_size":151936}`,
			func(c *Config) bool { return c.Wrapped && c.TieEmbedding && c.Rope.Type == "default" }},
		"Ministral-3": {`{"architectures":["Mistral3ForConditionalGeneration"],"model_type":"mistral3","text_config":{"head_dim":128,"hidden_act":"silu","hidden_size":3072,
			"intermediate_size":9216,"max_position_embeddings":262144,"model_type":"ministral3","num_attention_heads":32,"num_hidden_layers":26,
			"num_key_value_heads":8,"rope_parameters":{"beta_fast":32.0,"beta_slow":1.0,"factor":16.0,"llama_4_scaling_beta":0.1,"mscale":1.0,"mscale_all_dim":1.0,
			"original_max_position_embeddings":16384,"rope_theta":1000000.0,"rope_type":"yarn","type":"yarn"},"sliding_window":null,"vocab_size":131072},
			"tie_word_embeddings":true,"vision_config":{}}`,
			func(c *Config) bool {
				return c.Architecture == "Ministral3ForCausalLM" && c.Features.QueryGrowthSpan == 16384 && c.TieEmbedding
			}},
		"Granite 4, dense": {`{"architectures":["GraniteMoeHybridForCausalLM"],"model_type":"granitemoehybrid","hidden_size":2048,"intermediate_size":4096,"layer_types":["attention","attention"],
			"num_attention_heads":32,"num_hidden_layers":2,"num_key_value_heads":8,"num_local_experts":0,"num_experts_per_tok":0,"position_embedding_type":"rope",
			"shared_intermediate_size":8192,"tie_word_embeddings":true,"vocab_size":100352,"max_position_embeddings":131072}`,
			func(c *Config) bool { return c.FFN == 8192 && c.MoE.Experts == 0 }},
	} {
		got, err := parseConfig([]byte(c.text), nil)
		if err != nil || !c.want(&got) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if err == nil && got.WeightBytes(AsStored) <= 0 {
			t.Errorf("%s: no weights", name)
		}
	}
	if _, err := parseConfig([]byte(`{"architectures":["GraniteMoeHybridForCausalLM"],"hidden_size":64,"intermediate_size":64,"num_hidden_layers":2,"num_attention_heads":4,
		"vocab_size":100,"layer_types":["mamba","attention"]}`), nil); err == nil || err.Error() != "model: not supported: config.json: layer_types is mamba; supported: attention" {
		t.Errorf("Granite 4 with Mamba: %v", err)
	}
}
