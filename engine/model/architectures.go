package model

import (
	"maps"
	"slices"
	"strings"
)

// architecture is how the checkpoints of one name in config.json's architectures are read.
type architecture struct {
	models, has string // of the page docs/models.md: what has it, and what it has that Llama has not

	types []string // model_type of a config.json without architectures

	// config reads what config.json has in addition to the common keys; nil: nothing.
	config  func(*rawConfig, *Config) error
	network func(*Config) network // nil: the decoder

	rename  *strings.Replacer // of the decoder's names of tensors to the files'
	fused   []fusion
	stacked *stackNames // nil: each expert has tensors of its own
	either  *stackNames // the tensors of all experts that files have instead of each expert's, or nil

	extraLayers bool     // layers behind the last one may be in the files, which are not computed
	gelu        bool     // config reads the activation
	partial     float64  // partial_rotary_factor where config.json has none; 0: always 1
	theta       float64  // rope_theta where config.json has none; 0: 10000
	ropeKeys    []string // keys of the rotation's parameters that other architectures do not have
}

// architectures are the models that this package computes, by the name in config.json.
var architectures = map[string]*architecture{
	"LlamaForCausalLM": {
		models: "Llama 2 and 3, TinyLlama, Yi, DeepSeek-R1-Distill-Llama",
		types:  []string{"llama"}, config: configLlama,
	},
	"MistralForCausalLM": {
		models: "Mistral 7B, Nemo, Small", has: "windows",
		types: []string{"mistral"}, config: configMistral,
	},
	"MinistralForCausalLM": {
		models: "Ministral 8B", has: "windows by layer",
		types: []string{"ministral"}, config: configMistral,
	},
	"Ministral3ForCausalLM": {
		models: "Ministral 3", has: "queries grow with the position",
		types: []string{"ministral3"}, config: configMinistral3, theta: 1e6,
		ropeKeys: []string{"llama_4_scaling_beta", "max_position_embeddings"},
	},
	"MixtralForCausalLM": {
		models: "Mixtral 8x7B, 8x22B", has: "experts",
		types: []string{"mixtral"}, config: configMixtral, theta: 1e6,
		rename: strings.NewReplacer(append([]string{".mlp.gate.", ".block_sparse_moe.gate."}, expertNames...)...),
	},
	"Qwen2ForCausalLM": {
		models: "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen", has: "biases; windows of the last layers",
		types: []string{"qwen2", "qwen2_5_vl_text"}, config: configQwen2,
	},
	"Qwen3ForCausalLM": {
		models: "Qwen3", has: "norms of heads",
		types: []string{"qwen3", "qwen3_vl_text"}, config: configQwen3,
	},
	"Qwen3MoeForCausalLM": {
		models: "Qwen3-MoE", has: "norms of heads, experts",
		types: []string{"qwen3_moe"}, config: configQwen3MoE,
	},
	"Qwen3NextForCausalLM": {
		models: "Qwen3-Next", has: "layers with a state, gates, partial rotation, experts and a shared one; no guesses",
		types: []string{"qwen3_next"}, config: configQwen3Next, partial: 0.25, extraLayers: true,
		rename: sharedExpert,
	},
	"Qwen3_5ForCausalLM": {
		models: "Qwen3.5", has: "layers with a state, gates, partial rotation; no guesses",
		types: []string{"qwen3_5_text"}, config: configQwen35, partial: 0.25, extraLayers: true,
	},
	"Qwen3_5MoeForCausalLM": {
		models: "Qwen3.5 with experts", has: "layers with a state, gates, partial rotation, experts and a shared one; no guesses",
		types: []string{"qwen3_5_moe_text"}, config: configQwen35MoE, partial: 0.25, extraLayers: true,
		rename: sharedExpert,
		either: &stackNames{gateUp: "mlp.experts.gate_up_proj", down: "mlp.experts.down_proj"},
	},
	"GemmaForCausalLM": {
		models: "Gemma 1",
		types:  []string{"gemma"}, config: configGemma, gelu: true,
	},
	"Gemma2ForCausalLM": {
		models: "Gemma 2", has: "bounded scores and logits, windows by layer",
		types: []string{"gemma2"}, config: configGemma2, gelu: true,
		rename: gemmaNorms,
	},
	"Gemma3ForCausalLM": {
		models: "Gemma 3", has: "windows by layer with a rotation of their own, norms of heads",
		types: []string{"gemma3_text"}, config: configGemma3, gelu: true, theta: 1e6,
		rename: gemmaNorms,
	},
	gemma4Name: {
		models: "Gemma 4", has: "heads of two sizes, experts, embeddings by layer, shared KV",
		types: []string{"gemma4_text"}, config: configGemma4, network: newGemma4, gelu: true,
	},
	"Phi3ForCausalLM": {
		models: "Phi-3, Phi-4, Phi-4-mini", has: "fused matrices, partial rotation",
		types: []string{"phi3"}, config: configPhi3, partial: 1,
		fused: []fusion{fusedQKV, fusedGateUp},
	},
	"Olmo2ForCausalLM": {
		models: "OLMo 2", has: "norms behind attention and MLP; no tensor parallelism",
		types: []string{"olmo2"}, config: configOLMo2,
		rename: strings.NewReplacer(".post_self_attn_layernorm.", ".post_attention_layernorm.", ".post_mlp_layernorm.", ".post_feedforward_layernorm."),
	},
	"GraniteForCausalLM": {
		models: "Granite 3", has: "multipliers",
		types: []string{"granite"}, config: configGranite,
	},
	"GraniteMoeForCausalLM": {
		models: "Granite 3 with experts", has: "multipliers, experts",
		types: []string{"granitemoe"}, config: configGraniteMoE,
		rename: graniteNames,
		fused:  graniteShared, stacked: graniteExperts,
	},
	"GraniteMoeSharedForCausalLM": {
		models: "Granite 3 with experts", has: "multipliers, experts and a shared MLP",
		types: []string{"granitemoeshared"}, config: configGraniteMoE,
		rename: graniteNames,
		fused:  graniteShared, stacked: graniteExperts,
	},
	"GraniteMoeHybridForCausalLM": {
		models: "Granite 4 whose layers are all attention", has: "multipliers, experts and a shared MLP; no Mamba layers",
		types: []string{"granitemoehybrid"}, config: configGraniteHybrid,
		rename: graniteNames,
		fused:  graniteShared, stacked: graniteExperts,
	},
	"SmolLM3ForCausalLM": {
		models: "SmolLM3", has: "layers that do not rotate",
		types: []string{"smollm3"}, config: configSmolLM3, theta: 2e6,
	},
	"GlmForCausalLM": {
		models: "GLM-4-9B", has: "partial rotation, biases",
		types: []string{"glm"}, config: configGLM, partial: 0.5,
		fused: []fusion{fusedGateUp},
	},
	"Glm4ForCausalLM": {
		models: "GLM-4-0414, GLM-Z1", has: "partial rotation, biases, norms around attention and MLP",
		types: []string{"glm4"}, config: configGLM4, partial: 0.5,
		fused: []fusion{fusedGateUp},
	},
	"Glm4MoeForCausalLM": {
		models: "GLM-4.5, GLM-4.6", has: "partial rotation, experts and shared ones",
		types: []string{"glm4_moe"}, config: configGLM4MoE, partial: 0.5, extraLayers: true,
	},
	"MiniMaxM2ForCausalLM": {
		models: "MiniMax-M2", has: "partial rotation, experts; no tensor parallelism",
		types: []string{"minimax_m2"}, config: configMiniMaxM2, theta: 5e6, partial: 1, extraLayers: true,
		rename: strings.NewReplacer(append([]string{".mlp.gate.weight", ".block_sparse_moe.gate.weight", ".mlp.gate.e_score", ".block_sparse_moe.e_score"}, expertNames...)...),
	},
	gptOSSName: {
		models: "GPT-OSS 20B and 120B", has: "sinks, windows by layer, experts in MXFP4",
		types: []string{"gpt_oss"}, config: configGPTOSS,
		rename:  strings.NewReplacer(".mlp.gate.", ".mlp.router."),
		stacked: &stackNames{gateUp: "mlp.experts.gate_up_proj", down: "mlp.experts.down_proj", interleaved: true, byInput: true},
	},
	"DeepseekV2ForCausalLM": {
		models: "DeepSeek-V2, V2-Lite", has: "latents instead of KV, experts in groups and shared ones",
		types: []string{"deepseek_v2"}, config: configDeepseekV2,
	},
	deepseekName: {
		models: "DeepSeek-V3, V3.1, R1, Kimi K2", has: "latents instead of KV, experts in groups and shared ones",
		types: []string{"deepseek_v3", "kimi_k2"}, config: configDeepseek, extraLayers: true,
	},
}

// Tensors that several architectures name alike.
var (
	expertNames  = []string{".mlp.experts.", ".block_sparse_moe.experts.", ".gate_proj.", ".w1.", ".up_proj.", ".w3.", ".down_proj.", ".w2."}
	fusedQKV     = fusion{"self_attn.qkv_proj", []string{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}}
	sharedExpert = strings.NewReplacer(".mlp.shared_experts.", ".mlp.shared_expert.")
	fusedGateUp  = fusion{"mlp.gate_up_proj", []string{"mlp.gate_proj", "mlp.up_proj"}}
)

// network makes the network of a config.
func (c *Config) network() network {
	if make := architectures[c.Architecture].network; make != nil {
		return make(c)
	}
	return newDecoder(c)
}

// classifierSuffix ends the architectures that have a classifier instead of an output projection.
const classifierSuffix = "ForSequenceClassification"

// name finds the architecture, by model_type where config.json has no architectures. The model
// without an output projection, such as Qwen3Model or Qwen3ForSequenceClassification, is that of
// Qwen3ForCausalLM.
func (r *rawConfig) name() error {
	if len(r.Architectures) > 0 || r.ModelType == "" {
		if len(r.Architectures) != 1 {
			return nil
		}
		for _, suffix := range []string{"Model", classifierSuffix} {
			if base, ok := strings.CutSuffix(r.Architectures[0], suffix); ok && architectures[base+"ForCausalLM"] != nil {
				r.Architectures[0], r.Headless, r.Classifies = base+"ForCausalLM", true, suffix == classifierSuffix
				break
			}
		}
		r.arch = architectures[r.Architectures[0]]
		return nil
	}
	for name, a := range architectures {
		if slices.Contains(a.types, r.ModelType) {
			r.Architectures, r.arch = []string{name}, a
			return nil
		}
	}
	var all []string
	for a := range maps.Values(architectures) {
		all = append(all, a.types...)
	}
	slices.Sort(all)
	return refuse("model_type", r.ModelType, "without architectures "+strings.Join(all, ", "))
}
