// Package tokenizer turns text into the token ids of a Hugging Face
// tokenizer.json, and ids back into text.
//
// Encoding is BPE in five steps: added tokens are cut out of the text, the rest
// is normalized (NFC, literal replacements), cut into pre-tokens by a scanner
// written for the file's own pattern, each pre-token's symbols are merged by
// rank, and the post-processor's tokens go around the whole. Symbols are bytes,
// or, with byte fallback, characters; text of those is cut wherever no merge can
// reach across. A word that is one token is answered from a table, other recent
// words from a bounded cache.
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
