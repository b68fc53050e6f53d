#!/usr/bin/env python3
"""Train one small tokenizer per pattern and record what Hugging Face does.

    goldens.py [--strings 400] [--seed 1] [--out DIR] [FAMILY...]

Each DIR/NAME.json.gz holds {"tokenizer": tokenizer.json, "encode": [[text, ids,
ids without special tokens, decoded, decoded without special tokens]...],
"decode": [[ids, decoded]...]}. Needs PyPI tokenizers 0.23.3. Texts are made
here, from the seed alone.
"""
import argparse
import gzip
import io
import json
import pathlib
import random
import sys
import tempfile

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models,
                        normalizers, pre_tokenizers, processors, trainers)

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK3 = [
    r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
# Of DeepSeek-V2, whose letters are the letters with case that its files list.
LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK = ["[\r\n]", r"\s?[" + LETTERS + "]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"]
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

SENTENCES = """
The gateway renders the prompt, tokenizes it and sends the ids to a node.
It's what they'd have said: we're sure that you've seen it, I'll go and she'd stay, I'm done, DON'T.
A prefill node computes keys and values; a decode node streams one token after another.
def forward(self, x):\n    for i, layer in enumerate(self.layers):\n        x = layer(x)  # residual\n    return x
func (t *Tokenizer) Encode(text string) []int32 {\n\tif text == "" {\n\t\treturn nil\n\t}\n}
{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3, "units": null}}
SELECT id, name FROM users WHERE created_at >= '2024-01-01' ORDER BY id DESC LIMIT 100;
1 + 1 = 2; 3.14159; 1,000,000; 0xDEADBEEF; 2026-11-21T03:14:15Z; ½ cup; Ⅷ; ٣٤٥; १२३
Der schnelle braune Fuchs springt über den faulen Hund. Größe, Äpfel, Übermut, Straße.
El veloz murciélago hindú comía feliz cardillo y kiwi. ¿Qué? ¡Sí, señor!
Le cœur a ses raisons que la raison ne connaît point. L'été, l'œuf, aujourd'hui.
Съешь ещё этих мягких французских булок, да выпей чаю.
Γαζέες καὶ μυρτιὲς δὲν θὰ βρῶ πιὰ στὸ χρυσαφὶ ξέφωτο.
今日は天気がいいので、散歩しましょう。東京タワーへ行きます。カタカナとひらがな。
敏捷的棕色狐狸跳过了懒狗。人工智能正在改变世界,二零二六年。
키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.
صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت. שלום עולם, מה שלומך?
हिन्दी में लिखा हुआ एक छोटा सा वाक्य है। ภาษาไทยไม่มีช่องว่างระหว่างคำ
👩‍👩‍👧‍👦 family, 👍🏽 thumbs, 🇨🇭 flag, 🏳️‍🌈, 🤷🏻‍♀️ shrug, ☕️, ❤️‍🔥
Tiếng Việt có dấu: Nguyễn, phở, đường, những người bạn tốt.
""".strip().split("\n")
SENTENCES = [s.replace("\\n", "\n").replace("\\t", "\t") for s in SENTENCES]

BITS = [
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", "\t\t", " \n", "\n ", " \t \n  ", "\x0b", "\x0c", "\x85", "\u00a0",
    "\u2003", "\u2028", "\u3000", "\u200b", "\u200d", "\ufeff", "\u180e", "\u1680", "\x00", "\x00\x00", "\x01\x7f", "\x1b[31m", "\x1c\x1d",
    "a", "I", "the", " the", "Hello", " world", "foo_bar", "camelCase", "UPPER", "ǅ", "ß", "İ", "ſ", "K", "ﬁ", "ª", "ʰ",
    "'s", "'S", "'ſ", "'t", "'RE", "'re", "'Ve", "'m", "'ll", "'LL", "'d", "'x", "''", "' s", "'", "\"", "`", "'9", "'\n",
    "0", "7", "42", "123", "1234", "12345678901", "٣", "१२", "Ⅷ", "½", "²", "𝟗", "〇", "一", "㊿", "\U00011de3",
    ".", "...", "!", "?!", ",", ";", "()", "{}", "[]", "//", "#", "@", "$", "€", "=>", "->", "<|", "|>", "<", "§", "—", "…", "、", "。",
    "e\u0301", "é", "o\u0302\u0323", "\u0301", "\u0323\u0302", "a\u0327\u0301\u0328", "\u1100\u1161\u11a8", "\uac00\u11a8", "Å", "Ω",
    "\u0344", "\u0958", "\u0915\u093c", "\u2add", "\u0f43", "\U0001d15e", "\ufb2c", "\u1e9b\u0323", "\U00011935\U00011930", "\u0b47\u0b57",
    "漢字", "ひらがな", "カタカナ", "한국어", "中", "שלום", "مرحبا", "\u202e", "नमस्ते", "ไทย", "தமிழ்",
    "😀", "👩‍👩‍👧‍👦", "👍🏽", "🇨🇭", "🏳️‍🌈", "❤️", "\ufe0f", "\U000e0067", "𐍈", "𝔘𝔫𝔦", "\U0010ffff", "\uffff", "\ufffd", "\ue000", "\u0378",
]


RULES = {"e\u0301": "E'", "o": "0", "o\u0302\u0323": "long", "a": "", "\r": " ", "\r\n": "CRLF", "\u1100\u1161": "GA", "\U0001f1e8\U0001f1ed": "CH", "\u2764\ufe0f": "<3", "\U0001f44d": "+1",
         "\u0915": "ka", "\u0e44": "\u0e44\u0e44", "\u2028": "\n"}


def rules_file(rules):
    path = pathlib.Path(tempfile.mkdtemp()) / "rules.tsv"
    path.write_text("".join(" ".join(f"{ord(c):X}" for c in k) + "\t" + " ".join(f"{ord(c):X}" for c in v) + "\n" for k, v in sorted(rules.items())))
    return str(path)


def charsmap(rules=None):
    """The replacements of a SentencePiece model: its usual ones, or those given."""
    sys.path = [p for p in sys.path if pathlib.Path(p or ".").resolve() != pathlib.Path(__file__).resolve().parent]  # sentencepiece.py is there
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    model, kwargs = io.BytesIO(), dict(normalization_rule_tsv=rules_file(rules)) if rules else dict(normalization_rule_name="nmt_nfkc")
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(SENTENCES), model_writer=model, model_type="char", vocab_size=60, hard_vocab_limit=False, minloglevel=2, **kwargs)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    return proto.normalizer_spec.precompiled_charsmap


def special(content, **k):
    return AddedToken(content, special=True, normalized=False, **k)


FAMILIES = {
    "gpt2": dict(
        pre=lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
        post=lambda ids: processors.ByteLevel(trim_offsets=False),
        vocab=600,
        special=[special("<|endoftext|>")],
        added=[AddedToken("<|lr|>", lstrip=True, rstrip=True), AddedToken("solo", single_word=True), AddedToken("    ", normalized=False)],
    ),
    "llama3": dict(
        pre=lambda: pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        post=lambda ids: processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", ids["<|begin_of_text|>"])])]),
        vocab=1000,
        special=[special(s) for s in ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                                      "<|reserved_special_token_1|>", "<|reserved_special_token_10|>")],
        added=[AddedToken("<tool>", rstrip=True, normalized=False), AddedToken("</tool>", lstrip=True, normalized=False)],
        edit=lambda d: d["model"].update(ignore_merges=True),
    ),
    "qwen2": dict(
        normalizer=normalizers.NFC,
        pre=lambda: pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        post=lambda ids: processors.ByteLevel(trim_offsets=False),
        vocab=900,
        special=[special(s) for s in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")],
        added=[AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False), AddedToken("caf\u00e9X"),
               AddedToken("e\u0301e\u0301", normalized=True), AddedToken("solo", single_word=True, normalized=True)],
    ),
    "deepseek3": dict(
        normalizer=lambda: normalizers.Sequence([]),
        pre=lambda: pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(e), "isolated") for e in DEEPSEEK3), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        post=lambda ids: processors.ByteLevel(trim_offsets=False),
        vocab=900,
        special=[special("<｜begin▁of▁sentence｜>"), special("<｜end▁of▁sentence｜>")],
        added=[AddedToken("<think>", normalized=False)],
    ),
    "deepseek": dict(
        normalizer=lambda: normalizers.Sequence([]),
        pre=lambda: pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(e), "isolated") for e in DEEPSEEK), pre_tokenizers.Digits(individual_digits=True),
                                             pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        post=lambda ids: processors.ByteLevel(trim_offsets=False),
        vocab=900,
        special=[special("<｜begin▁of▁sentence｜>"), special("<｜end▁of▁sentence｜>")],
        added=[],
    ),
    "digits": dict(
        pre=lambda: pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        post=lambda ids: processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", ids["<s>"]), ("</s>", ids["</s>"])]),
        vocab=500,
        special=[special(s) for s in ("<s>", "</s>")],
        added=[],
        edit=lambda d: d["model"].update(merges=[" ".join(m) for m in d["model"]["merges"]]),  # the older form
    ),
    "prefix": dict(
        pre=lambda: pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.ByteLevel(add_prefix_space=True)]),
        post=lambda ids: processors.ByteLevel(trim_offsets=True),
        vocab=330,
        special=[special("<pad>")],
        added=[],
        alphabet=False,  # some bytes have no token: they are <unk>, fused
        unk="<unk>",
    ),
}


def metaspace(scheme, split, special_tokens, added):
    """A vocabulary of characters with SentencePiece's spaces, as transformers saves Llama's."""
    return dict(
        pre=lambda: pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split), characters=True, strip=scheme != "never",
        post=lambda ids: processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])]),
        vocab=900, special=[special(s) for s in special_tokens], added=added,
    )


FAMILIES |= {
    "metaspace-first": metaspace("first", False, ["<s>", "</s>", "[INST]", "[/INST]"], [AddedToken("<tool>", rstrip=True, normalized=False)]),
    "metaspace-always": metaspace("always", False, ["<s>", "</s>"], [AddedToken("solo", single_word=True), AddedToken("<|lr|>", lstrip=True, rstrip=True)]),
    "metaspace-split": metaspace("first", True, ["<s>", "</s>"], [AddedToken("solo", single_word=True, normalized=False)]),
    "metaspace-never": metaspace("never", True, ["<s>", "</s>"], []),
}


def unigram(pre, added, normalizer=None, bytes_too=True, strip=True, decoder=None):
    """A vocabulary with scores, as transformers saves SentencePiece's Unigram models."""
    return dict(
        pre=pre, normalizer=normalizer, unigram=True, bytes_too=bytes_too, strip=strip, decoder=decoder,
        post=lambda ids: processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])]),
        vocab=700, special=[special(s) for s in ("<s>", "</s>", "[INST]")], added=added,
    )


FAMILIES |= {
    # transformers 5: spaces by Metaspace, no normalizer.
    "unigram-first": unigram(lambda: pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
                             [AddedToken("<tool>", rstrip=True, normalized=False), AddedToken("solo", single_word=True)]),
    # transformers 4: spaces by the normalizer, no pre-tokenizer.
    "unigram-normalized": unigram(lambda: None, [AddedToken("<|lr|>", lstrip=True, rstrip=True)],
                                  normalizer=lambda: normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])),
    # Without bytes, which become <unk>, and with Metaspace as the decoder.
    "unigram-unk": unigram(lambda: pre_tokenizers.Metaspace(prepend_scheme="always", split=True), [AddedToken("solo", normalized=False)],
                           bytes_too=False, decoder=lambda: decoders.Metaspace(prepend_scheme="always", split=True)),
    # T5's and XLM-R's: SentencePiece's replacements, and runs of spaces.
    "unigram-precompiled": unigram(lambda: pre_tokenizers.Metaspace(prepend_scheme="always", split=True), [AddedToken("solo", single_word=True)], bytes_too=False,
                                   normalizer=lambda: normalizers.Sequence([normalizers.Precompiled(charsmap()), normalizers.Strip(left=False, right=True),
                                                                            normalizers.Replace(Regex(" {2,}"), "\u2581")]),
                                   decoder=lambda: decoders.Metaspace(prepend_scheme="always", split=True)),
    # Keys of several characters, of which the shortest counts, and the handling of spaces of a tokenizer.model.
    "unigram-charsmap": unigram(lambda: pre_tokenizers.Metaspace(prepend_scheme="always", split=False), [],
                                normalizer=lambda: normalizers.Sequence([
                                    normalizers.Precompiled(charsmap(RULES)), normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " "),
                                    normalizers.Replace(" ", "\u2581"), normalizers.Replace(Regex("\\A\u2581"), "\u2581\u2581")])),
    "unigram-never": unigram(lambda: pre_tokenizers.Metaspace(prepend_scheme="never", split=False), [], bytes_too=False,
                             decoder=lambda: decoders.Metaspace(prepend_scheme="never", split=False)),
}


def train_unigram(f):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.UnigramTrainer(vocab_size=f["vocab"], show_progress=False, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", max_piece_length=16)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    doc = json.loads(tokenizer.to_str())
    model = doc["model"]
    if f["bytes_too"]:
        model["byte_fallback"] = True
        model["vocab"][3:3] = [[f"<0x{b:02X}>", 0.0] for b in range(256)]
    # Runs of spaces and pieces with a mark within are common in published vocabularies.
    known = {t for t, _ in model["vocab"]}
    model["vocab"] += [[t, s] for t, s in (("\u2581\u2581", -6.5), ("\u2581\u2581\u2581\u2581", -7.25), ("of\u2581the", -5.0), ("aa", -3.0), ("aaa", -4.5), ("ab", -3.0), ("ba", -3.0)) if t not in known]
    doc["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(doc))
    if f["normalizer"]:
        tokenizer.normalizer = f["normalizer"]()
    tokenizer = Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), "pre_tokenizer": None})) if f["pre"]() is None else tokenizer
    if f["pre"]() is not None:
        tokenizer.pre_tokenizer = f["pre"]()
    decode = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = f["decoder"]() if f["decoder"] else decoders.Sequence(decode + [decoders.Strip(" ", 1, 0)] * f["strip"])
    tokenizer.add_special_tokens([special("<unk>"), *f["special"]])
    tokenizer.add_tokens(f["added"])
    tokenizer.post_processor = f["post"]({s.content: tokenizer.token_to_id(s.content) for s in f["special"]})
    return json.loads(tokenizer.to_str())


def train_characters(f):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=f["vocab"], show_progress=False, limit_alphabet=160, max_token_length=24,
                                  special_tokens=["<unk>", *(t.content for t in f["special"])] + [f"<0x{b:02X}>" for b in range(256)])
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    doc = json.loads(tokenizer.to_str())
    doc["added_tokens"] = [t for t in doc["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(doc))
    tokenizer.pre_tokenizer = f["pre"]()
    decode = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(decode + [decoders.Strip(" ", 1, 0)] * f["strip"])
    tokenizer.add_special_tokens(f["special"])
    tokenizer.add_tokens(f["added"])
    tokenizer.post_processor = f["post"]({s.content: tokenizer.token_to_id(s.content) for s in f["special"]})
    return json.loads(tokenizer.to_str())


def train(family):
    f = FAMILIES[family]
    if f.get("characters"):
        return train_characters(f)
    if f.get("unigram"):
        return train_unigram(f)
    unk = f.get("unk")
    tokenizer = Tokenizer(models.BPE(unk_token=unk, fuse_unk=unk is not None))
    tokenizer.pre_tokenizer = f["pre"]()
    if "normalizer" in f:
        tokenizer.normalizer = f["normalizer"]()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if f.get("alphabet", True) else [chr(c) for c in range(33, 110)]
    trainer = trainers.BpeTrainer(vocab_size=f["vocab"], initial_alphabet=sorted(alphabet), show_progress=False,
                                  limit_alphabet=256 if f.get("alphabet", True) else 90,
                                  special_tokens=[unk] if unk else [], max_token_length=24)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.add_special_tokens(f["special"])
    tokenizer.add_tokens(f["added"])
    tokenizer.post_processor = f["post"]({s.content: tokenizer.token_to_id(s.content) for s in f["special"]})
    doc = json.loads(tokenizer.to_str())
    if "edit" in f:
        f["edit"](doc)
    return doc


def strings(rng, n, added):
    fixed = ["", " ", "  a", "a  ", "\n", " \n", "'s", "'", "a'", "\x00", "é", "e\u0301"] + SENTENCES + BITS
    yield from fixed
    for _ in range(max(0, n - len(fixed))):
        kind = rng.random()
        if kind < 0.45:  # anything next to anything
            yield "".join(rng.choice(BITS + added) for _ in range(rng.randint(1, 14)))
        elif kind < 0.6:  # prose with added tokens and white space around them
            a, b = rng.choice(SENTENCES), rng.choice(SENTENCES)
            space = rng.choice(["", " ", "\n", " \n ", "  ", "\u3000"])
            yield a[:rng.randint(0, 40)] + space + rng.choice(added or [" "]) + rng.choice(["", space, " "]) + b[:rng.randint(0, 40)]
        elif kind < 0.7:  # runs
            yield rng.choice(BITS) * rng.randint(1, 90) + rng.choice(BITS)
        elif kind < 0.85:  # any code points
            yield "".join(chr(c) for c in (rng.choice([rng.randint(0, 0x2FF), rng.randint(0x300, 0x2FFF), rng.randint(0x3000, 0xD7FF),
                                                       rng.randint(0xE000, 0x1FFFF), rng.randint(0x20000, 0x10FFFF)])
                                           for _ in range(rng.randint(1, 16))))
        else:  # marks upon marks
            yield "".join(rng.choice(["e", "a", "\u0915", "\u1100", " "]) if rng.random() < 0.3 else chr(rng.randint(0x300, 0x36F))
                          for _ in range(rng.randint(2, 12)))


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--strings", type=int, default=400)
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent)
    args.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    args = args.parse_args()
    for family, f in FAMILIES.items():
        if args.families and family not in args.families:
            continue
        doc = train(family)
        tokenizer = Tokenizer.from_str(json.dumps(doc))
        rng = random.Random(f"{family} {args.seed}")
        encode = []
        for text in strings(rng, args.strings, [t.content for t in f["special"] + f["added"]]):
            ids = tokenizer.encode(text).ids
            plain = tokenizer.encode(text, add_special_tokens=False).ids
            encode.append([text, ids, plain if plain != ids else None,
                           tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(ids, skip_special_tokens=True)])
        decode = []
        size = tokenizer.get_vocab_size()
        for _ in range(args.strings // 2):
            ids = [rng.randrange(size + 2) for _ in range(rng.randint(1, 12))]
            decode.append([ids, tokenizer.decode(ids, skip_special_tokens=False)])
        for case in encode:  # null: equal to the column before
            case[4] = case[4] if case[4] != case[3] else None
            case[3] = case[3] if case[3] != case[0] else None
        path = args.out / f"{family}.json.gz"
        text = json.dumps({"tokenizer": doc, "encode": encode, "decode": decode}, separators=(",", ":"))
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        print(path, path.stat().st_size, "bytes,", len(encode), "strings, vocabulary", size)


if __name__ == "__main__":
    main()
