"""The anthropic package."""

import json

import anthropic
from anthropic.types import Message, RawMessageStreamEvent

import check

check.client("anthropic (Python)", "anthropic", 'Anthropic(base_url="http://HOST:8000", api_key=KEY)')

TOOLS = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in (check.FIND, check.NOW)]


def connect(server):
    return anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0, timeout=60)


def loop(server, ask):
    """Runs a loop of messages. Thinking goes back as it came."""
    messages = [{"role": "user", "content": check.QUESTION}]
    m = ask(messages)
    assert m.stop_reason == "tool_use", m
    uses = [b for b in m.content if b.type == "tool_use"]
    server.verify([(b.name, b.input) for b in uses])
    messages += [
        {"role": "assistant", "content": [b.to_dict(mode="json") for b in m.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": b.id, "content": r} for b, r in zip(uses, (check.CITY, check.TIME))]},
    ]
    m = ask(messages)
    assert m.stop_reason == "end_turn", m
    check.final("".join(b.text for b in m.content if b.type == "text"))


@check.loop("messages.create", "whole")
def create(server):
    client = connect(server)
    loop(server, lambda messages: check.valid(Message, client.messages.create(
        model=server.model, max_tokens=2000, messages=messages, tools=TOOLS, tool_choice={"type": "auto"})))


def shape(blocks):
    """Returns what a streamed and a whole answer have in common: the text of each kind, and the calls without their ids."""
    texts, calls = {}, []
    for b in blocks:
        if b["type"] == "tool_use":
            calls.append((b["name"], b["input"]))
        else:
            texts[b["type"]] = texts.get(b["type"], "") + b[b["type"]]
    return texts, calls


@check.loop("messages.create", "streamed")
def create_stream(server):
    client = connect(server)

    def ask(messages):
        asked = {"model": server.model, "max_tokens": 2000, "messages": messages, "tools": TOOLS}
        types, blocks, open_block, last = [], [], False, None
        for event in client.messages.create(**asked, stream=True):
            check.valid(RawMessageStreamEvent, event)
            types.append(event.type)
            if event.type == "content_block_start":
                assert not open_block and event.index == len(blocks), event
                open_block = True
                blocks.append(event.content_block.to_dict(mode="json"))
                if event.content_block.type == "tool_use":
                    blocks[-1]["input"] = ""
            elif event.type == "content_block_delta":
                assert open_block and event.index == len(blocks) - 1, event
                for member, value in event.delta.to_dict(mode="json").items():
                    if member != "type":
                        blocks[-1]["input" if member == "partial_json" else member] += value
            elif event.type == "content_block_stop":
                assert open_block and event.index == len(blocks) - 1, event
                open_block = False
            elif event.type == "message_delta":
                last = event
        assert types[0] == "message_start" and types[-2:] == ["message_delta", "message_stop"], types
        for b in blocks:
            if b["type"] == "tool_use":
                b["input"] = json.loads(b["input"] or "{}")
        whole = client.messages.create(**asked)
        assert shape(blocks) == shape(b.to_dict(mode="json") for b in whole.content), (blocks, whole)
        assert last.delta.stop_reason == whole.stop_reason and last.usage.output_tokens == whole.usage.output_tokens, (last, whole)
        return whole

    loop(server, ask)


@check.loop("messages.stream", "streamed", "helper, loop of two tools")
def helper(server):
    client = connect(server)

    def ask(messages):
        with client.messages.stream(model=server.model, max_tokens=2000, messages=messages, tools=TOOLS) as stream:
            for _ in stream:
                pass
            return stream.get_final_message()

    loop(server, ask)


@check.loop("beta.messages.tool_runner", "whole", "helper, loop of two tools")
def runner(server):
    ran = check.Ran()

    @anthropic.beta_tool(name="find_city", input_schema=check.FIND["parameters"])
    def find_city(q: str, **more) -> str:
        """Finds a city."""
        return ran.find_city(q)

    @anthropic.beta_tool
    def now() -> str:
        """Returns the time."""
        return ran.now()

    messages = [{"role": "user", "content": check.QUESTION}]
    m = connect(server).beta.messages.tool_runner(model=server.model, max_tokens=2000, messages=messages, tools=[find_city, now]).until_done()
    check.final("".join(b.text for b in m.content if b.type == "text"))
    ran.verify(server)


@check.loop("messages.count_tokens", "whole", "count")
def count(server):
    asked = {"model": server.model, "messages": [{"role": "user", "content": check.QUESTION}], "tools": TOOLS}
    n = connect(server).messages.count_tokens(**asked).input_tokens
    used = connect(server).messages.create(**asked, max_tokens=2000).usage
    assert n > 10 and n == used.input_tokens + used.cache_read_input_tokens, (n, used)


check.run()
