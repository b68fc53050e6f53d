"""Fields and errors of the API through the official OpenAI client.

    openai_fields.py BASE_URL

Each function below is a claim; one "ok" line each. The key is OPENAI_API_KEY.
"""

import json
import sys
import time
import urllib.request

import openai
import pydantic
from typing import Literal

STORY = [{"role": "user", "content": "Tell me a story about a dragon."}]


class Colour(pydantic.BaseModel):
    name: Literal["red", "blue"]


def refused(status, param, call, *words):
    try:
        call()
    except openai.APIStatusError as e:
        assert (e.status_code, e.param) == (status, param), (e.status_code, e.param, e)
        code = "context_length_exceeded" if "context" in words else status
        assert e.body["code"] == code and e.body["type"], e.body
        for word in words:
            assert word in e.body["message"], (word, e.body)
        return
    raise AssertionError(f"{param} was taken")


def pieces(stream):
    """A stream's text and finish by choice, and its chunks."""
    text, finish, chunks = {}, {}, list(stream)
    for chunk in chunks:
        for c in chunk.choices:
            piece = c.delta.content if hasattr(c, "delta") else c.text
            text[c.index] = text.get(c.index, "") + (piece or "")
            if c.finish_reason:
                assert c.index not in finish, chunk
                finish[c.index] = c.finish_reason
    return text, finish, chunks


def usage_of_a_completion_stream(client):
    ask = dict(model="", prompt=["Once upon", "a time there was"], n=2, temperature=0.9, seed=11, max_tokens=9)
    whole = client.completions.create(**ask)
    text, finish, chunks = pieces(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert text == {c.index: c.text for c in whole.choices}, (text, whole)
    assert finish == {c.index: c.finish_reason for c in whole.choices} and len(finish) == 4, finish
    assert not chunks[-1].choices and all(c.usage is None for c in chunks[:-1]), chunks
    seen = chunks[-1].usage
    assert (seen.prompt_tokens, seen.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens), (seen, whole.usage)


def no_usage_unless_asked(client):
    _, _, chunks = pieces(client.chat.completions.create(model="", messages=STORY, max_tokens=5, stream=True))
    assert all(c.choices and c.usage is None for c in chunks), chunks


def usage_on_every_chunk(client):
    _, _, chunks = pieces(client.chat.completions.create(
        model="", messages=STORY, temperature=0, max_tokens=8, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 8 and counts[0] <= 1, counts
    assert len({c.usage.prompt_tokens for c in chunks}) == 1, chunks


def cached_tokens(client):
    """What a cache held is told before the first token, however short the answer."""
    def ask(first, **more):
        r = client.completions.create(model="", prompt=list(range(first, first + 80)), max_tokens=16, temperature=0, extra_body={"ignore_eos": True, **more})
        return r.usage.prompt_tokens_details.cached_tokens

    told = []
    for first in range(300, 1300, 100):
        told.append((ask(first), ask(first), ask(first, cache_salt="mine")))
    assert all(cold == other == 0 for cold, _, other in told), told
    assert all(warm == 64 for _, warm, _ in told), told


def several_chats_streamed(client):
    ask = dict(model="", messages=STORY, n=3, temperature=1.2, seed=3, max_tokens=12)
    whole = client.chat.completions.create(**ask)
    text, finish, chunks = pieces(client.chat.completions.create(**ask, stream=True))
    assert text == {c.index: c.message.content for c in whole.choices}, (text, whole)
    assert finish == {c.index: c.finish_reason for c in whole.choices}, finish
    assert len(set(text.values())) > 1, "three choices, one answer"
    assert sorted(c.choices[0].index for c in chunks if c.choices[0].delta.role) == [0, 1, 2], chunks
    alone = client.chat.completions.create(**{**ask, "n": 1})
    assert alone.choices[0].message.content == text[0], "the first choice depends on how many there are"


def seeds(client):
    ask = dict(model="", messages=STORY, temperature=1.3, max_tokens=25)
    first = client.chat.completions.create(**ask, seed=-9)
    again, _, _ = pieces(client.chat.completions.create(**ask, seed=-9, stream=True))
    assert again[0] == first.choices[0].message.content, (again, first)
    assert len({client.chat.completions.create(**ask).choices[0].message.content for _ in range(5)}) > 1, "no seed, one answer"
    assert first.system_fingerprint, first


def stop_lists(client):
    ask = dict(model="", messages=STORY, temperature=0, max_tokens=40)
    whole = client.chat.completions.create(**ask)
    text = whole.choices[0].message.content
    words = [w for w in text.split() if len(w) > 3]
    late, early = words[6], words[2]
    r = client.chat.completions.create(**ask, stop=["never said", late, early])
    assert r.choices[0].message.content == text[: min(text.index(early), text.index(late))], (text, r)
    assert r.choices[0].finish_reason == "stop" and r.choices[0].stop_reason in (early, late), r
    assert r.usage.completion_tokens < whole.usage.completion_tokens, (r.usage, whole.usage)
    kept = client.chat.completions.create(**ask, stop=[early], extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == text[: text.index(early) + len(early)], (text, kept)
    streamed, finish, _ = pieces(client.chat.completions.create(**ask, stop=["never said", late, early], stream=True))
    assert streamed[0] == r.choices[0].message.content and finish[0] == "stop", (streamed, r)


def errors(client):
    chat = lambda **more: lambda: client.chat.completions.create(**{"model": "", "messages": STORY, **more})
    refused(400, "web_search_options", chat(web_search_options={}), "not supported")
    refused(400, "audio", chat(audio={"voice": "alloy", "format": "wav"}), "not supported")
    refused(400, "store", chat(store=True), "not stored")
    refused(400, "stop", chat(stop=[""]), "stop")
    refused(400, "n", chat(n=1000), "128")
    refused(400, "seed", chat(seed=2**63), "integer")
    refused(400, "stream_options", chat(stream_options={"include_usage": True}), "stream: true")
    refused(400, "messages[0].content[0].type", chat(messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]), "image_url", "only text")
    refused(400, "prompt", lambda: client.completions.create(model="", prompt=[]), "empty")
    refused(400, "max_tokens", lambda: client.completions.create(model="", prompt="a", max_tokens=10**6), "context")
    refused(404, "model", chat(model="gpt-5"), "gpt-5")
    refused(415, None, chat(extra_headers={"Content-Type": "text/plain"}), "application/json")
    refused(404, None, lambda: client.moderations.create(model="", input="a"), "/v1/moderations")
    for stream in False, True:
        refused(400, "temperature", chat(temperature=-2, stream=stream), "-2")


def harmless_fields(client):
    r = client.chat.completions.create(model="", messages=STORY, max_tokens=2, user="u", metadata={"a": "b"}, store=False, parallel_tool_calls=True,
                                       safety_identifier="s", prompt_cache_key="k", service_tier="auto", response_format={"type": "text"})
    assert r.choices[0].finish_reason == "length", r


def tokenize(client):
    def post(path, body):
        request = urllib.request.Request(str(client.base_url).removesuffix("v1/") + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json", "Authorization": f"Bearer {client.api_key}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    text = "Tokens and text: naïve 😀\n"
    r = post("tokenize", {"prompt": text, "return_token_strs": True})
    assert r["count"] == len(r["tokens"]) == len(r["token_strs"]) and r["max_model_len"] == 2048, r
    assert post("detokenize", {"tokens": r["tokens"]}) == {"prompt": text}, r
    r = post("tokenize", {"messages": STORY})
    used = client.chat.completions.create(model="", messages=STORY, max_tokens=1).usage.prompt_tokens
    assert r["count"] == used and r["token_strs"] is None, (r, used)


def prompt_logprobs(client):
    ask = dict(model="", prompt="Once upon a time there was a dragon.", temperature=0, logprobs=3)
    alone = client.completions.create(**ask, max_tokens=0, echo=True)
    told = client.completions.create(**ask, max_tokens=4, echo=True, extra_body={"prompt_logprobs": 3, "return_token_ids": True})
    c, n = told.choices[0], told.usage.prompt_tokens
    assert alone.choices[0].text == ask["prompt"] and alone.usage.completion_tokens == 0, alone
    for got in alone.choices[0].logprobs, c.logprobs:
        assert "".join(got.tokens[:n]) == ask["prompt"] and got.token_logprobs[0] is None and got.top_logprobs[0] is None, got
        assert got.token_logprobs[:n] == c.logprobs.token_logprobs[:n], (got, c.logprobs)
    assert len(c.logprobs.tokens) == n + told.usage.completion_tokens and len(c.token_ids) == told.usage.completion_tokens, c
    assert len(c.prompt_logprobs) == n and c.prompt_logprobs[0] is None, c.prompt_logprobs
    for i, entry in enumerate(c.prompt_logprobs[1:], 1):
        own = entry[str(c.prompt_token_ids[i])]
        assert own["logprob"] == c.logprobs.token_logprobs[i] and own["decoded_token"] == c.logprobs.tokens[i], (own, i)
        best = sorted(entry.values(), key=lambda p: p["rank"])
        assert [p["rank"] for p in best[:3]] == [1, 2, 3] and best == sorted(best, key=lambda p: -p["logprob"]), entry
    # What the model drew is what it would say of it as part of a prompt.
    again = client.completions.create(**{**ask, "prompt": c.prompt_token_ids + c.token_ids}, max_tokens=0, echo=True)
    assert again.choices[0].logprobs.token_logprobs == c.logprobs.token_logprobs, (again, c.logprobs)
    refused(400, "prompt_logprobs", lambda: client.completions.create(**ask, stream=True, extra_body={"prompt_logprobs": 1}))
    refused(400, "prompt_logprobs", lambda: client.completions.create(**ask, extra_body={"prompt_logprobs": 21}), "at most 20")


def named_logprobs(client):
    r = client.chat.completions.create(model="", messages=STORY, max_tokens=2, logprobs=True,
                                       extra_body={"logprob_token_ids": [70, 40, 90], "return_tokens_as_token_ids": True})
    for token in r.choices[0].logprobs.content:
        assert token.token.startswith("token_id:") and [t.token for t in token.top_logprobs] == ["token_id:70", "token_id:40", "token_id:90"], token


def responses(client):
    ask = dict(model="", instructions="Be brief.", input="What is prefill?", temperature=0, max_output_tokens=12)
    whole = client.responses.create(**ask)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens" and whole.usage.output_tokens == 12, whole
    with client.responses.stream(**ask, top_logprobs=1) as stream:
        events = list(stream)
        final = stream.get_final_response() if events[-1].type == "response.completed" else events[-1].response
    assert [e.sequence_number for e in events] == list(range(len(events))) and events[-1].type == "response.incomplete", events
    assert final.output_text == whole.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta"), (final, whole)
    assert "".join(p.token for p in final.output[0].content[0].logprobs) == whole.output_text, final
    parsed = client.responses.parse(model="", input="A colour", text_format=Colour, temperature=0, max_output_tokens=200)
    assert parsed.output_parsed.name in ("red", "blue"), parsed
    again = client.responses.create(model="", input=[{"role": "user", "content": "Hi"}, *whole.output, {"role": "user", "content": "Go on."}], max_output_tokens=2)
    assert again.output_text and again.usage.input_tokens > whole.usage.input_tokens, again
    refused(400, "store", lambda: client.responses.create(**ask, store=True), "set store to false")
    refused(400, "previous_response_id", lambda: client.responses.create(**ask, previous_response_id=whole.id))
    refused(400, "background", lambda: client.responses.create(**ask, background=True))
    refused(400, "tools[0].type", lambda: client.responses.create(**ask, tools=[{"type": "web_search"}]), "the client runs them")


CLAIMS = [responses, usage_of_a_completion_stream, no_usage_unless_asked, usage_on_every_chunk, cached_tokens, several_chats_streamed, seeds, stop_lists,
          errors, harmless_fields, tokenize, prompt_logprobs, named_logprobs]


def main():
    client = openai.OpenAI(base_url=sys.argv[1], timeout=60, max_retries=0)
    failed = 0
    for claim in CLAIMS:
        began = time.monotonic()
        try:
            claim(client)
            print(f"ok {claim.__name__} {time.monotonic() - began:.2f} s", flush=True)
        except Exception as e:
            failed += 1
            print(f"FAILED {claim.__name__}: {type(e).__name__}: {e}", flush=True)
    sys.exit(1 if failed else 0)


main()
