package nodes

import (
	"sync"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Kind says what an Event tells.
type Kind uint8

// Kinds of events. Failed and Overflow end their stream; so does a Token with a Finish.
const (
	Accepted Kind = iota + 1 // the node has queued the attempt
	Token                    // the next token, the end, or both
	Failed                   // the attempt is over without a finish: Err says why
	Scored                   // log-probabilities of the prompt's next tokens
	Overflow                 // the reader was too slow: the attempt was cancelled
)

// Event is something that happened to one choice's attempt.
type Event struct {
	Err     error                  // Failed
	Probs   *nodepb.TokenLogProbs  // Token: when they were asked for
	Prompt  *nodepb.PromptLogProbs // Scored
	Choice  int32                  // as given to Generate
	Token   int32                  // Token: the id, -1 for an end without one
	Cached  uint32                 // Accepted: tokens of the prompt found in the node's cache
	Attempt uint32
	Kind    Kind
	Finish  uint8 // Token: nodepb.FinishReason, 0 when the stream goes on
}

// Inbox gathers the events of one request's choices for its one reader. Tokens
// are bounded; what ends a stream always finds room, once per choice and
// attempt.
type Inbox struct {
	// Ready holds a value when there may be something to Drain.
	Ready chan struct{}

	mu     sync.Mutex
	events []Event
	most   int // tokens that may wait
	tokens int // tokens that wait
}

// NewInbox makes an inbox in which up to most tokens may wait.
func NewInbox(most int) *Inbox {
	return &Inbox{Ready: make(chan struct{}, 1), most: most}
}

// push adds an event; it refuses a token that goes on when the inbox is full.
func (in *Inbox) push(e Event) bool {
	in.mu.Lock()
	if e.Kind == Token && e.Finish == 0 {
		if in.tokens >= in.most {
			in.mu.Unlock()
			return false
		}
		in.tokens++
	}
	in.events = append(in.events, e)
	in.mu.Unlock()
	select {
	case in.Ready <- struct{}{}:
	default:
	}
	return true
}

// Drain takes all that waits, in order of arrival. The caller gives the slice of
// its last call back, to be filled anew.
func (in *Inbox) Drain(last []Event) []Event {
	clear(last) // drops errors
	in.mu.Lock()
	defer in.mu.Unlock()
	got := in.events
	in.events, in.tokens = last[:0], 0
	return got
}
