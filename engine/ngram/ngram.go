// Package ngram drafts tokens from earlier text: it finds the last place where the
// end of the tokens has occurred before, by its longest part of Min to Max tokens,
// and repeats what followed there. A text that quotes its prompt, or itself, is
// drafted right for long runs. (Prompt lookup, as vLLM's method ngram; Yang et al.,
// "Inference with reference", 2023.)
//
// Invariant: the drafts are a function of the tokens alone, so that the same request
// gets the same drafts on every path.
//
// The package keeps no state and does not know a model. The model decides which
// drafts are accepted.
package ngram

// maxLook bounds how many tokens back a match may end, and so the time of a draft,
// which is spent for each running request in each step.
const maxLook = 1 << 15

// Lookup is the length of the part that has to occur again, in tokens.
type Lookup struct {
	Min, Max int // 1 <= Min <= Max
}

// Draft appends at most n drafts to tokens, and none if nothing occurs again.
func (l Lookup) Draft(tokens []int32, n int) []int32 {
	at := l.match(tokens)
	if at == 0 {
		return tokens
	}
	// The repeated part may reach into the tokens just appended.
	for range n {
		tokens = append(tokens, tokens[at])
		at++
	}
	return tokens
}

// match returns the index after the longest match, the last of several, or 0 if
// there is none.
func (l Lookup) match(tokens []int32) (at int) {
	last := len(tokens) - 1
	best := l.Min - 1 // tokens of the longest match so far
	if last < best {
		return 0
	}
	// A longer match has this token in this place, which rules most places out.
	needed := tokens[last-best]
	for end := last - 1; end >= max(best, last-maxLook); end-- {
		if tokens[end-best] != needed {
			continue
		}
		length := 0
		for length < l.Max && length <= end && tokens[end-length] == tokens[last-length] {
			length++
		}
		if length <= best {
			continue
		}
		best, at = length, end+1
		if best == l.Max || best > last {
			break
		}
		needed = tokens[last-best]
	}
	return at
}
