"""instructor."""

from collections.abc import Iterable
from typing import Literal

import check

import instructor
import openai
from pydantic import BaseModel

check.client("instructor", "instructor", 'from_openai(OpenAI(base_url="http://HOST:8000/v1", api_key=KEY), mode=Mode.JSON_SCHEMA)')


class Pet(BaseModel, extra="forbid"):
    """A pet."""

    animal: Literal["cat", "bird", "dragon"]
    tame: bool


# Modes of the OpenAI provider that leave the members to the model: small models follow no prompt.
FREE = {"JSON", "MD_JSON", "JSON_O1"}


def ask(server, mode, stream):
    client = instructor.from_openai(openai.OpenAI(base_url=server.base, api_key=server.key, max_retries=0, timeout=60), mode=mode)
    asked = {"model": server.model, "messages": [{"role": "user", "content": "A pet with animal and tame, as JSON."}], "max_retries": 1}
    try:
        if stream:
            last = None
            for last in client.chat.completions.create_partial(response_model=Pet, **asked):
                pass
            assert last.animal and last.tame is not None, last
        else:
            pet = client.chat.completions.create(response_model=Pet, **asked)
            assert isinstance(pet, Pet), pet
    except Exception as e:
        if mode.name not in FREE:
            raise
        check.only_members(e)


for name in "FUNCTIONS", "TOOLS", "TOOLS_STRICT", "JSON", "MD_JSON", "JSON_SCHEMA", "JSON_O1", "RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS":
    mode = instructor.Mode[name]
    for stream in False, True:
        if stream and name in ("FUNCTIONS", "MD_JSON", "JSON_O1", "RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS"):
            continue
        ran = "request accepted, members not checked" if name in FREE else "schema"
        check.structured(f"Mode.{name}", "streamed" if stream else "whole", ran)(lambda server, m=mode, s=stream: ask(server, m, s))


class find_city(BaseModel):  # named as the tool
    """Finds a city."""

    q: str


class now(BaseModel):  # named as the tool
    """Returns the time."""


@check.loop("Mode.PARALLEL_TOOLS", "whole", "one turn with two calls")
def parallel(server):
    client = instructor.from_openai(openai.OpenAI(base_url=server.base, api_key=server.key, max_retries=0, timeout=60), mode=instructor.Mode.PARALLEL_TOOLS)
    calls = client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": check.QUESTION}], response_model=Iterable[find_city | now], max_retries=1)
    assert list(calls) == [find_city(q=server.calls[0][1]["q"]), now()], calls


check.run()
