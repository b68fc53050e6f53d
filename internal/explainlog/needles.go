package explainlog

import (
	"regexp/syntax"
	"strings"
)

// leastNeedle is the length of the shortest literal that is worth a search.
const leastNeedle = 3

// needles returns texts, in lower case, of which every match of the pattern contains at least one.
// Searching for them is cheaper than the pattern. nil: there are none.
func needles(pattern string) []string {
	re, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return nil
	}
	return required(re.Simplify())
}

func required(re *syntax.Regexp) []string {
	switch re.Op {
	case syntax.OpLiteral:
		if text := strings.ToLower(string(re.Rune)); len(text) >= leastNeedle {
			return []string{text}
		}
	case syntax.OpCapture, syntax.OpPlus:
		return required(re.Sub[0])
	case syntax.OpRepeat:
		if re.Min > 0 {
			return required(re.Sub[0])
		}
	case syntax.OpConcat:
		var best []string
		for _, sub := range re.Sub {
			if all := required(sub); shortest(all) > shortest(best) {
				best = all
			}
		}
		return best
	case syntax.OpAlternate:
		var union []string
		for _, sub := range re.Sub {
			all := required(sub)
			if all == nil {
				return nil
			}
			union = append(union, all...)
		}
		return union
	}
	return nil
}

func shortest(all []string) int {
	least := 0
	for _, s := range all {
		if least == 0 || len(s) < least {
			least = len(s)
		}
	}
	return least
}
