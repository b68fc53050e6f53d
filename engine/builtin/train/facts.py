"""Reads facts/*.txt and turns each fact into (kind, weight, phrasings, answer); phrasings.py has the templates. Nothing random happens here."""

import dataclasses
import pathlib
import re

import frames
from phrasings import GO, GO_PACKAGE, GO_TASK, HTTP, REASON, TASK, TOPIC, UNIX, WORD

HERE = pathlib.Path(__file__).resolve().parent

@dataclasses.dataclass(frozen=True)
class Fact:
    kind: str
    weight: int
    phrasings: tuple
    answer: str
    subjects: tuple = ()  # (noun, clause) for frames.frame


def normalize(text):
    """What two phrasings are compared by: lower case words, nothing else."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def lines(name):
    for line in (HERE / "facts" / name).read_text().splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            yield line


def read_lists(name):
    return {k.strip(): [x.strip() for x in v.split(",")] for k, v in (line.split(":", 1) for line in lines(name))}


def split(text, sep="|"):
    return [x.strip() for x in text.split(sep) if x.strip()]


def subjects(alias):
    """Yields (with article, bare) forms of a subject; a leading ~ marks a countable noun."""
    if not alias.startswith("~"):
        return [(alias, alias)]
    noun = alias[1:]
    a = "an" if noun[0].lower() in "aeiou" or re.match(r"(LLM|SLO|MLP|rms)", noun) else "a"
    return [(f"{a} {noun}", noun), (f"the {noun}", noun), (noun, noun)]


def topic_phrasings(aliases):
    return [t.format(s=s, b=b) for alias in aliases for s, b in subjects(alias) for t in TOPIC]


def weighted(line):
    m = re.match(r"(\d+) > (.*)", line)
    return (int(m[1]), m[2]) if m else (1, line)


def read_facts():
    """All facts, each answer once. A phrasing that two facts would answer differently stays with the first of them."""
    seen, clean = {}, []
    for f in [*own_facts(), *serving_facts(), *http_facts(), *unix_facts(), *go_facts(), *word_facts()]:
        keep = [p for p in dict.fromkeys(f.phrasings) if seen.setdefault(normalize(p), f.answer) == f.answer]
        if not keep:
            raise ValueError(f"every phrasing of this fact belongs to another fact already: {f.answer}")
        clean.append(dataclasses.replace(f, phrasings=tuple(keep)))
    return clean


def own_facts():
    for name, kind in (("chat.txt", "chat"), ("tandem.txt", "tandem")):
        for line in lines(name):
            weight, line = weighted(line)
            q, a = line.split(" => ")
            phrasings = [p for x in split(q) for p in (topic_phrasings([x[1:]]) if x.startswith("@") else [x])]
            yield Fact(kind, max(2, weight), tuple(phrasings), a)


def serving_facts():
    for line in lines("serving.txt"):
        weight, line = weighted(line)
        q, a = line.split(" => ")
        if q.startswith("? "):
            yield Fact("serving", 2, tuple(split(q[2:])), a)
        else:
            around = tuple(x for alias in split(q) for s, b in subjects(alias) for x in frames.of_topic(s, b))
            yield Fact("serving", weight, tuple(topic_phrasings(split(q))), a, around)


def http_facts():
    for line in lines("http.txt"):
        q, meaning = line.split(" => ")
        code, reason = split(q)
        ps = [t.format(c=code) for t in HTTP] + [t.format(r=r) for t in REASON for r in (reason, reason.lower())]
        yield Fact("http", 1, tuple(ps), f"HTTP {code} is {reason}: {meaning}", tuple(frames.of_http(code)))


def unix_facts():
    for line in lines("unix.txt"):
        cmd, rest = line.split(" => ")
        what, _, tasks = rest.partition(" | ")
        yield Fact("unix", 1, tuple(t.format(c=cmd) for t in UNIX), f"{cmd} {what}", tuple(frames.of_unix(cmd)))
        around = tuple(x for task in split(tasks, ";") for x in frames.of_task(task))
        yield Fact("unix task", 1, tuple(t.format(t=task) for task in split(tasks, ";") for t in TASK), f"Use {cmd}: it {what}", around)


def go_facts():
    for line in lines("go.txt"):
        name, rest = line.split(" => ")
        what, _, tasks = rest.partition(" | ")
        if "." not in name:
            yield Fact("go", 1, tuple(t.format(c=name) for t in GO_PACKAGE), f"The package {name} {what}", tuple(frames.of_package(name)))
            continue
        yield Fact("go", 1, tuple(t.format(c=name) for t in GO), f"{name} {what}", tuple(frames.of_go(name)))
        if tasks:
            around = tuple(x for task in split(tasks, ";") for x in frames.of_go_task(task))
            yield Fact("go task", 1, tuple(t.format(t=task) for task in split(tasks, ";") for t in GO_TASK), f"Use {name}: it {what}", around)


def word_facts():
    for line in lines("words.txt"):
        word, meaning = line.split(" => ")
        yield Fact("word", 1, tuple(t.format(w=word) for t in WORD), f"{word.capitalize()} means {meaning}.", tuple(frames.of_word(word)))


def read_unknown():
    """Returns (topics, questions, requests, tasks) that must be refused."""
    topics, questions, requests, tasks = [], [], [], []
    for line in lines("unknown.txt"):
        where = {"?": questions, "!": requests, "+": tasks}.get(line[0], topics)
        where.extend(split(line.lstrip("?!+ ")))
    return topics, questions, requests, tasks


def read_others():
    """Returns (words, Go packages, Go names) that no fact is about: they look like known ones and must be refused."""
    go = [x for line in lines("other_go.txt") for x in split(line)]
    return [x for line in lines("other_words.txt") for x in split(line)], [x for x in go if "." not in x], [x for x in go if "." in x]
