package grammar

import (
	"cmp"
	"fmt"
	"slices"
)

// An Automaton runs a Grammar over a Vocabulary. It keeps the states and masks that it has
// computed, so that all requests of a grammar share them. One goroutine uses an Automaton and its
// Matchers at a time: callers lock.
type Automaton struct {
	p      *program
	vocab  *Vocabulary // nil: only bytes are matched
	limits Limits
	tokens []int32 // [program tokens] ids

	thinking *bounded // nil: reasoning has no bound
	free     bool     // every token is allowed

	*generation
	set   closure
	work  int     // counted steps of the current call; see step
	epoch uint32  // of the current part of the call; see newEpoch
	last  uint32  // the largest epoch so far
	walk  []int32 // [longest token + 1] the states along a path of the trie
	other []int32 // likewise, of a second walk
	fill  maskBuilder
}

// A generation is what an Automaton has cached. When it outgrows the limit a new one replaces it;
// a Matcher of the old one carries its configurations over with its next call.
type generation struct {
	cells     []cell
	cellIDs   map[cell]int32
	cellHash  []uint64 // [cells] of the content of the stack, equal in all Automatons
	states    []state
	ids       map[uint64]int32 // the first state with a hash; state.chain has the others
	trans     []int32          // [states * classes] state ids, unknown, or firstHeavy minus an index of heavy
	heavy     []heavyStep
	plain     []int32  // [states] how many plain characters may follow one by one
	loops     []uint64 // [states] kinds of characters that lead from a state back to it, and kindsKnown
	loopsUsed []uint32 // [states] the last walk that used loops
	bytes     int
}

// A heavyStep is a transition that counts more than one step where it is first used in an epoch.
type heavyStep struct {
	to, steps int32
	used      uint32 // the last epoch
}

// A cell is an element of a stack, which shares its rest with other stacks.
type cell struct {
	parent int32
	kind   int32 // a position to return to, or one of the constants below
	val    uint64
	depth  int32
	big    int32 // longest counter value that masks may round, here or below
}

const (
	cellCounter int32 = -1
	cellHard    int32 = -2
	cellSet     int32 = -3
)

// item is one configuration: a position that reads, and a stack.
type item struct{ pos, stack int32 }

type state struct {
	items     []item // sorted
	chain     int32
	accept    bool
	hasTok    bool
	loop      bool  // every plain character leads back to this state
	rounded   int32 // the state whose mask this one has, or unknown
	relaxed   int32 // likewise, for tokens of at most shortToken bytes
	loopSteps int32 // steps that findLoops counts for it
	mask      *mask
}

// countSlack is how much more than the longest token a counter must allow to count as unlimited in
// masks.
const countSlack = 8

const (
	deadState  int32 = 0
	unknown    int32 = -1
	firstHeavy int32 = -2
)

// closureStep is the number of configurations that are visited in a counted step. A transition of
// fewer counts one.
const closureStep = 4

// NewAutomaton returns an automaton. vocab may be nil: then only bytes can be matched.
func NewAutomaton(g *Grammar, vocab *Vocabulary, limits Limits) (*Automaton, error) {
	a := &Automaton{p: g.p, vocab: vocab, limits: limits, free: g.free}
	var err error
	if a.thinking, err = g.thinking.resolve(vocab); err != nil {
		return nil, err
	}
	for _, t := range g.p.tokens {
		id, ok := int32(-1), false
		if vocab != nil {
			if id, ok = vocab.special[t.name]; !ok && !t.optional {
				return nil, &Error{Keyword: "token", Reason: fmt.Sprintf("the vocabulary has no special token %q", t.name)}
			}
		}
		if !ok {
			id = -1
		} else if id < 0 || int(id) >= 64*vocab.words {
			return nil, &Error{Keyword: "token", Reason: fmt.Sprintf("the id %d of %q is not in the vocabulary", id, t.name)}
		}
		a.tokens = append(a.tokens, id)
	}
	a.set.slots = make([]int32, 64)
	if vocab != nil {
		a.walk, a.other = make([]int32, vocab.longest+1), make([]int32, vocab.longest+1)
		a.fill.bits = make([]uint64, vocab.words)
	}
	a.reset()
	return a, nil
}

// reset starts a new generation. A Matcher that pauses keeps the configurations of the old one in
// memory, and nothing else of it.
func (a *Automaton) reset() {
	if old := a.generation; old != nil {
		old.trans, old.heavy, old.plain, old.loops, old.loopsUsed, old.ids, old.cellIDs, old.cellHash = nil, nil, nil, nil, nil, nil, nil, nil
		for i := range old.states {
			old.states[i].mask = nil
		}
	}
	a.generation = &generation{cellIDs: map[cell]int32{}, ids: map[uint64]int32{}}
	a.cells, a.cellHash = append(a.cells, cell{}), append(a.cellHash, 0) // cell 0 is the empty stack
	a.addState(nil, 0)                                                   // state 0 is dead
	for i := range a.p.classes {
		a.trans[i] = deadState
	}
}

// Bytes returns the memory of cached states and masks.
func (a *Automaton) Bytes() int { return a.bytes }

// Steps returns the counted steps of the last call of a Matcher: one for each node of the trie that
// a mask visits and for each byte of an accepted token, or more where a transition visits many
// configurations.
func (a *Automaton) Steps() int { return a.work }

// Drop frees what is cached. Matchers stay valid.
func (a *Automaton) Drop() { a.reset() }

// push returns the stack with one more cell.
func (a *Automaton) push(parent, kind int32, val uint64) int32 {
	p := &a.cells[parent]
	c := cell{parent: parent, kind: kind, val: val, depth: p.depth + 1, big: p.big}
	if kind == cellCounter {
		need, left := counts(val)
		if left = max(0, left-countSlack); left == unlimited-countSlack {
			left = 0
		}
		c.big = max(c.big, need, left)
	}
	if id, ok := a.cellIDs[c]; ok {
		return id
	}
	id := int32(len(a.cells))
	a.cells = append(a.cells, c)
	a.cellHash = append(a.cellHash, mix(mix(a.cellHash[parent], uint64(uint32(kind))), val))
	a.cellIDs[c] = id
	a.bytes += 104
	return id
}

// mix returns the hash of a value after those of h.
func mix(h, v uint64) uint64 {
	h = (h ^ v) * 0x9E3779B97F4A7C15
	return h ^ h>>29
}

// closure is the set of configurations that are reached without reading, in a hash table.
type closure struct {
	seen  []item
	slots []int32 // 1 + index in seen; a power of two
	items []item  // those of seen that read
	err   error
}

func (c *closure) clear() {
	if len(c.slots) > 1024 {
		c.slots = make([]int32, 64)
	}
	clear(c.slots)
	c.seen, c.items, c.err = c.seen[:0], c.items[:0], nil
}

func (c *closure) hash(it item) int {
	h := uint64(uint32(it.pos))*0x9E3779B97F4A7C15 ^ uint64(uint32(it.stack))*0xC2B2AE3D27D4EB4F
	return int(h>>32^h) & (len(c.slots) - 1)
}

// add reports whether it is new.
func (c *closure) add(it item) bool {
	if len(c.seen)*2 >= len(c.slots) {
		c.slots = make([]int32, 4*len(c.slots))
		for j, s := range c.seen {
			i := c.hash(s)
			for c.slots[i] != 0 {
				i = (i + 1) & (len(c.slots) - 1)
			}
			c.slots[i] = int32(j + 1)
		}
	}
	i := c.hash(it)
	for c.slots[i] != 0 {
		if c.seen[c.slots[i]-1] == it {
			return false
		}
		i = (i + 1) & (len(c.slots) - 1)
	}
	c.seen = append(c.seen, it)
	c.slots[i] = int32(len(c.seen))
	return true
}

// enter adds what is reached from position pos without reading.
func (a *Automaton) enter(pos, stack int32) {
	for {
		p := &a.p.pos[pos]
		if int(a.cells[stack].depth+p.height) > a.limits.StackDepth || a.set.err != nil {
			return
		}
		switch p.op {
		case opToken:
			if a.tokens[p.b] < 0 {
				if p.val == 0 {
					return
				}
				pos = int32(p.val - 1)
				continue
			}
			if a.set.add(item{pos, stack}) {
				a.set.items = append(a.set.items, item{pos, stack})
			}
			return
		case opBytes:
			if a.set.add(item{pos, stack}) {
				a.set.items = append(a.set.items, item{pos, stack})
			}
			return
		case opReturn:
			if stack == 0 {
				if a.set.add(item{0, 0}) {
					a.set.items = append(a.set.items, item{0, 0})
				}
				return
			}
			c := &a.cells[stack]
			pos, stack = c.kind, c.parent
			continue
		}
		if !a.set.add(item{pos, stack}) {
			return
		}
		a.work++
		if len(a.set.seen) > 8*a.limits.StateItems {
			a.set.err = fmt.Errorf("%w: more than %d configurations of one state", ErrBudget, a.limits.StateItems)
			return
		}
		switch p.op {
		case opSplit:
			edges := a.p.edges[p.a:p.b]
			if len(edges) == 0 {
				return
			}
			for _, e := range edges[:len(edges)-1] {
				a.enter(e.next, stack)
			}
			pos = edges[len(edges)-1].next
		case opCall:
			pos, stack = p.a, a.push(stack, p.b, 0)
		default:
			if stack = a.counted(p, stack); stack < 0 {
				return
			}
			pos = p.a
		}
	}
}

// counted applies an instruction to the counters and sets of a stack. It returns -1 where they
// forbid it.
func (a *Automaton) counted(p *position, stack int32) int32 {
	c := a.cells[stack]
	need, left := counts(c.val)
	switch p.op {
	case opPush:
		return a.push(stack, cellCounter, p.val)
	case opPushHard:
		return a.push(stack, cellHard, p.val)
	case opPushSet:
		return a.push(stack, cellSet, 0)
	case opTick:
		if left == 0 {
			return -1
		}
		if left != unlimited {
			left--
		}
		return a.push(c.parent, c.kind, counter(max(0, need-1), left))
	case opPop:
		if c.kind != cellSet && need > 0 {
			return -1
		}
		return c.parent
	case opCheck:
		if !a.p.checks[p.b].possible(int32(p.val), need, left) {
			return -1
		}
		return stack
	case opRoom:
		if most, least := counts(p.val); need > most || left < least {
			return -1
		}
		return stack
	case opTake:
		return a.take(stack, p.b)
	}
	panic("grammar: unknown instruction")
}

// take adds a bit to the innermost set of a stack. Counters may be above it.
func (a *Automaton) take(stack, bit int32) int32 {
	c := a.cells[stack]
	if c.kind != cellSet {
		if below := a.take(c.parent, bit); below >= 0 {
			return a.push(below, c.kind, c.val)
		}
		return -1
	}
	if c.val>>bit&1 != 0 {
		return -1
	}
	return a.push(c.parent, cellSet, c.val|1<<bit)
}

// intern returns the state of the collected items and clears them.
func (a *Automaton) intern() (int32, error) {
	err := a.set.err
	if err == nil && len(a.set.items) > 24 {
		a.prune()
	}
	if err == nil && len(a.set.items) > a.limits.StateItems {
		err = fmt.Errorf("%w: more than %d configurations of one state", ErrBudget, a.limits.StateItems)
	}
	if err != nil {
		a.set.clear()
		return deadState, err
	}
	items := a.set.items
	slices.SortFunc(items, func(x, y item) int {
		if x.pos != y.pos {
			return int(x.pos) - int(y.pos)
		}
		return int(x.stack) - int(y.stack)
	})
	if len(items) == 0 {
		a.set.clear()
		return deadState, nil
	}
	h := uint64(14695981039346656037)
	for _, it := range items {
		h = (h ^ uint64(uint32(it.pos))) * 0x9E3779B97F4A7C15
		h = (h ^ h>>29 ^ uint64(uint32(it.stack))) * 0xC2B2AE3D27D4EB4F
	}
	first, found := a.ids[h]
	for s := first; found && s != unknown; s = a.states[s].chain {
		if slices.Equal(a.states[s].items, items) {
			a.set.clear()
			return s, nil
		}
	}
	if !found {
		first = unknown
	}
	id := a.addState(slices.Clone(items), h)
	a.states[id].chain = first
	a.ids[h] = id
	a.set.clear()
	counted, before := a.work, a.epoch
	a.epoch = 0
	a.describe(id)
	a.work, a.epoch = counted, before // of a known state nothing is counted either
	return id, nil
}

func (a *Automaton) addState(items []item, h uint64) int32 {
	id := int32(len(a.states))
	a.states = append(a.states, state{items: items, chain: unknown, rounded: unknown, relaxed: unknown})
	a.plain, a.loops, a.loopsUsed = append(a.plain, 0), append(a.loops, 0), append(a.loopsUsed, 0)
	n := len(a.trans)
	a.trans = slices.Grow(a.trans, a.p.classes)[:n+a.p.classes]
	for i := n; i < len(a.trans); i++ {
		a.trans[i] = unknown
	}
	a.bytes += 4*a.p.classes + 8*len(items) + 128
	return id
}

// describe finds what masks need to know of a state.
func (a *Automaton) describe(id int32) {
	s := &a.states[id]
	others := true // no other item reads plain characters
	commits := false
	plains := 0
	for _, it := range s.items {
		p := &a.p.pos[it.pos]
		switch {
		case it.pos == 0:
			s.accept = true
		case p.op == opToken:
			s.hasTok = true
		case p.flag&flagCommit != 0:
			commits, others = true, false
		case p.flag&flagPlain != 0:
			n := int32(unlimited)
			if p.flag&flagTicked != 0 {
				if _, left := counts(a.cells[it.stack].val); left != unlimited {
					n = left + 1
				}
			}
			a.plain[id] = max(a.plain[id], n)
			plains++
		case p.flag&flagNoPlain == 0:
			others = false
		}
	}
	if commits {
		a.plain[id] = 0 // a plain character may end what reads them
	}
	if a.plain[id] == unlimited && plains == 1 && others {
		loop := a.closesLoop(id)
		a.states[id].loop = loop
	}
}

// closesLoop reports whether the plain character a leads back to a state.
func (a *Automaton) closesLoop(id int32) bool {
	to, err := a.step(id, a.p.class['a'])
	return err == nil && to == id
}

// newEpoch begins a part of a call that counts by itself. Parts whose steps are kept with a state
// have the epoch 0, in which no transition has been used.
func (a *Automaton) newEpoch() {
	a.last++
	a.epoch = a.last
}

// step returns the state after a byte of a class. It counts one step, or more where many
// configurations are visited, the first time in an epoch. A transition that is cached counts as
// many as when it was computed, so that a limit is exceeded at the same token whatever was computed
// before.
func (a *Automaton) step(s int32, class uint8) (int32, error) {
	at := int(s)*a.p.classes + int(class)
	switch t := a.trans[at]; {
	case t >= 0:
		a.work++
		return t, nil
	case t <= firstHeavy:
		h := &a.heavy[firstHeavy-t]
		switch {
		case a.epoch == 0:
			a.work += int(h.steps)
		case h.used == a.epoch:
			a.work++
		default:
			a.work += int(h.steps)
			h.used = a.epoch
		}
		return h.to, nil
	}
	counted := a.work
	t, err := a.visit(s, a.p.sample[class])
	steps := max(1, (a.work-counted)/closureStep)
	a.work = counted + steps
	if err != nil {
		return deadState, err
	}
	a.trans[at] = t
	if steps > 1 {
		a.trans[at] = firstHeavy - int32(len(a.heavy))
		a.heavy = append(a.heavy, heavyStep{t, int32(min(steps, 1<<30)), a.epoch})
		a.bytes += 12
	}
	return t, nil
}

// visit returns the state after a byte. It counts the configurations that it visits.
func (a *Automaton) visit(s int32, c byte) (int32, error) {
	items := a.states[s].items
	a.work += len(items)
	commit := a.p.commits && a.reads(items, c)
	for _, it := range items {
		p := &a.p.pos[it.pos]
		if p.op != opBytes || commit && p.flag&flagCommit == 0 {
			continue
		}
		for _, e := range a.p.edges[p.a:p.b] {
			if e.lo > c {
				break
			}
			if c <= e.hi {
				a.enter(e.next, it.stack)
			}
		}
	}
	return a.intern()
}

// reads reports whether a position with flagCommit reads a byte.
func (a *Automaton) reads(items []item, c byte) bool {
	return slices.ContainsFunc(items, func(it item) bool {
		p := &a.p.pos[it.pos]
		return p.op == opBytes && p.flag&flagCommit != 0 &&
			slices.ContainsFunc(a.p.edges[p.a:p.b], func(e edge) bool { return e.lo <= c && c <= e.hi })
	})
}

// bytesRead returns the bytes that a position of a state reads.
func (a *Automaton) bytesRead(s int32) (read byteSet) {
	for _, it := range a.states[s].items {
		if p := &a.p.pos[it.pos]; p.op == opBytes {
			for _, e := range a.p.edges[p.a:p.b] {
				read.add(e.lo, e.hi)
			}
		}
	}
	return read
}

// stepToken returns the state after a token that the grammar names.
func (a *Automaton) stepToken(s, token int32) (int32, error) {
	for _, it := range a.states[s].items {
		if p := &a.p.pos[it.pos]; p.op == opToken && a.tokens[p.b] == token {
			a.enter(p.a, it.stack)
		}
	}
	return a.intern()
}

// start returns the first state.
func (a *Automaton) start() (int32, error) {
	a.enter(a.p.start, 0)
	return a.intern()
}

// prune removes configurations that another one makes superfluous: the same position and stack,
// but for counters that allow less. The order of comparisons, and so their number, depends on the
// content of the stacks and not on when they were made.
func (a *Automaton) prune() {
	items := a.set.items
	slices.SortFunc(items, func(x, y item) int {
		return cmp.Or(cmp.Compare(x.pos, y.pos), cmp.Compare(a.cells[x.stack].depth, a.cells[y.stack].depth), cmp.Compare(a.cellHash[x.stack], a.cellHash[y.stack]))
	})
	kept := items[:0]
	for _, it := range items {
		dominated := false
		for i := len(kept) - 1; i >= 0 && kept[i].pos == it.pos && a.cells[kept[i].stack].depth == a.cells[it.stack].depth && !dominated; i-- {
			dominated = a.dominates(kept[i].stack, it.stack)
			if !dominated && a.dominates(it.stack, kept[i].stack) {
				kept = slices.Delete(kept, i, i+1)
			}
		}
		if !dominated {
			kept = append(kept, it)
		}
	}
	a.set.items = kept
}

// dominates reports whether stack x allows whatever stack y allows.
func (a *Automaton) dominates(x, y int32) bool {
	for x != y {
		c, d := &a.cells[x], &a.cells[y]
		a.work++
		if c.kind != d.kind || c.depth != d.depth || x == 0 || y == 0 {
			return false
		}
		if c.val != d.val {
			if c.kind != cellCounter {
				return false
			}
			cn, cl := counts(c.val)
			dn, dl := counts(d.val)
			if cn > dn || cl < dl {
				return false
			}
		}
		x, y = c.parent, d.parent
	}
	return true
}

// round returns the state that has the same mask as s: counters that no token can exhaust are
// rounded to those that many states share.
func (a *Automaton) round(s int32) (int32, error) {
	a.work += 1 + len(a.states[s].items)/closureStep
	if r := a.states[s].rounded; r != unknown {
		return r, nil
	}
	r, err := a.roundTo(s, int32(a.vocab.longest))
	if err == nil {
		a.states[s].rounded = r
	}
	return r, err
}

// shortToken is the number of bytes for which relax rounds counters.
const shortToken = 16

// relax returns a state from which the same strings of at most shortToken bytes are allowed as from
// s. A loop with a counter, which leads from state to state, is there a loop in one state.
func (a *Automaton) relax(s int32) (int32, error) {
	a.work += 1 + len(a.states[s].items)/closureStep
	if r := a.states[s].relaxed; r != unknown {
		return r, nil
	}
	r, err := a.roundTo(s, shortToken)
	if err == nil {
		a.states[s].relaxed = r
	}
	return r, err
}

// roundTo rounds counters that no string of longest bytes can exhaust.
func (a *Automaton) roundTo(s, longest int32) (int32, error) {
	big := false
	for _, it := range a.states[s].items {
		big = big || a.cells[it.stack].big > longest
	}
	if big {
		for _, it := range a.states[s].items {
			rounded := item{it.pos, a.roundStack(it.stack, longest)}
			if a.set.add(rounded) {
				a.set.items = append(a.set.items, rounded)
			}
		}
		counted := a.work
		r, err := a.intern()
		a.work = counted // the callers count
		return r, err
	}
	return s, nil
}

func (a *Automaton) roundStack(stack, longest int32) int32 {
	c := a.cells[stack]
	if c.big <= longest {
		return stack
	}
	if c.kind == cellCounter {
		need, left := counts(c.val)
		if left > longest+countSlack {
			left = unlimited
		}
		c.val = counter(min(need, longest+1), left)
	}
	return a.push(a.roundStack(c.parent, longest), c.kind, c.val)
}
