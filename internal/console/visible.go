package console

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/clipperhouse/displaywidth"
)

// Visible returns text that a terminal prints as it is: every control character but newline and
// tab is replaced. C0 controls and DEL become their control pictures, such as ␛ for ESC. C1
// controls, bidirectional overrides and other format characters become U+FFFD. A carriage return
// is removed. The result does not depend on where a stream of text is split.
func Visible(text string) string {
	if strings.IndexFunc(text, control) < 0 {
		return text
	}
	return strings.Map(func(r rune) rune {
		switch {
		case !control(r):
			return r
		case r == '\r':
			return -1
		case r < ' ':
			return '\u2400' + r
		case r == 0x7f:
			return '\u2421'
		}
		return unicode.ReplacementChar
	}, text)
}

// escaped returns a JSON text in which control characters are written as escapes. JSON has them
// only in strings.
func escaped(text string) string {
	var b strings.Builder
	for _, r := range text {
		if !control(r) {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&b, `\u%04x`, unit)
		}
	}
	return b.String()
}

// control reports whether a terminal may take r for more than a character of text. Soft hyphens and
// the joiners of scripts and emoji are text.
func control(r rune) bool {
	switch r {
	case '\n', '\t', '\u00ad', '\u200c', '\u200d':
		return false
	}
	return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) && !unicode.Is(unicode.Prepended_Concatenation_Mark, r)
}

// firstCluster returns the first character of text as a reader sees it, with its accents and
// joiners, and how many cells of a terminal it takes. text is not empty.
func firstCluster(text string) (cluster string, cells int) {
	if text[0] < utf8.RuneSelf && (len(text) == 1 || text[1] < utf8.RuneSelf) {
		return text[:1], 1
	}
	g := displaywidth.StringGraphemes(text)
	g.Next()
	return g.Value(), g.Width()
}
