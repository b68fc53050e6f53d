"""Trains the byte-level BPE tokenizer on the corpus and writes tokenizer.json with the split pattern of Llama 3."""

import sys

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from corpus import EOT, IM_END, IM_START, Corpus

PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
VOCAB = 2048


def train(path, vocab=VOCAB, seed=1):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])
    tok.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tok.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    corpus = Corpus(seed)
    specials = [EOT, IM_START, IM_END]

    def texts():
        for f in corpus.facts:
            yield f.answer
        for conversation in corpus.pool(-1, 12000):
            text = "".join(t for t, _ in conversation)
            for s in specials:
                text = text.replace(s, "\n")
            yield text
    tok.train_from_iterator(texts(), trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok.save(str(path))
    return tok


if __name__ == "__main__":
    t = train(sys.argv[1])
    for s in ("What is a KV cache?", "what does http 404 mean", "tell me a story about a dragon", "chmod changes the permissions of a file."):
        print(t.encode(s).tokens)
