// Package lengths counts the tokens of queued prompts by the length of the prompts.
//
// A prefill node computes the prompt with the least work left first. How long a prompt
// waits there thus depends on the tokens of prompts that are as short, not on all.
package lengths

import "time"

// StepTime is about what a step of a prefill node takes at most where the node can
// choose: a prompt that is the next to be computed waits no longer.
const StepTime = 50 * time.Millisecond

// N is the number of classes.
const N = 3

// Bounds are the most tokens that a prompt of each class has left. Heartbeats tell the
// counts in this order (rpc's Stats), so that they must not change.
var Bounds = [N]int{64, 256, 1024}

// Queue is how many tokens of prompts of at most each class's bound are queued. A prompt
// counts in each class that it is not too long for: so no count is above the next.
type Queue [N]int

// Class returns the first class that a prompt of so many tokens belongs to; N: none.
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

// Remove takes a prompt that was added with as many tokens away.
func (q *Queue) Remove(tokens int) { q.add(tokens, -tokens) }

func (q *Queue) add(length, tokens int) {
	for i := Class(length); i < N; i++ {
		q[i] += tokens
	}
}
