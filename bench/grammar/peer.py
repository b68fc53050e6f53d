"""Runs llguidance for bench/grammar: one JSON request a line on stdin, one answer a line on stdout.

{"vocabulary": path}     a JSON array of base64; the id after the last one ends an output
{"compile": schema}      compiles it, with whitespace as ours, and computes the first mask
{"mask": true}           computes the mask; with "bits" the answer has it in base64
{"accept": id}           accepts a token
Times are in nanoseconds of this process.
"""

import base64
import json
import resource
import sys
import time

import llguidance.numpy
import numpy
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

WHITESPACE = r"\x20|\x0A[\x20\x09]{0,19}"


class Ranks:
    """What TokenizerWrapper needs of a tokenizer."""

    def __init__(self, tokens):
        self.tokens = tokens + [b"<|endoftext|>"]
        self.eos_token_id = len(tokens)
        self.bos_token_id = None
        self.special_token_ids = [len(tokens)]

    def __call__(self, text):
        data = text if isinstance(text, bytes) else text.encode()
        return list(data)


def grammar(schema):
    """Returns a Lark grammar of a schema. Without no_forcing masks would hold one spelling only."""
    schema = json.loads(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}
    return '%llguidance {"no_forcing": true}\nstart: %json ' + json.dumps(schema)


def main():
    tokenizer, matcher, bitmask = None, None, None
    for line in sys.stdin:
        request = json.loads(line)
        answer = {}
        if "vocabulary" in request:
            with open(request["vocabulary"]) as f:
                tokens = [base64.b64decode(t) for t in json.load(f)]
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            start = time.perf_counter_ns()
            tokenizer = LLTokenizer(TokenizerWrapper(Ranks(tokens)), slices=LLTokenizer.json_slices())
            answer["ns"] = time.perf_counter_ns() - start
            answer["bytes"] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            bitmask = llguidance.numpy.allocate_token_bitmask(1, len(tokens) + 1)
        elif "compile" in request:
            start = time.perf_counter_ns()
            try:
                matcher = LLMatcher(tokenizer, grammar(request["compile"]))
                answer["error"] = matcher.get_error()
                answer["ns"] = time.perf_counter_ns() - start
            except Exception as e:
                answer["error"] = str(e)
        elif "mask" in request:
            start = time.perf_counter_ns()
            try:
                llguidance.numpy.fill_next_token_bitmask(matcher, bitmask, 0)
            except Exception as e:
                answer["error"] = str(e)
            answer["ns"] = time.perf_counter_ns() - start
            if matcher.get_error():
                answer["error"] = matcher.get_error()
            if request.get("bits"):
                answer["bits"] = base64.b64encode(bitmask.astype(numpy.int32).tobytes()).decode()
        else:
            if not matcher.consume_token(request["accept"]):
                answer["error"] = matcher.get_error() or "refused"
        print(json.dumps(answer), flush=True)


main()
