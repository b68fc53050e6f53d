"""langchain and LangGraph."""

from typing import Any, Literal

import check

import openai
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

check.client("langchain, LangGraph", "langchain", 'ChatOpenAI(model=MODEL, base_url="http://HOST:8000/v1", api_key=KEY)',
             configs={"responses": "ChatOpenAI(..., use_responses_api=True, store=False)"})


def connect(server, **more):
    return ChatOpenAI(model=server.model, base_url=server.base, api_key=server.key, max_retries=0, timeout=60, **more)


def tools(ran):
    def find_city(q: str, n: Any = None, deep: Any = None, m: Any = None, b: Any = None) -> str:
        """Finds a city."""
        return ran.find_city(q)

    def now() -> str:
        """Returns the time."""
        return ran.now()

    return [StructuredTool.from_function(find_city), StructuredTool.from_function(now)]


def bound_loop(server, stream, **more):
    model = connect(server, **more).bind_tools(tools(check.Ran()))
    messages = [HumanMessage(check.QUESTION)]

    def ask():
        if not stream:
            return model.invoke(messages)
        total = None
        for chunk in model.stream(messages):
            assert isinstance(chunk, AIMessageChunk), chunk
            total = chunk if total is None else total + chunk
        return total

    m = ask()
    server.verify([(c["name"], c["args"]) for c in m.tool_calls])
    messages.append(m)
    messages.extend(ToolMessage(r, tool_call_id=c["id"]) for c, r in zip(m.tool_calls, (check.CITY, check.TIME)))
    m = ask()
    check.final(m.text if isinstance(m.text, str) else m.text())


for stream in False, True:
    mode = "streamed" if stream else "whole"
    check.loop("bind_tools", mode)(lambda server, s=stream: bound_loop(server, s))
    check.loop("responses: bind_tools", mode)(lambda server, s=stream: bound_loop(server, s, use_responses_api=True, store=False))


@check.loop("create_agent (LangGraph)", "whole")
def agent(server):
    ran = check.Ran()
    r = create_agent(connect(server), tools(ran)).invoke({"messages": [HumanMessage(check.QUESTION)]})
    check.final(r["messages"][-1].content)
    ran.verify(server)


@check.loop("create_agent (LangGraph)", "streamed")
def agent_stream(server):
    ran = check.Ran()
    text = ""
    for chunk, _ in create_agent(connect(server, streaming=True), tools(ran)).stream({"messages": [HumanMessage(check.QUESTION)]}, stream_mode="messages"):
        if isinstance(chunk, AIMessageChunk):
            text += chunk.content
    check.final(text)
    ran.verify(server)


class Pet(BaseModel, extra="forbid"):
    """A pet."""

    animal: Literal["cat", "bird", "dragon"]
    tame: bool


for method in "json_schema", "function_calling":

    @check.structured("with_structured_output", "whole", method)
    def output(server, method=method):
        r = connect(server, max_tokens=400).with_structured_output(Pet, method=method).invoke("A pet.")
        assert isinstance(r, Pet), r


@check.structured("with_structured_output", "whole", "json_mode, members not checked")
def json_mode(server):
    # The model chooses the members, and may not end.
    try:
        text = connect(server, max_tokens=400).with_structured_output(Pet, method="json_mode", include_raw=True).invoke("A pet, as JSON.")["raw"].content
    except openai.LengthFinishReasonError as e:
        text = e.completion.choices[0].message.content
    assert text.lstrip().startswith("{"), text


check.run()
