"""Trains the built-in model: Muon on matrices, AdamW on embedding and norms, loss on answers only. Can be stopped and resumed at any time.

  python train.py --work DIR            trains, or resumes from DIR/checkpoint.pt
  python train.py --work DIR --steps N  sets the length of a run, also of a resumed one
  python train.py --work DIR --from HF  starts from the weights of a Hugging Face folder, with its tokenizer
  python train.py --work DIR --minutes M  ends after M minutes of wall time if that is sooner; the schedule follows whichever is further on
"""

import argparse
import math
import pathlib
import random
import shutil
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

import bpe
from corpus import Corpus
from export import export
from model import Config, Llama

POOL = 2048  # conversations drawn at a time, sorted by length to pad little


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by five Newton-Schulz steps."""

    def __init__(self, params, lr, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(m, group["momentum"])
                p.add_(orthogonal(x), alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(g):
    x = g.bfloat16()
    x = x / (x.norm() + 1e-7)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x if wide else x.T).to(g.dtype)


def batches(corpus, tok, pool, tokens_per_step, context):
    """Returns the batches of one pool, in random order: (ids [batch, tokens], learn [batch, tokens])."""
    rows = []
    for conversation in corpus.pool(pool, POOL):
        ids, learn = [], []
        for enc, (_, want) in zip(tok.encode_batch([t for t, _ in conversation]), conversation):
            ids += enc.ids
            learn += [want] * len(enc.ids)
        rows.append((ids[:context], learn[:context]))
    rows.sort(key=lambda r: len(r[0]))
    out, start = [], 0
    while start < len(rows):
        n = 1
        while start + n < len(rows) and len(rows[start + n][0]) * (n + 1) <= tokens_per_step:
            n += 1
        out.append(pad(rows[start:start + n]))
        start += n
    random.Random(pool).shuffle(out)
    return out


def pad(rows):
    width = max(len(r[0]) for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    learn = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (a, b) in enumerate(rows):
        ids[i, :len(a)] = torch.tensor(a)
        learn[i, :len(b)] = torch.tensor(b)
    return ids, learn


def loss_of(model, hidden_of, ids, learn):
    """Mean cross entropy of the learnt tokens; logits are computed only where they are needed."""
    hidden = hidden_of(ids)[:, :-1][learn[:, 1:]]
    return F.cross_entropy(model.logits(hidden).float(), ids[:, 1:][learn[:, 1:]])


def rate(step, progress):
    """Warm up, stay, and from 30 % of the run on go down to zero along a cosine."""
    down = 0.5 + 0.5 * math.cos(math.pi * min(1.0, max(0.0, progress - 0.3) / 0.7))
    return min(1.0, (step + 1) / 30, down)


def save(path, state):
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.rename(path)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--work", type=pathlib.Path, required=True)
    p.add_argument("--steps", type=int, default=3000)
    p.add_argument("--minutes", type=float, default=math.inf)
    p.add_argument("--from", dest="start", type=pathlib.Path)
    p.add_argument("--tokens-per-step", type=int, default=8192)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--save-minutes", type=float, default=4)
    p.add_argument("--rate", type=float, default=1.0, help="times the learning rate; less than 1 to resume from good weights")
    p.add_argument("--device", default="cpu")
    p.add_argument("--eager", action="store_true", help="do not compile; about a third of the speed, but needs no C++ compiler")
    args = p.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    vocabulary = args.work / "tokenizer.json"
    if args.start and not vocabulary.exists():
        shutil.copy(args.start / "tokenizer.json", vocabulary)
    tok = Tokenizer.from_file(str(vocabulary)) if vocabulary.exists() else bpe.train(vocabulary, seed=args.seed)
    corpus = Corpus(args.seed)
    model = Llama(Config(vocab=tok.get_vocab_size())).to(args.device)
    if args.start:
        model.load_state_dict({k.removeprefix("model."): w.float() for k, w in load_file(args.start / "model.safetensors").items()})
    matrices = [w for n, w in model.named_parameters() if w.ndim == 2 and "embed" not in n]
    others = [w for n, w in model.named_parameters() if not (w.ndim == 2 and "embed" not in n)]
    optimizers = [(Muon(matrices, 0.02), 0.02), (torch.optim.AdamW(others, 0.004, betas=(0.9, 0.98), weight_decay=0.0), 0.004)]
    at = {"step": 0, "pool": 0, "batch": 0, "tokens": 0, "seconds": 0.0}
    checkpoint = args.work / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=args.device)
        at = state["at"]
        model.load_state_dict(state["model"])
        for (o, _), s in zip(optimizers, state["optimizers"]):
            o.load_state_dict(s)
        print(f"resumed at step {at['step']} of {args.steps}", flush=True)
    print(f"{sum(w.numel() for w in model.parameters()):,} parameters", flush=True)
    run(args, at, model, optimizers, corpus, tok, checkpoint)


def progress(args, at):
    """How much of the run is done, from 0 to 1, by steps or by time."""
    return max(at["step"] / args.steps, at["seconds"] / (60 * args.minutes))


def run(args, at, model, optimizers, corpus, tok, checkpoint):
    def keep():
        save(checkpoint, {"at": at, "model": model.state_dict(), "optimizers": [o.state_dict() for o, _ in optimizers]})
        export(model, tok, args.work / "hf")

    hidden_of = model if args.eager else torch.compile(model, dynamic=True)
    last = saved = time.monotonic()
    tokens, seconds, total, n = at["tokens"], at["seconds"], 0.0, 0
    pool = batches(corpus, tok, at["pool"], args.tokens_per_step, model.c.context)
    while progress(args, at) < 1:
        if at["batch"] >= len(pool):
            at["pool"], at["batch"] = at["pool"] + 1, 0
            pool = batches(corpus, tok, at["pool"], args.tokens_per_step, model.c.context)
        ids, learn = (x.to(args.device) for x in pool[at["batch"]])
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = loss_of(model, hidden_of, ids, learn)
        loss.backward()
        for o, base in optimizers:
            for group in o.param_groups:
                group["lr"] = base * args.rate * rate(at["step"], progress(args, at))
            o.step()
            o.zero_grad(set_to_none=True)
        now = time.monotonic()
        at["step"], at["batch"], at["tokens"], at["seconds"], last = at["step"] + 1, at["batch"] + 1, at["tokens"] + ids.numel(), at["seconds"] + now - last, now
        total, n = total + loss.item(), n + 1
        if math.isnan(total):
            raise FloatingPointError(f"the loss is not a number at step {at['step']}")
        if n == 20:
            speed = (at["tokens"] - tokens) / (at["seconds"] - seconds)
            print(f"step {at['step']} ({progress(args, at):.1%}) tokens {at['tokens']:,} loss {total / n:.4f} {speed:.0f} tok/s", flush=True)
            tokens, seconds, total, n = at["tokens"], at["seconds"], 0.0, 0
        if now - saved > 60 * args.save_minutes:
            keep()
            saved = now
    keep()
    print("done", flush=True)


if __name__ == "__main__":
    main()
