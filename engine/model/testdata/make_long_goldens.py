"""Makes the checkpoints long-default and long-llama3, and frequencies.json. Run it here:

    python make_long_goldens.py

How a rotation's frequencies are rounded shows thousands of tokens from the start. This
is a reference of its own, in the standard library alone: torch and transformers are
neither needed nor run. Frequencies and angles are rounded to float32 after each step,
in the order of operations of transformers 5.23.0 (modeling_rope_utils.py); the rest of
Llama's network is computed in float64. check() holds it to the logits that transformers
computed for the shorter prompts of make_goldens.py.

frequencies.json has the inverse frequencies of each kind of rotation, also of those
whose networks are not computed here (yarn, proportional).
"""

import gzip
import json
import math
import pathlib
import random
import struct

ROOT = pathlib.Path(__file__).parent
LENGTH = 6000
POSITIONS = [499, 1999, 3999, 5999]  # whose logits are kept


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def frequencies(rope, dim):
    """The inverse frequencies of a head of dim columns."""
    kind, factor, found = rope["rope_type"], f32(rope.get("factor", 1)), []
    old = rope.get("original_max_position_embeddings")
    for i in range(dim // 2):
        power = f32(f32(rope["rope_theta"]) ** f32(2 * i / dim))
        inv = f32(1 / power)
        if kind == "llama3":
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            wavelength = f32(f32(1 / inv) * f32(2 * math.pi))  # torch: a number by a tensor is its reciprocal times the number
            if wavelength > f32(old / low):
                inv = f32(inv / factor)
            elif not wavelength < f32(old / high):
                smooth = f32(f32(f32(f32(1 / wavelength) * old) - low) / f32(high - low))
                inv = f32(f32(f32(f32(1 - smooth) * inv) / factor) + f32(smooth * inv))
        elif kind == "proportional":
            inv = f32((inv if i < int(rope["partial_rotary_factor"] * dim // 2) else 0) / factor)
        elif kind == "yarn":
            def pair(turns):
                return dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

            low, high = pair(rope["beta_fast"]), pair(rope["beta_slow"])
            if rope.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            if low == high:
                high += 0.001
            ramp = min(max(f32(f32(i - f32(low)) / f32(high - low)), 0), 1)
            keep = f32(1 - ramp)
            inv = f32(f32(f32(1 / f32(factor * power)) * f32(1 - keep)) + f32(inv * keep))
        found.append(inv)
    return found


def norm(x, w, eps):
    by = 1 / math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [v * by * u for v, u in zip(x, w)]


def times(m, x):
    return [sum(map(float.__mul__, row, x)) for row in m]


def turn(x, position, inv):
    half = len(inv)
    angles = [f32(position * f) for f in inv]
    cos, sin = [f32(math.cos(a)) for a in angles], [f32(math.sin(a)) for a in angles]
    return [x[i] * cos[i] - x[i + half] * sin[i] for i in range(half)] + [x[i + half] * cos[i] + x[i] * sin[i] for i in range(half)]


def logits(config, w, prompt, wanted):
    """Those behind the wanted tokens of a prompt, of Llama's network."""
    heads, kv, dim, eps = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"], config["rms_norm_eps"]
    layers, inv = config["num_hidden_layers"], frequencies(config["rope_parameters"], config["head_dim"])
    x = [w["model.embed_tokens.weight"][t] for t in prompt]
    for i in range(layers):
        def weight(name):
            return w[f"model.layers.{i}.{name}.weight"]

        keys, values, after = [[] for _ in range(kv)], [[] for _ in range(kv)], list(x)
        for p, row in enumerate(x):
            y = norm(row, weight("input_layernorm"), eps)
            k, v = times(weight("self_attn.k_proj"), y), times(weight("self_attn.v_proj"), y)
            for h in range(kv):
                keys[h].append(turn(k[h * dim:h * dim + dim], p, inv))
                values[h].append(v[h * dim:h * dim + dim])
            if i == layers - 1 and p not in wanted:
                continue
            q, read = times(weight("self_attn.q_proj"), y), []
            for h in range(heads):
                of, query = h // (heads // kv), turn(q[h * dim:h * dim + dim], p, inv)
                scores = [s * dim ** -0.5 for s in times(keys[of], query)]
                most = max(scores)
                scores = [math.exp(s - most) for s in scores]
                total = sum(scores)
                read += [s / total for s in times(zip(*values[of]), scores)]
            row = [a + b for a, b in zip(row, times(weight("self_attn.o_proj"), read))]
            y = norm(row, weight("post_attention_layernorm"), eps)
            gate = [g / (1 + math.exp(-g)) * u for g, u in zip(times(weight("mlp.gate_proj"), y), times(weight("mlp.up_proj"), y))]
            after[p] = [a + b for a, b in zip(row, times(weight("mlp.down_proj"), gate))]
        x = after
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return [times(head, norm(x[p], w["model.norm.weight"], eps)) for p in wanted]


def read_weights(folder):
    w = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        size, = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + size])
        header.pop("__metadata__", None)
        for name, t in header.items():
            a, b = (8 + size + o for o in t["data_offsets"])
            if t["dtype"] == "BF16":
                v = [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(a, b, 2)]
            else:
                v = list(struct.unpack(f"<{(b - a) // 4}f", data[a:b]))
            cols = t["shape"][-1]
            w[name] = v if len(t["shape"]) == 1 else [v[i:i + cols] for i in range(0, len(v), cols)]
    return w


def check():
    """The reference gives what transformers gives for prompts of 7, 15 and 16 tokens."""
    for name in ["mha", "headdim", "mistral-full"]:
        folder, worst = ROOT / name, 0
        config = json.loads((folder / "config.json").read_text())
        if "rope_parameters" not in config:
            config["rope_parameters"] = dict(config["rope_scaling"], rope_theta=config["rope_theta"])
        config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        w = read_weights(folder)
        for case in json.load(gzip.open(folder / "goldens.json.gz"))["cases"][2:5]:
            for row, want in zip(logits(config, w, case["prompt"], case["positions"]), case["logits"], strict=True):
                worst = max(worst, *(abs(a - b) for a, b in zip(row, want, strict=True)))
        print(f"{name}: off by {worst:.2g} from transformers")
        assert worst < 5e-5, (name, worst)


def make(name, rope, seed):
    # One layer with one head of 24, so that 2i/24 rounds, and scores that deviate by
    # much, so that single tokens far away have most of the weight.
    folder, rng = ROOT / name, random.Random(seed)
    hidden, dim, ffn, vocab = 32, 24, 32, 64
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", dtype="bfloat16", hidden_act="silu", hidden_size=hidden, intermediate_size=ffn,
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=dim, vocab_size=vocab, max_position_embeddings=8192,
        rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, attention_bias=False, mlp_bias=False, tie_word_embeddings=False, rope_parameters=rope,
    )
    attention, mlp, norms = "model.layers.0.self_attn.", "model.layers.0.mlp.", ["model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"]
    shapes = {
        "model.embed_tokens": (vocab, hidden, 6), "lm_head": (vocab, hidden, 3),
        attention + "q_proj": (dim, hidden, 3), attention + "k_proj": (dim, hidden, 3), attention + "v_proj": (dim, hidden, 1), attention + "o_proj": (hidden, dim, 1),
        mlp + "gate_proj": (ffn, hidden, 1), mlp + "up_proj": (ffn, hidden, 1), mlp + "down_proj": (hidden, ffn, 1),
    }
    header, data = {"__metadata__": {"format": "pt"}}, b""

    def store(key, shape, values):
        nonlocal data
        stored = b"".join(struct.pack("<f", v)[2:] for v in values)  # bfloat16, cut
        header[key + ".weight"] = dict(dtype="BF16", shape=shape, data_offsets=[len(data), len(data) + len(stored)])
        data += stored

    for key, (rows, cols, spread) in shapes.items():
        store(key, [rows, cols], [rng.gauss(0, spread / cols ** 0.5) for _ in range(rows * cols)])
    for key in norms:
        store(key, [hidden], [rng.gauss(1, 0.3) for _ in range(hidden)])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    prompt = [rng.randrange(vocab) for _ in range(LENGTH)]
    rows = logits(config, read_weights(folder), prompt, POSITIONS)
    case = dict(prompt=prompt, positions=POSITIONS, logits=[[round(v, 7) for v in row] for row in rows], greedy=[], gaps=[])
    with open(folder / "goldens.json.gz", "wb") as f:
        with gzip.GzipFile(fileobj=f, mode="wb", mtime=0, filename="") as z:
            z.write(json.dumps(dict(cases=[case]), separators=(",", ":")).encode())


LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
ROPES = [
    (128, dict(rope_type="default", rope_theta=10000.0)),
    (128, dict(rope_type="default", rope_theta=1000000.0)),
    (24, dict(rope_type="default", rope_theta=1000000.0)),
    (128, dict(LLAMA3, original_max_position_embeddings=8192)),
    (64, dict(LLAMA3, factor=32.0, original_max_position_embeddings=8192)),
    (64, dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096)),
    (64, dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, beta_fast=32.0, beta_slow=1.0, truncate=True, original_max_position_embeddings=4096)),
    (512, dict(rope_type="proportional", rope_theta=1000000.0, partial_rotary_factor=0.25)),
]

if __name__ == "__main__":
    rows = [dict(rope=rope, dim=dim, bits=[struct.unpack("<I", struct.pack("<f", f))[0] for f in frequencies(rope, dim)]) for dim, rope in ROPES]
    (ROOT / "frequencies.json").write_text("[\n" + ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows) + "\n]\n")
    make("long-default", dict(rope_type="default", rope_theta=500000.0), 211)
    make("long-llama3", dict(LLAMA3, original_max_position_embeddings=1024), 222)
    check()
