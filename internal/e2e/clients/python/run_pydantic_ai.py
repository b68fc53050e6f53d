"""pydantic-ai."""

from typing import Any, Literal

import check

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

check.client(
    "pydantic-ai", "pydantic-ai-slim", 'OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url="http://HOST:8000/v1", api_key=KEY))',
    configs={"OpenAIResponsesModel": 'OpenAIResponsesModel(MODEL, provider=..., settings={"openai_store": False})', "AnthropicModel": 'AnthropicModel(MODEL, provider=AnthropicProvider(base_url="http://HOST:8000", api_key=KEY))'},
)


def openai_chat(server):
    return OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.base, api_key=server.key))


def openai_responses(server):
    return OpenAIResponsesModel(server.model, provider=OpenAIProvider(base_url=server.base, api_key=server.key), settings={"openai_store": False})


def anthropic(server):
    return AnthropicModel(server.model, provider=AnthropicProvider(base_url=server.url, api_key=server.key))


def agent(model, ran):
    a = Agent(model, retries=0)

    @a.tool_plain
    def find_city(q: str, n: Any = None, deep: Any = None, m: Any = None, b: Any = None) -> str:
        """Finds a city."""
        return ran.find_city(q)

    @a.tool_plain
    def now() -> str:
        """Returns the time."""
        return ran.now()

    return a


for name, model in ("OpenAIChatModel", openai_chat), ("OpenAIResponsesModel", openai_responses), ("AnthropicModel", anthropic):

    @check.loop(name, "whole")
    async def whole(server, model=model):
        ran = check.Ran()
        r = await agent(model(server), ran).run(check.QUESTION)
        check.final(r.output)
        ran.verify(server)

    @check.loop(name, "streamed")
    async def streamed(server, model=model):
        ran = check.Ran()
        text = ""
        async with agent(model(server), ran).iter(check.QUESTION) as run:
            async for node in run:
                if Agent.is_model_request_node(node):
                    async with node.stream(run.ctx) as stream:
                        async for _ in stream:
                            pass
            text = run.result.output
        check.final(text)
        ran.verify(server)


class Pet(BaseModel, extra="forbid"):
    """A pet."""

    animal: Literal["cat", "bird", "dragon"]
    tame: bool


for kind in ToolOutput, NativeOutput:

    @check.structured("OpenAIChatModel", "whole", kind.__name__)
    async def typed(server, kind=kind):
        r = await Agent(openai_chat(server), output_type=kind(Pet), retries=0).run("A pet.")
        assert isinstance(r.output, Pet), r


@check.structured("OpenAIChatModel", "whole", "PromptedOutput: request accepted, members not checked")
async def prompted(server):
    # The server guarantees an object. The members are the model's, and these models follow no prompt.
    from pydantic_ai.exceptions import UnexpectedModelBehavior

    try:
        await Agent(openai_chat(server), output_type=PromptedOutput(Pet), retries=0, model_settings={"max_tokens": 400}).run("A pet.")
    except UnexpectedModelBehavior as e:
        check.only_members(e)


check.run()
