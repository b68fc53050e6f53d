"""Checks lines of JSON, events and whole responses, by the models of the official client.

Unlike the client, it refuses values that a model does not allow.
"""

import json
import sys

import pydantic
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

event_type = pydantic.TypeAdapter(ResponseStreamEvent)
good, state = 0, None
for line in sys.stdin:
    value = json.loads(line)
    if value.get("object") == "response":
        Response.model_validate_json(line, strict=True)
    else:
        event = event_type.validate_json(line, strict=True)
        extra = set(event.__pydantic_extra__ or {}) - {"name", "obfuscation"}
        assert event.type == value["type"] and not extra, (event, extra)
        if event.type == "response.created":
            state = ResponseStreamState(input_tools=omit, text_format=omit)
        seen = state.handle_event(event)
        if event.type == "response.completed":
            assert seen[0].response.id == event.response.id
            assert [i.id for i in seen[0].response.output] == [i.id for i in event.response.output]
    good += 1
print(good, "good")
