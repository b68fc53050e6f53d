// Package lengths counts the tokens of queued prompts by the length of the prompts.
//
// A prefill node computes the prompt with the least work left first. The wait of a prompt
// depends on the tokens of prompts of its length or less, not on all.
package lengths

import "time"

// StepTime is the duration that a prefill node aims at for a step, and so the longest wait of
// the next prompt.
const StepTime = 50 * time.Millisecond

// N is the number of classes.
const N = 3

// Bounds are the most tokens that a prompt of each class has left. They must not change,
// because heartbeats send the counts in this order (rpc's Stats).
var Bounds = [N]int{64, 256, 1024}

// Queue counts the queued tokens of prompts of at most each class's bound. A prompt counts in
// every class whose bound it does not exceed, so that no count is above the next.
type Queue [N]int

// Class returns the first class of a prompt with a number of tokens; N: none.
func Class(tokens int) int {
	for i, most := range Bounds {
		if tokens <= most {
			return i
		}
	}
	return N
}

// Add counts the tokens of one prompt.
func (q *Queue) Add(tokens int) { q.add(tokens, tokens) }

// Remove subtracts the tokens of a prompt that was added.
func (q *Queue) Remove(tokens int) { q.add(tokens, -tokens) }

func (q *Queue) add(length, tokens int) {
	for i := Class(length); i < N; i++ {
		q[i] += tokens
	}
}
