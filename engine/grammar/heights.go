package grammar

import "slices"

// heightsOf returns how deep the stack must get for each rule, infinite for those without strings.
func heightsOf(rules []*expr) []int32 {
	h := make([]int32, len(rules))
	for i := range h {
		h[i] = infinite
	}
	settle(rules, func(i int32) bool {
		n := tailHeight(rules[i], h)
		if n >= h[i] {
			return false
		}
		h[i] = n
		return true
	})
	return h
}

// settle calls update for every rule, and again for those that refer to a rule that was updated,
// until nothing changes. Update reports whether it changed a rule.
func settle(rules []*expr, update func(i int32) bool) {
	users := make([][]int32, len(rules))
	var queue []int32
	waits := make([]bool, len(rules))
	for i, r := range rules {
		if r == nil {
			continue
		}
		seen := map[*expr]bool{}
		eachRule(r, seen, func(to int32) { users[to] = append(users[to], int32(i)) })
		queue, waits[i] = append(queue, int32(i)), true
	}
	// The first round runs backwards: most rules refer to later ones.
	slices.Reverse(queue)
	for len(queue) > 0 {
		i := queue[0]
		queue, waits[i] = queue[1:], false
		if !update(i) {
			continue
		}
		for _, u := range users[i] {
			if !waits[u] {
				queue, waits[u] = append(queue, u), true
			}
		}
	}
}

// reachable returns the rules that start refers to, directly or by others, in their order. Some
// rules of a schema only decide whether the schema has an instance.
func reachable(rules []*expr, start int32) []int32 {
	seen := make([]bool, len(rules))
	seen[start] = true
	for todo := []int32{start}; len(todo) > 0; {
		r := rules[todo[len(todo)-1]]
		todo = todo[:len(todo)-1]
		eachRule(r, map[*expr]bool{}, func(to int32) {
			if !seen[to] && rules[to] != nil {
				seen[to] = true
				todo = append(todo, to)
			}
		})
	}
	var out []int32
	for i, ok := range seen {
		if ok {
			out = append(out, int32(i))
		}
	}
	return out
}

// eachRule calls found for the rules that e refers to.
func eachRule(e *expr, seen map[*expr]bool, found func(int32)) {
	if e.plain || seen[e] {
		return
	}
	if e.kind == kindRule {
		found(e.rule)
		return
	}
	if e.object != nil {
		for _, m := range e.object.members {
			eachRule(m.e, seen, found)
		}
		eachRule(e.object.extra, seen, found)
	}
	if len(e.subs) > 0 {
		seen[e] = true
	}
	for _, s := range e.subs {
		eachRule(s, seen, found)
	}
}

// tailHeight is heightOf for an expression behind which a rule returns: a call in last place
// pushes nothing.
func tailHeight(e *expr, rules []int32) int32 {
	if e.plain {
		return e.high
	}
	switch e.kind {
	case kindRule:
		return rules[e.rule]
	case kindSeq:
		last := len(e.subs) - 1
		n := tailHeight(e.subs[last], rules)
		for _, s := range e.subs[:last] {
			n = max(n, heightOf(s, rules))
		}
		return n
	case kindAlt:
		n := int32(infinite)
		for _, s := range e.subs {
			n = min(n, tailHeight(s, rules))
		}
		return n
	}
	return heightOf(e, rules)
}

// heightOf returns how many cells the stack must be able to get on top of its own for one string of
// e, given those of rules; infinite if e has no string.
func heightOf(e *expr, rules []int32) int32 {
	if e.plain {
		return e.high
	}
	switch e.kind {
	case kindNone:
		return infinite
	case kindSeq:
		n := int32(0)
		for _, s := range e.subs {
			n = max(n, heightOf(s, rules))
		}
		return n
	case kindAlt:
		n := int32(infinite)
		for _, s := range e.subs {
			n = min(n, heightOf(s, rules))
		}
		return n
	case kindRep:
		if e.min == 0 {
			return 1
		}
		return min(infinite, 1+heightOf(e.subs[0], rules))
	case kindDistinct:
		return min(infinite, 1+heightOf(e.subs[0], rules))
	case kindRule:
		return min(infinite, 1+rules[e.rule])
	case kindGraph:
		if e.graph.empty() {
			return infinite
		}
		return 1
	case kindObject:
		return e.object.height(rules)
	}
	return 0
}
