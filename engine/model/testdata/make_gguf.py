"""Makes the tiny GGUF files below gguf/ and what Hugging Face transformers computes with them.
Run it here, with the package gguf installed next to torch and transformers:

    python make_gguf.py [NAME …]

Blocks are random bytes with small scales, in the types that the parts of published files have.
Next to NAME.gguf is NAME/goldens.json.gz: the logits of transformers, which reads the file itself,
the SHA-256 of each matrix in float32 as gguf's numpy code expands it (for llama in transformers'
order of rows), and the ids of some texts. Vocabularies: bytes and some merges, or characters with
byte fallback.
"""

import gzip
import hashlib
import json
import pathlib
import sys

import gguf
import numpy
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from make_goldens import goldens
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

ROOT = pathlib.Path(__file__).parent / "gguf"
HIDDEN, FFN, HEADS, KV = 256, 96, 4, 2
TEXTS = ["Hello world", " two  spaces\n\nand 12345 lines", "I'll we've DON'T", "naïve Ünïcödé 你好 🙂", "<|end|>x<|end|>", "", "a\tb\r\n c", "the then there"]


def blocks(rng, shape, kind, std):
    """Random bytes of a type whose values deviate by about std, and the values."""
    if kind in (Q.F32, Q.F16, Q.BF16):
        w = (rng.standard_normal(shape) * std).astype(numpy.float32)
        data = gguf.quants.quantize(w, kind)
        return data, gguf.quants.dequantize(data, kind).reshape(shape)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    n = shape[0] * shape[1] // elements
    data = rng.integers(0, 256, (n, size), dtype=numpy.uint8)
    # Of each type, where its float16 scales are, and the deviation of its values for a scale of 1.
    places, unit = {Q.Q4_0: ((0,), 4.6), Q.Q4_1: ((0, 2), 4.6), Q.Q5_0: ((0,), 9.2), Q.Q5_1: ((0, 2), 9.2), Q.Q8_0: ((0,), 74), Q.Q4_K: ((0, 2), 330), Q.Q5_K: ((0, 2), 680), Q.Q6_K: ((208,), 1360)}[kind]
    scale = std / unit * rng.uniform(0.5, 1.5, n)
    for i, at in enumerate(places):
        # The least value of a part is about the middle of its values.
        factor = 1.0 if i == 0 else {Q.Q4_K: 7.5, Q.Q5_K: 15.5, Q.Q4_1: -7.5, Q.Q5_1: -15.5}[kind]
        data[:, at:at + 2] = (scale * factor).astype(numpy.float16)[:, None].view(numpy.uint8)
    data = data.reshape(shape[0], -1)
    return data, gguf.quants.dequantize(data, kind).reshape(shape)


def vocabulary(writer, spec):
    if spec["tokenizer"] == "llama":
        plain = [chr(c) for c in range(33, 127)] + ["▁", "é", "th", "the", "▁the", "re", "lo", "ll", "▁w", "or", "He", "ä", "an", "▁an", "▁▁"]
        tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)] + plain + ["<|end|>"]
        kinds = [2, 3, 3] + [6] * 256 + [1] * len(plain) + [4]
        scores = [0.0] * 259 + [-1000.0 + (len(t) if len(t) > 1 else -i) for i, t in enumerate(plain)] + [0.0]
        writer.add_token_scores(scores)
        ids = (1, 2)
        writer.add_unk_token_id(0)
    else:
        merges = ["t h", "th e", "Ġ the", "Ġ t", "l o", "l l", "o r", "H e", "r e", "Ġ w", "1 2", "Ġ Ġ", "Ċ Ċ", "Ã ¯"]
        tokens = list(bytes_to_unicode().values()) + [m.replace(" ", "") for m in merges] + ["<|bos|>", "<|end|>"]
        kinds = [1] * (len(tokens) - 2) + [3, 3]
        writer.add_token_merges(merges)
        writer.add_tokenizer_pre(spec["pre"])
        ids = (len(tokens) - 2, len(tokens) - 1)
    writer.add_tokenizer_model(spec["tokenizer"])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(ids[0])
    writer.add_eos_token_id(ids[1])
    writer.add_add_bos_token(spec.get("bos", False))
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    return len(tokens)


def make(name, spec, seed):
    ROOT.mkdir(exist_ok=True)
    (ROOT / name).mkdir(exist_ok=True)
    path = ROOT / f"{name}.gguf"
    rng = numpy.random.default_rng(seed)
    LAYERS = spec.get("layers", 2)
    DIM = spec.get("dim", 32)  # transformers ignores key_length of some architectures
    arch = spec["arch"]
    w = gguf.GGUFWriter(path, arch)
    w.add_context_length(1024)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV)
    w.add_key_length(DIM)
    w.add_value_length(DIM)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(spec.get("theta", 10000.0))
    w.add_rope_dimension_count(DIM)
    experts = spec.get("experts", 0)
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(2)
        w.add_expert_feed_forward_length(FFN)
    vocab = vocabulary(w, spec)
    sums = {}

    def add(tensor, shape, kind, std, hf, permute=0):
        if len(shape) == 1:
            value = (spec.get("plus", 1.0) + 0.2 * rng.standard_normal(shape)) if "norm" in tensor else 0.3 * rng.standard_normal(shape)
            w.add_tensor(tensor, value.astype(numpy.float32))
            return
        parts = [blocks(rng, shape[-2:], kind, std) for _ in range(shape[0] if len(shape) == 3 else 1)]
        data = numpy.stack([p[0] for p in parts]) if len(shape) == 3 else parts[0][0]
        w.add_tensor(tensor, data, raw_dtype=kind)
        for e, (_, value) in enumerate(parts):
            if permute:  # rows that rotate together are neighbours in the file
                value = value.reshape(permute, DIM // 2, 2, -1).swapaxes(1, 2).reshape(value.shape)
            sums[hf.replace("#", str(e))] = hashlib.sha256(numpy.ascontiguousarray(value, numpy.float32).tobytes()).hexdigest()

    t = spec["types"]
    add("token_embd.weight", (vocab, HIDDEN), t[7], 3 / HIDDEN**0.5 if spec.get("tied") else 1.0, "model.embed_tokens.weight")
    add("output_norm.weight", (HIDDEN,), None, 1, "")
    if not spec.get("tied"):
        add("output.weight", (vocab, HIDDEN), t[8], 3 / HIDDEN**0.5, "lm_head.weight")
    paired = arch == "llama"
    for i in range(LAYERS):
        b, hf = f"blk.{i}.", f"model.layers.{i}."
        add(b + "attn_norm.weight", (HIDDEN,), None, 1, "")
        add(b + "ffn_norm.weight", (HIDDEN,), None, 1, "")
        add(b + "attn_q.weight", (HEADS * DIM, HIDDEN), t[0], 1.5 / HIDDEN**0.5, hf + "self_attn.q_proj.weight", HEADS * paired)
        add(b + "attn_k.weight", (KV * DIM, HIDDEN), t[1], 1.5 / HIDDEN**0.5, hf + "self_attn.k_proj.weight", KV * paired)
        add(b + "attn_v.weight", (KV * DIM, HIDDEN), t[2], 1 / HIDDEN**0.5, hf + "self_attn.v_proj.weight")
        add(b + "attn_output.weight", (HIDDEN, HEADS * DIM), t[3], 1 / (HEADS * DIM) ** 0.5, hf + "self_attn.o_proj.weight")
        if arch == "qwen2":
            for part, n in (("q", HEADS), ("k", KV), ("v", KV)):
                add(b + f"attn_{part}.bias", (n * DIM,), None, 1, "")
        if arch in ("qwen3", "qwen3moe"):
            add(b + "attn_q_norm.weight", (DIM,), None, 1, "")
            add(b + "attn_k_norm.weight", (DIM,), None, 1, "")
        if experts:
            e, mlp = (experts,), hf + "mlp.experts.#."
            add(b + "ffn_gate_inp.weight", (experts, HIDDEN), Q.F32, 1.5 / HIDDEN**0.5, hf + "mlp.gate.weight")
        else:
            e, mlp = (), hf + "mlp."
        add(b + ("ffn_gate_exps.weight" if e else "ffn_gate.weight"), (*e, FFN, HIDDEN), t[4], 1 / HIDDEN**0.5, mlp + "gate_proj.weight")
        add(b + ("ffn_up_exps.weight" if e else "ffn_up.weight"), (*e, FFN, HIDDEN), t[5], 1 / HIDDEN**0.5, mlp + "up_proj.weight")
        add(b + ("ffn_down_exps.weight" if e else "ffn_down.weight"), (*e, HIDDEN, FFN), t[6], 1 / FFN**0.5, mlp + "down_proj.weight")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    config = AutoConfig.from_pretrained(ROOT, gguf_file=path.name)
    if experts:  # which transformers does not read
        config.moe_intermediate_size = FFN
    model = AutoModelForCausalLM.from_pretrained(ROOT, gguf_file=path.name, config=config, dtype=torch.float32, attn_implementation="eager").eval()
    result = next(r for r in (goldens(model, seed + k, False, True, None) for k in range(50)) if r) | {"sha256": sums}
    tokenizer = AutoTokenizer.from_pretrained(ROOT, gguf_file=path.name)
    result["texts"] = [dict(text=text, ids=tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
    with open(ROOT / name / "goldens.json.gz", "wb") as f:
        with gzip.GzipFile(fileobj=f, mode="wb", mtime=0, filename="") as z:
            z.write(json.dumps(result, separators=(",", ":")).encode())
    for file in [path, ROOT / name / "goldens.json.gz"]:
        file.chmod(0o644)
    print(f"{name}: logits deviate by {result['deviation']:.2f}, {path.stat().st_size} bytes")


K4, K5, K6 = Q.Q4_K, Q.Q5_K, Q.Q6_K
MODELS = {  # types of q, k, v, output, gate, up, down, embedding, head
    "llama": dict(arch="llama", tokenizer="llama", bos=True, types=[K4, K5, Q.F16, Q.Q5_1, Q.Q5_0, K6, Q.Q4_1, K6, Q.Q8_0]),
    "qwen2": dict(arch="qwen2", dim=64, tokenizer="gpt2", pre="qwen2", theta=1e6, types=[K5, K4, Q.BF16, Q.Q4_0, Q.F16, K5, Q.Q8_0, K4, K6]),
    "qwen3": dict(arch="qwen3", dim=128, layers=1, tokenizer="gpt2", pre="qwen2", theta=1e6, tied=True, types=[K6, Q.Q8_0, Q.Q4_0, Q.BF16, K5, K4, Q.F16, Q.Q8_0, None]),
    "qwen3moe": dict(arch="qwen3moe", tokenizer="gpt2", pre="qwen2", theta=1e6, experts=4, types=[K4, Q.F16, K6, Q.Q8_0, K4, K5, Q.Q4_0, K6, K6]),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for i, (name, spec) in enumerate(MODELS.items()):
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(name, spec, 5000 + i)
