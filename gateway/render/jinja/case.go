package jinja

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// multiCase lists the characters whose capitals are more than one character, as
// "small upper title", from Unicode's SpecialCasing. Go maps single characters
// only. Where the title form is missing it equals the upper one.
const multiCase = `ß SS Ss,ŉ ʼN,ǰ J̌,ΐ Ϊ́,ΰ Ϋ́,և ԵՒ Եւ,ẖ H̱,ẗ T̈,ẘ W̊,ẙ Y̊,ẚ Aʾ,ὐ Υ̓,ὒ Υ̓̀,ὔ Υ̓́,ὖ Υ̓͂,ᾀ ἈΙ ᾈ,ᾁ ἉΙ ᾉ,ᾂ ἊΙ ᾊ,ᾃ ἋΙ ᾋ,` +
	`ᾄ ἌΙ ᾌ,ᾅ ἍΙ ᾍ,ᾆ ἎΙ ᾎ,ᾇ ἏΙ ᾏ,ᾈ ἈΙ ᾈ,ᾉ ἉΙ ᾉ,ᾊ ἊΙ ᾊ,ᾋ ἋΙ ᾋ,ᾌ ἌΙ ᾌ,ᾍ ἍΙ ᾍ,ᾎ ἎΙ ᾎ,ᾏ ἏΙ ᾏ,ᾐ ἨΙ ᾘ,ᾑ ἩΙ ᾙ,ᾒ ἪΙ ᾚ,ᾓ ἫΙ ᾛ,` +
	`ᾔ ἬΙ ᾜ,ᾕ ἭΙ ᾝ,ᾖ ἮΙ ᾞ,ᾗ ἯΙ ᾟ,ᾘ ἨΙ ᾘ,ᾙ ἩΙ ᾙ,ᾚ ἪΙ ᾚ,ᾛ ἫΙ ᾛ,ᾜ ἬΙ ᾜ,ᾝ ἭΙ ᾝ,ᾞ ἮΙ ᾞ,ᾟ ἯΙ ᾟ,ᾠ ὨΙ ᾨ,ᾡ ὩΙ ᾩ,ᾢ ὪΙ ᾪ,ᾣ ὫΙ ᾫ,` +
	`ᾤ ὬΙ ᾬ,ᾥ ὭΙ ᾭ,ᾦ ὮΙ ᾮ,ᾧ ὯΙ ᾯ,ᾨ ὨΙ ᾨ,ᾩ ὩΙ ᾩ,ᾪ ὪΙ ᾪ,ᾫ ὫΙ ᾫ,ᾬ ὬΙ ᾬ,ᾭ ὭΙ ᾭ,ᾮ ὮΙ ᾮ,ᾯ ὯΙ ᾯ,ᾲ ᾺΙ Ὰͅ,ᾳ ΑΙ ᾼ,ᾴ ΆΙ Άͅ,ᾶ Α͂,` +
	`ᾷ Α͂Ι ᾼ͂,ᾼ ΑΙ ᾼ,ῂ ῊΙ Ὴͅ,ῃ ΗΙ ῌ,ῄ ΉΙ Ήͅ,ῆ Η͂,ῇ Η͂Ι ῌ͂,ῌ ΗΙ ῌ,ῒ Ϊ̀,ΐ Ϊ́,ῖ Ι͂,ῗ Ϊ͂,ῢ Ϋ̀,ΰ Ϋ́,ῤ Ρ̓,ῦ Υ͂,ῧ Ϋ͂,` +
	`ῲ ῺΙ Ὼͅ,ῳ ΩΙ ῼ,ῴ ΏΙ Ώͅ,ῶ Ω͂,ῷ Ω͂Ι ῼ͂,ῼ ΩΙ ῼ,ﬀ FF Ff,ﬁ FI Fi,ﬂ FL Fl,ﬃ FFI Ffi,ﬄ FFL Ffl,ﬅ ST St,ﬆ ST St,ﬓ ՄՆ Մն,` +
	`ﬔ ՄԵ Մե,ﬕ ՄԻ Մի,ﬖ ՎՆ Վն,ﬗ ՄԽ Մխ`

// multiUpper and multiTitle map the characters of multiCase.
var multiUpper, multiTitle = func() (upper *strings.Replacer, title map[rune]string) {
	var pairs []string
	title = map[rune]string{}
	for entry := range strings.SplitSeq(multiCase, ",") {
		parts := strings.Split(entry, " ")
		pairs = append(pairs, parts[:2]...)
		title[[]rune(parts[0])[0]] = parts[len(parts)-1]
	}
	return strings.NewReplacer(pairs...), title
}()

// upper is str.upper.
func upper(s string) string { return strings.ToUpper(multiUpper.Replace(s)) }

// lower is str.lower.
func lower(s string) string {
	if isASCII(s) {
		return strings.ToLower(s)
	}
	return recase(s, func(int, rune) bool { return false })
}

// capitalize is str.capitalize.
func capitalize(s string) string { return recase(s, func(i int, _ rune) bool { return i == 0 }) }

// title is str.title: a letter after a character without case is a capital.
func title(s string) string {
	return recase(s, func(_ int, before rune) bool { return !isCased(before) })
}

var word = regexp.MustCompile(`[^-({\[<\s\v\x1c-\x1f\x{85}\p{Z}]+`)

// jinjaTitle is the filter title, which differs from str.title: words begin only after
// white space, dashes and opening brackets.
func jinjaTitle(s string) string {
	return word.ReplaceAllStringFunc(s, func(w string) string {
		first := byteOffset(w, 1)
		return upper(w[:first]) + lower(w[first:])
	})
}

// recase returns s with the characters for which initial holds in title case and all others in
// lower case. initial gets the byte offset of a character and the character before it.
func recase(s string, initial func(i int, before rune) bool) string {
	var b strings.Builder
	before := rune(0)
	for i, c := range s {
		capitals, isMulti := multiTitle[c]
		switch titled := initial(i, before); {
		case titled && isMulti:
			b.WriteString(capitals)
		case titled:
			b.WriteRune(unicode.ToTitle(c))
		case c == 'İ':
			b.WriteString("i̇")
		case c == 'Σ' && finalSigma(s[:i], s[i+len("Σ"):]):
			b.WriteRune('ς')
		default:
			b.WriteRune(unicode.ToLower(c))
		}
		before = c
	}
	return b.String()
}

// finalSigma reports whether a sigma between two texts ends a word: a letter comes
// before it and none after, past characters that are ignored for case.
func finalSigma(before, after string) bool {
	last, _ := utf8.DecodeLastRuneInString(strings.TrimRightFunc(before, caseIgnorable))
	next, _ := utf8.DecodeRuneInString(strings.TrimLeftFunc(after, caseIgnorable))
	return isCased(last) && !isCased(next)
}

func isUpper(c rune) bool { return unicode.IsUpper(c) || unicode.Is(unicode.Other_Uppercase, c) }
func isLower(c rune) bool { return unicode.IsLower(c) || unicode.Is(unicode.Other_Lowercase, c) }
func isCased(c rune) bool { return isUpper(c) || isLower(c) || unicode.IsTitle(c) }

func caseIgnorable(c rune) bool {
	return unicode.In(c, unicode.Mn, unicode.Me, unicode.Cf, unicode.Lm, unicode.Sk) || strings.ContainsRune("'.:\u00b7\u0387\u055f\u05f4\u2018\u2019\u2024\u2027\ufe13\ufe52\ufe55\uff07\uff0e\uff1a", c)
}

func isASCII(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c >= utf8.RuneSelf })
}
