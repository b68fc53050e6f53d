package grammar

import "slices"

// shortest returns the smallest number of characters of g's strings.
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

// count returns g restricted to strings of lo to hi characters.
func (g *graph) count(lo, hi int32, limits *Limits) (*graph, error) {
	if g.empty() {
		return g, nil
	}
	if err := limits.spend(characterSteps * g.states()); err != nil {
		return nil, err
	}
	longest := g.longestFrom()
	if lo <= g.shortest() && longest[g.start] <= hi {
		g.forget()
		return g, nil
	}
	if err := g.describe(limits); err != nil {
		return nil, err
	}
	c := *g
	c.counted, c.min, c.max = true, lo, hi
	c.longest = longest
	inner, targets := g.innerStates()
	for _, s := range inner {
		for _, t := range targets[s] {
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
		if work*(int(hi)+1) > limits.CompileSteps {
			return nil, limitError("grammar", "", "lengths of a pattern", limits.CompileSteps)
		}
		if err := limits.spend((work + g.states()) * (int(hi) + 1) / 32); err != nil {
			return nil, err
		}
		c.fillLengths(succ)
		for _, s := range inner {
			for _, t := range targets[s] {
				for i, w := range c.lengths[t] {
					c.lengths[s][i] |= w
				}
			}
		}
		c.smooth = c.isSmooth()
	}
	g.forget()
	c.forget()
	if !c.possible(c.start, lo, hi) {
		return &graph{start: -1, classes: 1}, nil
	}
	return &c, nil
}

// innerStates returns the states inside characters, those with fewer bytes to come first, and the
// targets of each state.
func (g *graph) innerStates() (inner []int32, targets [][]int32) {
	done := slices.Clone(g.between)
	targets = make([][]int32, g.states())
	var todo []int32
	for s, ok := range done {
		if targets[s] = g.targets(int32(s)); !ok {
			todo = append(todo, int32(s))
		}
	}
	for range 3 {
		first := len(inner)
		todo = slices.DeleteFunc(todo, func(s int32) bool {
			known := !slices.ContainsFunc(targets[s], func(t int32) bool { return !done[t] })
			if known {
				inner = append(inner, s)
			}
			return known
		})
		for _, s := range inner[first:] {
			done[s] = true
		}
	}
	return inner, targets
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
	var between []int32
	for s := range n {
		if len(succ[s]) > 0 {
			between = append(between, int32(s))
		}
	}
	for i := 1; i <= int(g.max); i++ {
		for _, s := range between {
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
			switch w := g.lengths[s][i>>6]; {
			case w>>(i&63)&1 == 0:
				return false
			case ^w == 0:
				i |= 63
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
