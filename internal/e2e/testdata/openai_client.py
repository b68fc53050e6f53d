"""The official OpenAI client against a running cluster.

    openai_client.py all   BASE_URL    every claim below, one "ok" line each
    openai_client.py abort BASE_URL    a long stream, which must end in an exception

The key comes from OPENAI_API_KEY; the binary tests of the package above run it.
"""

import asyncio
import os
import sys
import time

import openai

QUESTION = [{"role": "user", "content": "What is prefill?"}]


def connect(base, cls=openai.OpenAI, **more):
    return cls(base_url=base, timeout=60, max_retries=0, **({"api_key": os.environ.get("OPENAI_API_KEY") or "none"} | more))


def refused(kind, status, call, *words):
    """The call raises exactly this kind of error, whose text has the words."""
    try:
        call()
    except kind as e:
        assert e.status_code == status, e.status_code
        for word in words:
            assert word in str(e), f"{word!r} is not in {e}"
        assert e.body and e.body["message"], e.body
        return
    raise AssertionError(f"no {kind.__name__}")


def models(client, base):
    listed = client.models.list()
    assert len(listed.data) == 1 and listed.data[0].object == "model", listed
    assert client.models.retrieve(listed.data[0].id).id == listed.data[0].id


def chat(client, base):
    model = client.models.list().data[0].id
    r = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_completion_tokens=40)
    assert r.object == "chat.completion" and r.model == model and r.id, r
    choice = r.choices[0]
    assert choice.message.role == "assistant" and choice.message.content.strip(), r
    assert choice.finish_reason in ("stop", "length"), choice.finish_reason
    assert r.usage.prompt_tokens > 0 and 0 < r.usage.completion_tokens <= 40, r.usage
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens, r.usage


def chat_stream(client, base):
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_completion_tokens=40)
    chunks = list(client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_completion_tokens=40,
                                                 stream=True, stream_options={"include_usage": True}))
    assert all(c.object == "chat.completion.chunk" and c.id == chunks[0].id for c in chunks), chunks
    assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    finish = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finish == [whole.choices[0].finish_reason], finish
    assert not chunks[-1].choices and chunks[-1].usage == whole.usage, (chunks[-1], whole.usage)
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 3, "the answer came in one piece"


def conversation(client, base):
    messages = [{"role": "system", "content": "You are brief."}]
    for question in "What is decode?", "Thank you!":
        messages.append({"role": "user", "content": question})
        r = client.chat.completions.create(model="", messages=messages, temperature=0, max_tokens=60)
        assert r.choices[0].message.content, r
        messages.append({"role": "assistant", "content": r.choices[0].message.content})


def completion(client, base):
    model = client.models.list().data[0].id
    r = client.completions.create(model=model, prompt="Once upon a time", temperature=0, max_tokens=12)
    assert r.object == "text_completion" and r.choices[0].text, r
    assert r.usage.completion_tokens <= 12 and r.choices[0].finish_reason in ("stop", "length"), r
    chunks = list(client.completions.create(model=model, prompt="Once upon a time", temperature=0, max_tokens=12, stream=True))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == r.choices[0].text, chunks


def token_ids(client, base):
    ids = list(range(400, 440))
    r = client.completions.create(model="", prompt=ids, temperature=0, max_tokens=7, extra_body={"ignore_eos": True})
    assert r.usage.prompt_tokens == 40 and r.usage.completion_tokens == 7 and r.choices[0].finish_reason == "length", r


def several(client, base):
    r = client.completions.create(model="", prompt=["one two", "three four"], n=2, temperature=1, seed=5, max_tokens=6)
    assert [c.index for c in r.choices] == [0, 1, 2, 3], r


def seeds(client, base):
    def draw(seed):
        r = client.chat.completions.create(model="", messages=[{"role": "user", "content": "Tell me a story about a fox."}],
                                           temperature=1.5, seed=seed, max_tokens=40)
        return r.choices[0].message.content

    assert draw(7) == draw(7), "one seed, two answers"
    assert len({draw(seed) for seed in range(6)}) > 1, "six seeds, one answer"


def stops(client, base):
    whole = client.chat.completions.create(model="", messages=QUESTION, temperature=0, max_tokens=40).choices[0].message.content
    word = whole.split()[2]
    r = client.chat.completions.create(model="", messages=QUESTION, temperature=0, max_tokens=40, stop=word)
    assert r.choices[0].message.content == whole[: whole.index(word)] and r.choices[0].finish_reason == "stop", (whole, r)


def concurrent(client, base):
    async def ask(c):
        r = await c.chat.completions.create(model="", messages=QUESTION, temperature=0, max_tokens=40)
        return r.choices[0].message.content

    async def all_at_once():
        async with connect(base, openai.AsyncOpenAI) as c:
            return await asyncio.gather(*(ask(c) for _ in range(24)))

    answers = set(asyncio.run(all_at_once()))
    assert len(answers) == 1, answers


def hang_up(client, base):
    stream = client.chat.completions.create(model="", messages=QUESTION, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    chat(client, base)


def unknown_model(client, base):
    refused(openai.NotFoundError, 404,
            lambda: client.chat.completions.create(model="luck", messages=QUESTION), "luck")
    refused(openai.NotFoundError, 404, lambda: client.models.retrieve("luck"), "luck")


def bad_parameters(client, base):
    def ask(**more):
        return lambda: client.chat.completions.create(**({"model": "", "messages": QUESTION} | more))

    refused(openai.BadRequestError, 400, ask(temperature=-1), "temperature", "-1")
    refused(openai.BadRequestError, 400, ask(max_tokens=0), "max_tokens")
    refused(openai.BadRequestError, 400, ask(top_p=2), "top_p")
    refused(openai.BadRequestError, 400, ask(messages=[]), "messages")
    refused(openai.BadRequestError, 400, ask(messages="hello"), "messages")
    refused(openai.BadRequestError, 400, ask(n=0), "n")
    refused(openai.BadRequestError, 400, ask(stream=True, max_tokens="many"), "max_tokens")
    refused(openai.BadRequestError, 400, ask(messages=[{"role": "user", "content": "word " * 5000}]), "2048")
    refused(openai.BadRequestError, 400, lambda: client.completions.create(model="", prompt=[1, 10**6]), "1000000")


def bad_key(client, base):
    for key in "sk-wrong", "sk-of-the-tes", "sk-of-the-test2":
        other = connect(base, api_key=key)
        refused(openai.AuthenticationError, 401, lambda: other.models.list())
        refused(openai.AuthenticationError, 401, lambda: other.chat.completions.create(model="", messages=QUESTION))
    assert connect(base, api_key="sk-another").models.list().data


def embeddings(client, base):
    text = "The fox is quick."
    r = client.embeddings.create(model="", input=text)  # the client asks for base64
    lists = client.embeddings.create(model="", input=[text, "A dog."], encoding_format="float")
    vector = r.data[0].embedding
    assert r.object == "list" and r.data[0].object == "embedding" and abs(sum(x * x for x in vector) - 1) < 1e-5, r
    assert [d.index for d in lists.data] == [0, 1] and len(lists.data[1].embedding) == len(vector), lists
    assert all(abs(a - b) < 1e-6 for a, b in zip(vector, lists.data[0].embedding)), (vector, lists)
    assert r.usage.prompt_tokens == r.usage.total_tokens > 0, r.usage
    short = client.embeddings.create(model="", input=[1, 2, 3], dimensions=8).data[0].embedding
    assert len(short) == 8 and abs(sum(x * x for x in short) - 1) < 1e-5, short
    refused(openai.BadRequestError, 400, lambda: client.embeddings.create(model="", input=text, dimensions=10**6), "dimensions")


def headers(client, base):
    r = client.chat.completions.with_raw_response.create(model="", messages=QUESTION, max_tokens=2)
    assert r.headers.get("x-request-id"), r.headers
    assert r.parse().choices[0].finish_reason == "length"


CLAIMS = [models, chat, chat_stream, conversation, completion, token_ids, several, seeds, stops, concurrent, hang_up,
          unknown_model, bad_parameters, bad_key, embeddings, headers]


def abort(client, base):
    stream = client.completions.create(model="", prompt=list(range(500, 520)), temperature=0, max_tokens=1500, stream=True,
                                       extra_body={"ignore_eos": True})
    n = 0
    try:
        for chunk in stream:
            n += 1
            if n == 3:
                print("started", flush=True)
            assert not (chunk.choices and chunk.choices[0].finish_reason), f"finished after {n} chunks"
    except (openai.APIError, openai.OpenAIError) as e:
        print(f"aborted after {n} chunks: {type(e).__name__}: {e}")
        return
    except Exception as e:  # what the HTTP library raises inside a stream passes through the client as it is
        if type(e).__module__.split(".")[0].startswith("httpx"):
            print(f"aborted after {n} chunks: {type(e).__name__}: {e}")
            return
        raise
    raise AssertionError(f"the stream ended cleanly after {n} chunks")


def main():
    mode, base = sys.argv[1:]
    client = connect(base)
    if mode == "abort":
        abort(client, base)
        return
    print("openai", openai.__version__)
    failed = 0
    for claim in CLAIMS:
        began = time.monotonic()
        try:
            claim(client, base)
            print(f"ok {claim.__name__} {time.monotonic() - began:.2f} s", flush=True)
        except Exception as e:
            failed += 1
            print(f"FAILED {claim.__name__}: {type(e).__name__}: {e}", flush=True)
    sys.exit(1 if failed else 0)


main()
