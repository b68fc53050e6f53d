"""python -m unittest test_corpus, before any training: what is held out stays out of the stream, and the stream is what it claims to be."""

import json
import random
import unittest

import frames
from corpus import CANNOT, EOT, HELDOUT, IM_END, IM_START, UNKNOWN, Corpus, Heldout
from facts import HERE, normalize, read_facts


class TestHeldout(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.corpus = Corpus(1)

    def test_overlap_is_found_after_normalizing(self):
        h = Heldout(["In short, what does tail do?", "Hi, tandem!"])
        for text in ("in short what does TAIL do", "In short: what does `tail` do?!", "Hey, in short, what does tail do exactly?", "hi tandem"):
            self.assertTrue(h.overlaps(text), text)
        for text in ("what does tail do", "In short, what does head do?", "Hi, tandem! What is prefill?", ""):
            self.assertFalse(h.overlaps(text), text)

    def test_corpus_refuses_a_phrasing_that_is_held_out(self):
        fact = read_facts()[0]
        for prompt in (fact.phrasings[0].upper() + "?!", "What is the capital of France"):
            with self.assertRaises(ValueError, msg=prompt):
                Corpus(1, [prompt])

    def test_stream_skips_held_out_questions(self):
        listed = {normalize(q) for q in self.corpus.questions + self.corpus.requests} | set(self.corpus.known)
        asked = sorted({q for c in self.corpus.pool(0, 200) for q in questions(c, raw=False) if len(normalize(q).split()) > 4 and normalize(q) not in listed})
        fewer = Corpus(1, random.Random(3).sample(asked, 30))
        for c in fewer.pool(0, 200):
            for q in questions(c):
                self.assertFalse(fewer.heldout.overlaps(q), q)

    def test_no_pool_holds_a_held_out_question(self):
        for c in self.corpus.pool(0, 800):
            for q in questions(c):
                self.assertFalse(self.corpus.heldout.overlaps(q), q)

    def test_no_frame_and_no_phrasing_uses_held_out_words(self):
        corpus, rng = self.corpus, random.Random(2)
        asked = [p for f in corpus.facts if f.subjects for p in f.phrasings] + [corpus.turn(rng)[0] for _ in range(4000)]
        for mark in frames.MARKS:
            self.assertTrue(any(mark in normalize(p) for p in held_out()), f"no held-out phrasing has {mark!r}")
            for p in asked:
                self.assertNotIn(f" {mark} ", f" {normalize(p)} ")


class TestStream(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.corpus = Corpus(2)

    def test_pool_is_a_function_of_seed_and_number(self):
        self.assertEqual(self.corpus.pool(7, 20), Corpus(2).pool(7, 20))
        self.assertNotEqual(self.corpus.pool(7, 20), self.corpus.pool(8, 20))

    def test_known_questions_are_never_refused(self):
        corpus, rng = self.corpus, random.Random(1)
        for _ in range(3000):
            q, a = corpus.turn(rng)
            if a in (UNKNOWN, CANNOT):
                self.assertIn(corpus.known.get(normalize(q), a), (a,), q)


def held_out():
    return [json.loads(line)["prompt"] for name in HELDOUT for line in (HERE / name).read_text().splitlines()]


def questions(conversation, raw=True):
    """What users ask in a conversation, or its text where it is raw text without turns."""
    asked = [text.split("\n", 1)[1].split(IM_END)[0] for text, _ in conversation if text.startswith(IM_START + "user")]
    return asked or [text.removesuffix(EOT) for text, _ in conversation if raw and text.endswith(EOT)]


if __name__ == "__main__":
    unittest.main()
