"""What schemathesis has to know of Tandem, besides /openapi.json.

TestBinaryOpenAPI runs `schemathesis run` with SCHEMATHESIS_HOOKS=openapi_hooks.
A schema cannot say which values exclude each other, nor what a model's template
and context take, so a good request may be answered with 400 if the error names
one of the fields in RULES. At the end a line "tally {...}" says how many answers
of each status every operation gave.
"""

import atexit
import collections
import json
import re
import zlib

import jsonschema_rs
import schemathesis

# Fields whose value may be well formed and yet wrong: because of another field,
# the model's vocabulary and context, or its chat template.
RULES = {"messages", "prompt", "tokens", "max_tokens", "min_tokens", "stream_options", "continue_final_message", "n", "chat_template_kwargs",
         "logprobs", "top_logprobs", "prompt_logprobs", "truncation_side", "logprob_token_ids", "allowed_token_ids", "logit_bias", "bad_words",
         "lora_name", "lora_path", "token_ids", "sampling_params", "input", "instructions", "max_output_tokens", "text", "truncation", "tools", "tool_choice", "output_format", "output_config", "chat_template",
         "generate_response", "generate_responses", "generate_chunk", "stream_state", "prompt_tokens", "prompt_token_ids", "request_ids", "dimensions", "texts", "input_type", "embedding_types", "output_dimension", "use_activation"}
PAIRS = ["text_1", "text_2", "data_1", "data_2", "queries", "query", "documents", "items"]  # of texts, whose lengths have to fit
RULES |= set(PAIRS)

# Fields of which each constrains the answer: two of them exclude each other, and
# what they hold may be no schema or grammar.
GRAMMARS = ["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"]
RULES |= set(GRAMMARS)

# Fields that force calls or end reasoning: they may contradict each other, the
# model may have no reasoning, and a tool's parameters may be no schema that can
# be enforced.
RULES |= {"tools", "tool_choice", "parallel_tool_calls", "thinking_token_budget"}

TALLY = collections.defaultdict(collections.Counter)  # good requests only
atexit.register(lambda: print("tally", json.dumps(TALLY), flush=True))


def whole(value, low, high):
    """3 and 3.0 alike, as JSON Schema and Tandem have it."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1 and low <= value <= high


def tokens(value):
    """Token ids that fit their schema, made ids of the built-in model."""
    if isinstance(value, list):
        return [tokens(v) for v in value]
    return value % 2000 if whole(value, 2000, 2**31 - 1) else value


@schemathesis.hook
def before_call(context, case, kwargs):
    """Keeps requests cheap: what asks for much text asks for little, and most
    ask for the model that is there. What is wrong in a body stays wrong."""
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("sampling_params", {}), dict) and "inference" in case.operation.path:
        body["sampling_params"] = {**body.get("sampling_params", {}), "max_tokens": 4}
    given = [name for name in GRAMMARS if body.get(name) is not None]
    for name in given[:-1] if zlib.crc32(repr(body).encode("utf-8", "replace")) % 3 else given:
        del body[name]
    if case.operation.path == "/v1/messages" and whole(body.get("max_tokens"), 5, 2**31 - 1):
        body["max_tokens"] = 4
    if "completions" in case.operation.path:
        for name in "max_tokens", "max_completion_tokens":
            if whole(body.get(name), 5, 2**31 - 1):
                body[name] = 4
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            body["max_tokens"] = 4
        if whole(body.get("n"), 3, 128):
            body["n"] = 2
        if whole(body.get("min_tokens"), 5, 2**31 - 1):
            body["min_tokens"] = 4
        if isinstance(body.get("prompt"), list) and body["prompt"] and isinstance(body["prompt"][0], (str, list)):
            if len(body["prompt"]) <= 256:
                body["prompt"] = body["prompt"][:4]
        if case.operation.path.endswith("chat/completions") and whole(body.get("top_logprobs"), 1, 20) and body.get("logprobs") in (None, False):
            body["logprobs"] = True
        for name in "top_logprobs", "logprobs", "prompt_logprobs":
            if whole(body.get(name), 21, 256):
                body[name] = 20
        if isinstance(body.get("stream_options"), dict) and not body.get("stream"):
            body["stream"] = True
    if "responses" in case.operation.path:
        if body.get("max_output_tokens") is None or whole(body["max_output_tokens"], 5, 2**31 - 1):
            body["max_output_tokens"] = 4
        if whole(body.get("min_tokens"), 5, 2**31 - 1):
            body["min_tokens"] = 4
        if whole(body.get("top_logprobs"), 21, 256):
            body["top_logprobs"] = 20
        if isinstance(body.get("stream_options"), dict) and not body.get("stream"):
            body["stream"] = True
        if body.get("structured_outputs") is not None and isinstance(body.get("text"), dict):
            body["text"].pop("format", None)  # both constrain the answer
        if body.get("tools"):
            body["tool_choice"] = "none"  # the model calls none
    for message in body.get("messages") if isinstance(body.get("messages"), list) else []:
        if isinstance(message, dict) and isinstance(message.get("role"), str) and message["role"]:
            message["role"] = "user"
            if message.get("content") is None:
                message["content"] = "Hello"
    if isinstance(body.get("texts"), list) and 4 < len(body["texts"]) <= 2048:
        body["texts"] = body["texts"][:4]
    if case.operation.path in ("/v1/embeddings", "/pooling"):
        body["input"] = tokens(body.get("input"))
        if isinstance(body["input"], list) and 4 < len(body["input"]) <= 2048 and isinstance(body["input"][0], (str, list)):
            body["input"] = body["input"][:4]
        if whole(body.get("dimensions"), 1, 2**31 - 1):
            body["dimensions"] = 1 + body["dimensions"] % 64
    if case.operation.path.endswith(("/score", "/rerank")):
        for name in PAIRS:
            if isinstance(body.get(name), list) and 0 < len(body[name]) <= 2048:
                body[name] = [text or "text" for text in body[name][:4]]
            elif body.get(name) == "":
                body[name] = "text"
    for name in "prompt", "tokens", "token_ids", "allowed_token_ids":
        if name in body:
            body[name] = tokens(body[name])
    model = body.get("model")
    if isinstance(model, str) and len(model) <= 1024 and zlib.crc32(model.encode("utf-8", "replace")) % 4:
        body["model"] = None


def errors(response):
    e = response.json()["error"]
    assert e["code"] == response.status_code, e
    assert e["message"].isprintable() or e["message"], e
    return e


@schemathesis.check
def tandem_answers(ctx, response, case):
    """Good requests are served or refused by a rule; errors name their status;
    streams are whole and their events fit their schema."""
    status = response.status_code
    good = case.meta is not None and case.meta.generation.mode.is_positive
    if good:
        TALLY[case.operation.label][str(status)] += 1
    kind = (response.headers.get("content-type") or [""])[0]
    if status >= 400 and kind.startswith("application/json"):
        e = response.json()["error"]
        if messages := case.operation.path.startswith("/v1/messages"):
            assert response.json()["type"] == "error" and response.json()["request_id"] == response.headers["request-id"][0] and e["type"], e
        else:
            assert e["code"] == status, e
        assert e["message"], e
        if good and status == 400:
            param = re.match("[a-z_]*", e["message"])[0] if messages else (e["param"] or "").split("[")[0].split(".")[0]
            assert param in RULES or not param and case.operation.path.endswith(("/score", "/rerank")) or messages and "maximum context length" in e["message"] or "cannot continue under its grammar" in e["message"], f"a request that fits the schema was refused: {e}"
    if status == 200 and kind.startswith("text/event-stream") and "messages" in case.operation.path:
        message(response.text, case.operation.schema.raw_schema)
    elif status == 200 and kind.startswith("text/event-stream") and "responses" in case.operation.path:
        typed_stream(response.text, case.operation.schema.raw_schema)
    elif status == 200 and kind.startswith("text/event-stream"):
        stream(response.text, "ChatChunk" if "chat" in case.operation.path else "TokensChunk" if "inference" in case.operation.path else "CompletionChunk", case.operation.schema.raw_schema)


def message(text, document):
    """The events of a message, against their schema in the document."""
    events = text.removesuffix("\n\n").split("\n\n")
    schema = jsonschema_rs.Draft202012Validator({"$ref": "#/components/schemas/MessageEvent", "components": document["components"]})
    names = []
    for event in events:
        name, data = event.split("\n")
        schema.validate(json.loads(data.removeprefix("data: ")))
        names.append(name.removeprefix("event: "))
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"], names


def typed_stream(text, document):
    """The events of a response, against their schema in the document."""
    schema = jsonschema_rs.Draft202012Validator({"$ref": "#/components/schemas/ResponseEvent", "components": document["components"]})
    events = text.split("\n\n")
    assert events.pop() == "", f"the stream ends in {events[-1:]}"
    for i, event in enumerate(events):
        name, _, data = event.partition("\ndata: ")
        event = json.loads(data)
        schema.validate(event)
        assert event["sequence_number"] == i and name == "event: " + event["type"], event
    assert event["type"] in ("response.completed", "response.incomplete"), event


def stream(text, name, document):
    """The events of a stream, against their schema in the document."""
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], f"the stream ends in {events[-3:]}"
    schema = jsonschema_rs.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})
    finished = set()
    for event in events[:-2]:
        assert event.startswith("data: "), event
        chunk = json.loads(event.removeprefix("data: "))
        schema.validate(chunk)
        for choice in chunk["choices"]:
            assert choice["index"] not in finished, f"choice {choice['index']} goes on after its end"
            if choice["finish_reason"]:
                finished.add(choice["index"])
    assert finished, "nothing has finished"
