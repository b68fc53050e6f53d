"""Write a checkpoint of a real shape with random bfloat16 weights, for benchmarks:

    python3 random_model.py llama-1b|llama-8b|llama-8b-fp8|gpt-oss-20b|gpt-oss-120b|tiny-… FOLDER

Requires only Python. Weights have a random sign and mantissa and a size of about
1/64, tiny models' of 1/16, and norms' weights are between 1 and 2: so each layer
and position matters in the output, which is noise. The same name writes the same file.
"""

import json
import math
import pathlib
import random
import struct
import sys

# Shapes of Llama-3.2-1B, Llama-3.1-8B and GPT-OSS; tiny ones are to try a script with.
GPT = dict(hidden_size=2880, intermediate_size=2880, num_attention_heads=64, head_dim=64, num_experts_per_tok=4, sliding_window=128)
SHAPES = {
    "gpt-oss-20b": dict(num_hidden_layers=24, num_local_experts=32, **GPT),
    "gpt-oss-120b": dict(num_hidden_layers=36, num_local_experts=128, **GPT),
    "llama-1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64, tie_word_embeddings=True),
    "llama-8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, head_dim=128, tie_word_embeddings=False),
}
CHUNK = 1 << 24  # numbers that are drawn at once
SMALL = bytes(0x3C | (i & 0x80) for i in range(256))  # upper bytes: sign, and 2^-7 to 2^-5
STEP, STARTS = 1009, 1 << 16  # pieces start at different columns of a matrix, so that rows differ


def draw(source, upper):
    out = bytearray(2 * CHUNK)
    out[0::2] = source.randbytes(CHUNK)
    out[1::2] = source.randbytes(CHUNK).translate(upper)
    return memoryview(out)


def noise(n, pool):
    """n bf16, in pieces of what was drawn, each from another start."""
    while n > 0:
        start, drawn = pool.pop(0)
        size = min(n, CHUNK - start)
        yield drawn[2 * start : 2 * (start + size)]
        pool.append(((start + len(pool) * STEP + STEP) % STARTS, drawn))
        n -= size


def llama(shape, vocab):
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=vocab, num_key_value_heads=8, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu", torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, **shape,
    )
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    tensors = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = [vocab, hidden]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        tensors |= attention(config, p) | {p + "mlp.gate_proj.weight": [ffn, hidden], p + "mlp.up_proj.weight": [ffn, hidden], p + "mlp.down_proj.weight": [hidden, ffn]}
    return config, tensors


def fp8(config, tensors):
    """Projections as DeepSeek-V3 has its own: E4M3 with a scale for each block of 128 x 128."""
    config["quantization_config"] = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    scales = {k + "_scale_inv": [-(-v[0] // 128), -(-v[1] // 128)] for k, v in tensors.items() if "_proj" in k}
    return config, tensors | scales


def attention(config, p):
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        p + "input_layernorm.weight": [hidden], p + "post_attention_layernorm.weight": [hidden],
        p + "self_attn.q_proj.weight": [q, hidden], p + "self_attn.k_proj.weight": [kv, hidden],
        p + "self_attn.v_proj.weight": [kv, hidden], p + "self_attn.o_proj.weight": [hidden, q],
    }


def gpt_oss(shape, vocab):
    config = dict(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", vocab_size=vocab, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
        hidden_act="silu", attention_bias=True, tie_word_embeddings=False, dtype="bfloat16", bos_token_id=1, eos_token_id=2, swiglu_limit=7.0, swiglu_alpha=1.702,
        layer_types=["sliding_attention", "full_attention"] * (shape["num_hidden_layers"] // 2), quantization_config=dict(quant_method="mxfp4"),
        rope_parameters=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_theta=150000.0, rope_type="yarn", truncate=False), **shape,
    )
    hidden, ffn, experts, heads = config["hidden_size"], config["intermediate_size"], config["num_local_experts"], config["num_attention_heads"]
    tensors = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden], "lm_head.weight": [vocab, hidden]}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        own = attention(config, p)
        tensors |= own | {k.removesuffix("weight") + "bias": v[:1] for k, v in own.items() if "_proj" in k}
        e = p + "mlp.experts."
        tensors |= {
            p + "self_attn.sinks": [heads], p + "mlp.router.weight": [experts, hidden], p + "mlp.router.bias": [experts],
            e + "gate_up_proj_bias": [experts, 2 * ffn], e + "down_proj_bias": [experts, hidden],
            e + "gate_up_proj_blocks": [experts, 2 * ffn, hidden // 32, 16], e + "gate_up_proj_scales": [experts, 2 * ffn, hidden // 32],
            e + "down_proj_blocks": [experts, hidden, ffn // 32, 16], e + "down_proj_scales": [experts, hidden, ffn // 32],
        }
    return config, tensors


def shape_of(name):
    tiny, name = name.startswith("tiny-"), name.removeprefix("tiny-")
    shape, gpt = dict(SHAPES[name.removesuffix("-fp8")]), name.startswith("gpt")
    if tiny:
        shape |= dict(hidden_size=128, intermediate_size=160, num_hidden_layers=2, num_attention_heads=8, head_dim=16)
        shape |= dict(num_local_experts=8) if gpt else {}
    made = (gpt_oss if gpt else llama)(shape, 2048 if tiny else 201088 if gpt else 128256)
    return fp8(*made) if name.endswith("-fp8") else made


SCALES = bytes(119 + i % 4 for i in range(256))  # 2^-8 to 2^-5
EIGHTS = bytes(i & 0x80 | 0x38 | i & 7 for i in range(256))  # E4M3: 1 to 15/8 of either sign
TYPES = {"BF16": 2, "U8": 1, "F8_E4M3": 1, "F32": 4}


def kind(key, tensors):
    if key.endswith("_scale_inv"):
        return "F32"
    return "U8" if key.endswith(("_blocks", "_scales")) else "F8_E4M3" if key + "_scale_inv" in tensors else "BF16"


def content(key, dtype, size, pool):
    if dtype == "F32":
        yield struct.pack("<f", 1 / 64) * (size // 4)
    elif key.endswith("norm.weight"):
        for piece in noise(size // 2, pool):
            out = bytearray(piece)
            out[0::2] = bytes(b | 0x80 for b in out[0::2])  # 1 to 2
            out[1::2] = b"\x3f" * (len(out) // 2)
            yield out
    elif dtype == "F8_E4M3" or key.endswith("_scales"):
        yield from (bytes(p).translate(EIGHTS if dtype == "F8_E4M3" else SCALES) for p in noise((size + 1) // 2, pool))
    else:
        yield from noise((size + 1) // 2, pool)


def main(name, folder):
    config, tensors = shape_of(name)
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for key, shape in tensors.items():
        dtype = kind(key, tensors)
        size = math.prod(shape) * TYPES[dtype]
        header[key] = dict(dtype=dtype, shape=shape, data_offsets=[at, at + size])
        at += size
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    source, upper = random.Random(name), bytes(b + 1 for b in SMALL) if config["hidden_size"] < 512 else SMALL
    pool = [(i * STEP, draw(source, upper)) for i in range(3)]
    with open(folder / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for key in tensors:
            size = header[key]["data_offsets"][1] - header[key]["data_offsets"][0]
            for piece in content(key, header[key]["dtype"], size, pool):
                f.write(piece[:size])
                size -= len(piece[:size])


if __name__ == "__main__":
    main(*sys.argv[1:])
