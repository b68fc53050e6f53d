"""Sentences around a subject, put together at random: hundreds of ways to ask, the same for what is known and for what is not.

So the frame says nothing about whether to refuse, and the answer must come from the subject. A subject is (noun, clause), such as ("the ls command",
"what ls does"); a task has only a clause, "how to list files". MARKS are words of the held-out phrasings that no frame may use.
"""

LEADS = ["Can you", "Could you", "Would you", "Will you", "Can somebody", "Please", "I want you to", "I need you to", "Now", "Then", ""]
VERBS = ["tell me", "explain", "explain to me", "say", "show me", "describe", "clarify", "let me know", "teach me", "help me see", "help me understand", "write down"]
TAILS = ["", "", "", "", " in simple words", " in plain English", " for a beginner", " quickly", " once more", " in a few words", " in one line", " please", " for my notes",
         " so that I understand it", " if you can", " as simply as possible", " step by step", " to me"]
SELF = ["I do not know", "I never understood", "I forgot", "I wonder", "I am not sure", "I want to understand", "I cannot remember", "I would love to know", "I am curious",
        "I keep forgetting", "I still do not see", "I was asked", "I need to find out", "I would like to hear", "I have no clue", "I must know", "I hope you know", "I never learnt"]
PEOPLE = ["My boss", "A friend", "My team", "A customer", "The teacher", "Someone", "Our admin", "A colleague", "My manager", "My sister", "The new guy", "Our support", "A student",
          "Somebody here", "The man next to me", "An engineer", "They"]
ASK = ["asked me", "wants to know", "does not know", "wonders", "forgot", "asks", "would like to know", "wanted to hear"]
KNOW = ["Do you know", "Have you any clue", "Is it clear", "Who knows", "Does anybody know", "Do you remember", "Are you able to say", "Is there a short way to say", "Can I ask",
        "May I know", "Would you happen to know", "Am I allowed to ask"]
SAW = ["saw", "read about", "found", "noticed", "heard of", "heard about", "stumbled over", "looked at", "had to deal with", "learnt about", "was shown"]
WHERE = ["in a talk", "in a blog post", "in the logs", "at work", "yesterday", "in a mail", "in my notes", "on a slide", "in a chat", "in a book", "in the docs", "today", "this morning",
         "in a meeting", "on a web page", "", ""]
DID = ["talked about", "asked about", "wrote about", "uses", "wants", "complained about", "showed me", "spoke of", "told me about", "likes", "brought up", "mentions", "loves"]
SO = ["What is it?", "What does it mean?", "what is that", "explain", "Explain it please.", "what is this about", "What is that supposed to be?", "Do you know it?", "can you explain",
      "What is this?", "what is it then", "What could that be?", "tell me what it is", "Can you tell me what that is?", "what is it about", "Please explain.", "I do not get it."]
ORDER = ["Explain", "Describe", "Define", "Tell me about", "Say something about", "Let me hear about", "Give me the basics of", "Give me a summary of", "Talk about", "Introduce",
         "Help me with", "Clarify", "Teach me", "Tell me something about", "Give me a definition of", "I would like an explanation of", "I need an explanation of", "Let us discuss"]
BARE = ["{n}, what is that?", "{n} - explain", "{n} again?", "What do you know about {n}?", "{n}, please explain", "{n}... what is it?", "what about {n}", "how about {n}", "so, {n}?",
        "the next thing is {n}", "next: {n}", "My question is about {n}.", "It is about {n}.", "a word about {n} please", "{n} please", "and {n}", "{n}? never heard of it", "Is {n} something you know?"]

NOUN, CLAUSE = "\x01", "\x02"
MARKS = ["can u", "in one sentence", "i keep hearing", "would you mind", "the deal with", "quick question", "colleague mentioned", "briefly explain", "any idea", "pardon my ignorance",
         "what would you say", "came across", "everyone here says", "eli5", "kindly explain", "on earth", "what would i", "how would you define", "people mean when", "easiest way", "in short what",
         "remind me what", "remind me how", "do servers mean", "good for in go"]


def clause(rng, c):
    """A question or order around a clause: "Could you tell me how to list files in a few words?"."""
    kind = rng.random()
    if kind < 0.5:
        lead = rng.choice(LEADS)
        text = f"{lead} {rng.choice(VERBS)} {c}{rng.choice(TAILS)}".strip()
        return text[0].upper() + text[1:] + ("?" if lead.endswith("you") and "I" not in lead or lead == "Can somebody" else ".")
    if kind < 0.7:
        return f"{rng.choice(SELF)} {c}."
    if kind < 0.85:
        return f"{rng.choice(PEOPLE)} {rng.choice(ASK)} {c}."
    return f"{rng.choice(KNOW)} {c}{rng.choice(TAILS)}?"


def around(rng, noun, c):
    kind = rng.random()
    if not noun or kind < 0.45:
        return clause(rng, c)
    if kind < 0.58:
        return f"I {rng.choice(SAW)} {noun} {rng.choice(WHERE)}".strip() + rng.choice([". ", ". ", ", "]) + rng.choice(SO)
    if kind < 0.72:
        return f"{rng.choice(PEOPLE)} {rng.choice(DID)} {noun}" + rng.choice([". ", ". ", ", "]) + rng.choice(SO)
    if kind < 0.88:
        return f"{rng.choice(ORDER)} {noun}{rng.choice(TAILS)}."
    return rng.choice(BARE).format(n=noun)


def frame(rng, noun, c, odd):
    """A sentence or two around a subject: its noun, or where that is empty, only its clause. In one of six a word beside the subject is missing or odd."""
    text = around(rng, noun and NOUN, CLAUSE)
    if rng.random() < 0.17:
        words = text.split(" ")
        beside = [i for i, w in enumerate(words) if NOUN not in w and CLAUSE not in w]
        if len(beside) > 1:
            words[rng.choice(beside)] = rng.choice(odd) if rng.random() < 0.7 else ""
            text = " ".join(w for w in words if w)
    text = text.replace(NOUN, noun).replace(CLAUSE, c)
    return text[0].upper() + text[1:]


def of_topic(s, b):
    return [(s, f"what {s} is"), (b, f"what {b} means"), (s, f"what {s} is about")]


def of_unix(c):
    return [(f"the {c} command", f"what {c} does"), (c, f"what {c} is"), (f"the command {c}", f"what the {c} command does"), (c, f"what {c} is for")]


def of_http(c):
    return [(f"HTTP {c}", f"what HTTP {c} means"), (f"status {c}", f"what status {c} means"), (c, f"what {c} means"), (f"a {c}", f"what a {c} is"), (f"error {c}", f"what error {c} is")]


def of_package(c):
    return [(f"the package {c}", f"what the package {c} does"), (f"the {c} package", f"what the {c} package is for"), (f"the Go package {c}", f"what the Go package {c} does")]


def of_go(c):
    return [(c, f"what {c} does"), (f"{c} in Go", f"what {c} does in Go"), (c, f"what {c} is"), (c, f"what {c} is for"), (f"the function {c}", f"how {c} works")]


def of_word(w):
    return [(f"the word {w}", f"what {w} means"), (w, f"what the word {w} means"), (f"the meaning of {w}", f"what is meant by {w}"), (f"the English word {w}", f"what {w} means in English")]


def of_task(t):
    return [("", f"how to {t}"), ("", f"how I can {t}"), ("", f"how one can {t}"), ("", f"which command can {t}")]


def of_go_task(t):
    return [("", f"how to {t} in Go"), ("", f"how I can {t} in Go"), ("", f"which function can {t} in Go"), ("", f"how to {t} with Go")]
