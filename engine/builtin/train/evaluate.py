"""Asks an exported folder and counts exact answers. Greedy, through transformers, bf16 weights computed in fp32.

  python evaluate.py MODEL_DIR                    prints the table of MODEL_CARD.md
  python evaluate.py MODEL_DIR --quick            a tenth of it
  python evaluate.py MODEL_DIR --ask "question"   one answer
  python evaluate.py MODEL_DIR --own              compares the text with that of model.py's forward pass
  python evaluate.py MODEL_DIR --write-eval FILE  writes the list that Go tests run, from candidates.jsonl
"""

import argparse
import collections
import json
import random

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

import stories
from corpus import CANNOT, EOT, HELDOUT, IM_END, RULES, UNKNOWN, Corpus
from facts import HERE
from model import Config, Llama

MARGIN = 0.5  # logits; an answer of eval.jsonl must be this far from its runner-up at every token


class Model:
    def __init__(self, folder):
        self.folder = folder
        self.tok = AutoTokenizer.from_pretrained(folder)
        self.hf = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.ends = {self.tok.convert_tokens_to_ids(t) for t in (IM_END, EOT)}

    def render(self, messages):
        return self.tok(self.tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False).input_ids

    @torch.inference_mode()
    def greedy(self, ids, limit=400):
        """Returns (text, tokens, smallest margin between the best and the second logit)."""
        out, past, feed, margin = [], None, torch.tensor([ids]), float("inf")
        while len(out) < limit:
            step = self.hf(feed, past_key_values=past, use_cache=True)
            past = step.past_key_values
            best = step.logits[0, -1].topk(2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            token = best.indices[0].item()
            if token in self.ends:
                break
            out.append(token)
            feed = torch.tensor([[token]])
        return self.tok.decode(out), out, margin

    def ask(self, *turns, system="", limit=400):
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(turns)]
        return self.greedy(self.render(messages), limit)

    @torch.inference_mode()
    def own(self, ids, limit=400):
        """The same with model.py, without any cache."""
        if not hasattr(self, "llama"):
            c = json.load(open(f"{self.folder}/config.json"))
            self.llama = Llama(Config(vocab=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"], heads=c["num_attention_heads"],
                                      kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"], ffn=c["intermediate_size"]))
            self.llama.load_state_dict({k.removeprefix("model."): v.float() for k, v in load_file(f"{self.folder}/model.safetensors").items()})
        out = []
        while len(out) < limit:
            token = self.llama.logits(self.llama(torch.tensor([ids + out]))[0, -1]).argmax().item()
            if token in self.ends:
                break
            out.append(token)
        return self.tok.decode(out)


class Table:
    def __init__(self, verbose):
        self.rows, self.verbose = collections.OrderedDict(), verbose

    def add(self, name, good, prompt="", got=""):
        row = self.rows.setdefault(name, [0, 0])
        row[0] += bool(good)
        row[1] += 1
        if not good and self.verbose:
            print(f"  [{name}] {prompt!r} -> {got[:160]!r}", flush=True)

    def show(self):
        print("| what | right | asked | share |\n|---|---|---|---|")
        for name, (good, n) in self.rows.items():
            print(f"| {name} | {good} | {n} | {100 * good / n:.0f} % |")


def refused(answer):
    return answer in (UNKNOWN, CANNOT)


def recall(model, table, corpus, rng, share):
    """Trained phrasings unchanged, and with the noise that people type."""
    false = "known question refused (should be 0)"
    refusals = asked = 0
    for f in corpus.facts:
        if rng.random() > share:
            continue
        for p, name in ((rng.choice(f.phrasings), f"trained phrasing: {f.kind}"), (corpus.noisy(rng, rng.choice(f.phrasings), f.kind == "chat"), "trained phrasing with noise: all")):
            got = model.ask(p, limit=100)[0]
            table.add(name, got == f.answer, p, got)
            refusals, asked = refusals + refused(got), asked + 1
    table.rows[false] = [refusals, asked]


def heldout(model, table, rng, share):
    refusals = asked = 0
    for name, row in ((name, json.loads(line)) for name in HELDOUT for line in (HERE / name).read_text().splitlines()):
        if rng.random() > share:
            continue
        got = model.ask(row["prompt"], limit=100)[0]
        if row["kind"] == "refusal":
            table.add(f"{name}: unknown question refused", refused(got), row["prompt"], got)
        else:
            table.add(f"{name}: {row['kind']}", got == row["answer"], row["prompt"], got)
            refusals, asked = refusals + refused(got), asked + 1
    table.rows["held-out question refused (should be 0)"] = [refusals, asked]


def sixgrams(tokens):
    return max(collections.Counter(tuple(tokens[i:i + 6]) for i in range(len(tokens) - 5)).values(), default=0)


def tell(model, table, rng, n):
    for _ in range(n):
        noun = stories.invented(rng) if rng.random() < 0.2 else rng.choice(stories.HEROES)
        name = rng.choice(stories.NAMES)
        x = f"{stories.article(noun)} {noun} named {name}"
        got, tokens, _ = model.ask(f"Tell me a story about {x}.")
        good = got.count(name) >= 4 and any(f"{noun} {word} {name}" in got for word in ("named", "called"))
        table.add("story: keeps the hero and the name asked for", good, x, got)
        x = f"{stories.article(noun)} {noun}"
        got, tokens, _ = model.ask(f"write a story about {x}")
        table.add("story: names the hero asked for", f" {noun} " in got, x, got)
        table.add("story: at least 150 tokens, no 6-gram more than twice", len(tokens) >= 150 and sixgrams(tokens) <= 2, x, got)


def dialogue(model, table, corpus, rng, n):
    for _ in range(n):
        picks = [rng.choice(corpus.facts) for _ in range(4)]
        turns = []
        for f in picks[:3]:
            turns += [rng.choice(f.phrasings), f.answer]
        p = rng.choice(picks[3].phrasings)
        got = model.ask(*turns, p, limit=100)[0]
        table.add("fourth turn of a conversation", got == picks[3].answer, p, got)
        system = " ".join(rng.sample(RULES, 20))
        got = model.ask(p, system=system, limit=100)[0]
        table.add("after a system prompt of 20 sentences", got == picks[3].answer, p, got)
        name = rng.choice(stories.PEOPLE)
        got = model.ask(f"My name is {name}.", f"Nice to meet you, {name}!", p, picks[3].answer, "What is my name?", limit=40)[0]
        table.add("recalls the user's name", got == f"Your name is {name}.", name, got)


def write_eval(model, path):
    """Keeps the candidates whose answer is right, the same through model.py, and clear at every token; stories by what they contain."""
    kept = []
    for line in open(HERE / "candidates.jsonl"):
        row = json.loads(line)
        turns = row.get("history", []) + [row["prompt"]]
        messages = [{"role": "system", "content": row["system"]}] if "system" in row else []
        messages += [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(turns)]
        ids = model.render(messages)
        got, tokens, margin = model.greedy(ids)
        if row["kind"] == "story":  # its first choices are ties by design, so its exact text is no test
            right, stable = all(w in got for w in row["contains"]) and len(tokens) >= row["min_tokens"] and sixgrams(tokens) <= 2, True
        else:
            right, stable = got.startswith(row["want"]), margin >= MARGIN and model.own(ids) == got
        print(f"{'keep' if right and stable else 'drop'} margin {margin:.2f} {row['prompt']!r} -> {got[:90]!r}", flush=True)
        if right and stable:
            kept.append(row if row["kind"] == "story" else {k: v for k, v in row.items() if k != "want"} | {"answer": got})
    with open(path, "w") as out:
        for row in kept:
            out.write(json.dumps(row) + "\n")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder")
    p.add_argument("--quick", action="store_true")
    p.add_argument("--verbose", action="store_true")
    p.add_argument("--ask")
    p.add_argument("--own", action="store_true")
    p.add_argument("--write-eval")
    args = p.parse_args()
    torch.set_num_threads(1)
    model, rng = Model(args.folder), random.Random(7)
    if args.ask:
        print(model.ask(args.ask)[0])
        return
    if args.write_eval:
        write_eval(model, args.write_eval)
        return
    corpus, table, share = Corpus(1), Table(args.verbose), 0.1 if args.quick else 1.0
    if args.own:
        for f in rng.sample(corpus.facts, 40):
            ids = model.render([{"role": "user", "content": rng.choice(f.phrasings)}])
            a, b = model.greedy(ids)[0], model.own(ids)
            table.add("same greedy text through transformers and model.py", a == b, a, b)
        table.show()
        return
    recall(model, table, corpus, rng, share)
    heldout(model, table, rng, share)
    tell(model, table, rng, int(40 * share))
    dialogue(model, table, corpus, rng, int(60 * share))
    table.show()


if __name__ == "__main__":
    main()
