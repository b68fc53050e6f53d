"""LiteLLM, as a library."""

import check

import litellm

check.client(
    "LiteLLM", "litellm", 'completion(model="hosted_vllm/MODEL", api_base="http://HOST:8000/v1", api_key=KEY)',
    configs={
        "responses": 'responses(model="hosted_vllm/MODEL", api_base="http://HOST:8000/v1", api_key=KEY, store=False)',
        "anthropic/": 'completion(model="anthropic/MODEL", api_base="http://HOST:8000", api_key=KEY)',
    },
)
litellm.telemetry = False
litellm.suppress_debug_info = True


def chat_loop(server, provider, stream):
    messages = [{"role": "user", "content": check.QUESTION}]

    def ask():
        r = litellm.completion(model=provider + server.model, api_base=server.url if provider == "anthropic/" else server.base, api_key=server.key, messages=messages, tools=check.TOOLS, tool_choice="auto",
                               stream=stream, max_retries=0, timeout=60)
        if stream:
            r = litellm.stream_chunk_builder(list(r), messages=messages)
        return r.choices[0]

    c = ask()
    assert c.finish_reason == "tool_calls", c
    calls = c.message.tool_calls
    server.verify([(t.function.name, t.function.arguments) for t in calls])
    messages.append(c.message.model_dump())
    messages.extend({"role": "tool", "tool_call_id": t.id, "content": r} for t, r in zip(calls, (check.CITY, check.TIME)))
    check.final(ask().message.content)


for provider in "hosted_vllm/", "openai/", "anthropic/":
    for stream in False, True:
        check.loop(f"completion, {provider}", "streamed" if stream else "whole")(lambda server, p=provider, s=stream: chat_loop(server, p, s))


@check.loop("responses, hosted_vllm/", "whole")
def responses(server):
    flat = [{"type": "function", **t["function"]} for t in check.TOOLS]
    items = [{"role": "user", "content": check.QUESTION}]

    def ask():
        return litellm.responses(model="hosted_vllm/" + server.model, api_base=server.base, api_key=server.key, input=items, tools=flat, store=False, timeout=60)

    r = ask()
    calls = [i for i in r.output if i.type == "function_call"]
    server.verify([(c.name, c.arguments) for c in calls])
    items.extend(i.model_dump(exclude_none=True) if hasattr(i, "model_dump") else dict(i) for i in r.output)
    items.extend({"type": "function_call_output", "call_id": c.call_id, "output": o} for c, o in zip(calls, (check.CITY, check.TIME)))
    check.final("".join(p.text for i in ask().output if i.type == "message" for p in i.content))


@check.structured("completion, hosted_vllm/", "whole")
def schema(server):
    from typing import Literal

    from pydantic import BaseModel

    class Pet(BaseModel, extra="forbid"):
        animal: Literal["cat", "bird"]
        tame: bool

    r = litellm.completion(model="hosted_vllm/" + server.model, api_base=server.base, api_key=server.key, messages=[{"role": "user", "content": "A pet, as JSON."}],
                           response_format=Pet, timeout=60)
    Pet.model_validate_json(r.choices[0].message.content)


check.run()
