"""Compare log-probabilities of bin/tandem with those of transformers in float32:

    python3 cuda/parity.py MODEL [REFERENCE] [--rehearse]

Requires PyTorch and transformers. Tandem runs on the first GPU, with --rehearse on the CPU;
transformers on a GPU if PyTorch sees one. Each type of KV is a row of the table in Markdown. The
prompts are random with a fixed seed. Tandem continues them greedily, and transformers computes the
same tokens. REFERENCE is the folder that transformers reads instead of MODEL, to see the comparison
fail. The exit status is 1 beyond a limit. TANDEM_BIN is another binary than bin/tandem.

The limit follows from the format. Weights are bfloat16 on both sides. Tandem rounds KV, and in some
kernels activations, to bfloat16; transformers in bfloat16 rounds every activation, the residual and
the logits too. So its own difference from float32, over the same tokens, bounds that of Tandem: the
mean by its mean, and the largest, an extreme value, by twice its largest.
"""

import concurrent.futures
import json
import os
import random
import sys
import urllib.request

import torch
import transformers
from gpu_hour import ROOT, serving

PROMPTS = 257, 300, 333  # lengths, in tokens
OUTPUT = 32  # tokens of each continuation
TOP = 20  # log-probabilities of each position


def ask(port, model, prompt):
    """Returns the generated tokens, and of each position but the first a map from token to log-probability."""
    body = dict(model=model, prompt=prompt, max_tokens=OUTPUT, temperature=0, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP,
                return_token_ids=True, return_tokens_as_token_ids=True)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    choice = json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]
    before = [{int(t): v["logprob"] for t, v in p.items()} for p in choice["prompt_logprobs"][1:]]
    after = [{int(t.removeprefix("token_id:")): v for t, v in p.items()} for p in choice["logprobs"]["top_logprobs"]]
    return choice["token_ids"], before + after


def answers(model, prompts, kv):
    binary, device = os.environ.get("TANDEM_BIN", ROOT / "bin" / "tandem"), "cpu" if "--rehearse" in sys.argv else "cuda:0"
    name = os.path.basename(os.path.normpath(model))
    with serving(binary, device, model, "--kv-cache-dtype", kv, "--max-num-seqs", "4", "--served-model-name", name) as port:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda p: ask(port, name, p), prompts))


def compare(reference, rounded, prompts, found):
    """Returns a row's cells and whether it is within the limits."""
    differences, rounding, ranks, first, sets = [], [], [], [], []
    for prompt, (tokens, positions) in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt + tokens[:-1]], device=reference.device)
        exact, coarse = (m(ids, use_cache=False).logits[0].float().log_softmax(dim=-1) for m in (reference, rounded))
        assert len(tokens) == OUTPUT and len(positions) == len(exact)
        best = exact.topk(TOP)
        for row, row16, values, order, ours in zip(exact, coarse, best.values.tolist(), best.indices.tolist(), positions, strict=True):
            mine = sorted(ours, key=ours.get, reverse=True)[:TOP]
            theirs = row[list(ours)]
            differences += [abs(a - b) for a, b in zip(ours.values(), theirs.tolist(), strict=True)]
            rounding += (row16[list(ours)] - theirs).abs().tolist()
            ranks += [abs(ours[t] - v) for t, v in zip(mine, values, strict=True)]
            first.append(mine[0] == order[0])
            sets.append(set(mine) == set(order))
    # A token that only transformers ranks in the first TOP raises the difference at a rank.
    largest, limit = max(differences + ranks), 2 * max(rounding)
    mean, mean_limit = sum(differences) / len(differences), sum(rounding) / len(rounding)
    cells = [f"{largest:.5f}", f"{limit:.5f}", f"{mean:.6f}", f"{mean_limit:.6f}", f"{sum(first) / len(first):.1%}", f"{sum(sets) / len(sets):.1%}", len(first)]
    return cells, largest <= limit and mean <= mean_limit


def main(model, other=None):
    random.seed(24)
    config = json.load(open(os.path.join(model, "config.json")))
    prompts = [[random.randrange(3, config["vocab_size"]) for _ in range(n)] for n in PROMPTS]
    runs = [(kv, answers(model, prompts, kv)) for kv in ("bfloat16", "float32")]

    # The servers have ended: transformers has the GPU's memory for itself.
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")  # no TF32
    torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transformers.utils.logging.disable_progress_bar()
    reference, rounded = (
        transformers.AutoModelForCausalLM.from_pretrained(other or model, dtype=dtype, attn_implementation="eager").to(device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    print("| KV | largest | limit | mean | limit | equal top-1 | equal top-20 | positions | verdict |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    failed = 0
    for kv, found in runs:
        cells, within = compare(reference, rounded, prompts, found)
        failed |= not within
        print("|", " | ".join(map(str, [kv, *cells, "within" if within else "BEYOND"])), "|", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*(a for a in sys.argv[1:] if not a.startswith("--"))))
