"""Reads facts/*.txt and turns each fact into (kind, weight, phrasings, answer). Nothing random happens here."""

import dataclasses
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent

TOPIC = ["What is {s}?", "What's {s}?", "whats {s}", "Explain {s}.", "Can you explain {s}?", "Tell me about {s}.", "What does {b} mean?", "Define {s}.",
         "{b}?", "{b}", "Do you know what {s} is?", "I want to know what {s} is.", "Please explain {s} to me.", "What do you mean by {s}?",
         "How would you describe {s}?", "Could you tell me what {s} is?", "Give me a short explanation of {s}.", "Help me understand {s}.",
         "I don't understand {s}.", "So what exactly is {s}?", "What is meant by {s}?", "the meaning of {b}", "And what is {s}?", "What about {s}?",
         "Can you tell me what {s} is?", "Tell me what {s} is.", "Describe {s}.", "what is {s} in llm serving", "How does {s} work?", "what is {s} for",
         "Can you tell me about {s}?", "I have a question about {s}.", "please tell me what {s} means", "What is the definition of {s}?",
         "Why do we need {s}?", "teach me about {s}", "I have never heard of {s}.", "Is {s} important?", "explain {s} in simple words"]
UNIX = ["What does {c} do?", "What does the {c} command do?", "What is {c}?", "what is the {c} command", "Explain {c}.", "Explain the {c} command.", "What is {c} for?",
        "what is {c} used for", "{c} command", "the {c} command", "man {c}", "Tell me about the {c} command.", "What does {c} do in Linux?", "what is {c} in unix",
        "Do you know the {c} command?", "How does {c} work?", "Can you explain the {c} command?", "Describe the {c} command.", "and {c}?", "what about {c}",
        "Please explain {c}.", "whats {c}", "Tell me what {c} does.", "I want to know what {c} does.", "when do I use {c}", "what can I do with {c}",
        "How do I use {c}?", "How do I use the {c} command?", "what happens when I type {c}", "unix command {c}", "Can you tell me what {c} does?"]
TASK = ["How do I {t}?", "How can I {t}?", "How do I {t} in Linux?", "How can I {t} in the shell?", "Which command do I use to {t}?", "I want to {t}.",
        "What command can {t}?", "command to {t}", "how to {t}", "Which Unix command can {t}?", "what is the command to {t}", "I need to {t}.",
        "Tell me how to {t}.", "Is there a command to {t}?", "with which command can I {t}", "how does one {t} in unix"]
HTTP = ["What does HTTP {c} mean?", "What is HTTP {c}?", "What does {c} mean?", "what is http status {c}", "http {c}", "{c}", "status {c}", "Explain HTTP {c}.",
        "What is status code {c}?", "What does status code {c} mean?", "I get a {c}.", "Why do I get a {c}?", "error {c}", "what is error {c}", "http status code {c}",
        "Tell me about HTTP {c}.", "What does the HTTP status {c} mean?", "the server returns {c}", "the server answers {c}, why", "what is a {c}", "explain {c}",
        "meaning of http {c}", "My request failed with {c}.", "And {c}?", "What about {c}?", "Can you explain HTTP {c}?", "what is a {c} error", "what does a {c} mean",
        "Do you know what HTTP {c} means?", "Tell me what {c} means.", "and what is {c}", "What is the meaning of HTTP {c}?", "what is code {c}"]
REASON = ["What does {r} mean?", "What is the status code for {r}?", "Which HTTP status is {r}?", "http {r}", "What is the code of {r}?",
          "which status code means {r}", "what is HTTP {r}", "explain the status {r}", "the server says {r}"]


@dataclasses.dataclass(frozen=True)
class Fact:
    kind: str
    weight: int
    phrasings: tuple
    answer: str


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
    out = []
    for name, kind in (("chat.txt", "chat"), ("tandem.txt", "tandem")):
        for line in lines(name):
            weight, line = weighted(line)
            q, a = line.split(" => ")
            phrasings = [p for x in split(q) for p in (topic_phrasings([x[1:]]) if x.startswith("@") else [x])]
            out.append(Fact(kind, max(2, weight), tuple(phrasings), a))
    for line in lines("serving.txt"):
        weight, line = weighted(line)
        q, a = line.split(" => ")
        if q.startswith("? "):
            out.append(Fact("serving", 2, tuple(split(q[2:])), a))
        else:
            out.append(Fact("serving", weight, tuple(topic_phrasings(split(q))), a))
    for line in lines("http.txt"):
        q, meaning = line.split(" => ")
        code, reason = split(q)
        ps = [t.format(c=code) for t in HTTP] + [t.format(r=r) for t in REASON for r in (reason, reason.lower())]
        out.append(Fact("http", 1, tuple(ps), f"HTTP {code} is {reason}: {meaning}"))
    for line in lines("unix.txt"):
        cmd, rest = line.split(" => ")
        what, _, tasks = rest.partition(" | ")
        out.append(Fact("unix", 1, tuple(t.format(c=cmd) for t in UNIX), f"{cmd} {what}"))
        out.append(Fact("unix task", 1, tuple(t.format(t=task) for task in split(tasks, ";") for t in TASK), f"Use {cmd}: it {what}"))
    seen, clean = {}, []
    for f in out:
        keep = [p for p in dict.fromkeys(f.phrasings) if seen.setdefault(normalize(p), f.answer) == f.answer]
        if not keep:
            raise ValueError(f"every phrasing of this fact belongs to another fact already: {f.answer}")
        clean.append(dataclasses.replace(f, phrasings=tuple(keep)))
    return clean


def read_unknown():
    """Returns (topics, questions, requests) that must be refused."""
    topics, questions, requests = [], [], []
    for line in lines("unknown.txt"):
        where = {"?": questions, "!": requests}.get(line[0], topics)
        where.extend(split(line.lstrip("?! ")))
    return topics, questions, requests
