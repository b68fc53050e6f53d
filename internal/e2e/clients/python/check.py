"""Runs the checks of one client and prints a line of JSON for each.

A script names its client, declares checks and calls run. Its only argument is a file with the
servers that the command clients started:

    formats: scripted models, one for each format of tool calls. A model answers with its calls and,
             when the results are in the chat, with the text "Found: RESULT; RESULT."
    models:  models that compute, for structured output

A check runs once for each of them. It passes, is refused by the server's name of what is missing,
or fails.
"""

import asyncio
import inspect
import json
import os
import re
import sys
import traceback
from importlib import metadata

os.environ.update(
    NO_PROXY="127.0.0.1", LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false", OPENAI_AGENTS_DISABLE_TRACING="1",
    HF_HUB_OFFLINE="1", ANONYMIZED_TELEMETRY="false", DSPY_CACHEDIR="/nonexistent", PYDANTIC_AI_NO_TELEMETRY="1",
)

CITY, TIME = "Oslo", "12:00"

# Tools as chat completions have them. Formats differ in the types of the arguments other than q.
FIND = {"name": "find_city", "description": "Finds a city.", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}}
NOW = {"name": "now", "description": "Returns the time.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FIND}, {"type": "function", "function": NOW}]
QUESTION = "Which city is it, and what time?"


class Server:
    """A model behind a gateway. calls are the calls of its answer, in order, as (name, arguments)."""

    def __init__(self, name, url, model, key, calls=()):
        self.name, self.url, self.model, self.key = name, url, model, key
        self.base = url + "/v1"
        self.calls = [(c["Name"], c["Arguments"]) for c in calls]

    def verify(self, calls):
        """The calls that the client returned are those of the answer."""
        calls = [(name, json.loads(a) if isinstance(a, str) else a) for name, a in calls]
        assert calls == self.calls, f"calls {calls}, want {self.calls}"


def final(text):
    """The answer behind the loop has the results of both tools once, in order, and nothing after them."""
    text = text or ""
    assert re.search(f"Found: [^;]*{CITY}[^;]*; [^;]*{TIME}[^;]*[.]$", text) and text.count("Found:") == 1, f"final answer {text!r}"


class Ran:
    """Tools that record how they were called."""

    def __init__(self):
        self.calls = []

    def find_city(self, q, *_, **__):
        self.calls.append(("find_city", q))
        return CITY

    def now(self):
        self.calls.append(("now", None))
        return TIME

    def verify(self, server):
        """Both tools ran once, with the first argument of the answer. Frameworks may run them in any order."""
        want = [("find_city", server.calls[0][1]["q"]), ("now", None)]
        assert sorted(self.calls) == want, f"ran {self.calls}, want {want}"


_adapters = {}


def valid(model, value):
    """A client's type accepts a value that the client made without checks."""
    from pydantic import BaseModel, TypeAdapter

    if id(model) not in _adapters:
        _adapters[id(model)] = TypeAdapter(model)
    plain = value.model_dump(mode="json", by_alias=True, exclude_unset=True, warnings="error") if isinstance(value, BaseModel) else value
    _adapters[id(model)].validate_python(plain)
    return value


def chain(e):
    """Yields an exception and those that led to it."""
    seen = set()
    while e is not None and id(e) not in seen:
        seen.add(id(e))
        yield e
        e = e.__cause__ or e.__context__


def only_members(e):
    """Raises e unless the server answered, and the client did not accept the members that the model chose."""
    if any(isinstance(getattr(part, "status_code", None), int) or "connect" in type(part).__name__.lower() or isinstance(part, TimeoutError) for part in chain(e)):
        raise e


def refusal(e):
    """Returns the server's reason for a refusal, or None where e is something else."""
    for e in chain(e):
        status = getattr(e, "status_code", None) or getattr(getattr(e, "response", None), "status_code", None)
        text = str(e)
        if status in (400, 404, 501) or re.search(r"\b(Error code: |status[ _]?code[:=] ?)(400|404|501)\b", text):
            found = re.search(r"""["']message["']: ?(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')""", text)
            return (found.group(1) or found.group(2)) if found else text
        for part in getattr(e, "exceptions", ()):
            if why := refusal(part):
                return why
    return None


_checks, _client = [], {}


def client(name, package, config, configs=None):
    """Names the client. config is what its user writes; configs are further settings by surface."""
    _client.update(client=name, package=package, version=metadata.version(package), config=config, configs=configs or {})


def _add(kind, surface, mode, ran):
    def add(f):
        _checks.append((kind, surface, mode, ran, f))
        return f

    return add


def loop(surface, mode, ran="loop of two tools"):
    """Declares a check of a loop with tools."""
    return _add("formats", surface, mode, ran)


def structured(surface, mode, ran="schema"):
    """Declares a check of structured output."""
    return _add("models", surface, mode, ran)


def _one(f, server):
    if inspect.iscoroutinefunction(f):
        asyncio.run(asyncio.wait_for(f(server), 120))
    else:
        f(server)


def run():
    with open(sys.argv[1], encoding="utf-8") as file:
        setup = json.load(file)
    print(json.dumps(_client), flush=True)
    for kind, surface, mode, ran, f in _checks:
        result = {"kind": kind, "surface": surface, "mode": mode, "ran": ran, "of": 0, "ok": 0, "refused": [], "failed": []}
        for s in setup[kind]:
            server = Server(s["name"], s["url"], s["model"], setup["key"], s.get("calls") or ())
            result["of"] += 1
            try:
                _one(f, server)
                result["ok"] += 1
            except BaseException as e:  # a client may end a check in any way
                if isinstance(e, KeyboardInterrupt):
                    raise
                if why := refusal(e):
                    result["refused"].append({"name": server.name, "why": why})
                else:
                    result["failed"].append({"name": server.name, "why": "".join(traceback.format_exception(e))[-3000:]})
        print(json.dumps(result), flush=True)
