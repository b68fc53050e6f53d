package explainlog

import "slices"

// finder finds in one pass over a text which rules may match it. There are hundreds of needles, and
// a search for each of them would take most of the time of a log.
type finder struct {
	needles []string
	// starts has the needles, as indices, by the hash of their first leastNeedle bytes.
	starts [1 << 11][]int
	found  []bool   // by needle, of the last text
	rules  []wanted // by rule
}

// wanted has what a text needs for a rule, as indices of needles.
type wanted struct {
	has int   // -1: nothing
	any []int // one of them; empty: nothing
}

func newFinder(rules []compiled) *finder {
	f := &finder{rules: make([]wanted, len(rules))}
	for i := range rules {
		w := &f.rules[i]
		w.has = -1
		if has := rules[i].has; len(has) >= leastNeedle {
			w.has = f.add(has)
		}
		for _, n := range rules[i].needles {
			w.any = append(w.any, f.add(n))
		}
	}
	f.found = make([]bool, len(f.needles))
	return f
}

// add returns the index of a needle of at least leastNeedle bytes.
func (f *finder) add(needle string) int {
	if i := slices.Index(f.needles, needle); i >= 0 {
		return i
	}
	f.needles = append(f.needles, needle)
	i, at := len(f.needles)-1, f.start(needle)
	f.starts[at] = append(f.starts[at], i)
	return i
}

// start returns the hash of the first leastNeedle bytes of text.
func (f *finder) start(text string) int {
	return (int(text[0]) ^ int(text[1])<<3 ^ int(text[2])<<6) % len(f.starts)
}

// look finds the needles in a text in lower case.
func (f *finder) look(lower string) {
	clear(f.found)
	for at := 0; at+leastNeedle <= len(lower); at++ {
		rest := lower[at:]
		for _, i := range f.starts[f.start(rest)] {
			if n := f.needles[i]; len(n) <= len(rest) && rest[:len(n)] == n {
				f.found[i] = true
			}
		}
	}
}

// may reports whether the last text has the needles of a rule.
func (f *finder) may(rule int) bool {
	w := &f.rules[rule]
	return (w.has < 0 || f.found[w.has]) && (len(w.any) == 0 || slices.ContainsFunc(w.any, func(i int) bool { return f.found[i] }))
}
