package grammar

import (
	"encoding/binary"
	"slices"
	"unicode/utf8"
)

// A program is a grammar as positions of a nondeterministic machine with a stack. It is immutable.
type program struct {
	pos     []position
	edges   []edge
	checks  []*graph   // of opCheck: the lengths that remain possible
	tokens  []tokenRef // of opToken
	start   int32
	class   [256]uint8 // bytes of a class are alike at every position
	classes int
	sample  []byte // [classes] one byte of each class
	commits bool   // a position has flagCommit
}

// tokenRef is a special token by name. An optional one may be spelled by bytes.
type tokenRef struct {
	name     string
	optional bool
}

// A position is an instruction. Those other than opBytes, opToken and opReturn consume nothing.
type position struct {
	val  uint64
	a, b int32 // see opCode
	// height is how much deeper the stack must be able to get for an output to be completed
	// from here within this call.
	height int32
	op     opCode
	flag   uint8
}

type opCode uint8

const (
	opBytes    opCode = iota // edges[a:b]
	opSplit                  // edges[a:b].next, each
	opCall                   // calls the position a, then continues at b
	opReturn                 // continues at the position on top of the stack
	opPush                   // pushes a counter of val, then a
	opPushHard               // as opPush, for a counter that masks must not round
	opPushSet                // pushes an empty set, then a
	opTick                   // counts the b-th cell from the top down by one, then a
	opPop                    // removes a counter that needs no more, or a set, then a
	opCheck                  // checks[b] must have a length that the counter on top allows, then a
	opRoom                   // the counter on top must fit the members to come, see builder.room; then a
	opTake                   // adds bit b to the set below the counters, then a
	opToken                  // the token tokens[b], then a; position val-1 if the vocabulary lacks it
)

// Flags of opBytes.
const (
	flagPlain   = 1 // the body of a loop that takes every character of plainChars
	flagTicked  = 2 // with flagPlain: the counter on top of the stack counts the characters
	flagNoPlain = 4 // no edge for a byte of a plain character
	flagCommit  = 8 // where it reads a byte, positions without the flag do not
)

type edge struct {
	lo, hi byte
	next   int32
}

func (x edge) compare(y edge) int {
	if x.lo != y.lo {
		return int(x.lo) - int(y.lo)
	}
	if x.hi != y.hi {
		return int(x.hi) - int(y.hi)
	}
	return int(x.next - y.next)
}

// counter packs how often a repeat must and may still occur.
func counter(need, left int32) uint64 { return uint64(uint32(need))<<32 | uint64(uint32(left)) }

func counts(v uint64) (need, left int32) { return int32(v >> 32), int32(uint32(v)) }

// infinite is the height of an expression that has no string.
const infinite = 1 << 30

// A builder turns expressions into a program, from the end of each expression to its start.
type builder struct {
	p       program
	limits  *Limits
	rules   []*expr
	starts  []int32
	heights []int32
	shared  map[uint64]int32 // byte positions by the hash of their edges; see place
	splits  map[string]int32
	texts   map[uint64]*charsPosition // by the hash of all but the position; see place
	wide    map[int32][]edge          // results of wideEdges
	escaped map[escapesKey]int32      // results of escapedChars
	err     error
}

// link compiles rules; the program starts with rule start.
func link(rules []*expr, start int32, limits *Limits) (*program, error) {
	b := &builder{limits: limits, rules: rules, shared: map[uint64]int32{}, splits: map[string]int32{}, texts: map[uint64]*charsPosition{}, wide: map[int32][]edge{}, escaped: map[escapesKey]int32{}}
	b.heights = heightsOf(rules)
	if b.heights[start] >= infinite {
		return nil, errNoText
	}
	if int(b.heights[start]) > limits.StackDepth {
		return nil, limitError("grammar", "", "levels of nesting in every text", limits.StackDepth)
	}
	b.p.pos = append(b.p.pos, position{op: opReturn}) // position 0
	b.starts = make([]int32, len(rules))
	used, sizes := reachable(rules, start), make([]int32, len(rules))
	for _, i := range used {
		b.starts[i] = b.add(position{op: opSplit})
	}
	for _, i := range used {
		if b.heights[i] >= infinite {
			continue
		}
		before := len(b.p.pos)
		body := b.build(rules[i], 0)
		b.alias(b.starts[i], []int32{body})
		b.p.pos[b.starts[i]].height = b.p.pos[body].height
		sizes[i] = int32(len(b.p.pos) - before)
		if e, ok := b.err.(*Error); ok && e.Err == ErrBudget {
			e.sizes = sizes
		}
		if b.err != nil {
			return nil, b.err
		}
	}
	b.p.start = b.starts[start]
	b.p.pos, b.p.edges = slices.Clone(b.p.pos), slices.Clone(b.p.edges) // without room to grow
	b.p.classify()
	return &b.p, nil
}

func (b *builder) add(p position) int32 {
	if len(b.p.pos) >= b.limits.Positions {
		b.fail(limitError("grammar", "", "positions", b.limits.Positions))
	}
	b.fail(b.limits.spend(2))
	if b.err != nil {
		return 0
	}
	b.p.pos = append(double(b.p.pos, 1), p)
	return int32(len(b.p.pos) - 1)
}

// double returns s with room for n more elements. A slice without room gets twice its length, so
// that a large one is copied less often than by append.
func double[T any](s []T, n int) []T {
	if len(s)+n > cap(s) {
		s = slices.Grow(s, max(n, len(s)))
	}
	return s
}

// fail keeps the first error.
func (b *builder) fail(err error) {
	if b.err == nil && err != nil {
		b.err = err
	}
}

func (b *builder) height(i int32) int32 { return b.p.pos[i].height }

// alias makes position i a split over nexts.
func (b *builder) alias(i int32, nexts []int32) {
	a := int32(len(b.p.edges))
	b.p.edges = double(b.p.edges, len(nexts))
	for _, n := range nexts {
		b.p.edges = append(b.p.edges, edge{next: n})
	}
	b.p.pos[i].op, b.p.pos[i].a, b.p.pos[i].b = opSplit, a, int32(len(b.p.edges))
}

// split returns a position that continues at any of nexts. Alternatives that only read bytes are
// joined into one position.
func (b *builder) split(nexts []int32) int32 { return b.join(nexts, nil) }

// join is split with one more alternative, which reads one of edges; nil: none.
func (b *builder) join(nexts []int32, edges []edge) int32 {
	var rest []int32
	h, joined := int32(infinite), len(edges)
	for _, e := range edges {
		h = min(h, b.height(e.next))
	}
	for _, n := range nexts {
		b.fail(b.limits.spend(1 + len(rest)/32))
		if b.err != nil {
			return 0
		}
		p := &b.p.pos[n]
		h = min(h, p.height)
		if p.op == opBytes && p.flag&(flagPlain|flagCommit) == 0 {
			edges = append(edges, b.p.edges[p.a:p.b]...)
			joined++
		} else if !slices.Contains(rest, n) {
			rest = append(rest, n)
		}
	}
	if joined > 0 {
		rest = append(rest, b.bytes(edges, 0))
	}
	if len(rest) == 1 {
		return rest[0]
	}
	key := make([]byte, 0, 4*len(rest))
	for _, n := range rest {
		key = binary.LittleEndian.AppendUint32(key, uint32(n))
	}
	if i, ok := b.splits[string(key)]; ok {
		return i
	}
	i := b.add(position{op: opSplit, height: h})
	b.alias(i, rest)
	b.splits[string(key)] = i
	return i
}

// chain is split without joining: joining the alternatives of a list of members one by one would
// take quadratic memory.
func (b *builder) chain(nexts []int32) int32 {
	if len(nexts) == 1 {
		return nexts[0]
	}
	h := int32(infinite)
	for _, n := range nexts {
		h = min(h, b.height(n))
	}
	i := b.add(position{op: opSplit, height: h})
	if b.err == nil {
		b.alias(i, nexts)
	}
	return i
}

// bytes returns the position that reads one of edges.
func (b *builder) bytes(edges []edge, flag uint8) int32 {
	if b.err != nil {
		return 0
	}
	b.fail(b.limits.spend(1 + len(edges)/2))
	if len(edges) > 1 {
		slices.SortFunc(edges, edge.compare)
		edges = slices.Compact(edges)
	}
	h, key := int32(infinite), uint64(0)
	plain := false
	for _, e := range edges {
		key = mix(key, uint64(e.lo)<<40|uint64(e.hi)<<32|uint64(uint32(e.next)))
		h = min(h, b.height(e.next))
		plain = plain || e.hi >= 0x80 || e.hi >= 0x20 && !(e.lo == e.hi && (e.lo == '"' || e.lo == '\\'))
	}
	if !plain {
		flag |= flagNoPlain
	}
	i, key := place(b.shared, mix(key, uint64(flag)), func(i int32) bool {
		p := &b.p.pos[i]
		return p.flag == flag && slices.Equal(b.p.edges[p.a:p.b], edges)
	})
	if i > 0 {
		return i
	}
	a := int32(len(b.p.edges))
	b.p.edges = append(double(b.p.edges, len(edges)), edges...)
	if i = b.add(position{op: opBytes, flag: flag, a: a, b: int32(len(b.p.edges)), height: h}); b.err == nil {
		b.shared[key] = i
	}
	return i
}

// place returns the entry of m for which equal holds, at its hash or at one of the next. If there
// is none, entry is the zero value, and at is the place of a new one. Only a few places are tried,
// so that a grammar whose parts have one hash takes no quadratic time: its parts are not shared.
func place[T any](m map[uint64]T, hash uint64, equal func(T) bool) (entry T, at uint64) {
	for range 32 {
		found, ok := m[hash]
		if !ok {
			break
		}
		if equal(found) {
			return found, hash
		}
		hash++
	}
	return entry, hash
}

func (b *builder) byteTo(c byte, next int32) int32 { return b.bytes([]edge{{c, c, next}}, 0) }

// build returns the position at which e followed by next starts.
func (b *builder) build(e *expr, next int32) int32 {
	if b.err != nil {
		return 0
	}
	switch e.kind {
	case kindEmpty:
		return next
	case kindBytes, kindCommit:
		edges := make([]edge, len(e.chars))
		for i, r := range e.chars {
			edges[i] = edge{byte(r.lo), byte(r.hi), next}
		}
		if e.kind == kindCommit {
			b.p.commits = true
			return b.bytes(edges, flagCommit)
		}
		return b.bytes(edges, 0)
	case kindChars:
		return b.chars(e.chars, e.mode, next)
	case kindLits:
		return b.lits(e.lits, 0, next)
	case kindSeq:
		for i := len(e.subs) - 1; i >= 0; i-- {
			next = b.build(e.subs[i], next)
		}
		return next
	case kindAlt:
		var nexts []int32
		for _, s := range e.subs {
			if heightOf(s, b.heights) < infinite {
				nexts = append(nexts, b.build(s, next))
			}
		}
		return b.split(nexts)
	case kindRep:
		return b.repeat(e, next)
	case kindRule:
		return b.call(e.rule, next)
	case kindToken:
		return b.token(e, next)
	case kindDistinct:
		pop := b.add(position{op: opPop, a: next, height: max(0, b.height(next)-1)})
		body := b.build(e.subs[0], pop)
		return b.add(position{op: opPushSet, a: body, height: max(b.height(next), 1+b.height(body))})
	case kindTake:
		return b.add(position{op: opTake, a: next, b: e.bit, height: b.height(next)})
	case kindGraph:
		return b.graph(e, next)
	case kindExcept:
		return b.except(e.trie, e.mode&modeTagged, next)
	case kindObject:
		return b.object(e.object, next)
	}
	b.err = errNoText
	return 0
}

// token returns the position that reads a special token, or the bytes of its spelling if it has
// one and the vocabulary lacks the token.
func (b *builder) token(e *expr, next int32) int32 {
	spelling := uint64(0)
	if len(e.subs) > 0 {
		spelling = uint64(b.build(e.subs[0], next)) + 1
	}
	b.p.tokens = append(b.p.tokens, tokenRef{e.token, spelling > 0})
	return b.add(position{op: opToken, a: next, b: int32(len(b.p.tokens) - 1), val: spelling, height: b.height(next)})
}

func (b *builder) call(rule, next int32) int32 {
	start := b.starts[rule]
	if b.p.pos[next].op == opReturn {
		// A call in last place needs no return; its height is that of the rule.
		a := b.add(position{op: opSplit, height: b.heights[rule]})
		if b.err == nil {
			b.alias(a, []int32{start})
		}
		return a
	}
	return b.add(position{op: opCall, a: start, b: next, height: max(b.height(next), 1+b.heights[rule])})
}

// lits returns a trie of sorted literals, whose first depth bytes are equal.
func (b *builder) lits(lits []string, depth int, next int32) int32 {
	// The bytes that all share are a chain, which is built from its end.
	same, last := depth, lits[len(lits)-1]
	for same < len(lits[0]) && same < len(last) && lits[0][same] == last[same] {
		same++
	}
	at := b.branch(lits, same, next)
	for i := same - 1; i >= depth && b.err == nil; i-- {
		at = b.byteTo(last[i], at)
	}
	return at
}

// branch is lits where the literals differ in the byte at depth, or one of them ends.
func (b *builder) branch(lits []string, depth int, next int32) int32 {
	var nexts []int32
	if len(lits[0]) == depth {
		nexts = append(nexts, next)
		lits = lits[1:]
	}
	var edges []edge
	for len(lits) > 0 {
		c := lits[0][depth]
		n := 1
		for n < len(lits) && lits[n][depth] == c {
			n++
		}
		edges = append(edges, edge{c, c, b.lits(lits[:n], depth+1, next)})
		lits = lits[n:]
	}
	if len(edges) > 0 {
		nexts = append(nexts, b.bytes(edges, 0))
	}
	return b.split(nexts)
}

// repeat builds a loop, with a counter where the number of rounds matters.
func (b *builder) repeat(e *expr, next int32) int32 {
	body := e.subs[0]
	bodyHeight := heightOf(body, b.heights)
	if bodyHeight >= infinite {
		return next // e.min is 0, or heightOf would have refused e
	}
	if e.max == unlimited && e.min <= 1 {
		loop := b.add(position{op: opSplit, height: b.height(next)})
		first := b.build(body, loop)
		if b.err != nil {
			return 0
		}
		b.markPlain(body, first, flagPlain)
		b.alias(loop, []int32{first, next})
		if e.min == 1 {
			return first
		}
		return loop
	}
	need := int32(0)
	if e.min > 0 {
		need = bodyHeight
	}
	inner := max(0, b.height(next)-1)
	loop := b.add(position{op: opSplit, height: max(need, inner)})
	pop := b.add(position{op: opPop, a: next, height: inner})
	tick := b.add(position{op: opTick})
	first := b.build(body, loop)
	if b.err != nil {
		return 0
	}
	b.markPlain(body, first, flagPlain|flagTicked)
	b.p.pos[tick].a, b.p.pos[tick].height = first, max(b.height(first), b.height(loop))
	b.alias(loop, []int32{tick, pop})
	return b.add(position{op: opPush, a: loop, val: counter(e.min, e.max), height: max(b.height(next), 1+need)})
}

// markPlain sets flags of the position of a loop's body that takes every plain character. No other
// position continues at the loop, so that first is not shared.
func (b *builder) markPlain(body *expr, first int32, flags uint8) {
	if body.kind == kindChars && body.mode&modeTagged == 0 && covers(body.chars, plainChars) && b.p.pos[first].op == opBytes {
		b.p.pos[first].flag |= flags
	}
}

// A byteSet is a set of bytes.
type byteSet [4]uint64

func (s *byteSet) has(c byte) bool { return s[c>>6]>>(c&63)&1 != 0 }

// add adds the bytes lo to hi.
func (s *byteSet) add(lo, hi byte) {
	for w := lo >> 6; w <= hi>>6; w++ {
		s[w] |= wordOf(w, lo, hi)
	}
}

// overlaps reports whether s has one of the bytes lo to hi.
func (s *byteSet) overlaps(lo, hi byte) bool {
	for w := lo >> 6; w <= hi>>6; w++ {
		if s[w]&wordOf(w, lo, hi) != 0 {
			return true
		}
	}
	return false
}

// wordOf returns word w of the set of the bytes lo to hi, some of which are in it.
func wordOf(w, lo, hi byte) uint64 {
	from, to := max(lo, w<<6)&63, min(hi, w<<6+63)&63
	return ^uint64(0) << from & (^uint64(0) >> (63 - to))
}

// classify divides the bytes into classes that no edge distinguishes.
func (p *program) classify() {
	var id [256]uint16
	n := uint16(1)
	seen := map[byteSet]bool{}
	refine := func(s byteSet) {
		if seen[s] {
			return
		}
		seen[s] = true
		var to [257]uint16
		for c := range 256 {
			if !s.has(byte(c)) {
				continue
			}
			if to[id[c]] == 0 {
				to[id[c]] = n
				n++
			}
			id[c] = to[id[c]] | 1<<15
		}
		// A class that moved as a whole keeps a new number: numbers are packed below.
		for c := range 256 {
			id[c] &^= 1 << 15
		}
		var pack [1024]uint16
		next := uint16(0)
		for c := range 256 {
			if pack[id[c]] == 0 {
				next++
				pack[id[c]] = next
			}
			id[c] = pack[id[c]] - 1
		}
		n = next
	}
	var ranges [256]byteSet // [lo] those of a single edge that were refined, by hi
	var edges []edge
	for i := range p.pos {
		if p.pos[i].op != opBytes || n == 256 {
			continue
		}
		edges = append(edges[:0], p.edges[p.pos[i].a:p.pos[i].b]...)
		if len(edges) > 1 {
			slices.SortFunc(edges, func(x, y edge) int { return int(x.next - y.next) })
		}
		for j := 0; j < len(edges); {
			first, next := edges[j], edges[j].next
			var s byteSet
			s.add(first.lo, first.hi)
			for j++; j < len(edges) && edges[j].next == next; j++ {
				s.add(edges[j].lo, edges[j].hi)
				first.lo, first.hi = 1, 0
			}
			if first.lo <= first.hi {
				if ranges[first.lo].has(first.hi) {
					continue
				}
				ranges[first.lo].add(first.hi, first.hi)
			}
			refine(s)
		}
	}
	p.classes = int(n)
	p.sample = make([]byte, n)
	for c := 255; c >= 0; c-- {
		p.class[c] = uint8(id[c])
		p.sample[id[c]] = byte(c)
	}
}

// runeEdges calls add for each sequence of byte ranges that spells the characters lo to hi.
func runeEdges(lo, hi rune, add func([]runeRange)) {
	for _, width := range []struct{ lo, hi rune }{{0, 0x7F}, {0x80, 0x7FF}, {0x800, 0xFFFF}, {0x10000, 0x10FFFF}} {
		l, h := max(lo, width.lo), min(hi, width.hi)
		if l <= h {
			sameWidth(l, h, nil, add)
		}
	}
}

// sameWidth splits characters of equal length into sequences of byte ranges.
func sameWidth(lo, hi rune, prefix []runeRange, add func([]runeRange)) {
	var a, z [utf8.UTFMax]byte
	n := utf8.EncodeRune(a[:], lo)
	utf8.EncodeRune(z[:], hi)
	splitBytes(a[:n], z[:n], prefix, add)
}

// splitBytes splits the byte strings from a to z, whose bytes after the first are continuation
// bytes, into sequences of ranges.
func splitBytes(a, z []byte, prefix []runeRange, add func([]runeRange)) {
	if len(a) == 1 {
		add(append(slices.Clone(prefix), runeRange{rune(a[0]), rune(z[0])}))
		return
	}
	step := func(lo, hi byte, a, z []byte) {
		splitBytes(a, z, append(slices.Clone(prefix), runeRange{rune(lo), rune(hi)}), add)
	}
	first, last := []byte{0x80, 0x80, 0x80}[:len(a)-1], []byte{0xBF, 0xBF, 0xBF}[:len(a)-1]
	if a[0] == z[0] {
		step(a[0], a[0], a[1:], z[1:])
		return
	}
	lo, hi := a[0], z[0]
	if !slices.Equal(a[1:], first) {
		step(lo, lo, a[1:], last)
		lo++
	}
	if !slices.Equal(z[1:], last) {
		hi--
	}
	if lo <= hi {
		step(lo, hi, first, last)
	}
	if hi != z[0] {
		step(z[0], z[0], first, z[1:])
	}
}
