package tokenizer

import (
	"slices"
	"strings"
)

// scanner returns the end of the pre-token that begins at s[i]; i < len(s), and
// the end is larger than i. A lookahead at the end of s finds nothing, as in the
// reference, which splits each piece by itself.
type scanner func(t *charTable, s string, i int) int

// stage is one pre-tokenizer of the file's sequence. Each stage cuts the pieces
// of the one before.
type stage struct {
	scan        scanner // nil: the piece stays whole
	prefixSpace bool    // a piece that does not begin with a space gets one
	meta        *metaspace
}

// pattern is a regular expression that this package has a scanner for.
type pattern struct {
	name string
	expr string
	scan scanner
}

// patterns are the known splitting expressions that match every character, by the family that
// brought them into use. A new one is a new line here and a scanner below.
var patterns = []pattern{
	{"gpt2", `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`, scanGPT2},
	{"gpt2", `'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`, scanGPT2},
	{"llama3", `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`, scanLlama3},
	{"qwen2", `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`, scanQwen2},
	{"o200k", `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`, scanO200K},
	{"tekken", `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`, scanTekken},
	{"kimi", `[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`, scanKimi},
}

// findPattern returns the scanner of an expression. whole reports whether it matches every
// character.
func findPattern(expr string) (scan scanner, whole, ok bool) {
	for _, p := range patterns {
		if p.expr == expr {
			return p.scan, true, true
		}
	}
	for _, p := range slices.Concat(deepseekV3, deepseekLLM) {
		if p.expr == expr {
			return p.scan, false, true
		}
	}
	return nil, false, false
}

// scanGPT2 is the pattern of the ByteLevel pre-tokenizer with use_regex.
func scanGPT2(t *charTable, s string, i int) int {
	if s[i] == '\'' {
		if end := contraction(s, i); end > 0 {
			return end
		}
	}
	c, width := t.at(s, i)
	start := i // of the run, behind an optional space
	if s[i] == ' ' && i+1 < len(s) {
		c, width = t.at(s, i+1)
		if c&space != 0 {
			return spaces(t, s, i)
		}
		start = i + 1
	}
	switch {
	case c&letter != 0:
		return t.run(s, start+width, letter)
	case c&number != 0:
		return t.run(s, start+width, number)
	case c&space != 0:
		return spaces(t, s, i)
	}
	return t.runNot(s, start+width, space|letter|number)
}

func scanLlama3(t *charTable, s string, i int) int { return scanCL100K(t, s, i, 3) }
func scanQwen2(t *charTable, s string, i int) int  { return scanCL100K(t, s, i, 1) }

// scanCL100K is the family of patterns that began with OpenAI's cl100k; digits
// is the most that stay together.
func scanCL100K(t *charTable, s string, i, digits int) int {
	if s[i] == '\'' {
		if end := contractionFold(s, i); end > 0 {
			return end
		}
	}
	c, width := t.at(s, i)
	if c&letter != 0 {
		return t.run(s, i+width, letter)
	}
	if c&number != 0 {
		return atMost(t, s, i+width, number, digits-1)
	}
	newline := s[i] == '\r' || s[i] == '\n'
	if !newline && i+width < len(s) {
		if next, w := t.at(s, i+width); next&letter != 0 {
			return t.run(s, i+width+w, letter)
		}
	}
	if end := signs(t, s, i); end > 0 {
		return newlines(s, end)
	}
	return spacesAndLines(t, s, i)
}

func scanO200K(t *charTable, s string, i int) int {
	return scanCased(t, s, i, casing{digits: 3, tail: contractionFold, slashes: true})
}

func scanTekken(t *charTable, s string, i int) int {
	return scanCased(t, s, i, casing{digits: 1, slashes: true})
}

// scanKimi is scanO200K with words of Han characters, which no other word has.
func scanKimi(t *charTable, s string, i int) int {
	if end := t.run(s, i, han); end > i {
		return end
	}
	return scanCased(t, s, i, casing{digits: 3, tail: contractionFold, avoid: han})
}

// casing is how a pattern of scanCased differs from others.
type casing struct {
	digits  int                   // the most that stay together
	tail    func(string, int) int // finds what may follow a word, 0 for nothing; nil: nothing may
	slashes bool                  // signs end in line breaks and slashes, not in line breaks alone
	avoid   class                 // characters that are in no word
}

// scanCased is the family of patterns that began with OpenAI's o200k, which cut
// words where case changes.
func scanCased(t *charTable, s string, i int, p casing) int {
	c, width := t.at(s, i)
	start := i // of the word, behind one sign that may lead it
	if c&(letter|number) == 0 && s[i] != '\r' && s[i] != '\n' {
		start += width
	}
	end, lowered := casedWord(t, s, start, p.avoid)
	if !lowered && start > i && c&lower != 0 && c&p.avoid == 0 {
		// The sign is a mark. A word of upper case alone is the second
		// choice; the first is a word of lower case, as the mark alone is.
		end, start = i+width, i
	}
	if end > start {
		if end < len(s) && s[end] == '\'' && p.tail != nil {
			return max(end, p.tail(s, end))
		}
		return end
	}
	if c&number != 0 {
		return atMost(t, s, i+width, number, p.digits-1)
	}
	if end := signs(t, s, i); end > 0 {
		for end < len(s) && (s[end] == '\r' || s[end] == '\n' || p.slashes && s[end] == '/') {
			end++
		}
		return end
	}
	return spacesAndLines(t, s, i)
}

// casedWord returns the end of `U*L+` at i, U being upper and L lower, which
// share what has no case; where there is no L, the end of `U*` and false.
// Characters of a class to avoid end a word.
func casedWord(t *charTable, s string, i int, avoid class) (end int, lowered bool) {
	both := 0 // end of the last character in U that is in L too
	for i < len(s) {
		c, width := t.at(s, i)
		if c&avoid != 0 {
			break
		}
		if c&upper == 0 {
			if c&lower != 0 {
				return t.runOf(s, i+width, lower, avoid), true
			}
			break
		}
		i += width
		if c&lower != 0 {
			both = i
		}
	}
	if both > 0 {
		return both, true
	}
	return i, false
}

// runOf is run for characters that have none of the properties in avoid.
func (t *charTable) runOf(s string, i int, want, avoid class) int {
	if avoid == 0 {
		return t.run(s, i, want)
	}
	for i < len(s) {
		c, width := t.at(s, i)
		if c&want == 0 || c&avoid != 0 {
			break
		}
		i += width
	}
	return i
}

// signs returns the end of ` ?[^\s\p{L}\p{N}]+` at i, or 0.
func signs(t *charTable, s string, i int) int {
	if s[i] == ' ' {
		i++
	}
	if end := t.runNot(s, i, space|letter|number); end > i {
		return end
	}
	return 0
}

// spacesAndLines is `\s*[\r\n]+|\s+(?!\S)|\s+` at a white space.
func spacesAndLines(t *charTable, s string, i int) int {
	end, last := t.spacesAndNewline(s, i)
	if last > 0 {
		return last
	}
	return trimLast(t, s, i, end)
}

// spaces is `\s+(?!\S)|\s+` at a white space.
func spaces(t *charTable, s string, i int) int {
	return trimLast(t, s, i, t.run(s, i, space))
}

// trimLast leaves the last of several white spaces s[i:end] to what follows it.
func trimLast(t *charTable, s string, i, end int) int {
	if end == len(s) {
		return end
	}
	_, width := t.before(s, end)
	if end-width > i {
		return end - width
	}
	return end
}

// spacesAndNewline returns the end of the white space from i, and the end of
// the last line break in it, 0 without one.
func (t *charTable) spacesAndNewline(s string, i int) (end, last int) {
	for i < len(s) {
		c, width := t.at(s, i)
		if c&space == 0 {
			break
		}
		if s[i] == '\r' || s[i] == '\n' {
			last = i + 1
		}
		i += width
	}
	return i, last
}

func newlines(s string, i int) int {
	for i < len(s) && (s[i] == '\r' || s[i] == '\n') {
		i++
	}
	return i
}

// atMost is run limited to n characters.
func atMost(t *charTable, s string, i int, want class, n int) int {
	for ; n > 0 && i < len(s); n-- {
		c, width := t.at(s, i)
		if c&want == 0 {
			break
		}
		i += width
	}
	return i
}

// contraction returns the end of 's, 't, 're, 've, 'm, 'll or 'd at s[i], or 0.
func contraction(s string, i int) int {
	if i+1 >= len(s) {
		return 0
	}
	switch s[i+1] {
	case 's', 't', 'm', 'd':
		return i + 2
	}
	if i+2 < len(s) {
		switch s[i+1 : i+3] {
		case "re", "ve", "ll":
			return i + 3
		}
	}
	return 0
}

// longS is the one character outside ASCII that folds to a letter of the
// contractions.
const longS = "ſ"

// contractionFold is contraction without regard to case.
func contractionFold(s string, i int) int {
	if i+1 >= len(s) {
		return 0
	}
	switch s[i+1] | 0x20 {
	case 's', 't', 'm', 'd':
		return i + 2
	}
	if strings.HasPrefix(s[i+1:], longS) {
		return i + 1 + len(longS)
	}
	if i+2 < len(s) {
		switch [2]byte{s[i+1] | 0x20, s[i+2] | 0x20} {
		case [2]byte{'r', 'e'}, [2]byte{'v', 'e'}, [2]byte{'l', 'l'}:
			return i + 3
		}
	}
	return 0
}

// scanDigits is the Digits pre-tokenizer: runs of numeric characters and of
// others.
func scanDigits(t *charTable, s string, i int) int {
	if c, _ := t.at(s, i); c&numeric != 0 {
		return t.run(s, i, numeric)
	}
	return t.runNot(s, i, numeric)
}

// scanEachDigit is Digits with individual_digits.
func scanEachDigit(t *charTable, s string, i int) int {
	if c, width := t.at(s, i); c&numeric != 0 {
		return i + width
	}
	return t.runNot(s, i, numeric)
}
