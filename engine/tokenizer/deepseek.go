package tokenizer

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// The expressions of DeepSeek leave characters between their matches, which are pieces, too.

// deepseekV3 are the expressions of DeepSeek-V3, R1 and later, one behind the other.
var deepseekV3 = []pattern{
	{"deepseek3-digits", `\p{N}{1,3}`, scanThreeDigits},
	{"deepseek3-cjk", "[一-龥\u3040-ゟ゠-ヿ]+", runesOf(0x3040, 0x309f, 0x30a0, 0x30ff, 0x4e00, 0x9fa5).scanner(false)},
	{"deepseek3", "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+", scanDeepseek3},
}

// deepseekLLM are the expressions of DeepSeek-LLM and DeepSeek-V2, of which Digits is the last.
var deepseekLLM = []pattern{
	{"deepseek-lines", "[\r\n]", scanLineBreaks},
	{"deepseek-letters", `\s?[` + deepseekLetters.class() + `]+`, deepseekLetters.scanner(true)},
	{"deepseek-signs", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", runesOf('!', '/', ':', '~', 0x2018, 0x201f, 0x3000, 0x3002, 0xff01, 0xff0f, 0xff1a, 0xff5e).scanner(true)},
	{"deepseek-end", `\s+$`, scanSpacesAtEnd},
	{"deepseek-cjk", "[一-龥\u0800-一가-\ud7ff]+", runesOf(0x800, 0x9fa5, 0xac00, 0xd7ff).scanner(false)},
}

// deepseekLetters are the letters with case of DeepSeek-V2, as its files list them.
var deepseekLetters = runesOf(
	0x41, 0x5a, 0x61, 0x7a, 0xb5, 0xb5, 0xc0, 0xd6, 0xd8, 0xf6, 0xf8, 0x1ba, 0x1bc, 0x1bf, 0x1c4, 0x293, 0x295, 0x2af, 0x370, 0x373, 0x376, 0x376, 0x377, 0x377,
	0x37b, 0x37d, 0x37f, 0x37f, 0x386, 0x386, 0x388, 0x38a, 0x38c, 0x38c, 0x38e, 0x3a1, 0x3a3, 0x3f5, 0x3f7, 0x481, 0x48a, 0x52f, 0x531, 0x556, 0x10a0, 0x10c5,
	0x13a0, 0x13f5, 0x13f8, 0x13fd, 0x1c90, 0x1cba, 0x1cbd, 0x1cbf, 0x1d00, 0x1d2b, 0x1d6b, 0x1d77, 0x1d79, 0x1d9a, 0x1e00, 0x1f15, 0x1f18, 0x1f1d,
	0x1f20, 0x1f45, 0x1f48, 0x1f4d, 0x1f50, 0x1f57, 0x1f59, 0x1f59, 0x1f5b, 0x1f5b, 0x1f5d, 0x1f5d, 0x1f5f, 0x1f7d, 0x1f80, 0x1fb4, 0x1fb6, 0x1fbc, 0x1fbe, 0x1fbe,
	0x1fc2, 0x1fc4, 0x1fc6, 0x1fcc, 0x1fd0, 0x1fd3, 0x1fd6, 0x1fdb, 0x1fe0, 0x1fec, 0x1ff2, 0x1ff4, 0x1ff6, 0x1ffc, 0x2102, 0x2102, 0x2107, 0x2107, 0x210a, 0x2113,
	0x2115, 0x2115, 0x2119, 0x211d, 0x2124, 0x2124, 0x2126, 0x2126, 0x2128, 0x2128, 0x212a, 0x212d, 0x212f, 0x2134, 0x2139, 0x2139, 0x213c, 0x213f, 0x2145, 0x2149,
	0x214e, 0x214e, 0x2183, 0x2183, 0x2184, 0x2184, 0x2c00, 0x2c7b, 0x2c7e, 0x2ce4, 0x2ceb, 0x2cee, 0x2cf2, 0x2cf2, 0x2cf3, 0x2cf3, 0xa640, 0xa66d, 0xa680, 0xa69b,
	0xa722, 0xa76f, 0xa771, 0xa787, 0xa78b, 0xa78e, 0xab70, 0xabbf, 0xfb00, 0xfb06, 0xfb13, 0xfb17, 0xff21, 0xff3a, 0xff41, 0xff5a, 0x10400, 0x1044f,
	0x104b0, 0x104d3, 0x104d8, 0x104fb, 0x10c80, 0x10cb2, 0x10cc0, 0x10cf2, 0x118a0, 0x118df, 0x1e900, 0x1e943,
)

// runes is a set of code points: ranges, first and last, in increasing order.
type runes [][2]rune

func runesOf(bounds ...rune) (set runes) {
	for r := range slices.Chunk(bounds, 2) {
		set = append(set, [2]rune(r))
	}
	return set
}

// class returns the set as the inner part of a character class.
func (set runes) class() string {
	var b strings.Builder
	for _, r := range set {
		b.WriteRune(r[0])
		if r[1] > r[0] {
			b.WriteString("-" + string(r[1]))
		}
	}
	return b.String()
}

// at reports whether the character at s[i] is in the set, and its width in bytes; false at the end.
func (set runes) at(s string, i int) (in bool, width int) {
	if i == len(s) {
		return false, 0
	}
	r, width := utf8.DecodeRuneInString(s[i:])
	_, in = slices.BinarySearchFunc(set, r, func(have [2]rune, r rune) int {
		switch {
		case have[1] < r:
			return -1
		case have[0] > r:
			return 1
		}
		return 0
	})
	return in, width
}

// begins returns where the first character of the set is in a match at s[i]; -1: there is no match.
func (set runes) begins(t *charTable, s string, i int, lead bool) int {
	in, width := set.at(s, i)
	if c, _ := t.at(s, i); lead && c&space != 0 {
		if next, _ := set.at(s, i+width); next {
			return i + width
		}
	}
	if in {
		return i
	}
	return -1
}

// scanner returns the scanner of `[set]+`, with lead of `\s?[set]+`.
func (set runes) scanner(lead bool) scanner {
	return func(t *charTable, s string, i int) int {
		if first := set.begins(t, s, i, lead); first >= 0 {
			in, width := set.at(s, first)
			for in {
				first += width
				in, width = set.at(s, first)
			}
			return first
		}
		return between(t, s, i, func(i int) bool { return set.begins(t, s, i, lead) >= 0 })
	}
}

// between returns the next position behind s[i] at which there is a match, or the end.
func between(t *charTable, s string, i int, match func(i int) bool) int {
	for {
		_, width := t.at(s, i)
		if i += width; i == len(s) || match(i) {
			return i
		}
	}
}

// scanThreeDigits is `\p{N}{1,3}`.
func scanThreeDigits(t *charTable, s string, i int) int {
	if end := atMost(t, s, i, number, 3); end > i {
		return end
	}
	return t.runNot(s, i, number)
}

// scanLineBreaks is `[\r\n]`.
func scanLineBreaks(_ *charTable, s string, i int) int {
	if s[i] == '\r' || s[i] == '\n' {
		return i + 1
	}
	if n := strings.IndexAny(s[i:], "\r\n"); n >= 0 {
		return i + n
	}
	return len(s)
}

// scanSpacesAtEnd is `\s+$`, in pieces that have no line break or are one.
func scanSpacesAtEnd(t *charTable, s string, i int) int {
	end := len(s)
	for end > i {
		c, width := t.before(s, end)
		if c&space == 0 {
			break
		}
		end -= width
	}
	if end == i {
		return len(s)
	}
	return end
}

// scanDeepseek3 is the last expression of deepseekV3.
func scanDeepseek3(t *charTable, s string, i int) int {
	if end := deepseek3(t, s, i); end > i {
		return end
	}
	return between(t, s, i, func(i int) bool { return deepseek3(t, s, i) > i })
}

// deepseek3 returns the end of a match at s[i], or 0.
func deepseek3(t *charTable, s string, i int) int {
	const inWord = letter | upper | lower // the last two have all marks
	c, width := t.at(s, i)
	if c&sign != 0 && s[i] < utf8.RuneSelf {
		end := i + 1
		for end < len(s) && (s[end]|0x20) >= 'a' && (s[end]|0x20) <= 'z' {
			end++
		}
		if end > i+1 {
			return end
		}
	}
	if c&inWord != 0 {
		return t.run(s, i+width, inWord)
	}
	if c&sign == 0 && s[i] != '\r' && s[i] != '\n' && i+width < len(s) {
		if next, w := t.at(s, i+width); next&inWord != 0 {
			return t.run(s, i+width+w, inWord)
		}
	}
	start := i
	if s[i] == ' ' {
		start++
	}
	if end := t.run(s, start, sign); end > start {
		return newlines(s, end)
	}
	if c&space != 0 {
		return spacesAndLines(t, s, i)
	}
	return 0
}
