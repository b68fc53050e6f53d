"""The openai package."""

import json

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field
from typing import Literal

import check

check.client(
    "openai (Python)", "openai", 'OpenAI(base_url="http://HOST:8000/v1", api_key=KEY)',
    configs={"responses": "responses.create(store=False, input=ITEMS_OF_ALL_TURNS)"},
)


def connect(server):
    return openai.OpenAI(base_url=server.base, api_key=server.key, max_retries=0, timeout=60)


def chat_loop(server, ask):
    """Runs a loop of chats. ask returns the message of an answer and its finish reason."""
    messages = [{"role": "user", "content": check.QUESTION}]
    message, reason = ask(messages)
    assert reason == "tool_calls", reason
    server.verify([(c.function.name, c.function.arguments) for c in message.tool_calls])
    assert len({c.id for c in message.tool_calls}) == 2, message
    messages.append(message.model_dump(exclude={"parsed"}))
    for c, result in zip(message.tool_calls, (check.CITY, check.TIME)):
        messages.append({"role": "tool", "tool_call_id": c.id, "content": result})
    message, reason = ask(messages)
    assert reason == "stop" and not message.tool_calls, (reason, message)
    check.final(message.content)


@check.loop("chat.completions.create", "whole")
def chat_create(server):
    client = connect(server)

    def ask(messages):
        r = check.valid(ChatCompletion, client.chat.completions.create(model=server.model, messages=messages, tools=check.TOOLS, tool_choice="auto"))
        return r.choices[0].message, r.choices[0].finish_reason

    chat_loop(server, ask)


@check.loop("chat.completions.create", "streamed")
def chat_create_stream(server):
    client = connect(server)

    def ask(messages):
        asked = {"model": server.model, "messages": messages, "tools": check.TOOLS, "tool_choice": "auto", "seed": 7}
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        text, thought, calls, reason, usage = "", "", [], None, None
        for chunk in stream:
            check.valid(ChatCompletionChunk, chunk)
            usage = chunk.usage or usage
            for c in chunk.choices:
                text += c.delta.content or ""
                thought += getattr(c.delta, "reasoning", None) or ""
                reason = c.finish_reason or reason
                for call in c.delta.tool_calls or []:
                    if call.id:
                        assert call.index == len(calls) and call.function.name and call.type == "function", call
                        calls.append({"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": ""}})
                    calls[call.index]["function"]["arguments"] += call.function.arguments or ""
        whole = client.chat.completions.create(**asked)
        m = whole.choices[0].message
        assert text == (m.content or "") and thought == (getattr(m, "reasoning", None) or ""), (text, thought, m)
        assert calls == [c.model_dump() for c in m.tool_calls or []], (calls, m)
        assert reason == whole.choices[0].finish_reason and usage == whole.usage, (reason, usage, whole)
        return m, reason

    chat_loop(server, ask)


@check.loop("chat.completions.stream", "streamed", "helper, loop of two tools")
def chat_helper(server):
    client = connect(server)

    def ask(messages):
        done = []
        with client.chat.completions.stream(model=server.model, messages=messages, tools=check.TOOLS, tool_choice="auto") as stream:
            for event in stream:
                if event.type == "chunk":
                    check.valid(ChatCompletionChunk, event.chunk)
                elif event.type == "tool_calls.function.arguments.done":
                    done.append((event.name, event.arguments))
            r = stream.get_final_completion()
        m = r.choices[0].message
        assert done == [(c.function.name, c.function.arguments) for c in m.tool_calls or []], (done, m)
        return m, r.choices[0].finish_reason

    chat_loop(server, ask)


FLAT = [{"type": "function", "strict": False, **t["function"]} for t in check.TOOLS]


def responses_loop(server, ask):
    """Runs a loop of responses, which are not stored."""
    items = [{"role": "user", "content": check.QUESTION}]
    r = ask(items)
    assert r.status == "completed", r
    calls = [i for i in r.output if i.type == "function_call"]
    server.verify([(c.name, c.arguments) for c in calls])
    items += [i.to_dict(mode="json") for i in r.output]
    items += [{"type": "function_call_output", "call_id": c.call_id, "output": o} for c, o in zip(calls, (check.CITY, check.TIME))]
    check.final(ask(items).output_text)


@check.loop("responses.create", "whole")
def responses_create(server):
    client = connect(server)
    responses_loop(server, lambda items: check.valid(Response, client.responses.create(
        model=server.model, input=items, tools=FLAT, tool_choice="auto", store=False, include=["reasoning.encrypted_content"])))


class Deltas:
    """Collects what the deltas of a stream add to each item."""

    def __init__(self):
        self.texts = {}

    def add(self, event):
        if event.type in ("response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta"):
            self.texts[event.output_index] = self.texts.get(event.output_index, "") + event.delta

    def verify(self, response):
        """The deltas are the items of the response."""
        want = {}
        for n, item in enumerate(response.output):
            text = item.arguments if item.type == "function_call" else "".join(p.text for p in item.content or [])
            if text:
                want[n] = text
        assert self.texts == want, (self.texts, response)


@check.loop("responses.create", "streamed")
def responses_create_stream(server):
    client = connect(server)

    def ask(items):
        last, open_items, deltas = None, 0, Deltas()
        stream = client.responses.create(model=server.model, input=items, tools=FLAT, tool_choice="auto", store=False, stream=True)
        for number, event in enumerate(stream):
            check.valid(ResponseStreamEvent, event)
            deltas.add(event)
            assert event.sequence_number == number, (event, number)
            open_items += {"response.output_item.added": 1, "response.output_item.done": -1}.get(event.type, 0)
            last = event
        assert last.type == "response.completed" and open_items == 0, last
        deltas.verify(last.response)
        return last.response

    responses_loop(server, ask)


@check.loop("responses.stream", "streamed", "helper, loop of two tools")
def responses_helper(server):
    client = connect(server)

    def ask(items):
        deltas = Deltas()
        with client.responses.stream(model=server.model, input=items, tools=FLAT, tool_choice="auto", store=False) as stream:
            for event in stream:
                deltas.add(event)
            r = stream.get_final_response()
        deltas.verify(r)
        return r

    responses_loop(server, ask)


@check.loop("chat.completions.create", "whole", "tool_choice required")
def chat_required(server):
    r = connect(server).chat.completions.create(model=server.model, messages=[{"role": "user", "content": check.QUESTION}], tools=check.TOOLS, tool_choice="required")
    assert r.choices[0].finish_reason == "tool_calls", r
    server.verify([(c.function.name, c.function.arguments) for c in r.choices[0].message.tool_calls])


class Pet(BaseModel, extra="forbid"):
    animal: Literal["cat", "bird", "dragon"]
    age: int = Field(ge=0, le=99)
    tame: bool
    names: list[Literal["Ada", "Bo"]] = Field(max_length=2)


ASK = [{"role": "user", "content": "A pet, as JSON."}]


@check.structured("chat.completions.parse", "whole")
def chat_parse(server):
    r = connect(server).chat.completions.parse(model=server.model, messages=ASK, response_format=Pet, seed=3)
    assert isinstance(r.choices[0].message.parsed, Pet), r


@check.structured("chat.completions.stream", "streamed")
def chat_parse_stream(server):
    with connect(server).chat.completions.stream(model=server.model, messages=ASK, response_format=Pet, seed=3) as stream:
        for event in stream:
            if event.type == "chunk":
                check.valid(ChatCompletionChunk, event.chunk)
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)


@check.structured("chat.completions.parse", "whole", "strict tool, tool_choice required, no parallel calls")
def chat_parse_tool(server):
    tools = [openai.pydantic_function_tool(Pet)]
    r = connect(server).chat.completions.parse(model=server.model, messages=ASK, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=3)
    assert isinstance(r.choices[0].message.tool_calls[0].function.parsed_arguments, Pet), r


@check.structured("chat.completions.create", "whole", "json_object")
def chat_json_object(server):
    r = connect(server).chat.completions.create(model=server.model, messages=ASK, response_format={"type": "json_object"}, max_tokens=400, seed=3)
    if r.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(r.choices[0].message.content), dict), r
    else:
        assert r.choices[0].message.content.lstrip().startswith("{"), r


@check.structured("responses.parse", "whole")
def responses_parse(server):
    r = connect(server).responses.parse(model=server.model, input=ASK, text_format=Pet, store=False)
    assert isinstance(r.output_parsed, Pet), r


@check.structured("responses.stream", "streamed")
def responses_parse_stream(server):
    deltas = Deltas()
    with connect(server).responses.stream(model=server.model, input=ASK, text_format=Pet, store=False) as stream:
        for event in stream:
            deltas.add(event)
        r = stream.get_final_response()
    deltas.verify(r)
    assert isinstance(r.output_parsed, Pet), r


check.run()
