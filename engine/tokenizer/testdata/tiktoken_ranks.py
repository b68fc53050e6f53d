#!/usr/bin/env python3
"""Make small files of ranks and record what OpenAI's own library makes of texts.

    tiktoken_ranks.py [--strings 500] [--seed 1] [--out FILE]

FILE holds {"ranks": the file, "classes": [[tokenizer_config.json, [[text, ids]...]]...]}. Patterns are those of the code that
is published with Kimi K2, GLM-4, Qwen-1 and Llama 3. Needs PyPI tiktoken 0.14, tokenizers.
"""
import argparse
import base64
import gzip
import json
import pathlib
import random

import tiktoken

HERE = pathlib.Path(__file__).resolve().parent
source = (HERE / "goldens.py").read_text().removesuffix("main()\n")
texts = {"__file__": str(HERE / "goldens.py"), "__name__": "goldens"}
exec(compile(source, "goldens.py", "exec"), texts)

KIMI = "|".join([
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""", r""" ?[^\s\p{L}\p{N}]+[\r\n]*""", r"""\s*[\r\n]+""", r"""\s+(?!\S)""", r"""\s+"""])
HAN = ["々〇", "漢a", "a漢", "A漢B", "中\u0301", "\u0301中", "!⺀", "⺀!", "'s漢's", "1〇2", "〇1", "𠀀x", "ヽ々", "你好world", "World你好'LL", " 你", "\n你", "\U0002ebf0", "\U00031350", "㋿", "〆"]


def decoder(tokens, first):
    return {str(first + i): dict(content=t, special=s) for i, (t, s) in enumerate(tokens)}


def ranks():
    """Single bytes, then the merges of a byte-level vocabulary in their order."""
    doc = texts["train"]("llama3")
    printable = [b for b in range(256) if 33 <= b <= 126 or 0xA1 <= b <= 0xAC or b >= 0xAE]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    tokens = [bytes([b]) for b in range(256)]
    for left, right in doc["model"]["merges"]:
        token = bytes(alphabet[c] for c in left + right)
        if token not in tokens:
            tokens.append(token)
    return tokens


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--strings", type=int, default=500)
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--out", type=pathlib.Path, default=HERE / "tiktoken.gz")
    args = args.parse_args()
    tokens = ranks()
    n = len(tokens)
    kimi = [("[BOS]", True), ("[EOS]", True), ("<|im_end|>", True), ("<|tool|>", False)]
    glm = [("<|endoftext|>", True), ("[gMASK]", True), ("<sop>", True), ("<|user|>", True)]
    classes = [
        (dict(tokenizer_class="TikTokenTokenizer", added_tokens_decoder=decoder(kimi, n)), KIMI,
         {t: n + i for i, (t, _) in enumerate(kimi)} | {f"<|reserved_token_{i}|>": i for i in range(n + len(kimi), n + 256)}),
        (dict(tokenizer_class="ChatGLM4Tokenizer", added_tokens_decoder=decoder(glm, n)), texts["LLAMA3"], {t: n + i for i, (t, _) in enumerate(glm)}),
        (dict(tokenizer_class="QWenTokenizer"), texts["QWEN2"],
         {t: n + i for i, t in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))])}),
        (dict(tokenizer_class="PreTrainedTokenizerFast", added_tokens_decoder=decoder([("<|begin_of_text|>", True)], n)), texts["LLAMA3"], {"<|begin_of_text|>": n}),
    ]
    out = []
    for i, (config, pattern, special) in enumerate(classes):
        encoding = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks={t: i for i, t in enumerate(tokens)}, special_tokens=special)
        rng = random.Random(f"tiktoken {args.seed} {i}")
        extra = list(special)[:6] + (HAN if i == 0 else [])
        cases = [[text, encoding.encode(text, allowed_special="all")] for text in texts["strings"](rng, args.strings, extra)]
        out.append([config, cases])
    lines = "".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(tokens))
    text = json.dumps({"ranks": lines, "classes": out}, separators=(",", ":"))
    args.out.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(args.out, args.out.stat().st_size, "bytes")


main()
