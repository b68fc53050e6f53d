package tokenizer

import (
	_ "embed"
	"encoding/binary"
	"sync"
	"unicode/utf8"
)

// unicodeData holds the classes of every code point by the reference
// implementation's regex engine, normalizer and standard library.
// testdata/unicode.py measured them and documents the layout.
//
//go:embed unicode.bin
var unicodeData []byte

// class is a set of properties of one code point.
type class uint16

const (
	letter    class = 1 << iota // \p{L}
	number                      // \p{N}
	space                       // \s
	upper                       // [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]
	numeric                     // char::is_numeric of the Rust standard library
	word                        // \w
	composing                   // may change under NFC, alone or after another
	lower                       // [\p{Ll}\p{Lm}\p{Lo}\p{M}]
	han                         // \p{Han}, not in unicode.bin
	sign                        // [\p{P}\p{S}]
)

// hanRanges are the code points of \p{Han} in tiktoken 0.14.0.
var hanRanges = [][2]rune{
	{0x2e80, 0x2e99}, {0x2e9b, 0x2ef3}, {0x2f00, 0x2fd5}, {0x3005, 0x3005}, {0x3007, 0x3007}, {0x3021, 0x3029}, {0x3038, 0x303b}, {0x3400, 0x4dbf},
	{0x4e00, 0x9fff}, {0xf900, 0xfa6d}, {0xfa70, 0xfad9}, {0x16fe2, 0x16fe3}, {0x16ff0, 0x16ff1}, {0x20000, 0x2a6df}, {0x2a700, 0x2b739}, {0x2b740, 0x2b81d},
	{0x2b820, 0x2cea1}, {0x2ceb0, 0x2ebe0}, {0x2ebf0, 0x2ee5d}, {0x2f800, 0x2fa1d}, {0x30000, 0x3134a}, {0x31350, 0x323af},
}

const (
	pageBits  = 7 // 128 code points a page: ASCII is page 0
	pageSize  = 1 << pageBits
	pageCount = (utf8.MaxRune + 1) >> pageBits
)

// charTable holds the measured character data in the form that scanning needs.
type charTable struct {
	page      [pageCount]uint16 // index into pages
	pages     [][pageSize]class // distinct pages
	ascii     [pageSize]class   // the first page once more, near at hand
	ccc       map[rune]uint8    // canonical combining class, zero left out
	decompose map[rune][]rune   // full canonical decomposition, Hangul left out
	compose   map[[2]rune]rune  // primary composites, Hangul left out
}

// chars builds the table once, at the first Load.
var chars = sync.OnceValue(func() *charTable {
	data := unicodeData
	next := func() int {
		v, n := binary.Uvarint(data)
		if n <= 0 {
			panic("tokenizer: unicode.bin is incomplete")
		}
		data = data[n:]
		return int(v)
	}
	flat := make([]class, utf8.MaxRune+1)
	eachRange(next, func(r rune, v int) { flat[r] = class(v) })
	for _, lo := range hanRanges {
		for r := lo[0]; r <= lo[1]; r++ {
			flat[r] |= han
		}
	}
	t := &charTable{ccc: map[rune]uint8{}, decompose: map[rune][]rune{}, compose: map[[2]rune]rune{}}
	eachRange(next, func(r rune, v int) { t.ccc[r] = uint8(v) })
	at := rune(0)
	for n := next(); n > 0; n-- {
		at += rune(next())
		parts := make([]rune, next())
		for i := range parts {
			parts[i] = rune(next())
		}
		t.decompose[at] = parts
	}
	for n := next(); n > 0; n-- {
		a, b := rune(next()), rune(next())
		t.compose[[2]rune{a, b}] = rune(next())
	}
	known := map[[pageSize]class]uint16{}
	for p := range t.page {
		content := [pageSize]class(flat[p<<pageBits:])
		index, ok := known[content]
		if !ok {
			index = uint16(len(t.pages))
			known[content] = index
			t.pages = append(t.pages, content)
		}
		t.page[p] = index
	}
	t.ascii = t.pages[t.page[0]]
	return t
})

// eachRange calls set for every code point of a (gap, length, value) list.
func eachRange(next func() int, set func(r rune, value int)) {
	end := 0
	for n := next(); n > 0; n-- {
		lo := end + next()
		end = lo + next()
		value := next()
		for r := lo; r < end; r++ {
			set(rune(r), value)
		}
	}
}

// of returns r's class; r is a valid code point.
func (t *charTable) of(r rune) class {
	return t.pages[t.page[r>>pageBits]][r&(pageSize-1)]
}

// at returns the class and width in bytes of the character at s[i]. A byte that
// begins no valid character has no class and width 1.
func (t *charTable) at(s string, i int) (class, int) {
	if b := s[i]; b < utf8.RuneSelf {
		return t.ascii[b], 1
	}
	r, width := utf8.DecodeRuneInString(s[i:])
	if width == 1 {
		return 0, 1
	}
	return t.of(r), width
}

// before returns the class of the character that ends at s[i]; i > 0.
func (t *charTable) before(s string, i int) (class, int) {
	r, width := utf8.DecodeLastRuneInString(s[:i])
	if r == utf8.RuneError && width == 1 {
		return 0, 1
	}
	return t.of(r), width
}

// run returns the end of the longest run from i whose characters have any of
// the properties in want.
func (t *charTable) run(s string, i int, want class) int {
	for i < len(s) {
		if b := s[i]; b < utf8.RuneSelf {
			if t.ascii[b]&want == 0 {
				return i
			}
			i++
			continue
		}
		c, width := t.at(s, i)
		if c&want == 0 {
			return i
		}
		i += width
	}
	return i
}

// runNot is run for characters that have none of the properties in avoid.
func (t *charTable) runNot(s string, i int, avoid class) int {
	for i < len(s) {
		if b := s[i]; b < utf8.RuneSelf {
			if t.ascii[b]&avoid != 0 {
				return i
			}
			i++
			continue
		}
		c, width := t.at(s, i)
		if c&avoid != 0 {
			return i
		}
		i += width
	}
	return i
}
