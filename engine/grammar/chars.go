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
	var edges []edge
	raw := minus(ranges, mode.escaped())
	if mode != modeRaw {
		if e := b.escapes(func(r rune) int32 {
			if contains(ranges, r) {
				return next
			}
			return -1
		}, mode, next); e != nil {
			edges = append(edges, edge{'\\', '\\', b.bytes(e, 0)})
		}
	}
	for _, r := range raw {
		runeEdges(r.lo, r.hi, func(s []runeRange) {
			to := next
			for i := len(s) - 1; i > 0; i-- {
				to = b.bytes([]edge{{byte(s[i].lo), byte(s[i].hi), to}}, 0)
			}
			edges = append(edges, edge{byte(s[0].lo), byte(s[0].hi), to})
		})
	}
	i := b.bytes(edges, 0)
	if b.err == nil {
		b.texts[key] = &charsPosition{ranges, mode, next, i}
	}
	return i
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
	var nexts []int32
	if !t.end {
		nexts = append(nexts, next)
	}
	var taken []runeRange
	for _, c := range t.children {
		to := child
		if !only {
			to = b.exceptFrom(c.node, tagged, next, text)
		}
		nexts = append(nexts, b.chars([]runeRange{{c.char, c.char}}, modeJSON|tagged, to))
		taken = append(taken, runeRange{c.char, c.char})
	}
	nexts = append(nexts, b.chars(minus(allChars, normalize(taken)), modeJSON|tagged, text))
	return b.split(nexts)
}

// graph returns the position at which the strings of an automaton start.
func (b *builder) graph(e *expr, next int32) int32 {
	g := e.graph
	g.describe()
	g.inner = nil
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
	if g.counted {
		for _, to := range g.targets(int32(s)) {
			if e := b.graphEdges(g, s, mode, at, to); len(e) > 0 {
				b.p.checks = append(b.p.checks, g)
				read = append(read, b.add(position{op: opCheck, a: b.bytes(e, 0), b: int32(len(b.p.checks) - 1), val: uint64(to), height: b.height(next)}))
			}
		}
	} else if e := b.graphEdges(g, s, mode, at, -1); len(e) > 0 {
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

// graphEdges returns the edges from state s to state only, or to all states if only is -1.
func (b *builder) graphEdges(g *graph, s int, mode charMode, at []int32, only int32) []edge {
	target := func(c byte) int32 {
		if to := g.step(int32(s), c); only < 0 || to == only {
			return to
		}
		return -1
	}
	var edges []edge
	for c := 0; c < 256; {
		to, lo := target(byte(c)), c
		for c < 256 && target(byte(c)) == to {
			c++
		}
		if to >= 0 {
			edges = append(edges, b.spell(mode, byte(lo), byte(c-1), at[to])...)
		}
	}
	if mode != modeRaw {
		if e := b.escapes(func(r rune) int32 {
			if to := target(byte(r)); to >= 0 {
				return at[to]
			}
			return -1
		}, mode, 0); e != nil {
			edges = append(edges, edge{'\\', '\\', b.bytes(e, 0)})
		}
	}
	return edges
}

// spell returns the edges for bytes lo to hi that need no escape.
func (b *builder) spell(mode charMode, lo, hi byte, next int32) []edge {
	if mode == modeRaw {
		return []edge{{lo, hi, next}}
	}
	var out []edge
	for _, r := range minus([]runeRange{{rune(lo), rune(hi)}}, mode.escaped()) {
		out = append(out, edge{byte(r.lo), byte(r.hi), next})
	}
	return out
}
