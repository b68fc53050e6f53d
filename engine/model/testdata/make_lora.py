"""Makes the adapters of this folder, below lora/, and what PEFT computes with each
merged into the weights of gqa-tied. Run it here, where peft is installed:

    python make_lora.py

Adapters are saved by PEFT (adapter_config.json, adapter_model.safetensors), with
goldens.json.gz as make_goldens.py has them. Factors and random weights are
such that an adapter changes the logits by about as much as they deviate.
"""

import gzip
import json
import pathlib
import shutil

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import make_goldens

BASE = make_goldens.ROOT / "gqa-tied"
ROOT = make_goldens.ROOT / "lora"

ADAPTERS = {
    "all": dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "attention": dict(r=8, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "v_proj"]),
    "mlp": dict(r=3, lora_alpha=3, target_modules=["down_proj", "up_proj"], layers_to_transform=[0, 2]),
}


def make(name, config, seed):
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, attn_implementation="eager").eval()
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path="gqa-tied", **config))
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in (p for n, p in peft.named_parameters() if "lora_" in n):
            p.copy_((torch.randn(p.shape, generator=gen) * (0.6 / p.shape[1] ** 0.5)).to(torch.bfloat16))
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    peft.save_pretrained(folder)
    for path in folder.glob("*.md"):
        path.unlink()
    path = folder / "adapter_config.json"
    text = json.loads(path.read_text())
    text["base_model_name_or_path"] = BASE.name
    text["target_modules"].sort()
    path.write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")
    merged = peft.merge_and_unload()
    make_goldens.PROMPTS, make_goldens.CONTINUE = [1, 17, 64], 12
    result = make_goldens.goldens(merged, seed)
    with open(folder / "goldens.json.gz", "wb") as f:
        with gzip.GzipFile(fileobj=f, mode="wb", mtime=0, filename="") as z:
            z.write(json.dumps(result, separators=(",", ":")).encode())
    for path in folder.iterdir():
        path.chmod(0o644)
    print(f"{name}: logits deviate by {result['deviation']:.2f}, {sum(p.stat().st_size for p in folder.iterdir())} bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for i, (name, config) in enumerate(ADAPTERS.items()):
        make(name, config, 200 + i)
