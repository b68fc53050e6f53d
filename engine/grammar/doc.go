// Package grammar computes which tokens may follow an output that must match a JSON schema, a
// regular expression, one of several choices, a context-free grammar or a structural tag.
//
// # Algorithm
//
// Compile turns a source into expressions over bytes (expr), one for each rule, and links them
// into a program: positions of a nondeterministic machine with a stack. A call pushes the position
// to return to. A repeat with bounds pushes a counter and is never unrolled. Unique items of an
// enum push a set.
//
// An Automaton runs a program. A state is an interned set of configurations (position, stack), and
// stacks are interned linked cells, so that equal states are equal integers. States and their
// transitions are computed when they are first needed, per class of bytes that the program does
// not distinguish. A mask walks the trie of the Vocabulary from a state and skips subtrees that
// lead nowhere. Inside a JSON string almost all tokens are plain text: their masks are
// precomputed by length, and only the parts of other tokens from their first byte that is not plain
// are walked (trie of tails). Masks are kept with their states. Counters that no single token can
// exhaust are rounded first, so that a string of at most 10,000 characters needs one mask.
//
// # Invariants
//
// A Matcher is a function of the grammar and the accepted tokens. It does not depend on what the
// Automaton has cached, so that another node that replays the output computes the same masks.
//
// A token is allowed exactly if Accept succeeds for it, and after it either the output may end or a
// byte exists that continues it. No mask leads into a dead end, unless the vocabulary lacks a byte.
//
// All bounds are counts (Limits): there is no clock and no goroutine, and a hostile grammar is
// refused by the same step on every machine. What is cached counts as if it were computed, so that
// a limit is exceeded at the same token on every node.
//
// # Structural tags
//
// A token of the vocabulary that a marker names is allowed in markers only, so that a reader which
// finds markers by their ids finds them where the grammar has them.
//
// Formats next to those of xgrammar: rule, one of the formats in rules by its name; excludes_first
// of any_text; object of json_schema, which allows objects only; commit of const_string, behind
// which no other alternative continues; parameters, an object schema in a model's own notation of
// tool calls (parameterCompiler); choice, one of several texts; and lark, a grammar in Lark's
// notation. Next to format, thinking bounds the tokens of reasoning, and
// the format anything allows all tokens.
//
// # Ownership
//
// A Grammar and a Vocabulary are immutable and shared. An Automaton caches and belongs to one
// goroutine at a time, together with its Matchers: callers that share it lock.
//
// # JSON Schema
//
// Keywords that assert something are enforced or refused by name and JSON pointer. Annotations,
// unknown keywords and unknown formats are ignored and counted, as draft 2020-12 demands; the known
// formats are those of stringFormats and integerFormats. Output is narrower than JSON:
//
//   - Members come in the order of properties, then required, then others.
//   - Integers have no fraction, and numbers with bounds no exponent.
//   - A slash is not escaped. Strings with a pattern use escapes only where JSON needs them, and
//     so do other keys as long as they may still become a declared one.
//   - Between tokens there is nothing, a space, or a newline and indentation (Limits.Whitespace).
//     There is no whitespace around the text.
//
// Keys that are not declared may repeat, so that minProperties counts a repeated key twice.
//
// The package does not sample, and knows nothing of requests.
package grammar
