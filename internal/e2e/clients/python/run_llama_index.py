"""llama-index."""

import json
from typing import Any, Literal

import check

from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

check.client(
    "llama-index", "llama-index-llms-openai-like",
    'OpenAILike(model=MODEL, api_base="http://HOST:8000/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True)',
    configs={"structured_predict": "OpenAILike(..., strict=True)"},
)


def connect(server, **more):
    return OpenAILike(model=server.model, api_base=server.base, api_key=server.key, is_chat_model=True, is_function_calling_model=True, context_window=8000, max_retries=0, timeout=60, **more)


def tools(ran):
    def find_city(q: str, n: Any = None, deep: Any = None, m: Any = None, b: Any = None) -> str:
        """Finds a city."""
        return ran.find_city(q)

    def now() -> str:
        """Returns the time."""
        return ran.now()

    return [FunctionTool.from_defaults(find_city), FunctionTool.from_defaults(now)]


@check.loop("chat_with_tools", "whole", "one turn with two calls")
def chat(server):
    llm = connect(server)
    r = llm.chat_with_tools(tools(check.Ran()), user_msg=check.QUESTION, allow_parallel_tool_calls=True)
    server.verify([(c.tool_name, c.tool_kwargs) for c in llm.get_tool_calls_from_response(r)])


for streaming in False, True:

    @check.loop("FunctionAgent", "streamed" if streaming else "whole")
    async def agent(server, streaming=streaming):
        ran = check.Ran()
        handler = FunctionAgent(tools=tools(ran), llm=connect(server), streaming=streaming, allow_parallel_tool_calls=True).run(user_msg=check.QUESTION)
        n = 0
        async for event in handler.stream_events():
            n += isinstance(event, AgentStream)
        assert n > 3 or not streaming, n
        check.final(str(await handler))
        ran.verify(server)


class Pet(BaseModel, extra="forbid"):
    """A pet."""

    animal: Literal["cat", "bird", "dragon"]
    tame: bool


@check.structured("structured_predict", "whole", "function call, strict")
def predict(server):
    from llama_index.core.prompts import PromptTemplate

    assert isinstance(connect(server, strict=True).structured_predict(Pet, PromptTemplate("A pet.")), Pet)


@check.structured("should_use_structured_outputs", "whole", "schema")
def native(server):
    from llama_index.core.llms import ChatMessage

    r = connect(server, should_use_structured_outputs=True).as_structured_llm(Pet).chat([ChatMessage("A pet.")])
    assert isinstance(r.raw, Pet), r


check.run()
