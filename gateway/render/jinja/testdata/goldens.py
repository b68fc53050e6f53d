#!/usr/bin/env python3
"""Record what Hugging Face's chat template renderer gives: goldens.json.gz.

    goldens.py [--templates DIR] [--out FILE]

Every template of templates/ is rendered with every chat below, and every
expression below in a small context. Needs PyPI transformers 5.23.0 and jinja2
3.1.6; what reference.py says without transformers is held against it. The file holds {"renders": [{template, chat, input, output | error}...],
"chats": {name: input}, "expressions": [[template, output | null, error]...],
"context": …}; an error is [Python's exception class, message].
"""
import argparse
import datetime
import gzip
import json
import pathlib
import re

import jinja2
from transformers.utils import chat_template_utils

import reference

HERE = pathlib.Path(__file__).resolve().parent
NOW = datetime.datetime(2026, 11, 5, 7, 8, 9)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


chat_template_utils.datetime = Clock


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments, id="call12345", **more):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather \"now\" in a city & its <surroundings>", "parameters": {
        "type": "object", "properties": {
            "city": {"type": "string", "description": "Name, e.g. Zürich or 東京"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit", "it's"], "default": "celsius"},
            "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 1e2, "default": 3},
            "tags": {"type": "array", "items": {"type": "string"}},
            "nested": {"type": "object", "properties": {"deep": {"type": "number", "multipleOf": 0.25}, "empty": {"type": "object"}}}},
        "required": ["city"]}, "strict": True}},
    {"type": "function", "function": {"name": "add numbers", "description": "Sum", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}},
]
UNICODE = "naïve café e\u0301 — 東京 👩‍👩‍👧 \u200b\ttab \x01 \"quoted\" 'single' \\back </s> <|im_end|> \u2028 end "
CHATS = {
    "plain": dict(messages=[say("user", "Hello!")]),
    "prompt": dict(messages=[say("user", "Hello!")], add_generation_prompt=True),
    "system": dict(messages=[say("system", "  Be kind.  "), say("user", "Hi")], add_generation_prompt=True),
    "multi": dict(messages=[say("system", "S"), say("user", "A"), say("assistant", " B \n"), say("user", "C\n"), say("assistant", "D"),
                            say("user", "E"), say("assistant", "F")]),
    "tools": dict(messages=[say("user", "Weather?")], tools=TOOLS, add_generation_prompt=True),
    "tools_system": dict(messages=[say("system", "Use tools."), say("user", "Weather?")], tools=TOOLS[:1], add_generation_prompt=True),
    "tools_in_system": dict(messages=[say("system", "Use tools."), say("user", "Weather?")], tools=TOOLS, tools_in_user_message=False),
    "tool_calls": dict(messages=[say("user", "Weather?"), say("assistant", None, tool_calls=[call("get_weather", {"city": "Zürich", "days": 2})]),
                                 say("tool", "{\"sky\": \"blue\"}", tool_call_id="call12345"), say("assistant", "Blue."), say("user", "Thanks")],
                       tools=TOOLS, add_generation_prompt=True),
    "two_calls": dict(messages=[say("user", "Sum"), say("assistant", "Let me see.", tool_calls=[
        call("add numbers", {"a": 1, "b": -2.5}), call("add numbers", "{\"a\": 3}", id="call67890")]),
        say("tool", "-1.5", tool_call_id="call12345"), say("tool", "6", tool_call_id="call67890"), say("assistant", "Done.")], tools=TOOLS),
    "bad_id": dict(messages=[say("user", "x"), say("assistant", "", tool_calls=[call("f", {}, id="short")])]),
    "tool_content": dict(messages=[say("user", "x"), say("assistant", "", tool_calls=[call("f", {})]),
                                   say("tool", {"a": [1, 2.0, None, True], "ü": "ß"}, tool_call_id="call12345")]),
    "unicode": dict(messages=[say("system", UNICODE), say("user", UNICODE * 2), say("assistant", UNICODE), say("user", "\n" + UNICODE)],
                    add_generation_prompt=True),
    "parts": dict(messages=[say("user", [{"type": "text", "text": " Look: "}, {"type": "image"}, {"type": "text", "text": "What is it?"}])],
                  add_generation_prompt=True),
    "thinking": dict(messages=[say("user", "1+1"), say("assistant", "<think>\nEasy.\n</think>\n\n2"), say("user", "2+2"),
                               say("assistant", "4", reasoning_content="\nStill easy. ")]),
    "reasoning": dict(messages=[say("user", "1+1"), say("assistant", "2", reasoning="Older name.")]),
    "no_thinking": dict(messages=[say("user", "1+1")], add_generation_prompt=True, enable_thinking=False),
    "twice_user": dict(messages=[say("user", "a"), say("user", "b")]),
    "odd_role": dict(messages=[say("user", "a"), say("assistant", "b"), say("critic", "c", name="The Critic")]),
    "empty_text": dict(messages=[say("user", ""), say("assistant", ""), say("user", "  ")], add_generation_prompt=True),
    "empty": dict(messages=[]),
    "no_content": dict(messages=[{"role": "user"}]),
    "null_content": dict(messages=[say("user", None)]),
    "long": dict(messages=[say("user" if i % 2 == 0 else "assistant", f"message {i}") for i in range(40)], add_generation_prompt=True),
    "continue": dict(messages=[say("user", "Count"), say("assistant", "one, two,")], continue_final_message=True),
    "continue_space": dict(messages=[say("user", "Count"), say("assistant", " one, two, ")], continue_final_message=True),
    "continue_parts": dict(messages=[say("user", [{"type": "text", "text": "Count "}])], continue_final_message=True),
    "no_bos": dict(messages=[say("user", "Hi")], bos_token=None),
    "date": dict(messages=[say("user", "Hi")], date_string="1 Jan 2000", add_generation_prompt=True),
}

CONTEXT = {
    "s": "Hello, Wörld", "e": "", "n": None, "t": True, "f": False, "i": 7, "neg": -3, "x": 2.5, "big": 1e16, "tiny": 0.00001, "huge": 123456789012345678901234567890,
    "l": [3, 1, 2], "words": ["b", "A", "c", "a"], "el": [], "d": {"k": 1, "items": "shadow", "z": [1, {"q": None}], "A b": "c"}, "ed": {},
    "users": [{"name": "Zoe", "age": 30, "on": True}, {"name": "adam", "age": 25, "on": False}, {"name": "Bob", "age": 30}],
    "q": "it's \"q\"", "u": "ÀÉ ß ŉ ΑΣ ΌΣΟΣ İ ǆ ﬁ 漢字 😀", "ws": " \t a  b\u00a0c\n d \u3000", "lines": "a\nb\r\nc\x0bd\n\ne\u2028f",
    "nan_like": "nan", "mixed": [1, "a", None, 2.0, True, [1], {"a": 1}],
}
EXPRESSIONS = pathlib.Path(HERE / "expressions.txt").read_text().splitlines()
# Whole templates, for what lines cannot hold.
PIECES = [
    "a\n  {% if t %}\n  b\n  {% endif %}\nc\n", "a\n  {%+ if t %}b{% endif +%}\nc", "  {%- if t -%}  b  {%- endif -%}  c", "{# c #}\nx\n  {# c -#}  \n y {#- d #}\nz",
    "{% raw %}{{ a }} {% b %}{% endraw %}", "{% raw -%}  x  {%- endraw %}\ny", "  {% raw %}\n {{ }}\n  {% endraw %}\nz", "x\r\ny\rz\n\n", "{{ 'a\\\nb' }}",
    "{{\n s\n}}\n{{ s -}}\n  x", "{% for c in 'héy' %}{{ loop.index }}{{ c }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.length }} {% endfor %}",
    "{% for a in l %}{% for b in l if b != a %}{{ a }}{{ b }}{{ loop.first }}{{ loop.last }};{% else %}-{% endfor %}{% endfor %}",
    "{% for a in l %}{{ loop.previtem }}<{{ a }}>{{ loop.nextitem }} {% endfor %}", "{% for a in [] %}x{% else %}none{% endfor %}",
    "{% for a in l %}{% if a == 1 %}{% break %}{% endif %}{{ a }}{% else %}E{% endfor %}", "{% for a in l %}{% continue %}{{ a }}{% else %}E{% endfor %}",
    "{% set v = 1 %}{% for a in l %}{{ v }}{% set v = a %}{{ v }} {% endfor %}{{ v }}", "{% set ns = namespace(v=1) %}{% for a in l %}{% set ns.v = ns.v * a %}{% endfor %}{{ ns.v }}{{ ns.w }}",
    "{% if t %}{% set inner = 5 %}{% endif %}{{ inner }}", "{% set a, b = 1, 'x' %}{{ a }}{{ b }}", "{% set (a, b), c = (1, 2), 3 %}{{ a + b + c }}", "{% set a, b = [1] %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in d | items %}{{ k }};{% endfor %}{% for k in d %}{{ k }},{% endfor %}", "{% for a, b in l %}{% endfor %}",
    "{% macro m(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, c=3) }} {{ m() }}", "{% macro m(a) %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, z=4) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}", "{% macro f(n) %}{% if n > 0 %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% set x = 1 %}{% macro m() %}{{ x }}{% endmacro %}{% set x = 2 %}{{ m() }}", "{% macro m() %}{{ caller(1, 2) }}{% endmacro %}{% call(a, b) m() %}{{ a }}-{{ b }}{% endcall %}",
    "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}x{{ s }}{% endcall %}", "{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}",
    "{% set b %}x{% set in = 1 %}{{ s }}{% endset %}{{ b | length }}{{ in }}", "{% set b | upper | trim %} x {% endset %}[{{ b }}]", "{% filter upper | replace('A', 'o') %}banana{% endfilter %}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}", "{% for i in range(3) %}{{ loop.cycle('a', 'b') }}{{ loop.changed(i // 2) }}{% endfor %}",
    "{% set g = users | map(attribute='name') %}{{ g | list }}{{ g | list }}", "{% set g = l | select('odd') %}{% for a in g %}{{ a }}{{ loop.length }}{% endfor %}{% for a in g %}again{% endfor %}",
    "{% set ns = namespace(stop=false) %}{% for a in l if not ns.stop %}{{ a }}{% set ns.stop = true %}{% endfor %}", "{% generation %}{{ s }}{% endgeneration %}",
    "{{ raise_exception('no ' ~ s) }}", "{{ raise_exception(7) }}", "{% if undefined_thing.x %}{% endif %}", "{{ undefined_thing.x }}", "{{ d.nothing.deeper }}", "{{ undefined_function(1) }}",
    "{{ l.append(1) }}", "{{ d.update({}) }}", "{{ s.__class__ }}", "{{ s.__class__.mro() }}", "{{ ''.__class__ is defined }}", "{% set s.x = 1 %}", "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{% if %}{% endif %}", "{% for %}{% endfor %}", "{{ }}", "{{ 1 + }}", "{% endif %}", "{% if t %}", "{{ 'a }}", "{{ (1 }}", "{{ [1, 2 }}", "{% unknown %}", "{# open", "{% raw %}", "{{ a b }}",
    "{% break %}", "{{ 1 is 2 }}", "{{ x|nofilter }}", "{{ x is notest }}", "{% set x %}", "{% macro %}", "{{ f(a=1, 2) }}", "{% set true = 1 %}", "{{ strftime_now('%a %A %d %b %B %m %y %Y %H %I %M %S %p %j %% %-d %-H %-I %e %F %T') }}",
    "{% if t %}a{% elif f %}b{% else %}c{% endif %}{% if f %}a{% elif t %}b{% else %}c{% endif %}{% if f %}a{% elif n %}b{% else %}c{% endif %}", "{{ l | safe }}{{ '<' | safe }}",
]


def render_chat(source, chat):
    chat = json.loads(json.dumps(chat))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for k in special:
        if k in chat and chat[k] is None:
            del chat[k], special[k]
            break
    out, _ = chat_template_utils.render_jinja_template(conversations=[chat.pop("messages")], chat_template=source, **{**special, **chat})
    return out[0]


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--templates", type=pathlib.Path, default=HERE / "templates")
    args.add_argument("--out", type=pathlib.Path, default=HERE / "goldens.json.gz")
    args = args.parse_args()
    renders = []
    env = reference.environment(NOW)
    for path in sorted(args.templates.glob("*.jinja")):
        for name, chat in CHATS.items():
            output, error = reference.attempt(lambda: render_chat(path.read_text(), chat))
            plain = reference.attempt(lambda: reference.render(env, path.read_text(), chat))
            # What transformers itself refuses, and the names of its classes, are its own words.
            own = error is not None and error[0] == plain[1][0] and (error[0] in ("ValueError", "RecursionError") or "transformers." in error[1])
            if plain != (output, error) and not own:
                raise SystemExit(f"{path.name} x {name}: transformers gives {output!r}, {error}; reference.py {plain}")
            renders.append({"template": path.name, "chat": name, "output": output, "error": error})
    pieces = []
    for text in [f"{{{{ {line} }}}}" for line in EXPRESSIONS if line.strip()] + PIECES:
        def render():
            out = chat_template_utils._compile_jinja_template(text).render(**json.loads(json.dumps(CONTEXT)))
            return re.sub(" at 0x[0-9a-f]+", "", out)
        output, error = reference.attempt(render)
        pieces.append([text, output, error])
    doc = {"renders": renders, "chats": CHATS, "pieces": pieces, "context": CONTEXT}
    args.out.write_bytes(gzip.compress(json.dumps(doc, ensure_ascii=False, indent=1).encode(), 9, mtime=0))
    failed = sum(r["error"] is not None for r in renders)
    print(len(renders), "renders,", failed, "of them errors;", len(pieces), "pieces,", sum(p[2] is not None for p in pieces), "of them errors")


main()
