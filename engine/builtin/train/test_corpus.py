"""python -m unittest test_corpus, before any training: what is held out stays out of the stream, and the stream is what it claims to be."""

import random
import unittest

from corpus import CANNOT, EOT, IM_START, UNKNOWN, Corpus, Heldout
from facts import normalize, read_facts


class TestHeldout(unittest.TestCase):
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
        plain = Corpus(1)
        asked = [q for c in plain.pool(0, 300) for q in questions(c)]
        held = random.Random(3).sample(sorted(q for q in set(asked) if normalize(q) and normalize(q) not in plain.known), 30)
        fewer = Corpus(1, [q for q in held if q not in plain.questions + plain.requests])
        for c in fewer.pool(0, 300):
            for q in questions(c):
                self.assertFalse(fewer.heldout.overlaps(q), q)

    def test_no_pool_holds_a_held_out_question(self):
        corpus = Corpus(1)
        for c in corpus.pool(0, 1500):
            for q in questions(c):
                self.assertFalse(corpus.heldout.overlaps(q), q)


class TestStream(unittest.TestCase):
    def test_pool_is_a_function_of_seed_and_number(self):
        self.assertEqual(Corpus(1).pool(7, 20), Corpus(1).pool(7, 20))
        self.assertNotEqual(Corpus(1).pool(7, 20), Corpus(1).pool(8, 20))

    def test_known_questions_are_never_refused(self):
        corpus = Corpus(2)
        rng = random.Random(1)
        for _ in range(3000):
            q, a = corpus.turn(rng)
            if a in (UNKNOWN, CANNOT):
                self.assertIn(corpus.known.get(normalize(q), a), (a,), q)


def questions(conversation):
    return [text.split("\n", 1)[1].split("<|im_end|>")[0] for text, _ in conversation if text.startswith(IM_START + "user")] or [
        text.removesuffix(EOT) for text, _ in conversation if text.endswith(EOT)]


if __name__ == "__main__":
    unittest.main()
