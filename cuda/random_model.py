"""Writes a checkpoint of a real shape with random bfloat16 weights, for benchmarks:

    python3 random_model.py llama-1b|llama-8b FOLDER

Needs nothing but Python. Weights have a random sign and mantissa and a size of about
1/64, which keeps activations finite; what the model says is noise.
"""

import json
import os
import pathlib
import sys

# Shapes of Llama-3.2-1B and Llama-3.1-8B.
SHAPES = {
    "llama-1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64, tie_word_embeddings=True),
    "llama-8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, head_dim=128, tie_word_embeddings=False),
}
CHUNK = 1 << 24  # numbers that are drawn at once
SMALL = bytes(0x3C | (i & 0x80) for i in range(256))  # upper bytes: sign, and 2^-7 to 2^-6


def draw():
    out = bytearray(2 * CHUNK)
    out[0::2] = os.urandom(CHUNK)
    out[1::2] = os.urandom(CHUNK).translate(SMALL)
    return memoryview(out)


def noise(n, pool):
    """n bf16, in pieces of what was drawn: they come again, which no kernel minds."""
    while n > 0:
        yield pool[0][: 2 * min(n, CHUNK)]
        pool.append(pool.pop(0))
        n -= CHUNK


def main(name, folder):
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu", torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, **SHAPES[name],
    )
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, 8 * head
    tensors = {"model.embed_tokens.weight": [128256, hidden], "model.norm.weight": [hidden]}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = [128256, hidden]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        tensors |= {
            p + "input_layernorm.weight": [hidden], p + "post_attention_layernorm.weight": [hidden],
            p + "self_attn.q_proj.weight": [q, hidden], p + "self_attn.k_proj.weight": [kv, hidden],
            p + "self_attn.v_proj.weight": [kv, hidden], p + "self_attn.o_proj.weight": [hidden, q],
            p + "mlp.gate_proj.weight": [ffn, hidden], p + "mlp.up_proj.weight": [ffn, hidden], p + "mlp.down_proj.weight": [hidden, ffn],
        }
    header, at = {}, 0
    for key, shape in tensors.items():
        size = 2 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        header[key] = dict(dtype="BF16", shape=shape, data_offsets=[at, at + size])
        at += size
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pool = [draw() for _ in range(3)]
    with open(folder / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for key in tensors:
            for piece in noise((header[key]["data_offsets"][1] - header[key]["data_offsets"][0]) // 2, pool):
                f.write(piece)


if __name__ == "__main__":
    main(*sys.argv[1:])
