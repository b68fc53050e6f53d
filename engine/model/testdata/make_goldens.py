"""Makes the tiny random checkpoints of this folder and what Hugging Face
transformers computes with them. Run it here:

    python make_goldens.py [NAME | frequencies.json …]

Each checkpoint is a folder as transformers saves it (config.json, safetensors),
with goldens.json.gz next to them: for prompts of several lengths the logits of some
positions, and a greedy continuation with the gap between the two best logits at
each step. Weights are rounded to bfloat16, so that a bfloat16 file holds them
exactly, and scaled so that logits have a standard deviation of 1 to 10: errors
show, and greedy choices are clear. All arithmetic is float32.

Checkpoints named long-… have one prompt of 6,000 tokens and the logits of some
positions, because rounding of the rotation's frequencies shows far from the start.
frequencies.json has the inverse frequencies of transformers for each kind of rotation.
"""

import gzip
import json
import math
import pathlib
import shutil
import sys
import tempfile

import numpy
import safetensors.torch
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

PROMPTS = [1, 2, 7, 15, 16, 17, 33, 64, 130]  # tokens; around the block size of 16
CONTINUE = 24  # greedy tokens
FAMILY_PROMPTS, FAMILY_CONTINUE = [1, 18, 600], 6  # of FAMILIES
LONG, LONG_POSITIONS = 6000, [499, 1999, 3999, 5999]  # of the checkpoints named long-…

ROOT = pathlib.Path(__file__).parent
COMMON = dict(
    hidden_act="silu", max_position_embeddings=256, rms_norm_eps=1e-5,
    bos_token_id=1, eos_token_id=2, attention_bias=False, mlp_bias=False,
)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)

GPT_OSS = dict(
    model_type="gpt_oss", tie_word_embeddings=False, attention_bias=True, sliding_window=21, swiglu_limit=7.0,
    rope_parameters=dict(
        rope_type="yarn", rope_theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
        original_max_position_embeddings=32,
    ),
)

GEMMA4 = dict(
    model_type="gemma4_text", vocab_size=128, hidden_size=48, intermediate_size=64, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, global_head_dim=32, sliding_window=21, final_logit_softcapping=30.0,
    rms_norm_eps=1e-6, tie_word_embeddings=True,
)

DEEPSEEK = dict(
    model_type="deepseek_v3", vocab_size=144, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16,
    v_head_dim=12, tie_word_embeddings=False, rms_norm_eps=1e-6,
    n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=24, first_k_dense_replace=1,
)

ONE_LAYER = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
    head_dim=24, tie_word_embeddings=False, max_position_embeddings=8192,
)

MODELS = {
    # as many KV heads as heads, a head of its own, plain rotation
    "mha": dict(
        seed=11, dtype=torch.float32,
        config=dict(
            vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
    # grouped heads, tied embeddings, scaled rotation that short prompts feel
    "gqa-tied": dict(
        seed=22, dtype=torch.bfloat16,
        config=dict(
            vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
            num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True,
            rope_parameters=dict(LLAMA3, rope_theta=10000.0, original_max_position_embeddings=32),
        ),
    ),
    # heads * head_dim != hidden, the older config spelling, several files
    "headdim": dict(
        seed=33, dtype=torch.bfloat16, shard="150KB", old_spelling=True,
        config=dict(
            vocab_size=320, hidden_size=96, intermediate_size=192, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False,
            rope_parameters=dict(LLAMA3, rope_theta=500000.0, original_max_position_embeddings=64),
        ),
    ),
    # a window shorter than most prompts, which begins anywhere in a block
    "mistral-window": dict(
        seed=44, dtype=torch.bfloat16,
        config=dict(
            model_type="mistral", vocab_size=192, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=24, tie_word_embeddings=False, sliding_window=21,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    "mistral-full": dict(
        seed=55, dtype=torch.bfloat16, old_spelling=True,
        config=dict(
            model_type="mistral", vocab_size=192, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=False, sliding_window=None,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    # norms of heads, heads * head_dim != hidden, tied embeddings
    "qwen3": dict(
        seed=66, dtype=torch.bfloat16,
        config=dict(
            model_type="qwen3", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, use_sliding_window=False,
            rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    # layer 1 is dense, the others choose 3 of 8 experts
    "qwen3-moe": dict(
        seed=77, dtype=torch.bfloat16,
        config=dict(
            model_type="qwen3_moe", vocab_size=192, hidden_size=64, intermediate_size=112, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, use_sliding_window=False,
            num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[1],
            rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    # every second layer has experts, whose weights stay as the softmax gave them
    "qwen3-moe-plain": dict(
        seed=88, dtype=torch.bfloat16,
        config=dict(
            model_type="qwen3_moe", vocab_size=160, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, head_dim=12, tie_word_embeddings=False, use_sliding_window=False,
            num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=False, decoder_sparse_step=2,
            rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    # every second layer sees all, the others a window that begins anywhere in a
    # block; sinks, biases, and a rotation whose stretch all prompts feel
    "gpt-oss": dict(
        seed=99, dtype=torch.bfloat16,
        config=dict(
            GPT_OSS, vocab_size=160, hidden_size=64, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=6, num_experts_per_tok=2,
        ),
    ),
    # the same with experts in four bits
    "gpt-oss-mxfp4": dict(
        seed=111, dtype=torch.bfloat16, mxfp4=True,
        config=dict(
            GPT_OSS, vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=24, num_local_experts=4, num_experts_per_tok=2,
        ),
    ),
    # heads of two sizes, keys that are values, experts in addition to the dense MLP
    "gemma4-moe": dict(
        seed=122, dtype=torch.bfloat16,
        config=dict(
            GEMMA4, num_hidden_layers=3, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
            enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24,
        ),
    ),
    # embeddings per layer, and layers that read others' KV; the hub's spelling
    "gemma4-ple": dict(
        seed=133, dtype=torch.bfloat16, hub_spelling=True,
        config=dict(
            GEMMA4, num_hidden_layers=6, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=8, vocab_size_per_layer_input=128, num_kv_shared_layers=3, use_double_wide_mlp=True,
        ),
    ),
    # a multimodal model's text: nested config, longer names
    "gemma4-multimodal": dict(
        seed=166, dtype=torch.bfloat16,
        vision=dict(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
            patch_size=4, position_embedding_size=8,
        ),
        config=dict(
            GEMMA4, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], attention_k_eq_v=True,
            num_global_key_value_heads=1, hidden_size_per_layer_input=0,
        ),
    ),
    # a latent instead of K and V, queries through a waist, experts in groups, a
    # rotation that is stretched and sharpened; as the hub has it
    "deepseek": dict(
        seed=144, dtype=torch.bfloat16, old_spelling=True,
        config=dict(
            DEEPSEEK, q_lora_rank=40, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.8,
                original_max_position_embeddings=32,
            ),
        ),
    ),
    # matrices in floats of 8 bits, blocks of which share a scale
    "deepseek-fp8": dict(
        seed=181, dtype=torch.bfloat16, fp8=(16, 32),
        config=dict(DEEPSEEK, num_hidden_layers=2, rope_parameters=dict(rope_type="default", rope_theta=10000.0), q_lora_rank=40),
    ),
    # queries without a waist, two shared experts, weights as they are, halves that turn
    "deepseek-plain": dict(
        seed=155, dtype=torch.float32,
        config=dict(
            DEEPSEEK, q_lora_rank=None, n_shared_experts=2, routed_scaling_factor=1.5, norm_topk_prob=False, rope_interleave=False,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
    # one layer for each kind of rotation, of 12 pairs of columns so that exponents round
    "long-default": dict(
        seed=211, dtype=torch.bfloat16, sharpen=2.0,
        config=dict(ONE_LAYER, rope_parameters=dict(rope_type="default", rope_theta=500000.0)),
    ),
    "long-llama3": dict(
        seed=222, dtype=torch.bfloat16, sharpen=2.0,
        config=dict(ONE_LAYER, rope_parameters=dict(LLAMA3, rope_theta=500000.0, original_max_position_embeddings=1024)),
    ),
    # each token has all experts, so that rounding cannot choose between them
    "long-gpt-oss": dict(
        seed=233, dtype=torch.bfloat16, sharpen=2.0,
        config=GPT_OSS | ONE_LAYER | dict(
            layer_types=["full_attention"], num_local_experts=2, num_experts_per_tok=2,
            rope_parameters=dict(GPT_OSS["rope_parameters"], original_max_position_embeddings=1024),
        ),
    ),
    "long-deepseek": dict(
        seed=244, dtype=torch.bfloat16, sharpen=2.0,
        config=DEEPSEEK | ONE_LAYER | dict(
            kv_lora_rank=16, qk_rope_head_dim=24, qk_nope_head_dim=8, v_head_dim=16, q_lora_rank=None,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=150000.0, factor=8.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.8,
                original_max_position_embeddings=1024,
            ),
        ),
    ),
    "long-linear": dict(
        seed=265, dtype=torch.bfloat16, sharpen=2.0, config=dict(ONE_LAYER, rope_parameters=dict(rope_type="linear", rope_theta=500000.0, factor=4.0)),
    ),
    # the prompt fills the context that the frequencies are made for
    "long-dynamic": dict(
        seed=267, dtype=torch.bfloat16, sharpen=2.0,
        config=ONE_LAYER | dict(max_position_embeddings=1500, rope_parameters=dict(rope_type="dynamic", rope_theta=500000.0, factor=4.0)),
    ),
    "long-longrope": dict(
        seed=268, dtype=torch.bfloat16, sharpen=2.0,
        config=ONE_LAYER | dict(
            model_type="phi3", hidden_size=48, num_attention_heads=2, head_dim=24, pad_token_id=0, original_max_position_embeddings=1024,
            rope_parameters=dict(rope_type="longrope", rope_theta=500000.0, short_factor=[1.0 + i / 9 for i in range(12)], long_factor=[1.05**i for i in range(12)]),
        ),
    ),
    # 6 of 12 pairs rotate, neighbours together
    "long-glm": dict(
        seed=269, dtype=torch.bfloat16, sharpen=2.0,
        config=ONE_LAYER | dict(model_type="glm", pad_token_id=0, attention_bias=True, rope_parameters=dict(rope_type="default", rope_theta=500000.0, partial_rotary_factor=0.5)),
    ),
    # 6 of 24 pairs turn
    "long-gemma4": dict(
        seed=256, dtype=torch.bfloat16,
        config=GEMMA4 | ONE_LAYER | dict(
            layer_types=["full_attention"], global_head_dim=48, attention_k_eq_v=False, hidden_size_per_layer_input=0, tie_word_embeddings=True,
        ),
    ),
}

# The families have prompts that pass every window and every limit of a rotation. Shapes are
# unusual, and each checkpoint has the features of its family that change the computation.
FAMILY = dict(vocab_size=96, hidden_size=40, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)

FAMILIES = {
    # biases of queries, keys and values; the last layer has a window; yarn
    "qwen2": dict(
        seed=301, config=FAMILY | dict(
            model_type="qwen2", tie_word_embeddings=True, use_sliding_window=True, max_window_layers=2, sliding_window=37,
            rope_parameters=dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=160),
            max_position_embeddings=160,
        ),
    ),
}
EXPERTS = dict(num_local_experts=6, num_experts_per_tok=2)
GRANITE = dict(
    embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.25, logits_scaling=0.6, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
)
ROPE = dict(rope_type="default", rope_theta=10000.0)

FAMILIES |= {
    "mixtral": dict(seed=302, config=FAMILY | EXPERTS | dict(
        model_type="mixtral", num_hidden_layers=2, intermediate_size=24, sliding_window=53, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    # every layer but the second has a window
    "ministral": dict(seed=303, config=FAMILY | dict(
        model_type="ministral", head_dim=14, sliding_window=45, layer_types=["sliding_attention", "full_attention", "sliding_attention"], tie_word_embeddings=False,
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0))),
    # all biases, frequencies that grow with the context, which the longest prompt fills
    "llama-dynamic": dict(seed=304, config=FAMILY | dict(
        model_type="llama", num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=False, max_position_embeddings=150,
        rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)), static=True),
    "gemma": dict(seed=305, config=FAMILY | dict(
        model_type="gemma", head_dim=16, num_key_value_heads=1, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True, rope_parameters=ROPE)),
    # experts out of the best groups; out of all, with queries that have no waist
    "deepseek-v2": dict(seed=320, config=DEEPSEEK | dict(
        model_type="deepseek_v2", num_hidden_layers=2, q_lora_rank=40, n_shared_experts=2, routed_scaling_factor=1.8, topk_method="group_limited_greedy",
        num_attention_heads=4, num_key_value_heads=4, norm_topk_prob=False,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.8, original_max_position_embeddings=100),
        max_position_embeddings=800)),
    "deepseek-v2-lite": dict(seed=321, config=DEEPSEEK | dict(
        model_type="deepseek_v2", num_hidden_layers=2, q_lora_rank=None, n_shared_experts=1, routed_scaling_factor=1.4, topk_method="greedy",
        n_group=1, topk_group=1, first_k_dense_replace=0, norm_topk_prob=False, rope_parameters=ROPE)),
    # scores that the bound bends, windows in every second layer
    "gemma2": dict(seed=318, config=FAMILY | dict(
        model_type="gemma2", head_dim=16, query_pre_attn_scalar=12, sliding_window=61, tie_word_embeddings=True,
        attn_logit_softcapping=3.0, final_logit_softcapping=9.0, rope_parameters=ROPE)),
    # queries that grow by steps of 100 positions
    "ministral3": dict(seed=319, config=FAMILY | dict(
        model_type="ministral3", head_dim=14, tie_word_embeddings=False, max_position_embeddings=800,
        rope_parameters=dict(rope_type="yarn", rope_theta=1000000.0, factor=8.0, original_max_position_embeddings=100, beta_fast=32.0, beta_slow=1.0,
                             mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3))),
    # windows with a rotation of their own, which is not stretched
    "gemma3": dict(seed=306, config=FAMILY | dict(
        model_type="gemma3_text", num_hidden_layers=4, head_dim=16, query_pre_attn_scalar=20, sliding_window=41, tie_word_embeddings=True,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"], final_logit_softcapping=20.0,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=4.0), sliding_attention=dict(rope_type="default", rope_theta=10000.0),
        ))),
    "olmo2": dict(seed=307, config=FAMILY | dict(model_type="olmo2", tie_word_embeddings=False, rope_parameters=ROPE)),
    "phi3": dict(seed=308, config=FAMILY | dict(
        model_type="phi3", hidden_size=48, num_attention_heads=4, sliding_window=90, tie_word_embeddings=False, max_position_embeddings=1024,
        original_max_position_embeddings=128, partial_rotary_factor=0.7, pad_token_id=0,
        rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.0, 1.5, 4.0, 7.5])), static=True),
    "granite": dict(seed=309, config=FAMILY | GRANITE | dict(model_type="granite", attention_bias=True, mlp_bias=True)),
    "granitemoe": dict(seed=310, config=FAMILY | GRANITE | EXPERTS | dict(model_type="granitemoe", num_hidden_layers=2, intermediate_size=24)),
    "granite4": dict(seed=311, config=FAMILY | GRANITE | EXPERTS | dict(
        model_type="granitemoehybrid", num_hidden_layers=2, intermediate_size=24, shared_intermediate_size=32, layer_types=["attention"] * 2,
        position_embedding_type="rope", mamba_n_heads=4)),
    # no experts, and no rotation
    "granite4-dense": dict(seed=312, config=FAMILY | GRANITE | dict(
        model_type="granitemoehybrid", num_hidden_layers=2, num_local_experts=0, shared_intermediate_size=56, layer_types=["attention"] * 2,
        position_embedding_type="nope", mamba_n_heads=4)),
    "smollm3": dict(seed=313, config=FAMILY | dict(
        model_type="smollm3", num_hidden_layers=4, pad_token_id=0, no_rope_layers=[1, 0, 1, 0], use_sliding_window=True, sliding_window=60, tie_word_embeddings=True,
        layer_types=["full_attention", "sliding_attention"] * 2, rope_parameters=dict(rope_type="yarn", rope_theta=2000000.0, factor=4.0, original_max_position_embeddings=160), max_position_embeddings=160)),
    "glm": dict(seed=314, config=FAMILY | dict(
        model_type="glm", head_dim=12, num_hidden_layers=2, attention_bias=True, tie_word_embeddings=False, pad_token_id=0, rope_parameters=ROPE | dict(partial_rotary_factor=0.5))),
    "glm4": dict(seed=315, config=FAMILY | dict(
        model_type="glm4", head_dim=12, attention_bias=True, tie_word_embeddings=False, pad_token_id=0, rope_parameters=ROPE | dict(partial_rotary_factor=0.5))),
    "glm4-moe": dict(seed=316, config=FAMILY | dict(
        model_type="glm4_moe", head_dim=12, attention_bias=True, use_qk_norm=True, tie_word_embeddings=False, n_routed_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=20, n_shared_experts=2, routed_scaling_factor=1.7, first_k_dense_replace=1, pad_token_id=0, rope_parameters=ROPE | dict(partial_rotary_factor=0.5))),
    "minimax-m2": dict(seed=317, config=FAMILY | EXPERTS | dict(
        model_type="minimax_m2", num_hidden_layers=2, head_dim=12, intermediate_size=24, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=5000000.0, partial_rotary_factor=0.5))),
}
# The text models of models that see: as transformers saves them, and as the hub has them.
EYE = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
QWEN_EYE = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=40, patch_size=4)
SEEING = FAMILY | dict(num_hidden_layers=2, intermediate_size=56)
FAMILIES |= {
    "gemma3-multimodal": dict(
        seed=331, wrapper="Gemma3", vision=EYE | dict(image_size=8, patch_size=4), outer=dict(mm_tokens_per_image=4),
        config=SEEING | dict(
            head_dim=16, query_pre_attn_scalar=20, sliding_window=41, tie_word_embeddings=True, layer_types=["sliding_attention", "full_attention"],
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=4.0), sliding_attention=dict(rope_type="default", rope_theta=10000.0),
            ))),
    "mistral3": dict(
        seed=332, wrapper="Mistral3", vision=EYE | dict(head_dim=8, image_size=8, patch_size=4), hub=("model.language_model.", "language_model.model.", "lm_head.", "language_model.lm_head."),
        config=SEEING | dict(model_type="mistral", head_dim=14, sliding_window=None, tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    "qwen2.5-vl": dict(
        seed=333, wrapper="Qwen2_5_VL", vision=QWEN_EYE | dict(fullatt_block_indexes=[0]), hub=("model.language_model.", "model.", "model.visual.", "visual."), flat=True,
        config=SEEING | dict(tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=1000000.0, mrope_section=[1, 2, 2]))),
    "qwen3-vl": dict(
        seed=334, wrapper="Qwen3VL", vision=QWEN_EYE | dict(num_position_embeddings=16, deepstack_visual_indexes=[0]),
        config=SEEING | dict(head_dim=16, tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=5000000.0, mrope_section=[4, 2, 2], mrope_interleaved=True))),
}
# Layers whose memory is a state, of odd widths; the last layer is one.
DELTA = SEEING | dict(
    num_hidden_layers=4, head_dim=16, tie_word_embeddings=False, layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2, linear_key_head_dim=12, linear_value_head_dim=10, linear_num_value_heads=4, rope_parameters=ROPE | dict(partial_rotary_factor=0.25),
)
FAMILIES |= {
    # the second layer is dense
    "qwen3-next": dict(seed=341, config=DELTA | dict(
        model_type="qwen3_next", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28, norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3.5": dict(
        seed=342, wrapper="Qwen3_5", vision=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=40, patch_size=4, num_position_embeddings=16),
        config=DELTA | dict(linear_num_value_heads=6, linear_value_head_dim=18, rope_parameters=ROPE | dict(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True))),
    "qwen3.5-moe": dict(seed=343, fuse=True, config=DELTA | dict(
        model_type="qwen3_5_moe_text", linear_num_value_heads=2, linear_value_head_dim=72, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28)),
}
for spec in FAMILIES.values():
    spec["dtype"] = torch.bfloat16
MODELS |= FAMILIES


ONE_PLUS = ("gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def fill(model, seed, sharpen=1.0):
    """Random weights: activations of order one, attention that is far from flat.

    sharpen scales queries and keys, so that few tokens have most of the attention.
    """
    gen = torch.Generator().manual_seed(seed)
    text = model.config.get_text_config()
    tied = text.tie_word_embeddings
    scalars = [(n, p) for n, p in model.named_buffers() if n.endswith("layer_scalar") or n.endswith("correction_bias")]
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *scalars]:
            r = torch.randn(p.shape, generator=gen)
            if name.endswith("norm.weight") and text.model_type in ONE_PLUS and "linear_attn" not in name:
                value = 0.3 * r  # a norm multiplies by 1 + weight
            elif name.endswith("A_log"):
                value = 1.5 * r - 2  # states that last for one token to hundreds
            elif "layernorm" in name and text.model_type == "gemma4_text":
                value = 1 + 0.3 * r
            elif name.endswith("layer_scalar"):
                value = 0.9 + 0.1 * r
            elif name.endswith("router.scale") or name.endswith("per_expert_scale"):
                value = 1 + 0.3 * r
            elif "embed_tokens_per_layer" in name:
                value = 0.5 * r
            elif name.endswith("norm.weight"):
                value = 1 + 0.3 * r
            elif "embed_tokens" in name:
                value = r * (3 / p.shape[1] ** 0.5 if tied else 1.0)
            elif "lm_head" in name:
                value = r * (3 / p.shape[1] ** 0.5)
            elif name.endswith("sinks"):
                value = 1 + r
            elif name.endswith("correction_bias"):
                value = 0.1 * r
            elif name.endswith("bias"):
                value = 0.3 * r
            elif model.config.model_type == "gpt_oss" and "experts" in name:  # [experts, in, out]
                value = r * (2.5 / p.shape[1] ** 0.5)
            elif "router" in name:
                value = r * (1.5 / p.shape[1] ** 0.5)
            elif "experts" in name or "mlp.gate.weight" in name:
                value = r * (1.5 / p.shape[-1] ** 0.5)
            elif "q_b_proj" in name or "kv_b_proj" in name:
                value = r * (1.5 * sharpen / p.shape[1] ** 0.5)
            elif name.endswith("a_layernorm.weight"):
                value = 1 + 0.3 * r
            elif "q_proj" in name or "k_proj" in name:
                value = r * (1.5 * sharpen / p.shape[1] ** 0.5)
            else:
                value = r / p.shape[1 if p.ndim > 1 else 0] ** 0.5
            p.copy_(value.to(torch.bfloat16).to(torch.float32))


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def store_mxfp4(folder):
    """Rounds the experts to four bits, as the hub's GPT-OSS has them."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name in [n for n in tensors if n.endswith("experts.gate_up_proj") or n.endswith("experts.down_proj")]:
        w = tensors.pop(name).float().transpose(1, 2)  # [experts, out, in]
        groups = w.reshape(*w.shape[:2], w.shape[2] // 32, 32)
        exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(1e-30))) - 2
        codes = (groups[..., None] / 2.0 ** exponent[..., None, None] - FP4).abs().argmin(-1).to(torch.uint8)
        tensors[name + "_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous()
        tensors[name + "_scales"] = (exponent + 127).to(torch.uint8)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = dict(
        quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    )
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def store_fp8(folder, block):
    """Rounds matrices to eight bits, as DeepSeek's own files have them; what it returns
    holds what they mean."""
    path = folder / "model.safetensors"
    tensors, means = safetensors.torch.load_file(path), {}
    for name in [n for n in tensors if n.endswith("_proj.weight") or n.endswith("_with_mqa.weight")]:
        w = tensors[name].float()
        down, across = -(-w.shape[0] // block[0]), -(-w.shape[1] // block[1])
        blocks = torch.zeros(down * block[0], across * block[1])
        blocks[:w.shape[0], :w.shape[1]] = w
        blocks = blocks.reshape(down, block[0], across, block[1])
        scales = blocks.abs().amax((1, 3)) / 448
        wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:w.shape[0], :w.shape[1]]
        tensors[name] = (w / wide).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scales
        means[name] = tensors[name].float() * wide
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=list(block))
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return {name: means.get(name, t.float()) for name, t in tensors.items() if not name.endswith("_scale_inv")}


def fuse_experts(folder):
    """One tensor for the matrices of all experts of a layer, as the hub's Qwen3.5 has them."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for first in [n for n in tensors if n.endswith("experts.0.gate_proj.weight")]:
        prefix = first.removesuffix("0.gate_proj.weight")
        count = sum(n.startswith(prefix) for n in tensors) // 3
        take = lambda kind: torch.stack([tensors.pop(f"{prefix}{e}.{kind}_proj.weight") for e in range(count)])
        tensors[prefix + "gate_up_proj"] = torch.cat([take("gate"), take("up")], 1)
        tensors[prefix + "down_proj"] = take("down")
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def respell(folder):
    """config.json as most checkpoints on the hub have it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def as_hub(folder, prefixes, flat):
    """Names of tensors, and the place of the text model's config, as older files have them."""
    path = folder / "model.safetensors"
    tensors = {}
    for name, t in safetensors.torch.load_file(path).items():
        for old, new in zip(prefixes[::2], prefixes[1::2]):
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        tensors[name] = t
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    if flat:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        text = config.pop("text_config")
        text.pop("model_type")
        path.write_text(json.dumps(text | config, indent=2, sort_keys=True) + "\n")


def positions(n, parts):
    """Which logits to keep of a prompt of n tokens."""
    return sorted({*(n * i // parts for i in range(parts)), max(n - 2, 0), n - 1})


def shortest(v):
    """The fewest digits that name this float32."""
    return float(numpy.format_float_positional(v, unique=True))


def watch_routers(model):
    """Collects by how much the last expert chosen beats the first one that is not."""
    found = []

    def hook(module, _, output):
        scores = output[0]
        if model.config.model_type == "deepseek_v3":
            scores = scores.sigmoid() + module.e_score_correction_bias
            pairs = scores.view(len(scores), module.num_group, -1).topk(2).values.sum(-1)
            best = torch.topk(pairs, module.topk_group + 1)
            found.append(float((best.values[:, -2] - best.values[:, -1]).min()))
            kept = torch.zeros_like(pairs).scatter_(1, best.indices[:, :-1], 1).repeat_interleave(scores.shape[1] // module.num_group, 1)
            scores = scores.masked_fill(kept == 0, float("-inf"))
        best = torch.topk(scores, module.top_k + 1).values
        found.append(float((best[:, -2] - best[:, -1]).min()))

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter") or type(module).__name__.endswith("TopkRouter"):
            module.register_forward_hook(hook)
    return found


@torch.no_grad()
def goldens(model, seed, long, family, static):
    rng = numpy.random.default_rng(seed)
    cases, every, routers = [], [], [] if long else watch_routers(model)
    for n in [LONG] if long else FAMILY_PROMPTS if family else PROMPTS:
        vocab = model.config.get_text_config().vocab_size
        prompt = rng.integers(0, vocab, n).tolist()
        # Frequencies that depend on the length are those of the longest prompt.
        rest = rng.integers(0, vocab, max(FAMILY_PROMPTS) - n).tolist() if static else []
        logits = model(torch.tensor([prompt + rest]), use_cache=False).logits[0]
        every.append(logits)
        tokens, gaps = list(prompt), []
        for _ in range(0 if long else 0 if static else FAMILY_CONTINUE if family else CONTINUE):
            best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
        kept = LONG_POSITIONS if long else positions(n, 5 if family else 2)
        cases.append({
            "prompt": prompt,
            "positions": kept,
            "logits": [[shortest(v) for v in logits[i].numpy()] for i in kept],
            "greedy": tokens[n:],
            "gaps": gaps,
        })
    deviation = float(torch.cat(every).std())
    assert 1 <= deviation <= 10, deviation
    if min(routers, default=1) < 2e-5:
        return None
    return {"transformers": transformers.__version__, "torch": torch.__version__, "deviation": deviation, "cases": cases}


def make(name, spec):
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    config = dict(COMMON, model_type="llama")
    config.update(spec["config"])
    kind = AutoModelForCausalLM
    if "wrapper" in spec:
        config["model_type"] = spec["config"].get("model_type")
        if not config["model_type"]:
            config.pop("model_type")
        outer = getattr(transformers, spec["wrapper"] + "Config")
        kind = getattr(transformers, spec["wrapper"] + "ForConditionalGeneration")
        model = kind(outer(text_config=config, vision_config=spec["vision"], tie_word_embeddings=config["tie_word_embeddings"], **spec.get("outer", {})))
    elif "vision" in spec:
        config.pop("model_type")
        model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=config, vision_config=spec["vision"], audio_config=None))
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.float().eval()
    fill(model, spec["seed"], spec.get("sharpen", 1.0))
    model.to(spec["dtype"]).save_pretrained(folder, max_shard_size=spec.get("shard", "5GB"))
    if spec.get("mxfp4"):
        store_mxfp4(folder)
    if spec.get("fuse"):
        fuse_experts(folder)
    if spec.get("hub_spelling"):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config.pop("per_layer_config", None)
        config["global_head_dim"] = spec["config"]["global_head_dim"]
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if spec.get("old_spelling"):
        respell(folder)
    # What is compared is what is in the folder, read back and computed in float32.
    if "vision" in spec and "wrapper" not in spec:
        kind = Gemma4ForConditionalGeneration
    if spec.get("fp8"):
        with tempfile.TemporaryDirectory() as wide:
            shutil.copy(folder / "config.json", wide)
            safetensors.torch.save_file(store_fp8(folder, spec["fp8"]), pathlib.Path(wide) / "model.safetensors", metadata={"format": "pt"})
            model = kind.from_pretrained(wide, dtype=torch.float32, attn_implementation="eager").eval()
    else:
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for seed in range(spec["seed"], spec["seed"] + 20000, 1000):  # of prompts, until rounding cannot choose experts
        result = goldens(model, seed, name.startswith("long-"), name in FAMILIES, spec.get("static"))
        if result:
            break
    if "hub" in spec:
        as_hub(folder, spec["hub"], spec.get("flat"))
    text = json.dumps(result, separators=(",", ":"))
    with open(folder / "goldens.json.gz", "wb") as f:
        with gzip.GzipFile(fileobj=f, mode="wb", mtime=0, filename="") as z:
            z.write(text.encode())
    for path in folder.iterdir():
        path.chmod(0o644)
    flat = min((g for c in result["cases"] for g in c["gaps"]), default=math.nan)
    size = sum(p.stat().st_size for p in folder.iterdir())
    print(f"{name}: logits deviate by {result['deviation']:.2f}, smallest gap {flat:.5f}, {size} bytes")


ROPES = [  # head_dim, rope_parameters
    (128, dict(rope_type="default", rope_theta=10000.0)),
    (128, dict(rope_type="default", rope_theta=1000000.0)),
    (24, dict(rope_type="default", rope_theta=1000000.0)),
    (128, dict(LLAMA3, rope_theta=500000.0, original_max_position_embeddings=8192)),
    (64, dict(LLAMA3, rope_theta=500000.0, factor=32.0, original_max_position_embeddings=8192)),
    (64, dict(GPT_OSS["rope_parameters"], factor=32.0, original_max_position_embeddings=4096)),
    (64, dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, beta_fast=32.0, beta_slow=1.0, truncate=True, original_max_position_embeddings=4096)),
    (512, dict(rope_type="proportional", rope_theta=1000000.0, partial_rotary_factor=0.25)),
]


def make_frequencies():
    rows = []
    for dim, rope in ROPES:
        config = AutoConfig.for_model("llama", head_dim=dim, max_position_embeddings=131072, rope_parameters=dict(rope))
        found = LlamaRotaryEmbedding(config).inv_freq.numpy()
        rows.append(json.dumps(dict(rope=rope, dim=dim, bits=found.view(numpy.uint32).tolist()), separators=(",", ":")))
    (ROOT / "frequencies.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ["frequencies.json", *MODELS]:
        if name == "frequencies.json":
            make_frequencies()
        else:
            make(name, MODELS[name])
