package jinja

import (
	"strings"
	"unicode"
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

type casing struct{ upper, title string }

var multi = func() map[rune]casing {
	m := map[rune]casing{}
	for entry := range strings.SplitSeq(multiCase, ",") {
		parts := strings.Split(entry, " ")
		c := casing{parts[1], parts[len(parts)-1]}
		m[[]rune(parts[0])[0]] = c
	}
	return m
}()

// upper is str.upper.
func upper(s string) string {
	if isASCII(s) {
		return strings.ToUpper(s)
	}
	var b strings.Builder
	for _, c := range s {
		if m, ok := multi[c]; ok {
			b.WriteString(m.upper)
		} else {
			b.WriteRune(unicode.ToUpper(c))
		}
	}
	return b.String()
}

// lower is str.lower.
func lower(s string) string {
	if isASCII(s) {
		return strings.ToLower(s)
	}
	var b strings.Builder
	rs := []rune(s)
	for i := range rs {
		writeLower(&b, rs, i)
	}
	return b.String()
}

// capitalize is str.capitalize.
func capitalize(s string) string {
	var b strings.Builder
	rs := []rune(s)
	for i, c := range rs {
		if i == 0 {
			writeTitle(&b, c)
		} else {
			writeLower(&b, rs, i)
		}
	}
	return b.String()
}

// title is str.title: a letter after anything without case is a capital.
func title(s string) string {
	var b strings.Builder
	rs := []rune(s)
	inWord := false
	for i, c := range rs {
		if inWord {
			writeLower(&b, rs, i)
		} else {
			writeTitle(&b, c)
		}
		inWord = isCased(c)
	}
	return b.String()
}

func writeTitle(b *strings.Builder, c rune) {
	if m, ok := multi[c]; ok {
		b.WriteString(m.title)
	} else {
		b.WriteRune(unicode.ToTitle(c))
	}
}

func writeLower(b *strings.Builder, rs []rune, i int) {
	switch c := rs[i]; {
	case c == 'İ':
		b.WriteString("i̇")
	case c == 'Σ' && finalSigma(rs, i):
		b.WriteRune('ς')
	default:
		b.WriteRune(unicode.ToLower(c))
	}
}

// finalSigma reports whether the sigma at rs[i] ends a word: a letter comes
// before it and none after, looking past what has no bearing on case.
func finalSigma(rs []rune, i int) bool {
	j := i - 1
	for j >= 0 && caseIgnorable(rs[j]) {
		j--
	}
	if j < 0 || !isCased(rs[j]) {
		return false
	}
	j = i + 1
	for j < len(rs) && caseIgnorable(rs[j]) {
		j++
	}
	return j == len(rs) || !isCased(rs[j])
}

func isUpper(c rune) bool { return unicode.IsUpper(c) || unicode.Is(unicode.Other_Uppercase, c) }
func isLower(c rune) bool { return unicode.IsLower(c) || unicode.Is(unicode.Other_Lowercase, c) }
func isCased(c rune) bool { return isUpper(c) || isLower(c) || unicode.IsTitle(c) }

func caseIgnorable(c rune) bool {
	return unicode.In(c, unicode.Mn, unicode.Me, unicode.Cf, unicode.Lm, unicode.Sk) || strings.ContainsRune("'.:\u00b7\u0387\u055f\u05f4\u2018\u2019\u2024\u2027\ufe13\ufe52\ufe55\uff07\uff0e\uff1a", c)
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}
