package grammar

import (
	"fmt"
	"slices"
)

// A graph is a deterministic automaton over UTF-8 in which every state can reach acceptance. It
// is how patterns are intersected, excluded and compared.
type graph struct {
	class   [256]uint8
	classes int
	next    []int32 // [states * classes] state, or -1
	accept  []bool
	start   int32  // -1: no string
	whole   []bool // every string is accepted from here
	between []bool // reached between characters

	// A counted graph accepts only strings of min to max characters. lengths and longest hold
	// which numbers of characters remain possible in each state.
	counted  bool
	min, max int32
	lengths  [][]uint64 // bit sets up to max, where that is bounded
	longest  []int32
	smooth   bool // masks may round the counter: see isSmooth
}

func (g *graph) states() int { return len(g.accept) }

func (g *graph) empty() bool { return g.start < 0 }

func (g *graph) acceptsEmpty() bool { return g.start >= 0 && g.accept[g.start] && g.min == 0 }

func (g *graph) step(s int32, c byte) int32 {
	if s < 0 {
		return -1
	}
	return g.next[int(s)*g.classes+int(g.class[c])]
}

// matches reports whether g accepts s, whatever its length limits.
func (g *graph) matches(s string) bool {
	at := g.start
	for i := 0; i < len(s); i++ {
		at = g.step(at, s[i])
	}
	return at >= 0 && g.accept[at]
}

// determinize returns the graph of an expression in modeRaw without rules.
func determinize(e *expr, limits *Limits) (*graph, error) {
	none := &graph{start: -1, classes: 1}
	if heightOf(e, nil) >= infinite {
		return none, nil
	}
	p, err := link([]*expr{e}, 0, limits)
	if err != nil {
		return nil, err
	}
	a, err := NewAutomaton(&Grammar{p: p}, nil, *limits)
	if err != nil {
		return nil, err
	}
	first, err := a.start()
	if err != nil {
		return nil, err
	}
	g := &graph{class: p.class, classes: p.classes}
	index := map[int32]int32{first: 0}
	order := []int32{first}
	for i := 0; i < len(order); i++ {
		s := order[i]
		g.accept = append(g.accept, a.states[s].accept)
		for c := range p.classes {
			t, err := a.step(s, uint8(c))
			if err != nil {
				return nil, err
			}
			to, known := index[t]
			switch {
			case t == deadState:
				to = -1
			case !known:
				if len(order) >= limits.DFAStates {
					return nil, fmt.Errorf("%w: more than %d states", ErrBudget, limits.DFAStates)
				}
				to = int32(len(order))
				index[t] = to
				order = append(order, t)
			}
			g.next = append(g.next, to)
		}
	}
	return g.finish(), nil
}

// finish trims and minimizes g.
func (g *graph) finish() *graph { return g.trim().minimize() }

// trim removes the states that are not reached or reach no acceptance.
func (g *graph) trim() *graph {
	n := g.states()
	back := make([][]int32, n)
	for s := range n {
		for _, t := range g.next[s*g.classes : (s+1)*g.classes] {
			if t >= 0 && (len(back[t]) == 0 || back[t][len(back[t])-1] != int32(s)) {
				back[t] = append(back[t], int32(s))
			}
		}
	}
	live := slices.Clone(g.accept)
	var todo []int32
	for s, ok := range live {
		if ok {
			todo = append(todo, int32(s))
		}
	}
	for len(todo) > 0 {
		s := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, t := range back[s] {
			if !live[t] {
				live[t] = true
				todo = append(todo, t)
			}
		}
	}
	out := &graph{class: g.class, classes: g.classes, start: -1}
	if n == 0 || g.start < 0 || !live[g.start] {
		return out
	}
	index := make([]int32, n)
	for i := range index {
		index[i] = -1
	}
	order := []int32{g.start}
	index[g.start], out.start = 0, 0
	for i := 0; i < len(order); i++ {
		out.accept = append(out.accept, g.accept[order[i]])
		for _, t := range g.next[int(order[i])*g.classes : (int(order[i])+1)*g.classes] {
			if t >= 0 && !live[t] {
				t = -1
			}
			if t >= 0 && index[t] < 0 {
				index[t] = int32(len(order))
				order = append(order, t)
			}
			if t >= 0 {
				t = index[t]
			}
			out.next = append(out.next, t)
		}
	}
	return out
}

// minimize joins states that accept the same strings, by Moore's refinement.
func (g *graph) minimize() *graph {
	n := g.states()
	part := make([]int32, n)
	for s, ok := range g.accept {
		if ok {
			part[s] = 1
		}
	}
	parts := 0
	row := make([]byte, 0, 4*(g.classes+1))
	for {
		ids := map[string]int32{}
		next := make([]int32, n)
		for s := range n {
			row = appendInt(row[:0], part[s])
			for _, t := range g.next[s*g.classes : (s+1)*g.classes] {
				p := int32(-1)
				if t >= 0 {
					p = part[t]
				}
				row = appendInt(row, p)
			}
			id, ok := ids[string(row)]
			if !ok {
				id = int32(len(ids))
				ids[string(row)] = id
			}
			next[s] = id
		}
		part = next
		if len(ids) == parts {
			break
		}
		parts = len(ids)
	}
	out := &graph{class: g.class, classes: g.classes, start: g.start, accept: make([]bool, parts), next: make([]int32, parts*g.classes)}
	if g.start >= 0 {
		out.start = part[g.start]
	}
	for s := range n {
		out.accept[part[s]] = g.accept[s]
		for c, t := range g.next[s*g.classes : (s+1)*g.classes] {
			if t >= 0 {
				t = part[t]
			}
			out.next[int(part[s])*g.classes+c] = t
		}
	}
	return out
}

func appendInt(b []byte, v int32) []byte {
	return append(b, byte(v), byte(v>>8), byte(v>>16), byte(v>>24))
}

// describe finds the states between characters and those from which every string is accepted.
func (g *graph) describe() {
	if g.whole != nil {
		return
	}
	n := g.states()
	g.whole, g.between = make([]bool, n), make([]bool, n)
	if g.start < 0 {
		return
	}
	g.between[g.start] = true
	todo := []int32{g.start}
	for len(todo) > 0 {
		s := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, t := range g.after(s) {
			if !g.between[t] {
				g.between[t] = true
				todo = append(todo, t)
			}
		}
	}
	for s := range n {
		candidate := g.accept[s]
		for c := range 0x80 {
			candidate = candidate && g.step(int32(s), byte(c)) == int32(s)
		}
		if !candidate {
			continue
		}
		from := *g
		from.start = int32(s)
		g.whole[s] = combine(anyText(), &from, onlyFirst, 1<<30).empty()
	}
}

// targets returns the states that follow s after one byte, sorted.
func (g *graph) targets(s int32) []int32 {
	var out []int32
	for _, t := range g.next[int(s)*g.classes : (int(s)+1)*g.classes] {
		if t >= 0 {
			out = append(out, t)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// after returns the states that follow s after one character, sorted.
func (g *graph) after(s int32) []int32 {
	var out []int32
	level := []int32{s}
	for width := range 4 {
		var next []int32
		for _, x := range level {
			lo, hi := 0x80, 0xBF
			if width == 0 {
				lo, hi = 0, 0xFF
			}
			for c := lo; c <= hi; c++ {
				t := g.step(x, byte(c))
				if t < 0 {
					continue
				}
				switch {
				case width == 0 && c < 0x80:
					out = append(out, t)
				case width == 0:
					// The number of bytes to come is kept in the high bits.
					next = append(next, t|int32(bytesAfter(byte(c)))<<28)
				}
			}
		}
		if width > 0 {
			break
		}
		for _, x := range next {
			g.continuations(x&(1<<28-1), int(x>>28), &out)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// continuations adds the states after n continuation bytes.
func (g *graph) continuations(s int32, n int, out *[]int32) {
	if n == 0 {
		*out = append(*out, s)
		return
	}
	last := int32(-1)
	for c := 0x80; c <= 0xBF; c++ {
		if t := g.step(s, byte(c)); t >= 0 && t != last {
			last = t
			g.continuations(t, n-1, out)
		}
	}
}

// bytesAfter returns how many bytes follow the first byte of a character.
func bytesAfter(c byte) int {
	switch {
	case c >= 0xF0:
		return 3
	case c >= 0xE0:
		return 2
	case c >= 0xC0:
		return 1
	}
	return 0
}

// How combine accepts.
func both(x, y bool) bool      { return x && y }
func onlyFirst(x, y bool) bool { return x && !y }

// combine returns the product of two graphs, nil if it has more than limit states.
func combine(x, y *graph, accept func(bool, bool) bool, limit int) *graph {
	g := &graph{}
	pairs := map[[2]uint8]uint8{}
	var samples []byte
	for c := range 256 {
		k := [2]uint8{x.class[c], y.class[c]}
		id, ok := pairs[k]
		if !ok {
			id = uint8(len(samples))
			pairs[k] = id
			samples = append(samples, byte(c))
		}
		g.class[c] = id
	}
	g.classes = len(samples)
	if x.start < 0 {
		g.start = -1
		return g
	}
	needBoth := accept(true, true)
	index := map[[2]int32]int32{}
	var order [][2]int32
	visit := func(p [2]int32) int32 {
		if p[0] < 0 || needBoth && p[1] < 0 {
			return -1
		}
		id, ok := index[p]
		if !ok {
			id = int32(len(order))
			index[p] = id
			order = append(order, p)
		}
		return id
	}
	g.start = visit([2]int32{x.start, y.start})
	for i := 0; i < len(order); i++ {
		if len(order) > limit {
			return nil
		}
		p := order[i]
		g.accept = append(g.accept, accept(x.accept[p[0]], p[1] >= 0 && y.accept[p[1]]))
		for _, c := range samples {
			g.next = append(g.next, visit([2]int32{x.step(p[0], c), y.step(p[1], c)}))
		}
	}
	return g.trim()
}

// anyText returns the graph of all UTF-8 texts.
func anyText() *graph {
	g := &graph{classes: 256, start: 0}
	for c := range 256 {
		g.class[c] = uint8(c)
	}
	const states = 8 // between characters, then what must follow
	g.next = make([]int32, states*256)
	for i := range g.next {
		g.next[i] = -1
	}
	set := func(s, lo, hi int, t int32) {
		for c := lo; c <= hi; c++ {
			g.next[s*256+c] = t
		}
	}
	set(0, 0x00, 0x7F, 0)
	set(0, 0xC2, 0xDF, 1)
	set(0, 0xE0, 0xE0, 3)
	set(0, 0xE1, 0xEC, 2)
	set(0, 0xED, 0xED, 4)
	set(0, 0xEE, 0xEF, 2)
	set(0, 0xF0, 0xF0, 5)
	set(0, 0xF1, 0xF3, 6)
	set(0, 0xF4, 0xF4, 7)
	set(1, 0x80, 0xBF, 0)
	set(2, 0x80, 0xBF, 1)
	set(3, 0xA0, 0xBF, 1)
	set(4, 0x80, 0x9F, 1)
	set(5, 0x90, 0xBF, 2)
	set(6, 0x80, 0xBF, 2)
	set(7, 0x80, 0x8F, 2)
	g.accept = make([]bool, states)
	g.accept[0] = true
	return g
}

// span returns the smallest and the largest number of characters of g's strings; unlimited where
// there is no largest.
func (g *graph) span() (shortest, longest int32) {
	return g.shortest(), g.longestFrom()[g.start]
}

func (g *graph) shortest() int32 {
	level := []int32{g.start}
	seen := make([]bool, g.states())
	for n := int32(0); ; n++ {
		var next []int32
		for _, s := range level {
			if g.accept[s] {
				return n
			}
			for _, t := range g.after(s) {
				if !seen[t] {
					seen[t] = true
					next = append(next, t)
				}
			}
		}
		level = next
	}
}

// longestFrom returns for each state between characters the largest number of characters that
// lead to acceptance, unlimited where a loop can be reached.
func (g *graph) longestFrom() []int32 {
	const open = -2
	out := make([]int32, g.states())
	for i := range out {
		out[i] = -1
	}
	var visit func(s int32) int32
	visit = func(s int32) int32 {
		if out[s] == open {
			return unlimited
		}
		if out[s] >= 0 {
			return out[s]
		}
		out[s] = open
		n := int32(0)
		for _, t := range g.after(s) {
			if m := visit(t); m == unlimited {
				n = unlimited
			} else if n != unlimited {
				n = max(n, m+1)
			}
		}
		out[s] = n
		return n
	}
	visit(g.start)
	return out
}

// count returns g restricted to strings of lo to hi characters. steps bounds the work; beyond it
// the result is nil.
func (g *graph) count(lo, hi int32, steps int) *graph {
	if g.empty() {
		return g
	}
	shortest, longest := g.span()
	if lo <= shortest && longest <= hi {
		return g
	}
	g.describe()
	c := *g
	c.counted, c.min, c.max = true, lo, hi
	c.longest = g.longestFrom()
	inner := g.innerStates()
	for _, s := range inner {
		for _, t := range g.targets(s) {
			c.longest[s] = max(c.longest[s], c.longest[t])
		}
	}
	if hi != unlimited {
		succ := make([][]int32, g.states())
		work := 0
		for s := range succ {
			if g.between[s] {
				succ[s] = g.after(int32(s))
				work += 1 + len(succ[s])
			}
		}
		if work*(int(hi)+1) > steps {
			return nil
		}
		c.fillLengths(succ)
		for _, s := range inner {
			for _, t := range g.targets(s) {
				for i, w := range c.lengths[t] {
					c.lengths[s][i] |= w
				}
			}
		}
		c.smooth = c.isSmooth()
	}
	if !c.possible(c.start, lo, hi) {
		return &graph{start: -1, classes: 1}
	}
	return &c
}

// innerStates returns the states inside characters, those with fewer bytes to come first.
func (g *graph) innerStates() []int32 {
	done := slices.Clone(g.between)
	var out []int32
	for range 3 {
		var level []int32
		for s := range g.states() {
			if !done[s] && !slices.ContainsFunc(g.targets(int32(s)), func(t int32) bool { return !done[t] }) {
				level = append(level, int32(s))
			}
		}
		for _, s := range level {
			done[s] = true
		}
		out = append(out, level...)
	}
	return out
}

func (g *graph) fillLengths(succ [][]int32) {
	n := g.states()
	words := int(g.max)/64 + 1
	g.lengths = make([][]uint64, n)
	for s := range n {
		g.lengths[s] = make([]uint64, words)
		if g.accept[s] {
			g.lengths[s][0] = 1
		}
	}
	for i := 1; i <= int(g.max); i++ {
		for s := range n {
			for _, t := range succ[s] {
				if g.lengths[t][(i-1)>>6]>>((i-1)&63)&1 != 0 {
					g.lengths[s][i>>6] |= 1 << (i & 63)
					break
				}
			}
		}
	}
}

// isSmooth reports whether each state allows all lengths from one that is at most countSlack, so
// that a large maximum does not matter, nor a minimum.
func (g *graph) isSmooth() bool {
	for s := range g.states() {
		if g.longest[s] != unlimited && g.min > 0 {
			return false
		}
		first := 0
		for first <= int(g.max) && g.lengths[s][first>>6]>>(first&63)&1 == 0 {
			first++
		}
		last := min(int(g.max), int(g.longest[s]))
		for i := first; i <= last; i++ {
			if g.lengths[s][i>>6]>>(i&63)&1 == 0 {
				return false
			}
		}
		if first > countSlack {
			return false
		}
	}
	return true
}

// possible reports whether a string of need to left characters leads from state s to acceptance.
func (g *graph) possible(s, need, left int32) bool {
	if left == unlimited {
		return need <= g.longest[s]
	}
	for i := int(need); i <= int(left); {
		if i&63 == 0 && i+63 <= int(left) {
			if g.lengths[s][i>>6] != 0 {
				return true
			}
			i += 64
			continue
		}
		if g.lengths[s][i>>6]>>(i&63)&1 != 0 {
			return true
		}
		i++
	}
	return false
}
