"""Writes ../parity.json: the greedy text of 50 prompts through Hugging Face transformers. A Go test compares Tandem's engine with it.

  python parity.py MODEL_DIR [FILE]

transformers computes in fp32 from the bf16 weights. Every position where the best two logits differ by at most CLOSE is listed with
the second token and the difference, because an engine that keeps its KV cache in bf16 may choose the other token there.
"""

import json
import pathlib
import random
import sys

import torch

from evaluate import Model
from facts import HERE

CLOSE = 0.25  # logits
MIX = (("trained.jsonl", None, 20), ("trained.jsonl", "multi-turn", 3), ("trained.jsonl", "system", 3), ("heldout2.jsonl", None, 10), ("heldout2.jsonl", "refusal", 6),
       ("stories.jsonl", "story", 8))


def prompts():
    rng, seen = random.Random(33), set()
    for name, kind, n in MIX:
        rows = [r for r in map(json.loads, (HERE / name).read_text().splitlines()) if kind is None or r["kind"] == kind]
        for r in rng.sample([r for r in rows if r["prompt"] not in seen], n):
            seen.add(r["prompt"])
            yield {k: r[k] for k in ("kind", "system", "history", "prompt") if k in r}


@torch.inference_mode()
def greedy(model, ids, limit=400):
    """Returns (tokens, positions of close calls); the token that ends the answer is not part of it, its position may be close."""
    out, close, past, feed = [], {}, None, torch.tensor([ids])
    while len(out) < limit:
        step = model.hf(feed, past_key_values=past, use_cache=True)
        past = step.past_key_values
        best = step.logits[0, -1].topk(2)
        margin, token = (best.values[0] - best.values[1]).item(), best.indices[0].item()
        if margin <= CLOSE:
            close[len(out)] = {"second": best.indices[1].item(), "margin": round(margin, 5)}
        if token in model.ends:
            break
        out.append(token)
        feed = torch.tensor([[token]])
    return out, close


def main():
    torch.set_num_threads(1)
    model = Model(sys.argv[1])
    rows = []
    for q in prompts():
        turns = q.get("history", []) + [q["prompt"]]
        messages = [{"role": "system", "content": q["system"]}] if "system" in q else []
        messages += [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(turns)]
        tokens, close = greedy(model, model.render(messages))
        rows.append(q | {"answer": model.tok.decode(tokens, skip_special_tokens=True), "tokens": tokens, "close": close})
    path = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else HERE.parent / "parity.json"
    path.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
    print(f"{len(rows)} prompts, {sum(len(r['tokens']) for r in rows)} tokens, {sum(len(r['close']) for r in rows)} close calls")


if __name__ == "__main__":
    main()
