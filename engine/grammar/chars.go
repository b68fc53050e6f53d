package grammar

import (
	"slices"
	"strings"
)

// jsonEscapes are the characters that JSON strings must escape and have a short escape for.
var jsonEscapes = []struct {
	char   rune
	letter byte
}{{'"', '"'}, {'\\', '\\'}, {'\b', 'b'}, {'\f', 'f'}, {'\n', 'n'}, {'\r', 'r'}, {'\t', 't'}}

// neverRaw are the characters that are escaped in JSON strings: those that JSON demands, and DEL.
var neverRaw = []runeRange{{0, 0x1F}, {'"', '"'}, {'\\', '\\'}, {0x7F, 0x7F}}

// neverTagged are neverRaw and the less-than sign.
var neverTagged = normalize(append(slices.Clone(neverRaw), runeRange{'<', '<'}))

// escaped returns the characters that a mode escapes.
func (m charMode) escaped() []runeRange {
	switch {
	case m == modeRaw:
		return nil
	case m&modeTagged != 0:
		return neverTagged
	}
	return neverRaw
}

const hexDigits = "0123456789abcdef"

// jsonChars returns s as it is spelled inside a JSON string: with the escapes that JSON needs.
func jsonChars(s string) string {
	var out strings.Builder
next:
	for _, r := range s {
		for _, e := range jsonEscapes {
			if r == e.char {
				out.WriteByte('\\')
				out.WriteByte(e.letter)
				continue next
			}
		}
		if r < 0x20 || r == 0x7F {
			out.WriteString(`\u00`)
			out.WriteByte(hexDigits[r>>4])
			out.WriteByte(hexDigits[r&15])
			continue
		}
		out.WriteRune(r)
	}
	return out.String()
}

func jsonString(s string) string { return `"` + jsonChars(s) + `"` }

func contains(ranges []runeRange, r rune) bool {
	for _, x := range ranges {
		if x.lo <= r && r <= x.hi {
			return true
		}
	}
	return false
}

// chars returns the position that reads one character of normalized ranges.
func (b *builder) chars(ranges []runeRange, mode charMode, next int32) int32 {
	if b.err != nil {
		return 0
	}
	if len(ranges) == 1 && mode&modeEscapes == 0 { // most characters of keys
		if r := ranges[0]; r.lo == r.hi && r.hi < 0x80 && !contains(mode.escaped(), r.lo) {
			return b.byteTo(byte(r.lo), next)
		}
	}
	key := mix(uint64(uint32(next)), uint64(mode))
	for _, r := range ranges {
		key = mix(key, uint64(r.lo)<<32|uint64(r.hi))
	}
	known, key := place(b.texts, key, func(x *charsPosition) bool {
		return x.next == next && x.mode == mode && slices.Equal(x.ranges, ranges)
	})
	if known != nil {
		return known.at
	}
	edges := b.charEdges(make([]edge, 0, 32), ranges, mode, next)
	i := b.bytes(edges, 0)
	if b.err == nil {
		b.texts[key] = &charsPosition{ranges, mode, next, i}
	}
	return i
}

// charEdges appends to edges those that read one character of normalized ranges.
func (b *builder) charEdges(edges []edge, ranges []runeRange, mode charMode, next int32) []edge {
	escaped := mode.escaped()
	if mode != modeRaw {
		if at := b.escapedChars(ranges, mode, next); at > 0 {
			edges = append(edges, edge{'\\', '\\', at})
		}
	}
	rest := ranges
	for i, r := range ranges {
		if r.hi >= 0x80 {
			rest = ranges[i:]
			break
		}
		edges, rest = appendRaw(edges, r.lo, r.hi, escaped, next), ranges[i+1:]
	}
	if len(rest) == 0 {
		return edges
	}
	if rest[0].lo <= 0x80 && slices.Equal(rest[1:], wideChars[1:]) && rest[0].hi == wideChars[0].hi {
		edges = appendRaw(edges, rest[0].lo, 0x7F, escaped, next)
		return append(edges, b.wideEdges(next)...)
	}
	for _, r := range rest {
		edges = appendRaw(edges, r.lo, min(r.hi, 0x7F), escaped, next)
		edges = b.runeEdges(edges, max(r.lo, 0x80), r.hi, next)
	}
	return edges
}

// appendRaw appends the edges of the bytes lo to hi, but for those of escaped characters.
func appendRaw(edges []edge, lo, hi rune, escaped []runeRange, next int32) []edge {
	for _, x := range escaped {
		if x.hi < lo || x.lo > hi {
			continue
		}
		if x.lo > lo {
			edges = append(edges, edge{byte(lo), byte(x.lo - 1), next})
		}
		lo = x.hi + 1
	}
	if lo <= hi {
		edges = append(edges, edge{byte(lo), byte(hi), next})
	}
	return edges
}

// wideChars are the characters beyond ASCII.
var wideChars = minus(allChars, []runeRange{{0, 0x7F}})

// wideEdges returns the edges that read one of wideChars.
func (b *builder) wideEdges(next int32) []edge {
	if e, ok := b.wide[next]; ok {
		return e
	}
	var edges []edge
	for _, r := range wideChars {
		edges = b.runeEdges(edges, r.lo, r.hi, next)
	}
	if b.err == nil {
		b.wide[next] = edges
	}
	return edges
}

// runeEdges appends the edges that read one of the characters lo to hi.
func (b *builder) runeEdges(edges []edge, lo, hi rune, next int32) []edge {
	runeEdges(lo, hi, func(s []runeRange) {
		to := next
		for i := len(s) - 1; i > 0; i-- {
			to = b.bytes([]edge{{byte(s[i].lo), byte(s[i].hi), to}}, 0)
		}
		edges = append(edges, edge{byte(s[0].lo), byte(s[0].hi), to})
	})
	return edges
}

// escapedChars returns the position behind the backslash of an escaped character of ranges; 0: none
// is escaped.
func (b *builder) escapedChars(ranges []runeRange, mode charMode, next int32) int32 {
	all := true
	for _, x := range mode.escaped() {
		all = all && slices.ContainsFunc(ranges, func(r runeRange) bool { return r.lo <= x.lo && x.hi <= r.hi })
	}
	key := escapesKey{next, mode}
	if at, ok := b.escaped[key]; ok && all {
		return at
	}
	e := b.escapes(func(r rune) int32 {
		if all || contains(ranges, r) {
			return next
		}
		return -1
	}, mode, next)
	if e == nil {
		return 0
	}
	at := b.bytes(e, 0)
	if all && b.err == nil {
		b.escaped[key] = at
	}
	return at
}

// escapesKey identifies the position of all escapes of a mode that continue at next.
type escapesKey struct {
	next int32
	mode charMode
}

// charsPosition is a position that reads a character.
type charsPosition struct {
	ranges   []runeRange
	mode     charMode
	next, at int32
}

// escapes returns the edges behind a backslash. to returns where a character continues, or -1. In
// modeEscapes, \uXXXX may spell any character, and continues at next.
func (b *builder) escapes(to func(rune) int32, mode charMode, next int32) []edge {
	var edges []edge
	for _, e := range jsonEscapes {
		if n := to(e.char); n >= 0 {
			edges = append(edges, edge{e.letter, e.letter, n})
		}
	}
	if mode&modeEscapes != 0 {
		return append(edges, edge{'u', 'u', b.anyEscape(next)})
	}
	var controls [8][]edge
	for _, x := range mode.escaped() {
		for r := x.lo; r <= x.hi; r++ {
			switch r {
			case '\b', '\f', '\n', '\r', '\t', '"', '\\':
				continue
			}
			if n := to(r); n >= 0 {
				c := hexDigits[r&15]
				controls[r>>4] = append(controls[r>>4], edge{c, c, n})
				if c >= 'a' {
					controls[r>>4] = append(controls[r>>4], edge{c - 32, c - 32, n})
				}
			}
		}
	}
	var second []edge
	for i, c := range controls {
		if c != nil {
			second = append(second, edge{'0' + byte(i), '0' + byte(i), b.bytes(c, 0)})
		}
	}
	if second == nil {
		return edges
	}
	return append(edges, edge{'u', 'u', b.byteTo('0', b.byteTo('0', b.bytes(second, 0)))})
}

// anyEscape returns the position behind \u: four digits of a character, or a pair of surrogates.
func (b *builder) anyEscape(next int32) int32 {
	hex := func(to int32) int32 { return b.bytes([]edge{{'0', '9', to}, {'A', 'F', to}, {'a', 'f', to}}, 0) }
	two := hex(hex(next))
	three := hex(two)
	low := b.bytes([]edge{{'C', 'F', two}, {'c', 'f', two}}, 0)
	low = b.bytes([]edge{{'D', 'D', low}, {'d', 'd', low}}, 0)
	low = b.byteTo('\\', b.byteTo('u', low))
	high := hex(hex(low))
	d := b.bytes([]edge{{'0', '7', two}, {'8', '9', high}, {'A', 'B', high}, {'a', 'b', high}}, 0)
	return b.bytes([]edge{{'0', '9', three}, {'A', 'C', three}, {'a', 'c', three}, {'E', 'F', three}, {'e', 'f', three}, {'D', 'D', d}, {'d', 'd', d}}, 0)
}

// A keyTrie is a set of keys by their characters.
type keyTrie struct {
	children []keyChild // sorted by char
	end      bool
}

type keyChild struct {
	char rune
	node *keyTrie
}

func newKeyTrie(keys []string) *keyTrie {
	root := &keyTrie{}
	for _, k := range keys {
		n := root
		for _, r := range k {
			i, ok := slices.BinarySearchFunc(n.children, r, func(c keyChild, r rune) int { return int(c.char - r) })
			if !ok {
				n.children = slices.Insert(n.children, i, keyChild{r, &keyTrie{}})
			}
			n = n.children[i].node
		}
		n.end = true
	}
	return root
}

// except returns the position at which a string starts that is none of the keys of t. While it
// may still become one of them, only the spelling of modeJSON is allowed. tagged is modeTagged, or
// 0.
func (b *builder) except(t *keyTrie, tagged charMode, next int32) int32 {
	return b.exceptFrom(t, tagged, next, b.build(star(charsOf(modeEscapes|tagged, allChars)), next))
}

func (b *builder) exceptFrom(t *keyTrie, tagged charMode, next, text int32) int32 {
	if len(t.children) == 0 && !t.end {
		return text
	}
	// Nodes with one child are a chain, which is built from its end.
	chain := []*keyTrie{t}
	for len(t.children) == 1 {
		t = t.children[0].node
		chain = append(chain, t)
	}
	at := int32(0)
	for i := len(chain) - 1; i >= 0 && b.err == nil; i-- {
		at = b.exceptNode(chain[i], tagged, at, i < len(chain)-1, next, text)
	}
	return at
}

// exceptNode builds one node. With only, its single child is at position child.
func (b *builder) exceptNode(t *keyTrie, tagged charMode, child int32, only bool, next, text int32) int32 {
	edges := make([]edge, 0, 32)
	var taken []runeRange
	for _, c := range t.children {
		to := child
		if !only {
			to = b.exceptFrom(c.node, tagged, next, text)
		}
		char := []runeRange{{c.char, c.char}}
		edges, taken = b.charEdges(edges, char, modeJSON|tagged, to), append(taken, char[0])
	}
	edges = b.charEdges(edges, minus(allChars, normalize(taken)), modeJSON|tagged, text)
	if t.end {
		return b.bytes(edges, 0)
	}
	return b.join([]int32{next}, edges)
}

// graph returns the position at which the strings of an automaton start.
func (b *builder) graph(e *expr, next int32) int32 {
	g := e.graph
	if b.fail(g.describe(b.limits)); b.err != nil {
		return 0
	}
	g.forget()
	if !g.counted {
		return b.graphStates(g, e.mode, next)
	}
	pop := b.add(position{op: opPop, a: next, height: max(0, b.height(next)-1)})
	start := b.graphStates(g, e.mode, pop)
	op := opPushHard
	if g.smooth {
		op = opPush
	}
	return b.add(position{op: op, a: start, val: counter(g.min, g.max), height: max(b.height(next), 1)})
}

func (b *builder) graphStates(g *graph, mode charMode, next int32) int32 {
	at := make([]int32, g.states())
	for s := range at {
		at[s] = b.add(position{op: opSplit, height: b.height(next)})
	}
	for s := range at {
		if b.err != nil {
			return 0
		}
		if g.whole[s] && !g.counted {
			m := mode
			if m&modeJSON != 0 {
				m = m&modeTagged | modeEscapes
			}
			b.alias(at[s], []int32{b.build(star(charsOf(m, allChars)), next)})
			continue
		}
		b.graphState(g, s, mode, at, next)
	}
	return at[g.start]
}

// graphState fills the position of one state. In a counted graph the lengths that remain possible
// are checked before the first byte of a character and before each byte that follows, so that no
// character is begun that cannot be completed.
func (b *builder) graphState(g *graph, s int, mode charMode, at []int32, next int32) {
	var nexts, read []int32
	if g.accept[s] {
		nexts = append(nexts, next)
	}
	runs := g.runs(int32(s))
	if g.counted {
		for _, to := range g.targets(int32(s)) {
			if e := b.graphEdges(runs, mode, at, to); len(e) > 0 {
				b.p.checks = append(b.p.checks, g)
				read = append(read, b.add(position{op: opCheck, a: b.bytes(e, 0), b: int32(len(b.p.checks) - 1), val: uint64(to), height: b.height(next)}))
			}
		}
	} else if e := b.graphEdges(runs, mode, at, -1); len(e) > 0 {
		read = append(read, b.bytes(e, 0))
	}
	if b.err != nil {
		return
	}
	if len(read) > 0 && g.counted && g.between[s] {
		read = []int32{b.add(position{op: opTick, a: b.chain(read), height: b.height(next)})}
	}
	b.alias(at[s], append(nexts, read...))
}

// graphEdges returns the edges of those runs that lead to state only, or of all if only is -1.
func (b *builder) graphEdges(runs []byteRun, mode charMode, at []int32, only int32) []edge {
	var edges []edge
	var read byteSet // the bytes of escaped characters
	escaped := mode.escaped()
	for _, r := range runs {
		if only >= 0 && r.to != only {
			continue
		}
		edges = appendRaw(edges, rune(r.lo), rune(r.hi), escaped, at[r.to])
		if r.lo < 0x80 {
			read.add(r.lo, min(r.hi, 0x7F))
		}
	}
	if slices.ContainsFunc(escaped, func(x runeRange) bool { return read.overlaps(byte(x.lo), byte(x.hi)) }) {
		e := b.escapes(func(c rune) int32 {
			if !read.has(byte(c)) {
				return -1
			}
			i := slices.IndexFunc(runs, func(r byteRun) bool { return byte(c) <= r.hi })
			return at[runs[i].to]
		}, mode, 0)
		edges = append(edges, edge{'\\', '\\', b.bytes(e, 0)})
	}
	return edges
}
