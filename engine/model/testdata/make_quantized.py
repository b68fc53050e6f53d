"""Makes the tiny checkpoints below quantized/: GPTQ, AWQ, compressed-tensors, and the NVFP4 and FP8
of NVIDIA's Model Optimizer. Run it here,
with gptqmodel, autoawq and compressed-tensors installed next to torch and transformers (gptqmodel 7.7.0,
autoawq 0.2.9, compressed-tensors 0.20.0; the sources of the first two are enough):

    python make_quantized.py [NAME …]

Each folder has what a tool of the format writes, and goldens.json.gz: the logits of transformers
over the weights as the format's own library expands them, and the SHA-256 of each expanded
matrix in float32. The matrices are rounded to the nearest code of their group; biases of zeros,
orders of inputs and the versions of zeros are those that published checkpoints have.
"""

import gzip
import hashlib
import json
import pathlib
import shutil
import sys
import tempfile

import safetensors.torch
import torch
import transformers
from make_goldens import COMMON, fill, goldens
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = pathlib.Path(__file__).parent / "quantized"
SHAPE = dict(
    COMMON, model_type="llama", vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=1024,
)
INTS = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj".split()


def groups_of(w, size, bits, symmetric, dtype, index=None):
    """Codes [out, in], scales and zeros [out, groups], and the group of each input."""
    out, n = w.shape
    size = n if size == -1 else size
    index = torch.arange(n) // size if index is None else index
    scales, zeros = [], []
    for g in range(int(index.max()) + 1):
        part = w[:, index == g]
        if symmetric:
            zeros.append(torch.full((out,), 2 ** (bits - 1)))
            scales.append(part.abs().amax(1) / (2 ** (bits - 1) - 1))
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scales.append((high - low) / (2**bits - 1))
            zeros.append((-low / scales[-1]).round().clamp(1, 2**bits - 1).int())
    scales, zeros = torch.stack(scales, 1).to(dtype), torch.stack(zeros, 1).int()
    codes = (w / scales.float()[:, index] + zeros[:, index]).round().clamp(0, 2**bits - 1).int()
    return codes, scales, zeros, index.int()


def pack(codes, bits, order=None):
    """Packs neighbours of the last dimension into words of 32 bits."""
    per = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per)).long().unflatten(-1, (-1, per))
    if order:
        codes = codes[..., order]
    words = (codes << (bits * torch.arange(per))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int().contiguous()


def gptq(w, spec, name):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    bits, index = spec["bits"], None
    if spec.get("act_order"):
        size = spec["group"]
        index = (torch.arange(w.shape[1]) // size)[torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(7))]
    codes, scales, zeros, index = groups_of(w, spec["group"], bits, spec["sym"], torch.float16, index)
    parts = {
        "qweight": pack(codes, bits).T.contiguous(), "scales": scales.T.contiguous(), "g_idx": index,
        "qzeros": pack(zeros.T - (0 if spec["v2"] else 1), bits),
        "bias": torch.zeros(len(w), dtype=torch.float16),
    }
    m = TorchLinear(
        bits=bits, group_size=spec["group"], sym=spec["sym"], desc_act=bool(spec.get("act_order")),
        in_features=w.shape[1], out_features=w.shape[0], bias=False, pack_dtype=torch.int32, register_buffers=True,
    )
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        getattr(m, part).data = parts[part].clone()
    if not spec["v2"]:
        convert_gptq_v1_to_v2_format_module(m, bits, torch.int32)
    m.post_init()
    return parts, m.dequantize_weight().T


def awq(w, spec, name):
    from awq.utils.packing_utils import dequantize_gemm

    codes, scales, zeros, _ = groups_of(w, spec["group"], 4, False, torch.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {"qweight": pack(codes.T, 4, order), "qzeros": pack(zeros.T, 4, order), "scales": scales.T.contiguous()}
    return parts, dequantize_gemm(*parts.values(), 4, spec["group"]).T


def compressed(w, spec, name):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    bits, index = spec["bits"], None
    if spec.get("act_order"):
        index = (torch.arange(w.shape[1]) // spec["group"])[torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(7))]
    codes, scales, zeros, index = groups_of(w, spec["group"], bits, spec["sym"], spec["dtype"], index)
    half = 2 ** (bits - 1)
    codes, zeros = (codes - half).to(torch.int8), (zeros - half).to(torch.int8)
    args = QuantizationArgs(**weights_args(spec))
    parts = {"weight_scale": scales}
    if spec["format"] == "pack-quantized":
        parts["weight_packed"] = pack_to_int32(codes, bits)
        parts["weight_shape"] = torch.tensor(w.shape)
        assert torch.equal(unpack_from_int32(parts["weight_packed"], bits, w.shape), codes)
    else:
        parts["weight"] = codes
    if not spec["sym"]:
        parts["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0) if spec["format"] == "pack-quantized" else zeros
    wide = dict(scale=scales, zero_point=None if spec["sym"] else zeros, args=args)
    if spec.get("act_order"):
        parts["weight_g_idx"] = index
        order = torch.argsort(index, stable=True)
        return parts, dequantize(codes[:, order], **wide)[:, torch.argsort(order)]
    return parts, dequantize(codes, **wide)


def nvfp4(w, spec, name):
    """Codes by compressed-tensors. The Model Optimizer stores the same with the inverse of the global scale."""
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(**fp4_args())
    w = w.to(torch.bfloat16)
    most = w.float().unflatten(1, (-1, 16)).abs().amax(2)
    whole = (448 * 6 / most.amax()).reshape(1)
    scales = (most / 6 * whole).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    packed = quantize_and_pack_fp4(w, scales.to(torch.bfloat16), global_scale=whole, group_size=16)
    codes = unpack_fp4_from_uint8(packed, *w.shape)
    if spec["method"] == "modelopt":  # NVFP4QTensor.dequantize
        inverse = (1 / whole).reshape(())
        wide = codes.float() * (scales.float() * inverse).repeat_interleave(16, 1)
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": inverse, "input_scale": torch.tensor(1.0)}, wide.to(torch.bfloat16)
    wide = dequantize(codes, scales.to(torch.bfloat16), args=args, global_scale=whole, dtype=torch.bfloat16)
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole, "input_global_scale": torch.ones(1)}, wide


def fp8(w, spec, name):
    scale = w.abs().amax() / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        parts[name[-13:-12] + "_scale"] = torch.tensor(1.0)
    return parts, codes.float() * scale


def fp4_args():
    return dict(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16, dynamic=False)


def fp4_config(spec):
    if spec["method"] == "modelopt":
        return modelopt_config(spec)
    group = dict(targets=["Linear"], weights=fp4_args(), input_activations=dict(fp4_args(), dynamic="local"))
    return dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized", ignore=["lm_head"], config_groups=dict(group_0=group), kv_cache_scheme=None)


def modelopt_config(spec):
    return dict(
        quant_method="modelopt", quant_algo=spec["algorithm"], producer=dict(name="modelopt", version="0.43.0"), ignore=["lm_head"],
        kv_cache_scheme=dict(dynamic=False, num_bits=8, type="float"),
    )


def weights_args(spec):
    group = spec["group"] != -1
    args = dict(num_bits=spec["bits"], type="int", symmetric=spec["sym"], strategy="group" if group else "channel", dynamic=False)
    if group:
        args["group_size"] = spec["group"]
    return args


def compressed_config(spec):
    group = dict(targets=["Linear"], weights=weights_args(spec), input_activations=None)
    if spec.get("act_order"):  # as older versions of the library write it
        group["weights"]["actorder"] = "group"
    if spec["bits"] == 8:
        group["input_activations"] = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    return dict(quant_method="compressed-tensors", format=spec["format"], ignore=["lm_head"], config_groups=dict(group_0=group), kv_cache_scheme=None)


def gptq_config(spec):
    config = dict(quant_method="gptq", bits=spec["bits"], group_size=spec["group"], desc_act=bool(spec.get("act_order")), sym=spec["sym"])
    if "says" in spec:
        config["checkpoint_format"] = spec["says"]
    return config


def awq_config(spec):
    return dict(quant_method="awq", bits=4, group_size=spec["group"], zero_point=True, version="gemm", modules_to_not_convert=None)


MODELS = {
    "gptq-4": dict(kind=gptq, config=gptq_config, bits=4, group=32, sym=True, v2=False, says="gptq"),
    # Zeros of version 2, which the config does not mention.
    "gptq-4-zeros-8": dict(kind=gptq, config=gptq_config, bits=4, group=16, sym=True, v2=True),
    "gptq-4-act-order": dict(kind=gptq, config=gptq_config, bits=4, group=32, sym=False, v2=False, act_order=True, says="gptq"),
    "gptq-8": dict(kind=gptq, config=gptq_config, bits=8, group=-1, sym=False, v2=True, says="gptq_v2"),
    "awq": dict(kind=awq, config=awq_config, group=32),
    "w4a16": dict(kind=compressed, config=compressed_config, bits=4, group=32, sym=True, dtype=torch.bfloat16, format="pack-quantized"),
    "w4a16-act-order": dict(kind=compressed, config=compressed_config, bits=4, group=32, sym=False, dtype=torch.float16, format="pack-quantized", act_order=True),
    "w8a8": dict(kind=compressed, config=compressed_config, bits=8, group=-1, sym=False, dtype=torch.bfloat16, format="int-quantized"),
    "nvfp4": dict(kind=nvfp4, config=fp4_config, method="compressed-tensors"),
    "modelopt-nvfp4": dict(kind=nvfp4, config=fp4_config, method="modelopt", algorithm="NVFP4"),
    "modelopt-fp8": dict(kind=fp8, config=modelopt_config, algorithm="FP8"),
}


def make(name, spec, seed):
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE)).float().eval()
    fill(model, seed)
    model.to(torch.float16).save_pretrained(folder)
    path = folder / "model.safetensors"
    stored, expanded, sums = {}, {}, {}
    for key, w in safetensors.torch.load_file(path).items():
        module = key.removesuffix(".weight")
        if not module.endswith(tuple(INTS)):
            stored[key], expanded[key] = w, w.float()
            continue
        parts, wide = spec["kind"](w.float(), spec, key)
        stored |= {f"{module}.{part}": t for part, t in parts.items()}
        expanded[key] = wide.float().contiguous()
        sums[key] = hashlib.sha256(expanded[key].numpy().tobytes()).hexdigest()
    config = json.loads((folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as wide:
        (pathlib.Path(wide) / "config.json").write_text(json.dumps(config))
        safetensors.torch.save_file(expanded, pathlib.Path(wide) / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32, attn_implementation="eager").eval()
    safetensors.torch.save_file(stored, path, metadata={"format": "pt"})
    config["quantization_config"] = spec["config"](spec)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)
    result = goldens(model, seed, False, True, None) | {"sha256": sums}
    with open(folder / "goldens.json.gz", "wb") as f:
        with gzip.GzipFile(fileobj=f, mode="wb", mtime=0, filename="") as z:
            z.write(json.dumps(result, separators=(",", ":")).encode())
    for file in folder.iterdir():
        file.chmod(0o644)
    print(f"{name}: logits deviate by {result['deviation']:.2f}, {sum(p.stat().st_size for p in folder.iterdir())} bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for i, (name, spec) in enumerate(MODELS.items()):
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(name, spec, 4000 + i)
