"""Makes the GGUF files below converted/, as llama.cpp's own converter writes them, and what Hugging
Face transformers computes with the folders that they were made from. Run it here, next to torch,
transformers and sentencepiece, with llama.cpp's source (LLAMA=FOLDER, such as vendor/llama.cpp of the
source package llama-cpp-python 0.3.36, which bench/engine/llama.sh downloads):

    LLAMA=FOLDER python make_converted.py [NAME …]

Weights are random and rounded to float16 or Q8_0, in which the files hold matrices. Next to NAME.gguf is
NAME/goldens.json.gz: the logits of transformers in float32, the ids of some texts, and the SHA-256 of
each expert's matrix in MXFP4 as gguf's numpy code expands it.
"""

import gzip
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import sys
import tempfile

import numpy
import safetensors.torch
import sentencepiece
import torch
from make_goldens import DEEPSEEK, FAMILY, GPT_OSS, GRANITE, fill, goldens, store_mxfp4
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

LLAMA = pathlib.Path(os.environ["LLAMA"])
sys.path[:0] = [str(LLAMA), str(LLAMA / "gguf-py")]
import gguf  # noqa: E402
from conversion import ModelBase, get_model_architecture, get_model_class  # noqa: E402
from conversion.base import ModelType, TextModel  # noqa: E402

ROOT = pathlib.Path(__file__).parent / "converted"
TEXTS = ["Hello world", " two  spaces\n\nand 12345 lines", "I'll we've DON'T", "naïve Ünïcödé 你好 🙂", "<|user|>x<|endoftext|>", "", "a\tb\r\n c", "the then there", "   \n  x  "]
CORPUS = pathlib.Path(__file__).parent.parent.parent.parent / "ARCHITECTURE.md"
VOCAB = 384


def sentencepiece_vocabulary(folder, spec):
    """A vocabulary with merges and byte fallback, trained on a page of this project."""
    out = io.BytesIO()
    lines = CORPUS.read_text().splitlines()[:200]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, model_type="bpe", vocab_size=spec.get("pieces", VOCAB), byte_fallback=True, character_coverage=0.98,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=spec["space"], num_threads=1, minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps(spec["class"]))


def byte_vocabulary(folder, spec):
    merges = ["t h", "th e", "Ġ the", "Ġ t", "l o", "l l", "o r", "H e", "r e", "Ġ w", "1 2", "Ġ Ġ", "Ċ Ċ", "Ã ¯", "1 23", "2 3"]
    tokens = list(bytes_to_unicode().values()) + sorted({m.replace(" ", "") for m in merges})
    special = ["<|endoftext|>", "<|user|>", "<|bos|>", "[gMASK]", "<|observation|>", *spec.get("special", [])]
    added = [dict(id=len(tokens) + i, content=t, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True) for i, t in enumerate(special)]
    merges = [m for m in merges if m != "1 23"] + ["1 23"]
    regex = spec.get("regex", [])
    cut = [dict(type="Split", pattern=dict(Regex=r), behavior="Isolated", invert=False) for r in ([regex] if isinstance(regex, str) else regex)]
    cut += [dict(type="Digits", individual_digits=True)] if not cut or spec.get("digits") else []
    file = dict(
        version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=None, post_processor=None, decoder=dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True),
        pre_tokenizer=dict(type="Sequence", pretokenizers=[*cut, dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex="regex" not in spec)]),
        model=dict(type="BPE", dropout=None, unk_token=None, fuse_unk=False, byte_fallback=False, ignore_merges=spec.get("ignore_merges", False),
                   vocab={t: i for i, t in enumerate(tokens)}, merges=merges),
    )
    (folder / "tokenizer.json").write_text(json.dumps(file))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|endoftext|>", bos_token="<|bos|>")))


def eighth(w):
    """Rounds rows to Q8_0, in which rounding again changes nothing."""
    kind = gguf.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(numpy.ascontiguousarray(w, numpy.float32), kind), kind))


def round_q8(model):
    """Rounds matrices to Q8_0 as the converter does, which turns the keys of latents."""
    c = model.config
    for name, p in model.named_parameters():
        if name.endswith("kv_b_proj.weight"):
            heads = p.view(c.num_attention_heads, -1, c.kv_lora_rank)
            heads[:, : c.qk_nope_head_dim] = eighth(heads[:, : c.qk_nope_head_dim].transpose(1, 2)).transpose(1, 2)
            heads[:, c.qk_nope_head_dim :] = eighth(heads[:, c.qk_nope_head_dim :])
        elif p.ndim > 1 and not name.endswith("mlp.gate.weight"):
            p.copy_(eighth(p))


def convert(folder, path, pre, fuse, whole=False, q8=False):
    """Has llama.cpp's converter write a file. whole: as until April 2025, when the keys and values of
    latents were one tensor."""
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre  # which it finds by the ids of published vocabularies
    hparams = ModelBase.load_hparams(folder, False)
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT), mmproj=False)
    if whole:
        kind = type("Whole", (kind,), dict(modify_tensors=whole_tensors, set_gguf_parameters=whole_sizes, model_arch=kind.model_arch))
    with torch.inference_mode():
        kind(folder, gguf.LlamaFileType.MOSTLY_Q8_0 if q8 else gguf.LlamaFileType.MOSTLY_F16, path, eager=True, fuse_qkv=fuse).write()


def whole_tensors(self, data, name, bid):
    if not name.endswith("kv_b_proj.weight"):
        yield from super(type(self), self).modify_tensors(data, name, bid)
        return
    yield from TextModel.modify_tensors(self, data, name, bid)


def whole_sizes(self):
    heads = self.hparams["num_attention_heads"]
    super(type(self), self).set_gguf_parameters()
    values = self.gguf_writer.kv_data[0]
    for key, size in dict(key_length=values.pop("deepseek2.attention.key_length_mla"), value_length=values.pop("deepseek2.attention.value_length_mla")).items():
        values[f"deepseek2.attention.{key}"] = size
    values["deepseek2.attention.head_count_kv"].value = heads


def guess_layer(folder):
    """Adds a layer that guesses the token after next, which is not computed here."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors, last = safetensors.torch.load_file(path), config["num_hidden_layers"] - 1
    for name in [n for n in tensors if n.startswith(f"model.layers.{last}.")]:
        tensors[name.replace(str(last), str(last + 1), 1)] = tensors[name].clone()
    width = config["hidden_size"]
    for name, shape in {"eh_proj": (width, 2 * width), "enorm": (width,), "hnorm": (width,), "shared_head.norm": (width,)}.items():
        tensors[f"model.layers.{last + 1}.{name}.weight"] = torch.ones(shape)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))


def sums(path):
    """The SHA-256 of each matrix in MXFP4 that a file has, in float32."""
    found, names = {}, dict(gate="gate_proj", up="up_proj", down="down_proj")
    for t in gguf.GGUFReader(path).tensors:
        if t.tensor_type == gguf.GGMLQuantizationType.MXFP4:
            _, layer, kind, _ = t.name.split(".")
            for e, w in enumerate(gguf.quants.dequantize(t.data, t.tensor_type)):
                name = f"model.layers.{layer}.mlp.experts.{e}.{names[kind.split('_')[1]]}.weight"
                found[name] = hashlib.sha256(numpy.ascontiguousarray(w, numpy.float32).tobytes()).hexdigest()
    return found


def make(name, spec):
    (ROOT / name).mkdir(parents=True, exist_ok=True)
    path = ROOT / f"{name}.gguf"
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        config = FAMILY | dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, bos_token_id=1, eos_token_id=2, max_position_embeddings=1024) | spec["config"]
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float().eval()
        fill(model, spec["seed"])
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.half().float())
            if spec.get("q8"):
                round_q8(model)
        model.save_pretrained(folder)
        if spec.get("mxfp4"):
            store_mxfp4(folder)
        if spec.get("guesses"):
            guess_layer(folder)
        (sentencepiece_vocabulary if "space" in spec else byte_vocabulary)(folder, spec)
        config = folder / "config.json"
        text = config.read_text()
        if "wrapper" in spec:  # a multimodal model, whose text the file has
            inner = json.loads(text)
            del inner["architectures"]
            config.write_text(json.dumps(spec["wrapper"] | dict(text_config=inner, vision_config=dict(model_type="pixtral"))))
        convert(folder, path, spec.get("pre", "default"), spec.get("fuse", False), spec.get("whole", False), spec.get("q8", False))
        config.write_text(text)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        result = next(r for r in (goldens(model, spec["seed"] + k, False, True, spec.get("static")) for k in range(50)) if r)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if spec.get("mxfp4"):
            result["sha256"] = sums(path)
        result["texts"] = [dict(text=text, ids=tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
    with open(ROOT / name / "goldens.json.gz", "wb") as f:
        with gzip.GzipFile(fileobj=f, mode="wb", mtime=0, filename="") as z:
            z.write(json.dumps(result, separators=(",", ":")).encode())
    for file in [path, ROOT / name / "goldens.json.gz"]:
        file.chmod(0o644)
    print(f"{name}: logits deviate by {result['deviation']:.2f}, {path.stat().st_size} bytes")


# The expressions of DeepSeek are there.
module = importlib.util.spec_from_file_location("tokenizers_goldens", pathlib.Path(__file__).parent.parent.parent / "tokenizer/testdata/goldens.py")
pre = importlib.util.module_from_spec(module)
module.loader.exec_module(pre)

ROPE = dict(rope_type="default", rope_theta=10000.0)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACED = dict(space=True, **{"class": dict(tokenizer_class="LlamaTokenizer", legacy=False, add_bos_token=True, bos_token="<s>", eos_token="</s>", unk_token="<unk>")})
BARE = dict(space=False, **{"class": dict(tokenizer_class="LlamaTokenizer", legacy=False, add_prefix_space=False, add_bos_token=True, bos_token="<s>", eos_token="</s>", unk_token="<unk>")})
GEMMA = dict(head_dim=16, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh", pad_token_id=0, query_pre_attn_scalar=16)
EXPERTS = dict(num_local_experts=6, num_experts_per_tok=2)
YARN = dict(rope_type="yarn", rope_theta=20000.0, factor=8.0, beta_fast=1.0, beta_slow=0.05, original_max_position_embeddings=100)
DEEPSEEK = DEEPSEEK | dict(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, max_position_embeddings=700)
V2 = DEEPSEEK | dict(
    model_type="deepseek_v2", n_shared_experts=2, routed_scaling_factor=1.8, norm_topk_prob=False)
OSS = GPT_OSS | EXPERTS | dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, head_dim=24, max_position_embeddings=900,
    rope_parameters=GPT_OSS["rope_parameters"] | dict(beta_fast=16.0, beta_slow=2.0, original_max_position_embeddings=128))

MODELS = {
    "llama": dict(seed=601, **SPACED, config=dict(
        model_type="llama", num_hidden_layers=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64))),
    "mixtral": dict(seed=602, **SPACED, config=EXPERTS | dict(
        model_type="mixtral", num_hidden_layers=2, intermediate_size=24, sliding_window=None, tie_word_embeddings=False, rope_parameters=ROPE)),
    "gemma": dict(seed=603, **BARE, config=GEMMA | dict(model_type="gemma", num_hidden_layers=2, num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=ROPE)),
    "gemma2": dict(seed=604, **BARE, config=GEMMA | dict(
        model_type="gemma2", tie_word_embeddings=True, sliding_window=37, attn_logit_softcapping=5.0, final_logit_softcapping=12.0, rope_parameters=ROPE)),
    # six layers, of which the last one alone sees all
    "gemma3": dict(seed=605, **BARE, config=GEMMA | dict(
        model_type="gemma3_text", num_hidden_layers=6, tie_word_embeddings=True, sliding_window=37,
        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0), sliding_attention=ROPE))),
    "phi3": dict(seed=606, **SPACED, static=True, config=dict(
        model_type="phi3", num_hidden_layers=2, sliding_window=53, tie_word_embeddings=False, pad_token_id=0, original_max_position_embeddings=128,
        max_position_embeddings=1024, partial_rotary_factor=0.75,
        rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75, original_max_position_embeddings=128, short_factor=[1.0, 1.1, 1.2], long_factor=[1.0, 2.0, 4.0]))),
    "glm4": dict(seed=607, pre="glm4", regex=LLAMA3, ignore_merges=True, config=dict(
        model_type="glm4", head_dim=16, attention_bias=True, tie_word_embeddings=False, pad_token_id=0, rope_parameters=ROPE | dict(partial_rotary_factor=0.5))),
    "glm4-moe": dict(seed=608, guesses=True, pre="glm4", regex=LLAMA3, ignore_merges=True, config=dict(
        model_type="glm4_moe", head_dim=16, attention_bias=True, use_qk_norm=True, tie_word_embeddings=False, pad_token_id=0, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=24, first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=True, n_group=1, topk_group=1,
        rope_parameters=ROPE | dict(partial_rotary_factor=0.5))),
    "qwen2": dict(seed=609, pre="qwen2", regex=QWEN2, fuse=True, config=dict(model_type="qwen2", tie_word_embeddings=True, use_sliding_window=False, rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=160), max_position_embeddings=160)),
    "qwen3": dict(seed=610, pre="qwen2", regex=QWEN2, config=dict(model_type="qwen3", head_dim=16, tie_word_embeddings=False, use_sliding_window=False, rope_parameters=ROPE)),
    "qwen3moe": dict(seed=611, pre="qwen2", regex=QWEN2, config=dict(
        model_type="qwen3_moe", head_dim=16, num_hidden_layers=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
        tie_word_embeddings=False, use_sliding_window=False, rope_parameters=ROPE)),
    "olmo2": dict(seed=612, pre="dbrx", regex=LLAMA3, config=dict(model_type="olmo2", tie_word_embeddings=False, pad_token_id=0, rope_parameters=ROPE)),
    "granite": dict(seed=613, pre="refact", config=GRANITE | dict(model_type="granite", attention_bias=True, mlp_bias=True)),
    "granitemoe": dict(seed=614, pre="refact", config=GRANITE | EXPERTS | dict(model_type="granitemoe", num_hidden_layers=2, intermediate_size=24)),
    "granitemoe-shared": dict(seed=615, pre="refact", config=GRANITE | EXPERTS | dict(
        model_type="granitemoeshared", num_hidden_layers=2, intermediate_size=24, shared_intermediate_size=40)),
    "smollm3": dict(seed=616, pre="llama-bpe", regex=LLAMA3, ignore_merges=True, config=dict(
        model_type="smollm3", num_hidden_layers=4, tie_word_embeddings=True, pad_token_id=0, no_rope_layer_interval=4, rope_parameters=dict(rope_type="default", rope_theta=5000000.0))),
    # queries that grow by steps of 100 positions
    "ministral3": dict(seed=619, pre="tekken", regex=TEKKEN, ignore_merges=True, config=dict(
        model_type="ministral3", num_hidden_layers=2, head_dim=14, tie_word_embeddings=False, max_position_embeddings=700,
        rope_parameters=dict(rope_type="yarn", rope_theta=1000000.0, factor=8.0, original_max_position_embeddings=100, beta_fast=2.0, beta_slow=0.25,
                             mscale=1.0, mscale_all_dim=0.5, llama_4_scaling_beta=0.3))),
    "mistral3": dict(
        seed=620, pre="tekken", regex=TEKKEN, ignore_merges=True, wrapper=dict(architectures=["Mistral3ForConditionalGeneration"], model_type="mistral3"),
        config=dict(model_type="mistral", num_hidden_layers=2, head_dim=12, sliding_window=None, tie_word_embeddings=False,
                    rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    # experts of the best groups by the logistic function and a bias; by the softmax, queries without a
    # waist; in addition as older files have it
    "deepseek2": dict(seed=621, pre="deepseek-v3", regex=pre.DEEPSEEK3, config=DEEPSEEK | dict(
        q_lora_rank=40, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True, scoring_func="sigmoid",
        rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0))),
    "deepseek2-v2": dict(seed=622, pre="deepseek-llm", regex=pre.DEEPSEEK, digits=True, q8=True, config=V2 | dict(
        q_lora_rank=32, hidden_size=64, kv_lora_rank=32, qk_nope_head_dim=32, v_head_dim=32, moe_intermediate_size=32, topk_method="group_limited_greedy", rope_parameters=dict(YARN, mscale=0.7, mscale_all_dim=0.7))),
    "deepseek2-lite": dict(seed=623, pre="qwen2", regex=QWEN2, whole=True, config=V2 | dict(
        q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1, rope_parameters=ROPE)),
    # experts in MXFP4, and the same as floats
    "gpt-oss": dict(seed=617, pre="gpt-4o", regex=O200K, special=["<|return|>", "<|call|>"], mxfp4=True, config=OSS),
    "gpt-oss-f16": dict(seed=618, pre="gpt-4o", regex=O200K, config=OSS | dict(num_hidden_layers=1, num_local_experts=4)),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        make(name, MODELS[name])
