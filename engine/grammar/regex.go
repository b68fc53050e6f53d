package grammar

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// regexParser reads a regular expression in the syntax that ECMA-262, RE2 and Python share. What
// no automaton can do is refused: look-around, back-references, word boundaries.
type regexParser struct {
	text    string
	at      int
	depth   int
	limits  *Limits
	fold    bool
	dotAll  bool
	keyword string // for errors
	pointer string
}

// anchored is an alternative of a pattern with the anchors at its ends.
type anchored struct {
	begin, end bool
	e          *expr
	parts      []*anchoredPart // before they are joined
}

// anchoredPart is a factor: an expression, a group of alternatives, or an anchor.
type anchoredPart struct {
	e      *expr
	group  []*anchored // a group that has anchors
	anchor byte        // '^', '$' or 0
}

var dotChars = minus(allChars, []runeRange{{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}})

// parsePattern returns the texts in modeRaw that contain a match of a pattern, as JSON Schema's
// pattern asks. With whole the match is all of the text.
func parsePattern(text, keyword, pointer string, whole bool, limits *Limits) (*expr, error) {
	p := &regexParser{text: text, limits: limits, keyword: keyword, pointer: pointer}
	if len(text) > limits.RegexBytes {
		return nil, limitError(keyword, pointer, "bytes of a regular expression", limits.RegexBytes)
	}
	if !utf8.ValidString(text) {
		return nil, p.bad("is not UTF-8")
	}
	alts, err := p.alternatives()
	if err != nil {
		return nil, err
	}
	if p.at < len(p.text) {
		return nil, p.bad("has an unmatched )")
	}
	var flat []*anchored
	for _, a := range alts {
		f, err := p.flatten(a)
		if err != nil {
			return nil, err
		}
		flat = append(flat, f...)
	}
	anything := star(charsOf(modeRaw, allChars))
	var out []*expr
	for _, a := range flat {
		e := a.e
		if !a.begin && !whole {
			e = seq(anything, e)
		}
		if !a.end && !whole {
			e = seq(e, anything)
		}
		out = append(out, e)
	}
	return alt(out...), nil
}

func (p *regexParser) bad(format string, args ...any) error {
	return &Error{Keyword: p.keyword, Pointer: p.pointer, Reason: fmt.Sprintf("%q ", clip(p.text)) + fmt.Sprintf(format, args...)}
}

// clip shortens a text for a message.
func clip(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}

// flatten moves the anchors of groups at the ends of an alternative outwards.
func (p *regexParser) flatten(a *anchored) ([]*anchored, error) {
	out := []*anchored{{e: emptyString}}
	for i := 0; i < len(a.parts); i++ {
		part, run := a.parts[i], []*expr{emptyString} // run: parts that need no look at anchors, joined at once
		for ; i < len(a.parts) && a.parts[i].anchor == 0 && a.parts[i].group == nil; i++ {
			run = append(run, a.parts[i].e)
		}
		if len(run) > 1 {
			i--
		}
		if err := p.limits.spend(len(out) * (len(run) + i/8)); err != nil {
			return nil, err
		}
		first, last := i == 0, i == len(a.parts)-1
		var next []*anchored
		for _, o := range out {
			switch {
			case part.anchor == '^' && o.e.kind == kindEmpty:
				next = append(next, &anchored{begin: true, e: o.e})
			case part.anchor == '$' && onlyAnchors(a.parts[i:]):
				next = append(next, &anchored{begin: o.begin, end: true, e: o.e})
			case part.anchor != 0:
				return nil, p.bad("has an anchor that is not at an end")
			case part.group != nil:
				for _, g := range part.group {
					inner, err := p.flatten(g)
					if err != nil {
						return nil, err
					}
					for _, n := range inner {
						if n.begin && !first && o.e.kind != kindEmpty || n.end && !last && !onlyAnchors(a.parts[i+1:]) {
							return nil, p.bad("has an anchor that is not at an end")
						}
						next = append(next, &anchored{begin: o.begin || n.begin, end: n.end, e: seq(o.e, n.e)})
					}
				}
			default:
				run[0] = o.e
				next = append(next, &anchored{begin: o.begin, end: o.end, e: seq(run...)})
			}
		}
		if len(next) > p.limits.AlternateSets {
			return nil, limitError(p.keyword, p.pointer, "alternatives with anchors", p.limits.AlternateSets)
		}
		out = next
	}
	return out, nil
}

func onlyAnchors(parts []*anchoredPart) bool {
	for _, p := range parts {
		if p.anchor != '$' {
			return false
		}
	}
	return true
}

func (p *regexParser) alternatives() ([]*anchored, error) {
	if p.depth++; p.depth > 4*p.limits.Depth {
		return nil, limitError(p.keyword, p.pointer, "nested groups", 4*p.limits.Depth)
	}
	defer func() { p.depth-- }()
	var out []*anchored
	for {
		a, err := p.concatenation()
		if err != nil {
			return nil, err
		}
		out = append(out, a)
		if p.at >= len(p.text) || p.text[p.at] != '|' {
			return out, nil
		}
		p.at++
	}
}

func (p *regexParser) concatenation() (*anchored, error) {
	a := &anchored{}
	for p.at < len(p.text) {
		switch p.text[p.at] {
		case '|', ')':
			return a, nil
		}
		part, err := p.atom()
		if err != nil {
			return nil, err
		}
		if part, err = p.quantified(part); err != nil {
			return nil, err
		}
		a.parts = append(a.parts, part)
	}
	return a, nil
}

// quantified reads the quantifiers behind an atom.
func (p *regexParser) quantified(part *anchoredPart) (*anchoredPart, error) {
	for once := false; p.at < len(p.text); once = true {
		lo, hi := 0, unlimited
		switch c := p.text[p.at]; c {
		case '*':
			p.at++
		case '+':
			lo = 1
			p.at++
		case '?':
			hi = 1
			p.at++
		case '{':
			var ok bool
			var err error
			if lo, hi, ok, err = p.braces(); err != nil {
				return nil, err
			} else if !ok {
				return part, nil
			}
		default:
			return part, nil
		}
		if once {
			return nil, p.bad("repeats a repeat")
		}
		if p.at < len(p.text) && p.text[p.at] == '?' {
			p.at++ // lazy: the same texts match
		} else if p.at < len(p.text) && p.text[p.at] == '+' {
			return nil, p.bad("has a possessive quantifier")
		}
		if part.anchor != 0 || part.group != nil {
			return nil, p.bad("repeats an anchor")
		}
		part = &anchoredPart{e: repeat(part.e, int32(lo), int32(hi))}
	}
	return part, nil
}

// braces reads {n}, {n,} or {n,m}; ok is false for a brace that is a character.
func (p *regexParser) braces() (lo, hi int, ok bool, err error) {
	at := p.at + 1
	number := func() (int, bool) {
		n, start := 0, at
		for at < len(p.text) && '0' <= p.text[at] && p.text[at] <= '9' {
			n = min(n*10+int(p.text[at]-'0'), unlimited)
			at++
		}
		return n, at > start
	}
	lo, ok = number()
	if !ok || at >= len(p.text) {
		return 0, 0, false, nil
	}
	hi = lo
	if p.text[at] == ',' {
		at++
		if hi, ok = number(); !ok {
			hi = unlimited
		} else if hi > p.limits.RegexRepeat {
			return 0, 0, false, limitError(p.keyword, p.pointer, "repeats", p.limits.RegexRepeat)
		}
	}
	if at >= len(p.text) || p.text[at] != '}' {
		return 0, 0, false, nil
	}
	if lo > p.limits.RegexRepeat {
		return 0, 0, false, limitError(p.keyword, p.pointer, "repeats", p.limits.RegexRepeat)
	}
	if lo > hi {
		return 0, 0, false, p.bad("has a repeat from %d to %d", lo, hi)
	}
	p.at = at + 1
	return lo, hi, true, nil
}

func (p *regexParser) atom() (*anchoredPart, error) {
	c := p.text[p.at]
	switch c {
	case '^', '$':
		p.at++
		return &anchoredPart{anchor: c}, nil
	case '(':
		return p.group()
	case '[':
		set, err := p.class()
		if err != nil {
			return nil, err
		}
		return &anchoredPart{e: charsOf(modeRaw, set)}, nil
	case '.':
		p.at++
		if p.dotAll {
			return &anchoredPart{e: charsOf(modeRaw, allChars)}, nil
		}
		return &anchoredPart{e: charsOf(modeRaw, dotChars)}, nil
	case '*', '+', '?':
		return nil, p.bad("has nothing to repeat")
	case '\\':
		return p.escape()
	}
	r, n := utf8.DecodeRuneInString(p.text[p.at:])
	p.at += n
	return &anchoredPart{e: charsOf(modeRaw, p.folded([]runeRange{{r, r}}))}, nil
}

// folded adds the other case of characters under (?i).
func (p *regexParser) folded(set []runeRange) []runeRange {
	if !p.fold {
		return set
	}
	out := append([]runeRange(nil), set...)
	for _, r := range set {
		if r.hi-r.lo > 1000 {
			continue // large sets hold both cases
		}
		for c := r.lo; c <= r.hi; c++ {
			for f := unicode.SimpleFold(c); f != c; f = unicode.SimpleFold(f) {
				out = append(out, runeRange{f, f})
			}
		}
	}
	return out
}

func (p *regexParser) group() (*anchoredPart, error) {
	p.at++
	fold, dotAll := p.fold, p.dotAll
	if strings.HasPrefix(p.text[p.at:], "?") {
		done, err := p.groupKind()
		if err != nil {
			return nil, err
		}
		if done { // flags for the rest of the enclosing group
			return &anchoredPart{e: emptyString}, nil
		}
	}
	alts, err := p.alternatives()
	if err != nil {
		return nil, err
	}
	if p.at >= len(p.text) {
		return nil, p.bad("has an unmatched (")
	}
	p.at++
	p.fold, p.dotAll = fold, dotAll
	for _, a := range alts {
		for _, part := range a.parts {
			if part.anchor != 0 || part.group != nil {
				return &anchoredPart{group: alts}, nil
			}
		}
	}
	var out []*expr
	for _, a := range alts {
		var s []*expr
		for _, part := range a.parts {
			s = append(s, part.e)
		}
		out = append(out, seq(s...))
	}
	return &anchoredPart{e: alt(out...)}, nil
}

// groupKind reads what follows "(?". done means that the group was only flags.
func (p *regexParser) groupKind() (done bool, err error) {
	rest := p.text[p.at:]
	switch {
	case strings.HasPrefix(rest, "?:"):
		p.at += 2
		return false, nil
	case strings.HasPrefix(rest, "?="), strings.HasPrefix(rest, "?!"), strings.HasPrefix(rest, "?<="), strings.HasPrefix(rest, "?<!"):
		return false, p.bad("has a look-around")
	case strings.HasPrefix(rest, "?<"), strings.HasPrefix(rest, "?P<"):
		end := strings.IndexByte(rest, '>')
		if end < 0 {
			return false, p.bad("has a group without a name")
		}
		p.at += end + 1
		return false, nil
	}
	for i := 1; i < len(rest); i++ {
		switch rest[i] {
		case 'i':
			p.fold = true
		case 's':
			p.dotAll = true
		case ':':
			p.at += i + 1
			return false, nil
		case ')':
			p.at += i + 1
			return true, nil
		default:
			return false, p.bad("has an unknown kind of group")
		}
	}
	return false, p.bad("has an unmatched (")
}
