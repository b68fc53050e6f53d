package grammar

// minimize joins states that accept the same strings, by Hopcroft's algorithm. From every state of
// g acceptance can be reached. Transitions that are missing lead to a further state, which accepts
// nothing.
func (g *graph) minimize(limits *Limits) (*graph, error) {
	n := g.states()
	if err := limits.spend(1 + n*g.classes/8); err != nil {
		return nil, err
	}
	p := newPartition(n + 1)
	for s, ok := range g.accept {
		if ok {
			p.mark(int32(s))
		}
	}
	first, sources := g.sources()
	var members []int32
	for todo := p.split([]int32{0}); len(todo) > 0; {
		b := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		members = append(members[:0], p.states[p.begin[b]:p.end[b]]...)
		visits := g.classes * (1 + len(members))
		for c := range g.classes {
			for _, s := range members {
				at := c*(n+1) + int(s)
				visits += int(first[at+1] - first[at])
				for _, from := range sources[first[at]:first[at+1]] {
					p.mark(from)
				}
			}
			todo = p.split(todo)
		}
		if err := limits.spend(visits / 12); err != nil {
			return nil, err
		}
	}
	return g.joined(p), nil
}

// sources returns the states from which a class leads to a state: those of class c and state s
// begin at first[c*(states+1)+s].
func (g *graph) sources() (first, sources []int32) {
	n, k := g.states(), g.classes
	to := func(s, c int) int {
		if s < n {
			if t := g.next[s*k+c]; t >= 0 {
				return c*(n+1) + int(t)
			}
		}
		return c*(n+1) + n
	}
	first = make([]int32, k*(n+1)+1)
	for s := range n + 1 {
		for c := range k {
			first[to(s, c)+1]++
		}
	}
	for i := 1; i < len(first); i++ {
		first[i] += first[i-1]
	}
	sources = make([]int32, k*(n+1))
	for s := n; s >= 0; s-- { // fill each list from its end, so that first is right again
		for c := range k {
			at := to(s, c)
			first[at+1]--
			sources[first[at+1]] = int32(s)
		}
	}
	copy(first, first[1:])
	first[len(first)-1] = int32(len(sources))
	return first, sources
}

// joined returns g with one state for each block, in the order of their first states.
func (g *graph) joined(p *partition) *graph {
	out := &graph{class: g.class, classes: g.classes, start: -1}
	id := make([]int32, len(p.begin))
	var of []int32 // one state of each block
	for s := range g.states() {
		if b := p.block[s]; id[b] == 0 {
			of = append(of, int32(s))
			id[b] = int32(len(of))
		}
	}
	if g.start >= 0 {
		out.start = id[p.block[g.start]] - 1
	}
	out.accept, out.next = make([]bool, 0, len(of)), make([]int32, 0, len(of)*g.classes)
	for _, s := range of {
		out.accept = append(out.accept, g.accept[s])
		for _, t := range g.next[int(s)*g.classes : (int(s)+1)*g.classes] {
			if t >= 0 {
				t = id[p.block[t]] - 1
			}
			out.next = append(out.next, t)
		}
	}
	return out
}

// A partition divides states into blocks.
type partition struct {
	states, at []int32 // [states] by block; where each state is
	block      []int32 // [states]
	begin, end []int32 // [blocks] of states
	marked     []int32 // [blocks] states that are marked, the first of the block
	touched    []int32 // blocks with marked states
}

func newPartition(n int) *partition {
	p := &partition{states: make([]int32, n), at: make([]int32, n), block: make([]int32, n), begin: []int32{0}, end: []int32{int32(n)}, marked: []int32{0}}
	for s := range p.states {
		p.states[s], p.at[s] = int32(s), int32(s)
	}
	return p
}

// mark marks a state, which may be marked already.
func (p *partition) mark(s int32) {
	b, i := p.block[s], p.at[s]
	to := p.begin[b] + p.marked[b]
	if i < to {
		return
	}
	if p.marked[b] == 0 {
		p.touched = append(p.touched, b)
	}
	other := p.states[to]
	p.states[to], p.states[i] = s, other
	p.at[s], p.at[other] = to, i
	p.marked[b]++
}

// split divides blocks into marked states and others, and appends the smaller parts, which are new
// blocks, to dst. No state is marked then.
func (p *partition) split(dst []int32) []int32 {
	for _, b := range p.touched {
		k := p.marked[b]
		p.marked[b] = 0
		middle, part := p.begin[b]+k, int32(len(p.begin))
		switch {
		case middle == p.end[b]:
			continue
		case k <= p.end[b]-middle:
			p.begin, p.end = append(p.begin, p.begin[b]), append(p.end, middle)
			p.begin[b] = middle
		default:
			p.begin, p.end = append(p.begin, middle), append(p.end, p.end[b])
			p.end[b] = middle
		}
		p.marked = append(p.marked, 0)
		for _, s := range p.states[p.begin[part]:p.end[part]] {
			p.block[s] = part
		}
		dst = append(dst, part)
	}
	p.touched = p.touched[:0]
	return dst
}
