"""Writes heldout.jsonl: questions that training must never see. Run once, before training; corpus.py refuses any overlap.

The phrasings here are not those of facts.py, and the unknown topics are not those of facts/unknown.txt.
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


def main():
    rng = random.Random(20)
    rows, trained = [], {}
    facts = read_facts()
    by_answer = {f.answer: f for f in facts}
    for f in facts:
        for p in f.phrasings:
            trained[normalize(p)] = f.answer

    def add(kind, prompt, answer):
        n = normalize(prompt)
        if n not in trained:
            rows.append({"kind": kind, "prompt": prompt, "answer": answer})

    for line in lines("serving.txt"):
        _, line = weighted(line)
        q, a = line.split(" => ")
        if not q.startswith("? "):
            add("serving", rng.choice(TOPIC).format(s=subjects(split(q)[0])[0][0]), a)
    for kind, name, templates in (("unix", "unix.txt", UNIX), ("http", "http.txt", HTTP)):
        pool = [x.split(" => ") for x in lines(name)]
        for q, rest in rng.sample(pool, 40):
            key = split(q)[0]
            answer = next(a for a in by_answer if a.startswith(f"{key} " if kind == "unix" else f"HTTP {key} "))
            add(kind, rng.choice(templates).format(c=key), answer)
    for prompt, start in HAND:
        answer = [a for a in by_answer if a.startswith(start)]
        if len(answer) != 1:
            raise ValueError(f"{start!r} starts {len(answer)} answers")
        add(by_answer[answer[0]].kind, prompt, answer[0])
    for s in UNKNOWN:
        add("refusal", rng.choice(UNKNOWN_TEMPLATES).format(s=s), "")
    for s in UNKNOWN_HAND:
        add("refusal", s, "")
    with open(HERE / "heldout.jsonl", "w") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
