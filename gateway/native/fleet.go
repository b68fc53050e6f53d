// Package native answers requests by the fleet's own decode nodes.
//
// A request is parsed, its prompts rendered, tokenized, hashed and routed. Each of its
// choices then becomes attempts on decode nodes, whose tokens turn into text and leave as a
// response or as a stream of events. All tokens of a request are kept, so that when a node
// dies the next attempt continues elsewhere, after the last token taken.
//
// Which nodes there are and the connections to them are package nodes'; which state a choice
// is in is package choice's.
//
// Invariant: a token that a client was sent is never sent again, and each attempt is taken
// off its node's books once.
package native

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// Options of a Fleet.
type Options struct {
	Nodes                  nodes.Options     // but for Blocks and Left
	AcceptTimeout          time.Duration     // within which a node queues an attempt
	StreamTokens           int               // of one choice that may wait for a slow client
	MinRemotePrefillTokens int               // uncached prompt tokens from which a prefill node computes them
	ServedModelName        string            // what clients call the first model; empty: its own name
	Names                  map[string]string // further names of models, with the models' own
	ChatTemplate           string            // instead of the models' own; empty: those
	RejectSpecialTokens    bool              // in messages of users and tools
	LogPromptText          int               // characters of each request's prompt in its log line
	Quiet                  bool              // that there is no model is not worth a log line
}

// Fleet answers requests by decode nodes. Make it with New.
type Fleet struct {
	*exchange.Service
	Nodes    *nodes.Fleet
	Blocks   *nodes.Blocks // what nodes cache
	Models   models        // that are served
	Buffered atomic.Int64  // bytes of streams' buffers

	o              Options
	torn           map[uint64]time.Time // models that could not be taken up, by fingerprint; keepModel's
	passed         map[uint64]string    // models that wait for another of their name to go, by fingerprint; keepModel's
	membersChanged chan struct{}
	bus            *cluster.Bus // nil: nobody tells of caches
	news           news         // of the present models; set by keepModel
}

// New makes a fleet without members.
func New(s *exchange.Service, o Options) *Fleet {
	fl := &Fleet{Service: s, Blocks: nodes.NewBlocks(), o: o, membersChanged: make(chan struct{}, 1)}
	o.Nodes.Blocks, o.Nodes.Left = fl.Blocks, fl.left
	fl.Nodes = nodes.New(o.Nodes)
	return fl
}

// Run follows which models the members serve until ctx ends.
func (fl *Fleet) Run(ctx context.Context) { fl.keepModel(ctx) }

// Close ends the connections to nodes, after the last request.
func (fl *Fleet) Close() {
	fl.Nodes.Close()
	fl.news.close()
}

// SetMembers says who is in the fleet; any goroutine may call it.
func (fl *Fleet) SetMembers(members []nodes.Member) {
	fl.Nodes.SetMembers(members)
	select {
	case fl.membersChanged <- struct{}{}:
	default:
	}
}

// Usable is the number of decode nodes that requests can go to.
func (fl *Fleet) Usable() (n int) {
	now := fl.Nodes.Now()
	for _, m := range fl.Models.All() {
		n += now.Usable(m.Fingerprint)
	}
	return n
}

// Serve has decode nodes answer a request for tokens.
func (fl *Fleet) Serve(ctx *fasthttp.RequestCtx, path string, on openai.Endpoint) {
	fl.Answer(ctx, path, on, &job{fleet: fl})
}
