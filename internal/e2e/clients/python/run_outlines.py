"""outlines."""

import json
from typing import Literal

import check

import openai
import outlines
from pydantic import BaseModel

check.client("outlines", "outlines", 'outlines.from_vllm(OpenAI(base_url="http://HOST:8000/v1", api_key=KEY), MODEL)', configs={"from_openai": 'outlines.from_openai(OpenAI(base_url="http://HOST:8000/v1", api_key=KEY), MODEL)'})


class Pet(BaseModel, extra="forbid"):
    animal: Literal["cat", "bird", "dragon"]
    tame: bool


def connect(server):
    return openai.OpenAI(base_url=server.base, api_key=server.key, max_retries=0, timeout=60)


def vllm(server):
    return outlines.from_vllm(connect(server), server.model)


@check.structured("from_vllm", "whole")
def schema(server):
    Pet.model_validate_json(vllm(server)("A pet.", Pet, max_tokens=300))


@check.structured("from_vllm", "streamed")
def schema_stream(server):
    Pet.model_validate_json("".join(vllm(server).stream("A pet.", Pet, max_tokens=300)))


@check.structured("from_vllm", "whole", "choice")
def choice(server):
    assert vllm(server)("A pet.", Literal["cat", "bird"], max_tokens=20) in ("cat", "bird")


@check.structured("from_vllm", "whole", "regex")
def regex(server):
    import re

    assert re.fullmatch("[a-c]{3}-[0-9]{2}", vllm(server)("A code.", outlines.types.Regex("[a-c]{3}-[0-9]{2}"), max_tokens=20))


@check.structured("from_vllm", "whole", "grammar")
def grammar(server):
    from outlines.types import CFG

    assert vllm(server)("A word.", CFG('start: "a" | "b" "c"'), max_tokens=20) in ("a", "bc")


@check.structured("from_openai", "whole")
def schema_openai(server):
    Pet.model_validate_json(outlines.from_openai(connect(server), server.model)("A pet.", Pet))


check.run()
