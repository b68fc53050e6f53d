package grammar

import (
	"fmt"
	"math"
	"slices"
)

// A graph is a deterministic automaton over UTF-8 in which every state can reach acceptance. It
// is how patterns are intersected, excluded and compared.
type graph struct {
	class   [256]uint8
	classes int
	next    []int32 // [states * classes] state, or -1
	accept  []bool
	start   int32                  // -1: no string
	whole   []bool                 // every string is accepted from here
	between []bool                 // reached between characters
	inner   map[innerState][]int32 // of continued
	follow  [][]int32              // [states] results of after

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

// row returns the states after s by class; nil for state -1.
func (g *graph) row(s int32) []int32 {
	if s < 0 {
		return nil
	}
	return g.next[int(s)*g.classes : (int(s)+1)*g.classes]
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
	spent := a.work
	index := make([]int32, first+1) // [states of a] 1 + number
	index[first] = 1
	order := []int32{first}
	for i := 0; i < len(order); i++ {
		s := order[i]
		g.accept = append(g.accept, a.states[s].accept)
		read := a.bytesRead(s)
		for c := range p.classes {
			if !read.has(p.sample[c]) {
				g.next = append(double(g.next, 1), -1)
				continue
			}
			t, err := a.step(s, uint8(c))
			if err != nil {
				return nil, err
			}
			for int(t) >= len(index) {
				index = append(index, 0)
			}
			switch {
			case t == deadState:
			case index[t] == 0:
				if len(order) >= limits.DFAStates {
					return nil, fmt.Errorf("%w: more than %d states", ErrBudget, limits.DFAStates)
				}
				order = append(order, t)
				index[t] = int32(len(order))
			}
			g.next = append(double(g.next, 1), index[t]-1) // -1 for the dead state
		}
		if err := limits.spend(transitionSteps*(a.work-spent) + p.classes/4); err != nil {
			return nil, err
		}
		spent = a.work
	}
	return g.finish(limits)
}

// transitionSteps is the number of compile steps of a transition that an Automaton computes.
const transitionSteps = 5

// finish trims and minimizes g.
func (g *graph) finish(limits *Limits) (*graph, error) {
	if err := limits.spend(g.states() * g.classes / 16); err != nil {
		return nil, err
	}
	return g.trim().minimize(limits)
}

// trim removes the states that are not reached or reach no acceptance.
func (g *graph) trim() *graph {
	n := g.states()
	live := g.live()
	out := &graph{class: g.class, classes: g.classes, start: -1}
	if n == 0 || g.start < 0 || !live[g.start] {
		return out
	}
	index := make([]int32, n)
	for i := range index {
		index[i] = -1
	}
	out.next = make([]int32, 0, len(g.next))
	order := []int32{g.start}
	index[g.start], out.start = 0, 0
	for i := 0; i < len(order); i++ {
		out.accept = append(out.accept, g.accept[order[i]])
		for _, t := range g.row(order[i]) {
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

// live reports which states reach acceptance.
func (g *graph) live() []bool {
	n := g.states()
	first := make([]int32, n+1) // [states + 1] where from lists the states that lead to each state
	each := func(visit func(s, t int32)) {
		for s := range n {
			last := int32(-1)
			for _, t := range g.row(int32(s)) {
				if t >= 0 && t != last {
					visit(int32(s), t)
					last = t
				}
			}
		}
	}
	each(func(_, t int32) { first[t]++ })
	for i := range n {
		first[i+1] += first[i]
	}
	from := make([]int32, first[n])
	each(func(s, t int32) {
		first[t]--
		from[first[t]] = s
	})
	live := slices.Clone(g.accept)
	var todo []int32
	for s, ok := range live {
		if ok {
			todo = append(todo, int32(s))
		}
	}
	for len(todo) > 0 {
		t := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, s := range from[first[t]:first[t+1]] {
			if !live[s] {
				live[s] = true
				todo = append(todo, s)
			}
		}
	}
	return live
}

// A byteRun is a range of bytes that lead to one state.
type byteRun struct {
	lo, hi byte
	to     int32
}

// runs returns the bytes that lead from s to a state, in order.
func (g *graph) runs(s int32) []byteRun {
	row := g.row(s)
	out := make([]byteRun, 0, 16)
	for c := 0; c < 256; {
		to, lo := row[g.class[c]], c
		for c < 256 && row[g.class[c]] == to {
			c++
		}
		if to >= 0 {
			out = append(out, byteRun{byte(lo), byte(c - 1), to})
		}
	}
	return out
}

// describe finds the states between characters and those from which every string is accepted.
func (g *graph) describe(limits *Limits) error {
	if g.whole != nil {
		return nil
	}
	n := g.states()
	if err := limits.spend(characterSteps * n); err != nil {
		return err
	}
	all := *limits
	all.DFAStates = math.MaxInt
	g.whole, g.between = make([]bool, n), make([]bool, n)
	if g.start < 0 {
		return nil
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
		more, err := combine(anyText(), &from, onlyFirst, &all)
		if err != nil {
			return err
		}
		g.whole[s] = more.empty()
	}
	return nil
}

// characterSteps is the number of compile steps of finding which states follow a state.
const characterSteps = 25

// targets returns the states that follow s after one byte, sorted.
func (g *graph) targets(s int32) []int32 {
	var out []int32
	last := int32(-1)
	for _, t := range g.row(s) {
		if t >= 0 && t != last {
			out, last = append(out, t), t
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// forget drops the results that after and continued keep.
func (g *graph) forget() { g.inner, g.follow = nil, nil }

// after returns the states that follow s after one character, sorted.
func (g *graph) after(s int32) []int32 {
	if g.follow == nil {
		g.follow = make([][]int32, g.states())
	}
	if out := g.follow[s]; out != nil {
		return out
	}
	out := []int32{}
	last := int32(-1)
	width := 0
	for c := range 256 {
		t, w := g.step(s, byte(c)), bytesAfter(byte(c))
		if t < 0 || t == last && w == width {
			continue
		}
		last, width = t, w
		out = append(out, g.continued(t, w)...)
	}
	slices.Sort(out)
	g.follow[s] = slices.Compact(out)
	return g.follow[s]
}

// continued returns the states after n continuation bytes.
func (g *graph) continued(s int32, n int) []int32 {
	if n == 0 {
		return []int32{s}
	}
	if g.inner == nil {
		g.inner = map[innerState][]int32{}
	}
	at := innerState{s, n}
	out, known := g.inner[at]
	if known {
		return out
	}
	last := int32(-1)
	for c := 0x80; c <= 0xBF; c++ {
		if t := g.step(s, byte(c)); t >= 0 && t != last {
			last = t
			out = append(out, g.continued(t, n-1)...)
		}
	}
	slices.Sort(out)
	out = slices.Compact(out)
	g.inner[at] = out
	return out
}

// innerState is a state with the number of continuation bytes to come.
type innerState struct {
	s int32
	n int
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

// combine returns the product of two graphs, at most of Limits.DFAStates states.
func combine(x, y *graph, accept func(bool, bool) bool, limits *Limits) (*graph, error) {
	g := &graph{}
	classes := map[[2]uint8]uint8{}
	var pairs [][2]uint8 // [classes] those of x and y
	for c := range 256 {
		k := [2]uint8{x.class[c], y.class[c]}
		id, ok := classes[k]
		if !ok {
			id = uint8(len(pairs))
			classes[k] = id
			pairs = append(pairs, k)
		}
		g.class[c] = id
	}
	g.classes = len(pairs)
	if x.start < 0 {
		g.start = -1
		return g, nil
	}
	needBoth := accept(true, true)
	index := newPairs(x.states(), y.states())
	perState := 1 + g.classes/4
	if index.few != nil {
		perState += g.classes / 2
	}
	if err := limits.spend(combineSteps + len(index.dense)/4096); err != nil {
		return nil, err
	}
	var order [][2]int32
	visit := func(p [2]int32) int32 {
		if p[0] < 0 || needBoth && p[1] < 0 {
			return -1
		}
		id, ok := index.id(p, int32(len(order)))
		if !ok {
			order = append(order, p)
		}
		return id
	}
	g.start = visit([2]int32{x.start, y.start})
	for i := 0; i < len(order); i++ {
		if len(order) > limits.DFAStates {
			return nil, limitError("grammar", "", "states", limits.DFAStates)
		}
		if err := limits.spend(perState); err != nil {
			return nil, err
		}
		p := order[i]
		g.accept = append(g.accept, accept(x.accept[p[0]], p[1] >= 0 && y.accept[p[1]]))
		g.next = double(g.next, g.classes)
		rowX, rowY := x.row(p[0]), y.row(p[1])
		for _, k := range pairs {
			to := [2]int32{rowX[k[0]], -1}
			if rowY != nil {
				to[1] = rowY[k[1]]
			}
			g.next = append(g.next, visit(to))
		}
	}
	return g.trim(), nil
}

// combineSteps is the number of compile steps of combining two small graphs.
const combineSteps = 80

// pairs numbers pairs of states, of which the second may be -1.
type pairs struct {
	wide  int
	dense []int32 // 1 + number
	few   map[[2]int32]int32
}

// newPairs returns pairs of n and m states. Those of small graphs are in an array.
func newPairs(n, m int) *pairs {
	const most = 1 << 16
	if n*(m+1) <= most {
		return &pairs{wide: m + 1, dense: make([]int32, n*(m+1))}
	}
	return &pairs{few: map[[2]int32]int32{}}
}

// id returns the number of a pair, which is next if the pair is not known.
func (x *pairs) id(p [2]int32, next int32) (id int32, known bool) {
	if x.few != nil {
		if id, known = x.few[p]; !known {
			x.few[p], id = next, next
		}
		return id, known
	}
	at := &x.dense[int(p[0])*x.wide+int(p[1])+1]
	if *at > 0 {
		return *at - 1, true
	}
	*at = next + 1
	return next, false
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
