"""guidance."""

import json

import check

import guidance
from guidance.models.experimental import VLLMModel

check.client("guidance", "guidance", 'models.experimental.VLLMModel(MODEL, base_url="http://HOST:8000/v1", api_key=KEY)', configs={"json": 'models.OpenAI(MODEL, base_url="http://HOST:8000/v1", api_key=KEY)'})

PET = {"type": "object", "properties": {"animal": {"enum": ["cat", "bird"]}, "tame": {"type": "boolean"}}, "required": ["animal", "tame"], "additionalProperties": False}


def ask(server, grammar, kind=VLLMModel):
    lm = kind(server.model, echo=False, base_url=server.base, api_key=server.key)
    with guidance.user():
        lm += "A pet."
    with guidance.assistant():
        lm += grammar
    return lm


@check.structured("VLLMModel, json", "streamed")
def schema(server):
    pet = json.loads(ask(server, guidance.json("pet", schema=PET))["pet"])
    assert pet["animal"] in ("cat", "bird") and isinstance(pet["tame"], bool), pet


@check.structured("OpenAI, json", "streamed")
def schema_openai(server):
    pet = json.loads(ask(server, guidance.json("pet", schema=PET), guidance.models.OpenAI)["pet"])
    assert pet["animal"] in ("cat", "bird") and isinstance(pet["tame"], bool), pet


@check.structured("VLLMModel, select", "streamed", "choice")
def select(server):
    assert ask(server, guidance.select(["cat", "bird"], name="pet"))["pet"] in ("cat", "bird")


@check.structured("VLLMModel, gen", "streamed", "regex")
def regex(server):
    import re

    assert re.fullmatch("[a-c]{3}-[0-9]{2}", ask(server, guidance.gen("code", regex="[a-c]{3}-[0-9]{2}"))["code"])


check.run()
