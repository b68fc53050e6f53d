#!/usr/bin/env python3
"""Print the ids and texts of Hugging Face's tokenizers.

    real.py < {"tokenizer": tokenizer.json, "texts": [text...], "ids": [[id...]...]}

writes {"texts": [[ids, decoded, decoded without special tokens]...], "ids":
[decoded...]}. Needs PyPI tokenizers 0.23.3. TestRealVocabularies -update runs
it and keeps a digest of every answer.
"""
import json
import sys

from tokenizers import Tokenizer

request = json.load(sys.stdin)
tokenizer = Tokenizer.from_str(json.dumps(request["tokenizer"]))
texts = []
for text in request["texts"]:
    ids = tokenizer.encode(text).ids
    texts.append([ids, tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(ids, skip_special_tokens=True)])
json.dump({"texts": texts, "ids": [tokenizer.decode(ids, skip_special_tokens=False) for ids in request["ids"]]}, sys.stdout)
