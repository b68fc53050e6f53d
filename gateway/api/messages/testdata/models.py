"""Reads the golden events and answers by the models of Anthropic's client, in strict mode."""

import pathlib
import sys

try:
    from anthropic.types import Message, RawMessageStreamEvent
except ImportError:
    print("no client")
    sys.exit()
from pydantic import TypeAdapter

folder = pathlib.Path(__file__).parent
event = TypeAdapter(RawMessageStreamEvent)
n = 0
for block in (folder / "stream.txt").read_text().strip().split("\n\n"):
    name, data = block.split("\n")
    name, data = name.removeprefix("event: "), data.removeprefix("data: ")
    if name in ("ping", "error"):  # the client reads them without a model
        continue
    e = event.validate_json(data, strict=True)
    assert e.type == name, block
    n += 1
for line in (folder / "whole.txt").read_text().splitlines():
    m = Message.model_validate_json(line, strict=True)
    assert m.type == "message" and not m.model_extra, m
    n += 1
print("read", n)
