// Package native answers requests by the fleet's own decode nodes.
//
// A request is parsed. Its prompts are rendered, tokenized, hashed and routed. Each of its choices
// becomes attempts on decode nodes, whose tokens are detokenized and sent as a response or as
// events of a stream. All tokens of a request are kept, so that after a node's failure the next
// attempt continues on another node behind the last token received.
//
// Package nodes has the nodes and the connections to them, package choice the state of a choice.
//
// Invariant: no token is sent to a client twice, and each attempt is removed from its node's
// counters once.
package native

import (
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// Options of a Fleet.
type Options struct {
	Nodes                  nodes.Options     // without Meters, Blocks and Left
	AcceptTimeout          time.Duration     // for a node to queue an attempt
	StreamTokens           int               // of one choice that may wait for a slow client
	MinRemotePrefillTokens int               // uncached prompt tokens from which a prefill node computes them
	ServedModelName        string            // of the first model in the API; empty: its own name
	Names                  map[string]string // of further names to the models' own
	ChatTemplate           string            // replaces the models' own; empty: it does not
	ToolCallParser         string            // of all models; empty: each model's template shows it
	ReasoningParser        string            // likewise
	NoToolCalls            bool              // refuses requests for tool calls
	RejectSpecialTokens    bool              // in messages of users and tools
	TrustTemplates         bool              // runs the chat templates of requests
	CompactJSON            bool              // constrained answers have no whitespace between JSON tokens
	LogPromptText          int               // characters of each prompt in the request's log line
	Quiet                  bool              // does not log that there is no model
	KeepModels             bool              // a model whose nodes are all gone keeps its name, and its requests wait for one

	// Arrived, if set, is called for each choice that the fleet can serve, before the queue. Ended,
	// if set, is called for each of them when its request ends. Unserved, if set, is called with the
	// bytes of each body that is refused because no node is there. None may block.
	Arrived  func(prompt int)
	Ended    func(a *Ended)
	Unserved func(bytes int)
}

// End is how a choice ended.
type End string

// Ends of a choice.
const (
	EndAnswered   End = "answered"
	EndIncomplete End = "incomplete" // of a request that was admitted
	EndRefused    End = "refused"    // of a request that was not admitted; its client may have left the queue
)

// Ended is a choice that has ended. It is valid during the call.
type Ended struct {
	End    End
	Start  time.Time // of the request
	Prompt *render.Prompt
	// BlockTokens is the number of tokens of each of Prompt.Hashes.
	BlockTokens int
	Cached      int // tokens of the prompt
	Output      int // tokens of the answer, received so far
	// Times are when the first and the last tokens of the answer arrived.
	Times exchange.Timing
}

// Fleet answers requests by decode nodes. Make it with New.
type Fleet struct {
	*exchange.Service
	Nodes    *nodes.Fleet
	Blocks   *nodes.Blocks // cached by nodes
	Models   models        // being served
	Buffered atomic.Int64  // bytes of streams' buffers

	o        Options
	grammars *grammars
	// Owned by Run.
	failedModels   map[uint64]time.Time    // when loading last failed, by fingerprint
	pendingModels  map[pendingModel]string // by which model of the same name each waits: its name
	membersChanged chan struct{}
	bus            *cluster.Bus  // nil: there are no block events
	events         subscriptions // of the present models; set by Run
}

// New returns a fleet without members.
func New(s *exchange.Service, o Options) *Fleet {
	fl := &Fleet{Service: s, Blocks: nodes.NewBlocks(), o: o, grammars: newGrammars(s.Limits().GrammarCompiles), membersChanged: make(chan struct{}, 1), failedModels: map[uint64]time.Time{}, pendingModels: map[pendingModel]string{}}
	o.Nodes.Meters, o.Nodes.Blocks, o.Nodes.Left = s.Meters, fl.Blocks, fl.left
	fl.events.of = map[string]*cluster.Subscription{}
	fl.Nodes = nodes.New(o.Nodes)
	return fl
}

// Close closes the connections to nodes. It is called after the last request.
func (fl *Fleet) Close() {
	fl.Nodes.Close()
	fl.events.close()
}

// SetMembers replaces the members of the fleet. Any goroutine may call it.
func (fl *Fleet) SetMembers(members []nodes.Member) {
	fl.Nodes.SetMembers(members)
	select {
	case fl.membersChanged <- struct{}{}:
	default:
	}
}

// Usable returns the number of decode nodes that take requests.
func (fl *Fleet) Usable() (n int) {
	now := fl.Nodes.Now()
	for _, m := range fl.Models.All() {
		n += now.Usable(m.Fingerprint)
	}
	return n
}

// Waits reports whether requests wait although no decode node takes any: there is a model, and
// models keep their names.
func (fl *Fleet) Waits() bool { return fl.o.KeepModels && fl.Models.Load() != nil }

// Serve lets decode nodes answer a request for tokens.
func (fl *Fleet) Serve(ctx *fasthttp.RequestCtx, path string, on openai.Endpoint) {
	fl.Answer(ctx, path, on, &request{fleet: fl})
}
