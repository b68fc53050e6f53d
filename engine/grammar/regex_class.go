package grammar

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

var (
	digitChars = []runeRange{{'0', '9'}}
	wordChars  = []runeRange{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}
	spaceChars = []runeRange{{'\t', '\r'}, {' ', ' '}, {0xA0, 0xA0}, {0x1680, 0x1680}, {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}}
)

// escape reads an escape outside a class.
func (p *regexParser) escape() (*anchoredPart, error) {
	if p.at+1 >= len(p.text) {
		return nil, p.bad("ends with a backslash")
	}
	switch c := p.text[p.at+1]; {
	case c == 'b' || c == 'B':
		return nil, p.bad("has a word boundary")
	case c == 'A':
		p.at += 2
		return &anchoredPart{anchor: '^'}, nil
	case c == 'z' || c == 'Z':
		p.at += 2
		return &anchoredPart{anchor: '$'}, nil
	case '1' <= c && c <= '9' || c == 'k':
		return nil, p.bad("has a back-reference")
	}
	set, err := p.classEscape()
	if err != nil {
		return nil, err
	}
	return &anchoredPart{e: charsOf(modeRaw, p.folded(set))}, nil
}

// classEscape reads an escape of one character or of a class.
func (p *regexParser) classEscape() ([]runeRange, error) {
	p.at++
	if p.at >= len(p.text) {
		return nil, p.bad("ends with a backslash")
	}
	r, n := utf8.DecodeRuneInString(p.text[p.at:])
	p.at += n
	one := func(r rune) ([]runeRange, error) { return []runeRange{{r, r}}, nil }
	switch r {
	case 'd':
		return digitChars, nil
	case 'D':
		return minus(allChars, digitChars), nil
	case 'w':
		return wordChars, nil
	case 'W':
		return minus(allChars, wordChars), nil
	case 's':
		return spaceChars, nil
	case 'S':
		return minus(allChars, spaceChars), nil
	case 'n':
		return one('\n')
	case 'r':
		return one('\r')
	case 't':
		return one('\t')
	case 'f':
		return one('\f')
	case 'v':
		return one('\v')
	case 'a':
		return one('\a')
	case 'e':
		return one(0x1B)
	case '0':
		return one(0)
	case 'c':
		if p.at < len(p.text) && unicode.IsLetter(rune(p.text[p.at])) {
			p.at++
			return one(rune(p.text[p.at-1] & 31))
		}
		return nil, p.bad("has \\c without a letter")
	case 'x', 'u', 'U':
		return p.hexEscape(r)
	case 'p', 'P':
		return p.property(r == 'P')
	}
	if r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r)) {
		return nil, p.bad("has an unknown escape \\%c", r)
	}
	return one(r)
}

func (p *regexParser) hexEscape(kind rune) ([]runeRange, error) {
	digits := map[rune]int{'x': 2, 'u': 4, 'U': 8}[kind]
	rest := p.text[p.at:]
	if strings.HasPrefix(rest, "{") {
		end := strings.IndexByte(rest, '}')
		if end < 0 {
			return nil, p.bad("has an escape without }")
		}
		rest = rest[1:end]
		p.at += end + 1
	} else {
		if len(rest) < digits {
			return nil, p.bad("has a short escape")
		}
		rest = rest[:digits]
		p.at += digits
	}
	v, err := strconv.ParseUint(rest, 16, 32)
	if err != nil || v > unicode.MaxRune {
		return nil, p.bad("has a bad escape %q", rest)
	}
	r := rune(v)
	if kind == 'u' && 0xD800 <= r && r < 0xDC00 && strings.HasPrefix(p.text[p.at:], `\u`) && len(p.text) >= p.at+6 {
		if low, err := strconv.ParseUint(p.text[p.at+2:p.at+6], 16, 32); err == nil && 0xDC00 <= low && low < 0xE000 {
			p.at += 6
			r = 0x10000 + (r-0xD800)<<10 + rune(low) - 0xDC00
		}
	}
	return []runeRange{{r, r}}, nil
}

// property reads the name of \p or \P.
func (p *regexParser) property(not bool) ([]runeRange, error) {
	rest := p.text[p.at:]
	name := ""
	if strings.HasPrefix(rest, "{") {
		end := strings.IndexByte(rest, '}')
		if end < 0 {
			return nil, p.bad("has \\p without }")
		}
		name = rest[1:end]
		p.at += end + 1
	} else if rest != "" {
		name = rest[:1]
		p.at++
	}
	if strings.HasPrefix(name, "^") {
		not, name = !not, name[1:]
	}
	for _, prefix := range []string{"Script=", "sc=", "General_Category=", "gc=", "Script_Extensions=", "scx="} {
		name = strings.TrimPrefix(name, prefix)
	}
	if long, ok := longCategories[name]; ok {
		name = long
	}
	table, ok := unicode.Categories[name]
	if !ok {
		table, ok = unicode.Scripts[name]
	}
	var out []runeRange
	switch {
	case ok:
		for _, r := range table.R16 {
			out = appendStride(out, rune(r.Lo), rune(r.Hi), rune(r.Stride))
		}
		for _, r := range table.R32 {
			out = appendStride(out, rune(r.Lo), rune(r.Hi), rune(r.Stride))
		}
	case name == "Any":
		out = allChars
	case name == "ASCII":
		out = []runeRange{{0, 0x7F}}
	default:
		return nil, p.bad("has an unknown property %q", name)
	}
	out = normalize(out)
	if not {
		out = minus(allChars, out)
	}
	return out, nil
}

func appendStride(out []runeRange, lo, hi, stride rune) []runeRange {
	if stride == 1 {
		return append(out, runeRange{lo, hi})
	}
	for r := lo; r <= hi; r += stride {
		out = append(out, runeRange{r, r})
	}
	return out
}

var longCategories = map[string]string{
	"Letter": "L", "Lowercase_Letter": "Ll", "Uppercase_Letter": "Lu", "Titlecase_Letter": "Lt", "Modifier_Letter": "Lm", "Other_Letter": "Lo",
	"Mark": "M", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Punctuation": "P", "punct": "P", "Symbol": "S", "Separator": "Z",
	"Space_Separator": "Zs", "Control": "Cc", "Other": "C",
}

// class reads a bracketed class.
func (p *regexParser) class() ([]runeRange, error) {
	p.at++
	not := strings.HasPrefix(p.text[p.at:], "^")
	if not {
		p.at++
	}
	var set []runeRange
	for {
		if p.at >= len(p.text) {
			return nil, p.bad("has an unmatched [")
		}
		if p.text[p.at] == ']' {
			p.at++
			break
		}
		lo, err := p.classItem()
		if err != nil {
			return nil, err
		}
		if len(lo) == 1 && lo[0].lo == lo[0].hi && p.at+1 < len(p.text) && p.text[p.at] == '-' && p.text[p.at+1] != ']' {
			p.at++
			hi, err := p.classItem()
			if err != nil {
				return nil, err
			}
			switch {
			case len(hi) != 1 || hi[0].lo != hi[0].hi: // [a-\d]: three members
				set = append(set, runeRange{'-', '-'})
				set = append(set, hi...)
			case hi[0].lo < lo[0].lo:
				return nil, p.bad("has a range from %q to %q", lo[0].lo, hi[0].lo)
			default:
				lo = []runeRange{{lo[0].lo, hi[0].lo}}
			}
		}
		set = append(set, lo...)
	}
	set = normalize(p.folded(set))
	if not {
		return minus(allChars, set), nil
	}
	return set, nil
}

func (p *regexParser) classItem() ([]runeRange, error) {
	rest := p.text[p.at:]
	if strings.HasPrefix(rest, "[:") {
		if end := strings.Index(rest, ":]"); end > 0 {
			if set, ok := posixClasses[rest[2:end]]; ok {
				p.at += end + 2
				return set, nil
			}
		}
	}
	if rest[0] == '\\' {
		if strings.HasPrefix(rest, `\b`) {
			p.at += 2
			return []runeRange{{'\b', '\b'}}, nil
		}
		return p.classEscape()
	}
	r, n := utf8.DecodeRuneInString(rest)
	p.at += n
	return []runeRange{{r, r}}, nil
}

var posixClasses = map[string][]runeRange{
	"alpha": {{'A', 'Z'}, {'a', 'z'}}, "digit": digitChars, "alnum": {{'0', '9'}, {'A', 'Z'}, {'a', 'z'}}, "lower": {{'a', 'z'}},
	"upper": {{'A', 'Z'}}, "space": {{'\t', '\r'}, {' ', ' '}}, "xdigit": {{'0', '9'}, {'A', 'F'}, {'a', 'f'}}, "word": wordChars,
	"punct": {{'!', '/'}, {':', '@'}, {'[', '`'}, {'{', '~'}}, "blank": {{'\t', '\t'}, {' ', ' '}}, "cntrl": {{0, 0x1F}, {0x7F, 0x7F}},
	"print": {{' ', '~'}}, "graph": {{'!', '~'}},
}
