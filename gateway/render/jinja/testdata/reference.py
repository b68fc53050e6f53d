#!/usr/bin/env python3
"""Render chat templates with Python's jinja2, set up as transformers does.

    reference.py < {"templates": [file or folder...], "package": name, "every": n, "chats": {name: input},
                    "now": "2026-11-05T07:08:09"}

writes one line of JSON per template: {"template": name, "source": text,
"renders": [[chat, output | null, error]...]}; an error is [Python's exception
class, message]. With "package", the templates/*.jinja of that installed package
come too, every n-th of them. Needs PyPI jinja2 3.1.6 alone; goldens.py, which
has transformers itself, checks that both say the same.
"""
import datetime
import functools
import importlib.util
import json
import pathlib
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASONING = ("reasoning_content", "thinking", "reasoning")
TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class Generation(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} is its body, in a scope of its own."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Namespace(jinja2.utils.Namespace):
    def __init__(*args, **kwargs):
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            Namespace.check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        Namespace.check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"Chat templates cannot store underscore-prefixed attributes on a namespace, but got {name!r}. Please rename the attribute.")


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def environment(now):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    env.globals.update(raise_exception=raise_exception, strftime_now=now.strftime, namespace=Namespace,
                       dict=lambda *a, **k: dict(*a, **k))
    return env


def alias(message):
    """A message's reasoning is found under the newer names too."""
    for field in REASONING:
        if message.get(field) is not None:
            return {"thinking": message[field], **message, "reasoning_content": message[field]}
    return message


def tag(messages, source):
    """Put TAG behind the final message's text; return that text."""
    if not messages:
        raise ValueError("no message to continue")
    content = messages[-1].get("content")
    if content is None or "content" not in source:
        raise ValueError("no content to continue")
    if isinstance(content, str):
        messages[-1]["content"] += TAG
        return content
    for part in reversed(content):
        if "text" in part:
            text = part["text"]
            part["text"] += TAG
            return text
    raise ValueError("no text to continue")


@functools.lru_cache(maxsize=1)  # compiling takes longer than rendering
def compiled(env, source):
    return env.from_string(source)


def render(env, source, chat):
    chat = json.loads(json.dumps(chat))
    context = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None, "add_generation_prompt": False, **chat}
    if context["bos_token"] is None:
        del context["bos_token"]
    going_on = context.pop("continue_final_message", False)
    context["messages"] = [alias(m) for m in context["messages"]]
    template = compiled(env, source)
    text = tag(context["messages"], source) if going_on else ""
    out = template.render(**context)
    if not going_on:
        return out
    if text.strip() not in out or TAG.strip() not in out:
        raise ValueError("the template drops text of the final message")
    at = out.rindex(TAG.strip())
    return out[:at] if out[at:].startswith(TAG) else out[:at].rstrip()


def attempt(f):
    try:
        return f(), None
    except Exception as e:  # the class and the message are the record
        return None, [type(e).__name__, str(e)]


def files(request):
    for name in request.get("templates", []):
        path = pathlib.Path(name)
        yield from sorted(path.glob("*.jinja")) if path.is_dir() else [path]
    if "package" in request:
        spec = importlib.util.find_spec(request["package"])
        if spec is None:
            sys.exit(f"package {request['package']} is not installed in {sys.prefix}")
        yield from sorted((pathlib.Path(spec.origin).parent / "templates").glob("*.jinja"))[::request.get("every", 1)]


def main():
    request = json.load(sys.stdin)
    env = environment(datetime.datetime.fromisoformat(request["now"]))
    for path in files(request):
        source = path.read_text(encoding="utf-8")
        renders = [[name, *attempt(lambda: render(env, source, chat))] for name, chat in request["chats"].items()]
        print(json.dumps({"template": path.name, "source": source, "renders": renders}))


if __name__ == "__main__":
    main()
