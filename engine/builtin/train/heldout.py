"""Writes heldout.jsonl and heldout2.jsonl: questions that training must never see; corpus.py refuses any overlap.

The first list was written before the first training, and its results were seen while the recipe was mended; the second was written before the second
training with phrasings that nothing had been asked with. A list that exists keeps its questions, and only its answers follow the facts.
"""

import json
import random

from facts import HERE, normalize, read_facts, split, subjects, lines, weighted

TOPIC = ["hey, can u tell me what {s} is", "In one sentence, what is {s}?", "I keep hearing about {s}, what is it?", "Would you mind explaining {s}?",
         "what's the deal with {s}", "Quick question: what is {s}?", "My colleague mentioned {s}. What is that?", "could you briefly explain {s}"]
UNIX = ["hey, what is the {c} command good for?", "In short, what does {c} do?", "could you briefly explain the {c} command", "remind me what {c} does"]
HTTP = ["hey, my server says {c}, what is that?", "In short, what does HTTP {c} mean?", "could you briefly explain status {c}", "remind me what a {c} means"]
HAND = [
    ("hello there tandem", "Hello! How can I help you?"), ("hey hey", "Hello! How can I help you?"), ("Hi, tandem!", "Hello! How can I help you?"),
    ("How are you feeling today?", "I am fine"), ("hey, how's everything going?", "I am fine"),
    ("Can you tell me who you are?", "I am the built-in model"), ("So, who exactly are you?", "I am the built-in model"),
    ("may I ask what your name is", "I am called"), ("What sort of things can you do?", "You can ask me about"), ("what can you help me with", "You can ask me about"),
    ("Thank you so much!", "You are welcome"), ("thanks, that helped", "You are welcome"), ("ok, goodbye then", "Goodbye!"), ("good bye and good night", "Goodbye!"),
    ("Could you explain to me what Tandem is?", "Tandem is a server"), ("what exactly is tandem about", "Tandem is a server"),
    ("I would like to add another decode node, how?", "Start one more on any machine: tandem decode"), ("how would I add one more prefill node", "Start one more on any machine: tandem prefill"),
    ("what port is the server on", "The gateway listens on"), ("Which port should I connect to?", "The gateway listens on"),
    ("is a gpu needed", "No. The engine runs on any CPU"), ("what's the job of the gateway", "The gateway takes HTTP requests"),
    ("How do I get the cluster running?", "Type make up"), ("how do decode and prefill differ", "Prefill reads the whole prompt"),
    ("does tandem work with the openai python client", "Tandem speaks the OpenAI API"), ("please tell me a good joke", "Why did the decode node"),
]
UNKNOWN = ["thermodynamics", "the eiffel tower", "a saxophone", "ruby on rails", "kotlin", "the human heart", "mayonnaise", "a submarine", "saturn", "the milky way",
           "madrid", "leonardo da vinci", "cricket", "a kangaroo rat", "osmosis", "an eclipse", "karate", "tiramisu", "the constitution of france", "a quokka",
           "blorptime", "zanderfluss", "a grimblewick", "hyperfrost", "the wendlebar"]
UNKNOWN_TEMPLATES = ["What is {s}?", "Explain {s}.", "tell me about {s}", "do you know what {s} is", "can you explain {s}"]
UNKNOWN_HAND = ["who is the mayor of chicago", "what is the capital of norway", "how do I grow tomatoes", "why do birds sing", "when was the printing press invented",
                "what does the frobnitz command do", "what does the zaplist command do", "explain the quuxify command", "what does http 299 mean", "what is http 777",
                "how many bones does a human have", "who composed the ninth symphony", "what is 13 + 29", "write a limerick", "translate cheese into italian"]

TOPIC2 = ["Any idea what {s} is?", "Pardon my ignorance, but what is {s}?", "What would you say {s} is?", "I came across {s} in a paper. What is that?",
          "everyone here says {b}, what do they mean", "ELI5: {b}", "Kindly explain {s} to a beginner.", "what on earth is {s}"]
UNIX2 = ["Any idea what {c} does?", "I came across the {c} command, what is that?", "what would I use {c} for"]
TASK2 = ["hey, how would I {t}?", "remind me how to {t}", "What is the easiest way to {t}?"]
HTTP2 = ["Any idea what HTTP {c} means?", "I came across a {c}, what is that?", "What do servers mean by {c}?"]
GO2 = ["Any idea what {c} does?", "In short, what does {c} do?", "remind me what {c} does", "What would I use {c} for?", "hey, what is {c} good for in go",
       "I came across {c} in some Go code. What is that?"]
GO_PACKAGE2 = ["Any idea what the package {c} does?", "remind me what the {c} package is for", "In short, what does the package {c} do?", "what would I import {c} for in go"]
GO_TASK2 = ["hey, how would I {t} in go?", "In Go, what is the easiest way to {t}?", "remind me how to {t} in go"]
WORD2 = ["Any idea what {w} means?", "In short, what does {w} mean?", "how would you define {w}", "remind me what the word {w} means",
         "What do people mean when they say {w}?", "I came across the word {w}. What does that mean?"]
HAND2 = [
    ("hello friend", "Hello! How can I help you?"), ("a very good morning to you", "Good morning!"), ("how are you getting on", "I am fine"),
    ("Would you introduce yourself please?", "I am the built-in model"), ("Please say who you are.", "I am the built-in model"), ("how do people call you", "I am called"),
    ("Which questions can I ask you?", "You can ask me about"), ("thanks, you helped me a lot", "You are welcome"), ("see you tomorrow", "Goodbye!"),
    ("would you tell me a joke please", "Why did the decode node"), ("who was it that made you", "I was trained from scratch by"), ("What is Tandem for?", "Tandem is a server"),
    ("How would I start one more decode node?", "Start one more on any machine: tandem decode"), ("How can I bring up another prefill node?", "Start one more on any machine: tandem prefill"),
    ("how can I stop the tandem cluster", "Press Ctrl-C"), ("Must I have a GPU for Tandem?", "No. The engine runs on any CPU"), ("Must I install Kubernetes for Tandem?", "No. Tandem is one binary"),
    ("What is the use of the gateway?", "The gateway takes HTTP requests"), ("How do nodes learn about each other?", "Nodes find each other by gossip"),
    ("What is a decode node for?", "A decode node owns requests"), ("Where can I see metrics?", "Every node serves Prometheus"), ("In which language did you write Tandem?", "Tandem is written in Go"),
    ("How can I run the tests?", "Type make test"), ("which api does the gateway speak", "Tandem speaks the OpenAI API"), ("how can I see all nodes of the cluster", "Run tandem status"),
    ("how would I benchmark my server", "tandem bench serve loads"),
]
UNKNOWN2 = ["abstraction", "conscience", "enthusiasm", "a fixed price", "finance", "an orange", "powder", "integration", "a crazy plan", "a suburban house", "a tuba", "a catapult",
            "geology", "the panama canal", "sweden", "frederick the great", "badminton", "a platypus", "mitosis", "lasagna", "typescript", "elixir", "the laws of kepler",
            "astigmatism", "a hedge fund", "flumtopia", "the zibberwock", "a crundle", "snarfbatch", "mordelheim"]
UNKNOWN_WORD2 = ["contemplate", "afford", "incur", "hasten", "profound", "sufficient", "vocational", "participate", "glare", "bellow", "firmly", "elsewhere"]
UNKNOWN_GO2 = ["utf16.Encode", "crc32.MakeTable", "slog.Level", "expvar.Handler", "rand.Prime", "syscall.Umask", "strings.TrimLeftFunc", "filepath.SplitList", "bytes.NewBuffer",
               "draw.Op", "fs.ReadFile", "os.OpenInRoot", "strings.Wibble", "os.Frobnicate", "http.Zap", "json.Grumble", "time.Wander", "sync.Blorp"]
UNKNOWN_PACKAGE2 = ["compress/lzw", "net/rpc", "archive/zip", "plugin", "crypto/ecdsa", "hash/crc64", "go/version", "wibble", "net/frob"]
UNKNOWN_HAND2 = ["who is the mayor of paris", "what is the capital of portugal", "how do I prune a rose", "why do wolves howl", "when was the radio invented", "what does the glimmer command do",
                 "explain the snizzle command", "what is the wumpus command", "what does http 377 mean", "status 499 please explain", "how many teeth does a shark have",
                 "who wrote the magic flute", "what is 17 + 26", "write a ballad", "translate dog into polish", "how do I shear a sheep in go", "how do I repair a roof"]


class List:
    def __init__(self, facts):
        self.rows, self.facts = [], facts
        self.trained = {normalize(p) for f in facts for p in f.phrasings}

    def add(self, kind, prompt, answer):
        if normalize(prompt) not in self.trained:
            self.rows.append({"kind": kind, "prompt": prompt, "answer": answer})

    def hand(self, pairs):
        for prompt, start in pairs:
            found = [f for f in self.facts if f.answer.startswith(start)]
            if len(found) != 1:
                raise ValueError(f"{start!r} starts {len(found)} answers")
            self.add(found[0].kind, prompt, found[0].answer)

    def write(self, path):
        """Keeps the questions of a list that is there, and brings its answers up to date."""
        if path.exists():
            answers, now = {r["prompt"]: r["answer"] for r in self.rows}, {f.answer for f in self.facts} | {""}
            self.rows = [r if r["answer"] in now else r | {"answer": answers[r["prompt"]]} for r in map(json.loads, open(path))]
        with open(path, "w") as out:
            for row in self.rows:
                out.write(json.dumps(row) + "\n")


def first(facts):
    rng, rows = random.Random(20), List(facts)
    by_answer = [f.answer for f in facts]
    for line in lines("serving.txt"):
        _, line = weighted(line)
        q, a = line.split(" => ")
        if not q.startswith("? "):
            rows.add("serving", rng.choice(TOPIC).format(s=subjects(split(q)[0])[0][0]), a)
    for kind, name, templates in (("unix", "unix.txt", UNIX), ("http", "http.txt", HTTP)):
        pool = [x.split(" => ") for x in lines(name)]
        for q, rest in rng.sample(pool, 40):
            key = split(q)[0]
            answer = next(a for a in by_answer if a.startswith(f"{key} " if kind == "unix" else f"HTTP {key} "))
            rows.add(kind, rng.choice(templates).format(c=key), answer)
    rows.hand(HAND)
    for s in UNKNOWN:
        rows.add("refusal", rng.choice(UNKNOWN_TEMPLATES).format(s=s), "")
    for s in UNKNOWN_HAND:
        rows.add("refusal", s, "")
    return rows


def second(facts):
    rng, rows = random.Random(21), List(facts)
    for line in lines("serving.txt"):
        _, line = weighted(line)
        q, a = line.split(" => ")
        if not q.startswith("? "):
            s, b = rng.choice(subjects(rng.choice(split(q))))
            rows.add("serving", rng.choice(TOPIC2).format(s=s, b=b), a)

    def some(kind, n, key, templates, start):
        for f in rng.sample([f for f in facts if f.kind == kind and start(f)], n):
            rows.add(kind, rng.choice(templates).format(**key(f)), f.answer)
    named = {line.split(" => ")[0]: split(line.partition(" | ")[2], ";") for name in ("go.txt", "unix.txt") for line in lines(name)}

    def task(f):
        return {"t": rng.choice(named[f.answer.split(":")[0].removeprefix("Use ")])}
    some("unix", 30, lambda f: {"c": f.answer.split()[0]}, UNIX2, lambda f: True)
    some("unix task", 30, task, TASK2, lambda f: True)
    some("http", 30, lambda f: {"c": f.answer.split()[1]}, HTTP2, lambda f: True)
    some("go", 80, lambda f: {"c": f.answer.split()[0]}, GO2, lambda f: not f.answer.startswith("The package"))
    some("go", 20, lambda f: {"c": f.answer.split()[2]}, GO_PACKAGE2, lambda f: f.answer.startswith("The package"))
    some("go task", 30, task, GO_TASK2, lambda f: True)
    some("word", 80, lambda f: {"w": f.answer.split()[0].lower()}, WORD2, lambda f: True)
    rows.hand(HAND2)
    for unknown, templates in ((UNKNOWN2, UNKNOWN_TEMPLATES + TOPIC2[:3]), (UNKNOWN_WORD2, ["What does {s} mean?", "Define {s}."] + WORD2[:3]),
                               (UNKNOWN_GO2, ["What does {s} do?", "explain {s} in go"] + GO2[:3]), (UNKNOWN_PACKAGE2, ["What does the package {s} do?"] + GO_PACKAGE2[:2])):
        for s in unknown:
            t = rng.choice(templates)
            rows.add("refusal", t.format(**{k: s for k in ("s", "b", "w", "c")}), "")
    for s in UNKNOWN_HAND2:
        rows.add("refusal", s, "")
    return rows


def main():
    facts = read_facts()
    first(facts).write(HERE / "heldout.jsonl")
    second(facts).write(HERE / "heldout2.jsonl")


if __name__ == "__main__":
    main()
