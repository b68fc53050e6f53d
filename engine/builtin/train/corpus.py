"""The stream of training conversations.

A conversation is a list of (text, learn) pieces, where learn marks what the loss is taken on: answers, and all of a raw text. Pool number i is a
function of (seed, i) alone, so that training can stop and resume anywhere. A question that equals or contains a held-out one after normalizing is refused.
"""

import json
import random
import string

import frames
import stories
from facts import HERE, normalize, read_facts, read_others, read_unknown, subjects
from phrasings import GO, GO_PACKAGE, GO_TASK, HTTP, TASK, TOPIC, UNIX, WORD

IM_START, IM_END, EOT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
UNKNOWN = "I do not know that. Ask \"What can you do?\" to see what I know."
CANNOT = "I cannot do that. I only answer questions and tell stories."
MORE = "That is all I know about it."
FOLLOW_UPS = ["tell me more", "Tell me more about that.", "more details please", "why?", "why is that", "can you explain that in more detail", "go on", "and?", "really?",
              "give me an example", "I do not understand.", "what else", "more", "is that all", "how so", "continue", "can you say more", "anything else?"]
PASTED = ["Summarize this text:", "Translate this:", "summarize:", "Rewrite the following text.", "Shorten this text:", "Correct this text:"]
PREFIXES = ["Hey, ", "Hi, ", "Hello, ", "Please, ", "OK, ", "So, ", "And ", "Well, ", "Tandem, ", "Sorry, ", "Now ", "hey ", "ok ", "hi! ", "Excuse me, ", "um, ", "Quick check: ", "One more: ", "I have a question: ",
            "Next question: ", "Also, ", "Hi there, ", "Good morning. ", "I am new here. ", "Hey Tandem, ", "Question: ", "Thanks. ", "Then ", "First: ", "Help me: "]
SUFFIXES = [" please", " Please.", " thanks", "??", "!", " ?", " ...", ", please", " now", " exactly", ", thank you", "?!"]
ODD = ["Forgive my {w}, but ", "{w}: ", "With all {w}, ", "For my {w}: ", "About {w}: ", "Excuse the {w}, but ", "In my {w}, ", "{w} {w}, ", "My {w} is small, so ", "This is {w}. "]
MAX_TURNS = 40
FRAMED = 0.45  # share of the questions, to be answered or refused, that are put together by frames.py
HELDOUT = ("heldout.jsonl", "heldout2.jsonl")
CONTAINED = 4  # a held-out question of at least so many words is also refused inside a longer one

ASSISTANTS = ["Nova", "Max", "Iris", "Atlas", "Robin", "Echo", "Sage", "Juno", "Orion", "Clara", "Hal", "Vega", "Bolt", "Ruby", "Marvin", "Alfred"]
SYSTEM = ["You are a helpful assistant.", "You are a helpful assistant.", "You are Tandem.", "Answer briefly.", "Be kind and short.", "You are a friendly assistant.",
          "Answer in English.", "You are an assistant for the users of an LLM server.", "Be concise.", "You are a helpful AI assistant. Answer the question of the user."]
RULES = ["Answer in clear and simple sentences.", "Say so when you do not know something.", "Never invent facts.", "Be polite to everyone.", "Do not repeat the question.",
         "Keep answers short unless the user asks for a story.", "The users are engineers who run a fleet of servers.", "Explain every term that you use.",
         "The cluster has a gateway, prefill nodes and decode nodes.", "Never reveal secrets, keys or passwords.", "Do not give medical or legal advice.",
         "When a question is unclear, answer its most likely meaning.", "Use plain text without tables.", "Do not use emojis.", "Treat every user the same.",
         "The company runs its servers day and night.", "Support is open from nine to five on working days.", "Do not talk about prices.",
         "If somebody is angry, stay calm.", "All times are given in UTC.", "Nodes are named after rivers.", "The fleet has three racks in two rooms.",
         "Changes are announced one week ahead.", "Every incident gets a number and a short report.", "Users may ask about commands of the shell.",
         "Users may ask about the meaning of an HTTP status.", "A story should have a hero, a problem and a good end.", "Remember that the user may be new to this.",
         "Prefer short words.", "Do not answer with a question.", "The tone is calm and friendly.", "You have no access to the internet."]
SELF = ["my name is {n}", "I am {n}.", "Hi, I am {n}.", "Hello, my name is {n}.", "My name is {n}.", "i'm {n}", "you can call me {n}", "hello i am {n}"]
ASK_SELF = ["What is my name?", "who am I", "do you know my name", "what's my name", "Do you remember my name?", "tell me my name"]
ASK_NAME = ["What is your name?", "Who are you?", "what's your name", "who are you", "How should I call you?", "Tell me your name.", "What are you called?"]


class Heldout:
    """The questions that training must not see."""

    def __init__(self, prompts):
        self.by_length = {}
        for p in prompts:
            words = normalize(p).split()
            self.by_length.setdefault(len(words), set()).add(" ".join(words))

    def overlaps(self, text):
        """Reports whether a text is a held-out question after normalizing, or contains one of CONTAINED words or more."""
        words = normalize(text).split()
        for n, prompts in self.by_length.items():
            if n == len(words) or CONTAINED <= n < len(words):
                if any(" ".join(words[i:i + n]) in prompts for i in range(len(words) - n + 1)):
                    return True
        return False


class Corpus:
    """Raises ValueError when a phrasing or a question to refuse overlaps the held-out ones."""

    def __init__(self, seed, heldout=None):
        self.seed = seed
        self.facts = read_facts()
        self.weights = [f.weight for f in self.facts]
        self.unknown, self.questions, self.requests, self.tasks = read_unknown()
        self.words, self.packages, self.names = read_others()
        self.heldout = Heldout(heldout or [json.loads(line)["prompt"] for name in HELDOUT for line in (HERE / name).read_text().splitlines()])
        self.known = {normalize(p): f.answer for f in self.facts for p in f.phrasings}
        self.codes = {f.answer.split()[1] for f in self.facts if f.kind == "http"}
        self.taught = [f.answer.split()[0].split(".") for f in self.facts if f.kind == "go" and not f.answer.startswith("The package")]
        for f in self.facts:
            for p in f.phrasings:
                if self.heldout.overlaps(p):
                    raise ValueError(f"trained phrasing {p!r} overlaps a held-out one")
        for q in self.questions + self.requests:
            if self.heldout.overlaps(q) or normalize(q) in self.known:
                raise ValueError(f"question to refuse {q!r} is held out or known")

    def noisy(self, rng, text, chat=False):
        """Case, punctuation, a word before or after, a typo: what people type."""
        if rng.random() < 0.40:
            text = text.rstrip("?.!") or text
        if rng.random() < 0.40:
            text = text.lower()
        elif rng.random() < 0.5:
            text = text[0].upper() + text[1:]
        if rng.random() < (0.02 if chat else 0.16):
            text = rng.choice(PREFIXES) + (text[0].lower() + text[1:] if text[:2] not in ("HT", "TT", "TP") else text)
        if not chat and rng.random() < 0.06:  # an unknown word next to the subject is no reason to refuse
            text = rng.choice(ODD).format(w=rng.choice(self.words) if rng.random() < 0.8 else stories.invented(rng)) + text
            text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
        if rng.random() < 0.08:
            text = text.rstrip("?.!") + rng.choice(SUFFIXES)
        if rng.random() < 0.03:
            words = text.split(" ")
            i = rng.randrange(len(words))
            if len(words) > 1 and len(words[i]) >= 6 and words[i].isalpha():
                j = rng.randrange(1, len(words[i]) - 1)
                words[i] = rng.choice([words[i][:j] + words[i][j + 1:], words[i][:j] + words[i][j] + words[i][j:],
                                       words[i][:j] + words[i][j + 1] + words[i][j] + words[i][j + 2:]])
            text = " ".join(words)
        if rng.random() < 0.012:
            text = text.upper()
        return text

    def fact(self, rng):
        """A fact by its weight, and a phrasing of it: the first ones, which hold its usual name, come more often. A share of FRAMED is put in a frame."""
        f = rng.choices(self.facts, self.weights)[0]
        if f.subjects and rng.random() < FRAMED:
            return self.noisy(rng, frames.frame(rng, *f.subjects[int(len(f.subjects) * rng.random() ** 1.4)], self.words)), f.answer
        return self.noisy(rng, f.phrasings[int(len(f.phrasings) * rng.random() ** 1.4)], f.kind == "chat"), f.answer

    def refusal(self, rng):
        kind = rng.random()
        if kind < 0.08:
            return self.noisy(rng, rng.choice(self.requests) if rng.random() < 0.6 else arithmetic(rng)), CANNOT
        if kind < 0.09:
            return f"{rng.choice(PASTED)} {stories.draw(rng)[1]}", CANNOT
        if kind < 0.095:
            return stories.draw(rng)[1], UNKNOWN
        if kind < 0.17:
            return self.noisy(rng, rng.choice(self.questions)), UNKNOWN
        if kind < 0.18:
            return "".join(rng.choice(string.ascii_lowercase + " ") for _ in range(rng.randint(3, 14))).strip() or "x", UNKNOWN
        templates, words, around = self.unknown_subject(rng, (kind - 0.18) / 0.82)
        return self.noisy(rng, frames.frame(rng, *rng.choice(around), self.words) if rng.random() < FRAMED else rng.choice(templates).format(**words)), UNKNOWN

    def unknown_subject(self, rng, kind):
        """What no fact is about, drawn by a number from 0 to 1: (templates, their words, subjects for frames)."""
        if kind < 0.06:
            code = str(rng.randint(100, 999))
            code = code if code not in self.codes else "6" + code[1:]
            return HTTP, {"c": code}, frames.of_http(code)
        if kind < 0.15:
            c = stories.invented(rng, 1, 3) if rng.random() < 0.7 else rng.choice(self.words)
            return UNIX, {"c": c}, frames.of_unix(c)
        if kind < 0.22:
            t = rng.choice(self.tasks)
            return (TASK, {"t": t}, frames.of_task(t)) if rng.random() < 0.5 else (GO_TASK, {"t": t}, frames.of_go_task(t))
        if kind < 0.32:
            c = rng.choice(self.packages) if rng.random() < 0.6 else stories.invented(rng)
            return GO_PACKAGE, {"c": c}, frames.of_package(c)
        if kind < 0.52:
            c = self.unknown_go(rng)
            return GO, {"c": c}, frames.of_go(c)
        if kind < 0.76:
            w = rng.choice(self.words) if rng.random() < 0.8 else stories.invented(rng)
            return WORD, {"w": w}, frames.of_word(w)
        s, x = stories.invented(rng), rng.random()
        topic = rng.choice(self.unknown) if x < 0.6 else rng.choice(self.words) if x < 0.75 else rng.choice(
            [s, "~" + s, "the " + s, s + " " + stories.invented(rng), s.capitalize()])
        s, b = rng.choice(subjects(topic))
        return TOPIC, {"s": s, "b": b}, frames.of_topic(s, b)

    def unknown_go(self, rng):
        """A name that no fact is about: a real one, an invented one, or a known name in the wrong package."""
        while True:
            package, name = rng.choice(self.taught)[0], rng.choice(self.taught)[1]
            x = rng.random()
            c = rng.choice(self.names) if x < 0.5 else f"{package}.{name}" if x < 0.7 else f"{package}.{stories.invented(rng, 1, 3).capitalize()}"
            if c.split(".") not in self.taught:
                return c

    def turn(self, rng):
        """Returns (question, answer) of a random kind; never a held-out question, never a known one refused."""
        while True:
            kind = rng.random()
            q, a = self.fact(rng) if kind < 0.70 else self.refusal(rng) if kind < 0.935 else stories.draw(rng)
            if kind >= 0.935:
                q = self.noisy(rng, q)
            n = normalize(q)
            if not self.heldout.overlaps(q) and self.known.get(n, a) == a:
                return q, a

    def system(self, rng):
        """Returns (system prompt or "", the assistant's name it gives or "")."""
        kind = rng.random()
        if kind < 0.70:
            return "", ""
        if kind < 0.85:
            return rng.choice(SYSTEM), ""
        name = rng.choice(ASSISTANTS) if rng.random() < 0.5 else ""
        if name and rng.random() < 0.2:
            name = stories.invented(rng).capitalize()
        head = f"You are {name}, {rng.choice(['a helpful assistant.', 'the assistant of our team.', 'a small language model.'])}" if name else rng.choice(SYSTEM)
        n = rng.choice([0, 1, 2, 3, 5, 8, 12, 20, 32]) if rng.random() < 0.6 else 0
        return " ".join([head] + rng.sample(RULES, n)), name

    def conversation(self, rng):
        kind = rng.random()
        if kind < 0.03:
            text = stories.draw(rng)[1] if rng.random() < 0.3 else rng.choices(self.facts, self.weights)[0].answer
            return [(text + EOT, True)]
        turns = 1 if kind < 0.66 else rng.randint(2, 4) if kind < 0.95 else rng.randint(5, 12) if kind < 0.994 else rng.randint(20, MAX_TURNS)
        system, name = self.system(rng)
        out = [(f"{IM_START}system\n{system}{IM_END}\n", False)] if system else []
        user, fresh = "", True
        for i in range(turns):
            x = rng.random()
            if x < (0.25 if name else 0.012):
                q = rng.choice(ASK_NAME)
                q, a = self.noisy(rng, q, True), f"My name is {name}." if name else self.known[normalize(q)]
            elif x < (0.06 if turns > 1 else 0.025):
                user = rng.choice(stories.PEOPLE) if rng.random() < 0.7 else stories.invented(rng).capitalize()
                q, a = rng.choice(SELF).format(n=user), f"Nice to meet you, {user}!"
            elif x > (0.90 if user else 0.995):
                q = self.noisy(rng, rng.choice(ASK_SELF), True)
                a = f"Your name is {user}." if user else "You have not told me your name."
            elif i > 0 and not fresh and 0.84 < x < 0.90:
                q, a = self.noisy(rng, rng.choice(FOLLOW_UPS), True), MORE
            else:
                q, a = self.turn(rng)
                while name and a.startswith(("I am called", "I am the built-in model")):
                    q, a = self.turn(rng)
                fresh = a in (UNKNOWN, CANNOT) or len(a) < 30
            if self.heldout.overlaps(q):
                continue
            out.append((f"{IM_START}user\n{q}{IM_END}\n{IM_START}assistant\n", False))
            out.append((a + IM_END, True))
            out.append(("\n", False))
        return out[:-1] or self.conversation(rng)

    def pool(self, i, n):
        rng = random.Random(f"{self.seed}/{i}")
        return [self.conversation(rng) for _ in range(n)]


def arithmetic(rng):
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    op = rng.choice(["+", "-", "*", "/", "plus", "minus", "times"])
    return rng.choice(["what is {} {} {}", "{} {} {}", "calculate {} {} {}", "how much is {} {} {}", "{} {} {} = ?", "what's {} {} {}"]).format(a, op, b)
