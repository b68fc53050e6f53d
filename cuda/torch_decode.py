"""Decode with PyTorch and transformers, random weights, batch 1: tokens per second.

    python3 torch_decode.py CONFIG.json cuda|cpu
"""

import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

config, device = AutoConfig.from_pretrained(sys.argv[1]), sys.argv[2]
if device == "cuda" and not torch.cuda.is_available():
    sys.exit("PyTorch sees no GPU")
torch.set_grad_enabled(False)
with torch.device(device):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
ids = torch.ones((1, 16), dtype=torch.long, device=device)


def decode(n):
    out = model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=n, max_new_tokens=n, do_sample=False, pad_token_id=0)
    assert out.shape[1] == 16 + n
    if device == "cuda":
        torch.cuda.synchronize()


n = 64 if device == "cuda" else 4
decode(4)
began = time.perf_counter()
decode(n)
print(f"{n / (time.perf_counter() - began):.0f} tok/s")
