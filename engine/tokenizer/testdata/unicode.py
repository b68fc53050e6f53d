#!/usr/bin/env python3
"""Write ../unicode.bin: the character data that Hugging Face `tokenizers` sees.

Classes and normal forms are measured on the installed `tokenizers`, not taken
from a Unicode table, because its regex engine, its normalizer and its standard
library are each built on another Unicode version. Run with PyPI tokenizers
0.23.3 and Python 3.11 or later; the numbers in the file are unsigned varints:

  classes       count, then (gap since the last range, length, bits)
  ccc           count, then (gap since the last range, length, combining class)
  decompose     count, then (code point delta, n, n code points)
  compose       count, then (first, second, composite)
"""
import pathlib
import unicodedata

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models,
                        normalizers, pre_tokenizers)

LETTER, NUMBER, SPACE, UPPER, NUMERIC, WORD, COMPOSING, LOWER = (1 << i for i in range(8))
SIGN = 1 << 9  # 1 << 8 is Han, which is in unicode.go
CODEPOINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
HANGUL = range(0xAC00, 0xD7A4)


def regex_class(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    return {c for c in CODEPOINTS if not split.pre_tokenize_str(chr(c))}


def numeric_class():
    digits = pre_tokenizers.Digits()
    return {c for c in CODEPOINTS if len(digits.pre_tokenize_str("a" + chr(c))) == 2}


def word_class():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens([AddedToken("@@", single_word=True, normalized=False)])
    return {c for c in CODEPOINTS if 1 not in tokenizer.encode(chr(c) + "@@").ids}


def combining_classes(nfd):
    """A mark's class, from which representatives of other classes it passes."""
    overlay, iota = "\u0334", "\u0345"  # of the lowest class and of the highest
    representatives = {1: overlay, 240: iota}
    for c in CODEPOINTS:
        k, ch = unicodedata.combining(chr(c)), chr(c)
        if k and k not in representatives and nfd(ch + overlay) == overlay + ch:
            representatives[k] = ch
    order = sorted(representatives)
    out = {ord(ch): k for k, ch in representatives.items()}

    def passes(ch, k):  # ch, put before the representative of class k, moves behind it
        return nfd(ch + representatives[k]) == representatives[k] + ch

    for c in CODEPOINTS:
        ch = chr(c)
        if c in out or nfd(ch) != ch:
            continue
        if passes(ch, 1):
            out[c] = order[max(i for i, k in enumerate(order) if passes(ch, k)) + 1]
        elif nfd(iota + ch) == ch + iota:
            out[c] = order[0]  # a mark, and not above the lowest class
    return out


def main():
    nfd, nfc = normalizers.NFD().normalize_str, normalizers.NFC().normalize_str
    ccc = combining_classes(nfd)
    decompose = {c: nfd(chr(c)) for c in CODEPOINTS if c not in HANGUL and nfd(chr(c)) != chr(c)}
    compose = {}
    for c in decompose:
        parts = unicodedata.decomposition(chr(c)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            a, b = (int(p, 16) for p in parts)
            if nfc(chr(a) + chr(b)) == chr(c):
                compose[a, b] = c
    seconds = {b for _, b in compose} | set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))

    bits = [0] * 0x110000
    for mask, members in ((LETTER, regex_class(r"\p{L}")), (NUMBER, regex_class(r"\p{N}")),
                          (SPACE, regex_class(r"\s")), (UPPER, regex_class(r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]")),
                          (LOWER, regex_class(r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")),
                          (SIGN, regex_class(r"[\p{P}\p{S}]")), (NUMERIC, numeric_class()), (WORD, word_class()),
                          (COMPOSING, set(ccc) | seconds | {c for c in CODEPOINTS if nfc(chr(c)) != chr(c)})):
        for c in members:
            bits[c] |= mask

    out = bytearray()

    def varint(n):
        while n >= 0x80:
            out.append(n & 0x7F | 0x80)
            n >>= 7
        out.append(n)

    def ranges(value):
        runs = []
        for c in range(0x110000):
            if value(c) and runs and runs[-1][1] == c and runs[-1][2] == value(c):
                runs[-1][1] = c + 1
            elif value(c):
                runs.append([c, c + 1, value(c)])
        varint(len(runs))
        end = 0
        for lo, hi, v in runs:
            varint(lo - end), varint(hi - lo), varint(v)
            end = hi

    ranges(lambda c: bits[c])
    ranges(lambda c: ccc.get(c, 0))
    varint(len(decompose))
    last = 0
    for c, text in sorted(decompose.items()):
        varint(c - last), varint(len(text))
        for ch in text:
            varint(ord(ch))
        last = c
    varint(len(compose))
    for (a, b), c in sorted(compose.items()):
        varint(a), varint(b), varint(c)
    path = pathlib.Path(__file__).resolve().parent.parent / "unicode.bin"
    path.write_bytes(out)
    print(path, len(out), "bytes;", len(ccc), "marks,", len(decompose), "decompositions,", len(compose), "pairs")


main()
