// Package ngram guesses what tokens follow from what followed the same words
// before: it finds the last place where the end of the tokens occurred already,
// by its longest part of Min to Max tokens, and repeats what stood behind it. A
// text that quotes its prompt, or itself, is guessed right for long runs.
// (Prompt lookup, as vLLM's method ngram; Yang et al., "Inference with
// reference", 2023.)
//
// Invariant: a guess is a function of the tokens alone, so that the same request
// is guessed alike on every path.
//
// The package keeps no state and knows no model: whether a guess is right is for
// the model to say.
package ngram

// maxLook is how many tokens back a match may end. It bounds the time of a guess,
// which is taken for each running request in each step.
const maxLook = 1 << 15

// Lookup says how long the part is that has to occur again, in tokens.
type Lookup struct {
	Min, Max int // 1 <= Min <= Max
}

// Draft appends at most n guesses to tokens; none where nothing occurs again.
func (l Lookup) Draft(tokens []int32, n int) []int32 {
	at := l.match(tokens)
	if at == 0 {
		return tokens
	}
	// What is repeated may reach into what has just been appended.
	for range n {
		tokens = append(tokens, tokens[at])
		at++
	}
	return tokens
}

// match is where the longest match ends, the last of several; 0 where there is
// none.
func (l Lookup) match(tokens []int32) (at int) {
	last := len(tokens) - 1
	best := l.Min - 1 // tokens of the longest match so far
	if last < best {
		return 0
	}
	// A longer match has this token in this place; most places are passed over
	// for want of it.
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
