package nodes

import (
	"sync"
	"sync/atomic"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Kind is the kind of an Event.
type Kind uint8

// Kinds of events. Failed, Overflow and Vector end their stream, and so does a Token with a Finish.
const (
	Accepted Kind = iota + 1 // the node has queued the attempt
	Token                    // the next token, the end, or both
	Failed                   // the attempt ended without a finish, because of Err
	Scored                   // log-probabilities of the prompt's next tokens
	Overflow                 // the reader was too slow and the attempt was cancelled
	Vector                   // the prompt's vector
)

// Event is an event of one choice's attempt.
type Event struct {
	Err     error                  // Failed
	Probs   *nodepb.TokenLogProbs  // Token: if requested
	Prompt  *nodepb.PromptLogProbs // Scored
	Vector  *nodepb.Vector         // Vector
	Choice  int32                  // as given to Generate
	Token   int32                  // Token: the id, -1 for an end without one
	Cached  uint32                 // Accepted: tokens of the prompt found in the node's cache
	Attempt uint32
	Kind    Kind
	Finish  uint8 // Token: nodepb.FinishReason; 0: more follow
}

// Inbox collects the events of one request's choices for one reader. Tokens are bounded. An event
// that ends a stream always finds room, once for each choice and attempt.
type Inbox struct {
	// Ready has a value if there may be something to Drain, or after Wake.
	Ready chan struct{}

	woken  atomic.Bool
	mu     sync.Mutex
	events []Event
	most   int // tokens that may wait
	tokens int // tokens that wait
}

// NewInbox returns an inbox in which at most so many tokens may wait.
func NewInbox(most int) *Inbox {
	return &Inbox{Ready: make(chan struct{}, 1), most: most}
}

// push adds an event. It refuses a token, unless that is the last one, if the inbox is full.
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
	in.signal()
	return true
}

func (in *Inbox) signal() {
	select {
	case in.Ready <- struct{}{}:
	default:
	}
}

// Wake wakes the reader without an event. Its reasons to wake all come through Ready, because a
// receive from one channel costs a fraction of a select.
func (in *Inbox) Wake() {
	in.woken.Store(true)
	in.signal()
}

// Woken reports whether Wake was called since the last call.
func (in *Inbox) Woken() bool {
	return in.woken.Load() && in.woken.Swap(false)
}

// Drain returns all events in order of arrival. The caller passes the slice of its last call, which
// is reused.
func (in *Inbox) Drain(last []Event) []Event {
	clear(last) // drops errors
	in.mu.Lock()
	defer in.mu.Unlock()
	got := in.events
	in.events, in.tokens = last[:0], 0
	return got
}
