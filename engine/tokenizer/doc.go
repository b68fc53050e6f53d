// Package tokenizer converts text to the token ids of a Hugging Face
// tokenizer.json, and ids to text. A tekken.json and a SentencePiece
// tokenizer.model are converted to a tokenizer.json first.
//
// Encoding is BPE in five steps. Added tokens are cut out of the text. The rest
// is normalized (NFC, SentencePiece's replacements and spaces) and cut into
// pre-tokens by a scanner written for the file's own pattern. The symbols of each
// pre-token are merged by rank, and the post-processor's tokens surround the
// result. Symbols are bytes or, with byte fallback, characters; text of characters
// is cut wherever no merge can reach across. A table holds the words that are one
// token, and a bounded cache other recent words. Unigram vocabularies take the
// place of merging: a pre-token becomes the tokens with the largest sum of scores.
//
// Invariant: for valid UTF-8 text the ids equal those of Hugging Face's
// tokenizers, and a Stream's pieces, joined, equal Decode of all its ids (but
// see Stream.Next for byte tokens that are no UTF-8).
//
// It does not run regular expressions, train, truncate or pad, and it never
// approximates: what a file asks for beyond the steps above is refused by name
// when the file is loaded. Bytes that are no UTF-8 count as neither letter,
// number nor space and keep their value through encoding.
package tokenizer
