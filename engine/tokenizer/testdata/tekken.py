#!/usr/bin/env python3
"""Make a small tekken.json and record what Mistral's own library makes of texts.

    tekken.py [--strings 300] [--seed 1] [--out FILE]

FILE holds {"tekken": tekken.json, "cases": [[text, ids without special tokens]...]}. Needs PyPI mistral-common, tokenizers.
"""
import argparse
import base64
import gzip
import json
import pathlib
import random
import tempfile

from mistral_common.tokens.tokenizers.tekken import Tekkenizer

HERE = pathlib.Path(__file__).resolve().parent
source = (HERE / "goldens.py").read_text().removesuffix("main()\n")
texts = {"__file__": str(HERE / "goldens.py"), "__name__": "goldens"}
exec(compile(source, "goldens.py", "exec"), texts)

PATTERN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
           r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def tekken():
    """Single bytes, then the merges of a byte-level vocabulary in their order."""
    doc = texts["train"]("llama3")
    alphabet = {c: b for b, c in texts["byte_of"]()}
    tokens = [bytes([b]) for b in range(256)]
    for left, right in doc["model"]["merges"]:
        token = bytes(alphabet[c] for c in left + right)
        if token not in tokens:
            tokens.append(token)
    vocab = [dict(rank=i, token_bytes=base64.b64encode(t).decode(), token_str=t.decode("utf-8", "replace")) for i, t in enumerate(tokens)]
    config = dict(pattern=PATTERN, num_vocab_tokens=len(vocab), default_vocab_size=len(vocab) + 30 - 5, default_num_special_tokens=30, version="v3")
    return dict(config=config, vocab=vocab)


def byte_of():
    printable = [b for b in range(256) if 33 <= b <= 126 or 0xA1 <= b <= 0xAC or b >= 0xAE]
    others = [b for b in range(256) if b not in printable]
    return [(b, chr(b)) for b in printable] + [(b, chr(256 + i)) for i, b in enumerate(others)]


texts["byte_of"] = byte_of


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--strings", type=int, default=300)
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--out", type=pathlib.Path, default=HERE / "tekken.gz")
    args = args.parse_args()
    doc = tekken()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tekken.json"
        path.write_text(json.dumps(doc))
        tokenizer = Tekkenizer.from_file(path)
    rng = random.Random(f"tekken {args.seed}")
    cases = [[text, tokenizer.encode(text, bos=False, eos=False)] for text in texts["strings"](rng, args.strings, [])]
    text = json.dumps({"tekken": doc, "cases": cases}, separators=(",", ":"))
    args.out.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(args.out, args.out.stat().st_size, "bytes")


main()
