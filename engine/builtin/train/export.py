"""Writes a model as a Hugging Face folder: config.json, model.safetensors (bf16), tokenizer.json and its configuration."""

import json
import pathlib

import torch
from safetensors.torch import save_file

from corpus import EOT, IM_END, IM_START

TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def export(model, tok, folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    c = model.c
    eot, im_end = tok.token_to_id(EOT), tok.token_to_id(IM_END)
    # On disk each file appears at once and whole, because another process may be reading the folder.
    tensors = {"model." + k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(tensors, folder / "model.part", metadata={"format": "pt"})
    (folder / "model.part").chmod(0o644)
    (folder / "model.part").rename(folder / "model.safetensors")
    write(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": c.vocab, "hidden_size": c.hidden,
        "intermediate_size": c.ffn, "num_hidden_layers": c.layers, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim, "hidden_act": "silu", "rms_norm_eps": c.eps, "rope_theta": c.theta, "rope_scaling": None,
        "max_position_embeddings": c.context, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "initializer_range": 0.02, "use_cache": True, "bos_token_id": eot, "eos_token_id": im_end, "pad_token_id": eot})
    write(folder / "generation_config.json", {"bos_token_id": eot, "eos_token_id": [im_end, eot], "pad_token_id": eot, "do_sample": False})
    special = {str(tok.token_to_id(t)): {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
               for t in (EOT, IM_START, IM_END)}
    write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": special, "bos_token": None, "eos_token": IM_END, "pad_token": EOT,
        "unk_token": None, "add_bos_token": False, "clean_up_tokenization_spaces": False, "model_max_length": c.context,
        "additional_special_tokens": [IM_START, IM_END], "chat_template": TEMPLATE})
    tok.save(str(folder / "tokenizer.part"))
    (folder / "tokenizer.part").rename(folder / "tokenizer.json")


def write(path, value):
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.rename(path)
