"""openai-agents at its default settings, which are the Responses API and strict schemas."""

import check

from agents import Agent, Runner, function_tool, set_default_openai_api, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from typing import Literal
from pydantic import BaseModel

check.client(
    "openai-agents", "openai-agents", 'set_default_openai_client(AsyncOpenAI(base_url="http://HOST:8000/v1", api_key=KEY)); set_tracing_disabled(True)',
    configs={"chat_completions": 'set_default_openai_api("chat_completions")', "responses": "Runner.run(agent, input), without previous_response_id and conversation_id; a Session of the client keeps turns"},
)
set_tracing_disabled(True)


def agent(server, ran, api, **more):
    set_default_openai_client(AsyncOpenAI(base_url=server.base, api_key=server.key, max_retries=0, timeout=60), use_for_tracing=False)
    set_default_openai_api(api)

    @function_tool
    def find_city(q: str) -> str:
        """Finds a city."""
        return ran.find_city(q)

    @function_tool
    def now() -> str:
        """Returns the time."""
        return ran.now()

    return Agent(name="a", instructions="Be brief.", model=server.model, tools=[find_city, now] if ran else [], **more)


for api in "responses", "chat_completions":

    @check.loop(api, "whole", "default settings, loop of two tools" if api == "responses" else "loop of two tools")
    async def whole(server, api=api):
        ran = check.Ran()
        r = await Runner.run(agent(server, ran, api), check.QUESTION)
        check.final(r.final_output)
        ran.verify(server)

    @check.loop(api, "streamed", "default settings, loop of two tools" if api == "responses" else "loop of two tools")
    async def streamed(server, api=api):
        ran = check.Ran()
        r = Runner.run_streamed(agent(server, ran, api), check.QUESTION)
        n = 0
        async for _ in r.stream_events():
            n += 1
        assert n > 3, n
        check.final(r.final_output)
        ran.verify(server)


class Pet(BaseModel, extra="forbid"):
    animal: Literal["cat", "bird", "dragon"]
    tame: bool


for api in "responses", "chat_completions":

    @check.structured(api, "whole", "output_type")
    async def typed(server, api=api):
        r = await Runner.run(agent(server, None, api, output_type=Pet), "A pet.")
        assert isinstance(r.final_output, Pet), r


check.run()
