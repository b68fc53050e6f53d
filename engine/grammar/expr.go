package grammar

import (
	"slices"
)

// An expr is an expression over bytes: the intermediate form of all front ends. Expressions are
// immutable once built and may share parts.
type expr struct {
	kind   exprKind
	mode   charMode
	chars  []runeRange // kindChars
	lits   []string    // kindLits: sorted, without duplicates
	subs   []*expr     // kindSeq, kindAlt; the body of kindRep and kindDistinct
	min    int32       // kindRep
	max    int32       // kindRep; unlimited for any number
	rule   int32       // kindRule
	bit    int32       // kindTake
	token  string      // kindToken
	graph  *graph      // kindGraph
	trie   *keyTrie    // kindExcept
	object *objectExpr // kindObject

	// Of a plain expression, one without rules, the answers of nullable and heightOf are kept:
	// parts are shared, so that walking them again could take exponential time.
	plain bool
	null  bool
	high  int32
}

type exprKind uint8

const (
	kindNone     exprKind = iota // no string
	kindEmpty                    // the empty string
	kindBytes                    // one byte of chars, whose runes are byte values
	kindChars                    // one character of chars, spelled by mode
	kindLits                     // one of lits
	kindSeq                      // subs in order
	kindAlt                      // one of subs
	kindRep                      // subs[0], min to max times
	kindRule                     // the expression of a rule
	kindToken                    // one token of the vocabulary that has no bytes
	kindDistinct                 // subs[0], inside which each kindTake bit occurs at most once
	kindTake                     // the empty string; consumes a bit of the enclosing kindDistinct
	kindGraph                    // the strings of an automaton, spelled by mode
	kindObject                   // a JSON object
	kindExcept                   // the JSON string characters that spell none of trie's keys
	kindCommit                   // one byte of chars, which excludes alternatives that read the same
)

// A charMode selects the spelling of characters.
type charMode uint8

const (
	modeRaw     charMode = iota // UTF-8
	modeJSON                    // as in a JSON string, with escapes only where JSON needs them
	modeEscapes                 // as modeJSON, and \uXXXX for every character

	// modeTagged, added to modeJSON or modeEscapes, spells a less-than sign by its escape, so that a
	// string contains no marker that begins with one.
	modeTagged charMode = 4
)

// unlimited is the max of a repeat without an upper bound.
const unlimited = 1<<31 - 1

type runeRange struct{ lo, hi rune }

var (
	noString    = (&expr{kind: kindNone}).seal()
	emptyString = (&expr{kind: kindEmpty}).seal()
)

// seal keeps the answers for a plain expression.
func (e *expr) seal() *expr {
	for _, s := range e.subs {
		if !s.plain {
			return e
		}
	}
	switch e.kind {
	case kindNone, kindEmpty, kindBytes, kindChars, kindLits, kindSeq, kindAlt, kindRep:
		e.null, e.high = nullable(e, nil), heightOf(e, nil)
		e.plain = true
	}
	return e
}

func lit(s string) *expr {
	if s == "" {
		return emptyString
	}
	return (&expr{kind: kindLits, lits: []string{s}}).seal()
}

// oneOfLits returns the expression of a set of literals.
func oneOfLits(lits []string) *expr {
	if len(lits) == 0 {
		return noString
	}
	sorted := slices.Clone(lits)
	slices.Sort(sorted)
	return (&expr{kind: kindLits, lits: slices.Compact(sorted)}).seal()
}

func seq(subs ...*expr) *expr {
	out := make([]*expr, 0, len(subs))
	for _, s := range subs {
		switch s.kind {
		case kindNone:
			return noString
		case kindEmpty:
		case kindSeq:
			out = append(out, s.subs...)
		default:
			out = append(out, s)
		}
	}
	switch len(out) {
	case 0:
		return emptyString
	case 1:
		return out[0]
	}
	return (&expr{kind: kindSeq, subs: out}).seal()
}

func alt(subs ...*expr) *expr {
	out := make([]*expr, 0, len(subs))
	for _, s := range subs {
		switch s.kind {
		case kindNone:
		case kindAlt:
			out = append(out, s.subs...)
		default:
			out = append(out, s)
		}
	}
	switch len(out) {
	case 0:
		return noString
	case 1:
		return out[0]
	}
	return (&expr{kind: kindAlt, subs: out}).seal()
}

func opt(e *expr) *expr { return alt(e, emptyString) }

// rep returns e repeated min to max times. A body that may be empty must be made non-empty by the
// caller; see nonEmpty.
func rep(e *expr, min, max int32) *expr {
	switch {
	case max == 0 || min > max:
		if min > max {
			return noString
		}
		return emptyString
	case e.kind == kindEmpty:
		return emptyString
	case e.kind == kindNone:
		if min > 0 {
			return noString
		}
		return emptyString
	case min == 1 && max == 1:
		return e
	case min == 0 && max == 1:
		return opt(e)
	}
	return (&expr{kind: kindRep, subs: []*expr{e}, min: min, max: max}).seal()
}

func star(e *expr) *expr { return rep(e, 0, unlimited) }
func plus(e *expr) *expr { return rep(e, 1, unlimited) }

func ruleRef(i int32) *expr { return &expr{kind: kindRule, rule: i} }

func bytesOf(ranges ...runeRange) *expr { return (&expr{kind: kindBytes, chars: ranges}).seal() }

func charsOf(mode charMode, ranges []runeRange) *expr {
	ranges = normalize(ranges)
	if len(ranges) == 0 {
		return noString
	}
	return (&expr{kind: kindChars, mode: mode, chars: ranges}).seal()
}

// digits returns n to m decimal digits.
func digits(n, m int32) *expr { return rep(bytesOf(runeRange{'0', '9'}), n, m) }

// allChars are the Unicode scalar values.
var allChars = []runeRange{{0, 0xD7FF}, {0xE000, 0x10FFFF}}

// plainChars are the characters that JSON strings and patterns' dots both take as they are: not
// quotes, backslashes and controls, nor the line separators that a dot refuses.
var plainChars = []runeRange{{0x20, 0x21}, {0x23, 0x5B}, {0x5D, 0x7E}, {0x80, 0x2027}, {0x202A, 0xD7FF}, {0xE000, 0x10FFFF}}

// normalize sorts ranges, merges those that touch and removes surrogates.
func normalize(ranges []runeRange) []runeRange {
	var in []runeRange
	for _, r := range ranges {
		r.lo, r.hi = max(r.lo, 0), min(r.hi, 0x10FFFF)
		if r.lo <= min(r.hi, 0xD7FF) {
			in = append(in, runeRange{r.lo, min(r.hi, 0xD7FF)})
		}
		if max(r.lo, 0xE000) <= r.hi {
			in = append(in, runeRange{max(r.lo, 0xE000), r.hi})
		}
	}
	slices.SortFunc(in, func(a, b runeRange) int { return int(a.lo - b.lo) })
	var out []runeRange
	for _, r := range in {
		if n := len(out); n > 0 && r.lo <= out[n-1].hi+1 {
			out[n-1].hi = max(out[n-1].hi, r.hi)
			continue
		}
		out = append(out, r)
	}
	return out
}

// minus returns the characters of a that are not in b; both are normalized.
func minus(a, b []runeRange) []runeRange {
	var out []runeRange
	for _, r := range a {
		lo := r.lo
		for _, x := range b {
			if x.hi < lo || x.lo > r.hi {
				continue
			}
			if x.lo > lo {
				out = append(out, runeRange{lo, x.lo - 1})
			}
			lo = x.hi + 1
		}
		if lo <= r.hi {
			out = append(out, runeRange{lo, r.hi})
		}
	}
	return out
}

// covers reports whether a has every character of b; both are normalized.
func covers(a, b []runeRange) bool { return len(minus(b, a)) == 0 }

// rewritten returns e with each part replaced by change, which gets a copy whose own parts are
// replaced already. Parts that are shared are changed once.
func rewritten(e *expr, done map[*expr]*expr, change func(*expr) *expr) *expr {
	if out, ok := done[e]; ok {
		return out
	}
	c := *e
	c.plain = false
	c.subs = make([]*expr, len(e.subs))
	for i, s := range e.subs {
		c.subs[i] = rewritten(s, done, change)
	}
	out := change(&c).seal()
	done[e] = out
	return out
}

// spelled returns e with its characters in another spelling.
func spelled(e *expr, mode charMode) *expr {
	return rewritten(e, map[*expr]*expr{}, func(c *expr) *expr {
		switch c.kind {
		case kindChars:
			c.mode = mode
		case kindLits:
			lits := make([]string, len(c.lits))
			for i, l := range c.lits {
				lits[i] = jsonChars(l)
			}
			return oneOfLits(lits)
		}
		return c
	})
}

// nonEmpty returns the non-empty strings of a regular expression without rules.
func nonEmpty(e *expr) *expr {
	if !nullable(e, nil) {
		return e
	}
	switch e.kind {
	case kindEmpty:
		return noString
	case kindLits:
		return oneOfLits(slices.DeleteFunc(slices.Clone(e.lits), func(l string) bool { return l == "" }))
	case kindAlt:
		out := make([]*expr, len(e.subs))
		for i, s := range e.subs {
			out[i] = nonEmpty(s)
		}
		return alt(out...)
	case kindRep:
		return rep(e.subs[0], max(e.min, 1), e.max)
	case kindSeq:
		// The first part that is not empty decides: those before it are left out.
		out := make([]*expr, len(e.subs))
		for i, s := range e.subs {
			out[i] = seq(append([]*expr{nonEmpty(s)}, e.subs[i+1:]...)...)
		}
		return alt(out...)
	}
	return e
}

// repeat is rep for any regular body: a body that may be empty is made non-empty.
func repeat(e *expr, min, max int32) *expr {
	if nullable(e, nil) {
		e, min = nonEmpty(e), 0
	}
	return rep(e, min, max)
}

// nullable reports whether e has the empty string; rules has the answers for rules.
func nullable(e *expr, rules []bool) bool {
	if e.plain {
		return e.null
	}
	switch e.kind {
	case kindEmpty, kindTake:
		return true
	case kindLits:
		return e.lits[0] == ""
	case kindSeq:
		for _, s := range e.subs {
			if !nullable(s, rules) {
				return false
			}
		}
		return true
	case kindAlt:
		for _, s := range e.subs {
			if nullable(s, rules) {
				return true
			}
		}
		return false
	case kindRep:
		return e.min == 0 || nullable(e.subs[0], rules)
	case kindRule:
		return rules != nil && rules[e.rule]
	case kindDistinct:
		return nullable(e.subs[0], rules)
	case kindGraph:
		return e.graph.acceptsEmpty()
	case kindExcept:
		return true // callers close it with a quote
	}
	return false
}
