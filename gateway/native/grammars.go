package native

import (
	"cmp"
	"container/list"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// grammars compiles the grammars of requests before the requests are accepted, so that a grammar
// that no node could follow is refused. It keeps outcomes, not compiled grammars: nodes compile
// again, for their vocabulary.
//
// Invariant: at most limits.GrammarCompiles grammars are compiled at once, apart from those that
// run when the limit changes, and at most limits.MaxQueuedGrammars requests wait. The outcome of a
// grammar depends on its source alone.
type grammars struct {
	mu      sync.Mutex
	slots   chan struct{}                       // has a value for each compilation that runs
	waiting int                                 // requests that wait for a slot or have one
	known   map[[sha256.Size]byte]*list.Element // of outcome
	recent  list.List                           // the most recently used first
	bytes   int
}

// outcome is the result of a compilation.
type outcome struct {
	key [sha256.Size]byte
	err error // nil: it compiles
}

// outcomeBytes is the memory of an outcome without the text of its error.
const outcomeBytes = 256

// errCompiles means that too many requests wait for the compilation of their grammars.
var errCompiles = errors.New("gateway: too many grammars wait to be compiled")

func newGrammars(compiles int) *grammars {
	return &grammars{slots: make(chan struct{}, max(1, compiles)), known: map[[sha256.Size]byte]*list.Element{}}
}

// check returns the error of compiling src, of which size bytes are the client's, and where the
// outcome came from, as a value of metrics.GatewayGrammars.
func (g *grammars) check(ctx context.Context, src *grammar.Source, size int, l *exchange.Limits) (result string, err error) {
	if size > l.MaxGrammarBytes {
		return "limit", fmt.Errorf("%w: %d bytes, at most %d are compiled (--max-grammar-bytes)", grammar.ErrBudget, size, l.MaxGrammarBytes)
	}
	key := sha256.Sum256(fmt.Appendf(nil, "%d %t %q %q %q %q", src.Kind, src.Compact, src.After, src.Text, src.Choices, src.Special))
	g.mu.Lock()
	if e := g.known[key]; e != nil {
		g.recent.MoveToFront(e)
		err := e.Value.(*outcome).err
		g.mu.Unlock()
		return "known", err
	}
	if n := max(1, l.GrammarCompiles); n != cap(g.slots) { // the limit was reloaded
		g.slots = make(chan struct{}, n)
	}
	slots := g.slots
	if g.waiting >= l.MaxQueuedGrammars+cap(slots) {
		g.mu.Unlock()
		return "queue_full", errCompiles
	}
	g.waiting++
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		g.waiting--
		g.mu.Unlock()
	}()
	select {
	case slots <- struct{}{}:
	case <-ctx.Done():
		return "late", context.Cause(ctx)
	}
	defer func() { <-slots }()
	_, err = grammar.Compile(*src, grammar.DefaultLimits())
	g.keep(&outcome{key, err}, l.GrammarCache)
	switch {
	case errors.Is(err, grammar.ErrBudget):
		return "limit", err
	case err != nil:
		return "invalid", err
	}
	return "compiled", nil
}

// keep remembers an outcome, and forgets those that were not used for longest beyond most bytes.
func (g *grammars) keep(o *outcome, most int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.known[o.key] != nil { // another request was faster
		return
	}
	g.known[o.key] = g.recent.PushFront(o)
	for g.bytes += o.size(); g.bytes > most && g.recent.Len() > 0; {
		last := g.recent.Remove(g.recent.Back()).(*outcome)
		delete(g.known, last.key)
		g.bytes -= last.size()
	}
}

func (o *outcome) size() int {
	if o.err == nil {
		return outcomeBytes
	}
	return outcomeBytes + len(o.err.Error())
}

// Grammars returns how many requests wait for the compilation of their grammar or run it, and the
// bytes of recent outcomes.
func (fl *Fleet) Grammars() (waiting, bytes int) {
	g := fl.grammars
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.waiting, g.bytes
}

// checkGrammar refuses a request whose grammar does not compile, or that no node can constrain.
func (x *request) checkGrammar(m *Model) *openai.Error {
	g := x.req.Grammar
	if g == nil {
		return nil
	}
	if m.Text == nil {
		return openai.BadRequest(g.Param, "%s needs a model with a tokenizer, which %q does not have", g.Param, m.Name)
	}
	g.Compact = g.Compact || x.fleet.o.CompactJSON
	l := x.fleet.Limits()
	ctx, cancel := context.WithDeadline(context.Background(), x.Deadline)
	defer cancel()
	size, own := g.Bytes(), g.Own
	if own != nil && own.Param == g.Param { // without the calls of tools
		size = own.Bytes()
	}
	result, err := x.fleet.grammars.check(ctx, &g.Source, size, l)
	x.S.Meters.Counter(metrics.GatewayGrammars, result).Inc()
	switch {
	case errors.Is(err, errCompiles):
		x.S.Meters.Counter(metrics.GatewayRefused, "grammars").Inc()
		return openai.TooMany(exchange.RetryAfter, "%d requests wait for the compilation of their grammars, as many as may (--max-queued-grammars): send this one again later", l.MaxQueuedGrammars)
	case errors.Is(err, context.DeadlineExceeded):
		return x.CutOff(exchange.CauseDeadline)
	case err != nil && own != nil:
		own.Compact = g.Compact
		if _, e := x.fleet.grammars.check(ctx, &own.Source, own.Bytes(), l); e != nil && !errors.Is(e, errCompiles) && ctx.Err() == nil {
			return openai.GrammarError(own, e)
		}
		fallthrough
	case err != nil:
		return openai.GrammarError(g, err)
	}
	return x.unconstrained(m)
}

// unconstrained returns an error if no decode node has grammars of this gateway's version.
func (x *request) unconstrained(m *Model) *openai.Error {
	if x.req.Grammar == nil || x.fleet.Nodes.Now().Constrains(m.Fingerprint, grammar.Version) > 0 {
		return nil
	}
	return openai.Unavailable(exchange.RetryAfter, "no decode node of model %q can constrain outputs (%s) by grammars of version %d: upgrade the nodes, or leave %s out",
		openai.Clip(m.Name, 200), x.req.Grammar.Param, grammar.Version, x.req.Grammar.Param)
}

// grammarOf returns the grammar of a Generate whose output has at most maxTokens.
func (x *request) grammarOf(maxTokens uint32) *nodepb.Grammar {
	g := x.req.Grammar
	return &nodepb.Grammar{
		Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_SCHEMA + nodepb.GrammarKind(g.Kind), Text: g.Text, Choices: g.Choices, Compact: g.Compact,
		After: g.After, Special: g.Special, MaxTokens: maxTokens, Version: grammar.Version, MaskSteps: uint32(x.fleet.Limits().MaxMaskSteps),
	}
}

// constrained returns 1 if the request has a grammar, and else 0.
func (x *request) constrained() int64 {
	if x.req.Grammar == nil {
		return 0
	}
	return 1
}

// DrainTime returns how long constrained streams may continue on a node that is about to be
// drained. asked is the time that the operator gave; 0: fallback is used. If no other node has
// grammars of this gateway's version, the streams get the time of a whole request, because they
// cannot move. An asked time that is shorter is refused then.
func (fl *Fleet) DrainTime(n *nodes.Node, asked, fallback time.Duration) (time.Duration, *openai.Error) {
	given := cmp.Or(asked, fallback)
	streams, others := n.Constrained.Load(), fl.Nodes.Now().Constrains(n.Fingerprint(), grammar.Version)
	if n.Usable() {
		others--
	}
	most := fl.Limits().RequestTimeout
	switch {
	case streams == 0 || others > 0 || given >= most:
		return given, nil
	case asked == 0:
		return most, nil
	}
	return 0, &openai.Error{Status: 409, Type: openai.TypeConflict, Param: "timeout",
		Message: fmt.Sprintf("node %s is the last with grammars of version %d and runs %d constrained streams, which no other node can continue: leave timeout out, or give %v (--request-timeout) or more, so that they end there",
			openai.Clip(n.Member().Name, 100), grammar.Version, streams, most)}
}
