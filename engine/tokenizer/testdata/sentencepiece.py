#!/usr/bin/env python3
"""Train SentencePiece vocabularies and record what transformers makes of them alone.

    sentencepiece.py [--strings 300] [--seed 1] [--out DIR] [NAME...]

Each DIR/NAME.gz holds {"model": tokenizer.model in base64, "configs": [[tokenizer_config.json,
[[text, ids, ids without special tokens, decoded]...]]...]}. Needs PyPI transformers 5.24, sentencepiece, protobuf.
"""
import argparse
import base64
import gzip
import io
import json
import pathlib
import random
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path = [p for p in sys.path if pathlib.Path(p or ".").resolve() != HERE]  # this file has a module's name

import sentencepiece
from transformers import AutoTokenizer

source = (HERE / "goldens.py").read_text().removesuffix("main()\n")
texts = {"__file__": str(HERE / "goldens.py"), "__name__": "goldens"}
exec(compile(source, "goldens.py", "exec"), texts)

PLAIN = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
MODELS = {  # how it is trained, and each tokenizer_config.json
    "sentencepiece": (dict(PLAIN, model_type="bpe", vocab_size=900, byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True), [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True, "add_eos_token": True},
        {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": False, "add_bos_token": True},
    ]),
    # With replacements and without; with bytes and without.
    "sentencepiece-unigram": (dict(rules=True, model_type="unigram", vocab_size=600, byte_fallback=True), [
        {"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": "TokenizersBackend", "add_bos_token": True}]),
    "sentencepiece-plain": (dict(PLAIN, model_type="unigram", vocab_size=430), [{}, {"legacy": False}]),
    "sentencepiece-bare": (dict(PLAIN, model_type="unigram", vocab_size=430, add_dummy_prefix=False), [{"tokenizer_class": "PreTrainedTokenizerFast"}]),
}


def train(name, rules=False, **kwargs):
    model = io.BytesIO()
    if rules:
        kwargs["normalization_rule_tsv"] = texts["rules_file"](texts["RULES"])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts["SENTENCES"] * 3), model_writer=model, character_coverage=0.98, user_defined_symbols=["<tool>"],
        control_symbols=["[INST]", "[/INST]"], hard_vocab_limit=name == "sentencepiece", minloglevel=2, **kwargs)
    return model.getvalue()


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--strings", type=int, default=300)
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--out", type=pathlib.Path, default=HERE)
    args.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    args = args.parse_args()
    for name, (kwargs, wanted) in MODELS.items():
        if args.names and name not in args.names:
            continue
        model, configs = train(name, **kwargs), []
        for i, config in enumerate(wanted):
            with tempfile.TemporaryDirectory() as folder:
                folder = pathlib.Path(folder)
                (folder / "tokenizer.model").write_bytes(model)
                (folder / "tokenizer_config.json").write_text(json.dumps(config))
                (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
                tokenizer = AutoTokenizer.from_pretrained(folder)
                rng = random.Random(f"sentencepiece {args.seed} {i}")
                cases = []
                for text in texts["strings"](rng, args.strings, ["[INST]", "[/INST]", "<s>", "</s>", "<tool>"]):
                    ids = tokenizer.encode(text)
                    cases.append([text, ids, tokenizer.encode(text, add_special_tokens=False), tokenizer.decode(ids, clean_up_tokenization_spaces=False)])
                configs.append([config, cases])
        text = json.dumps({"model": base64.b64encode(model).decode(), "configs": configs}, separators=(",", ":"))
        path = args.out / f"{name}.gz"
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        print(path, path.stat().st_size, "bytes")


main()
