"""Writes trained.jsonl and stories.jsonl: what `make test` asks of trained phrasings and of stories. Fixed seeds; run again when facts change.

trained.jsonl has one phrasing of each small kind of fact and of half of the others, every second one with the noise of corpus.py, then trained questions
as a later turn of a conversation and after a system prompt of 20 sentences. stories.jsonl has requests for a hero, some of them made-up words.
"""

import json
import random

import stories
from corpus import RULES, Corpus
from facts import HERE

FULL = ("chat", "tandem", "serving", "http")


def trained(corpus):
    rng = random.Random(31)
    for i, f in enumerate(f for f in corpus.facts if f.kind in FULL or rng.random() < 0.5):
        p = rng.choice(f.phrasings)
        yield {"kind": f.kind, "prompt": p if i % 2 else clean(corpus, rng, p, f), "answer": f.answer}
    for _ in range(50):
        first, second, third = rng.sample(corpus.facts, 3)
        history = [rng.choice(first.phrasings), first.answer, rng.choice(second.phrasings), second.answer]
        yield {"kind": "multi-turn", "history": history, "prompt": rng.choice(third.phrasings), "answer": third.answer}
    system = " ".join(["You are a helpful assistant."] + rng.sample(RULES, 20))
    for f in rng.sample(corpus.facts, 50):
        yield {"kind": "system", "system": system, "prompt": rng.choice(f.phrasings), "answer": f.answer}


def clean(corpus, rng, phrasing, fact):
    """A phrasing with noise that is no held-out question by accident."""
    while True:
        p = corpus.noisy(rng, phrasing, fact.kind == "chat")
        if not corpus.heldout.overlaps(p):
            return p


def tales():
    rng = random.Random(32)
    for i in range(40):
        noun = stories.invented(rng) if i % 5 == 4 else rng.choice(stories.HEROES)
        quality = rng.choice(stories.QUALITIES) if i % 3 == 0 else ""
        name = rng.choice(stories.PEOPLE) if i % 2 else ""
        qh = f"{quality} {noun}".strip()
        x = f"{stories.article(qh)} {qh}" + (f"{rng.choice([' named ', ' called '])}{name}" if name else "")
        yield {"kind": "story", "prompt": rng.choice(stories.REQUESTS).format(x=x), "contains": [noun] + ([name] if name else []), "min_tokens": 150}


def write(name, rows):
    with open(HERE / name, "w") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write("trained.jsonl", trained(Corpus(1)))
    write("stories.jsonl", tales())
