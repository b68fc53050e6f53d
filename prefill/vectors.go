package prefill

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/node"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/prefill/line"
)

// generate queues a Generate for a vector, or refuses it.
func (n *Node) generate(k key, payload []byte) {
	g := new(nodepb.Generate)
	if err := proto.Unmarshal(payload, g); err != nil {
		n.refuse(k, 0, nodepb.Code_CODE_INVALID, fmt.Sprintf("Generate does not parse: %v", err))
		return
	}
	p := &nodepb.Prefill{RequestId: g.RequestId, Attempt: g.Attempt, Tokens: g.Prompt, Priority: g.Priority, Adapter: g.Adapter, Trace: g.Trace}
	if code, msg := n.validateVector(g, p); code != 0 {
		n.refuse(k, g.Attempt, code, msg)
		return
	}
	timeout := n.o.JobTimeout
	if ms := g.DeadlineMs; ms > 0 && ms < uint64(timeout/time.Millisecond) {
		timeout = time.Duration(ms) * time.Millisecond
	}
	if n.queue(&job{key: k, asked: p, vector: g}, timeout) {
		n.send(k, rpc.FrameAccepted, &nodepb.Accepted{Attempt: g.Attempt})
	}
}

// validateVector refuses a Generate for anything but a vector that the node computes.
func (n *Node) validateVector(g *nodepb.Generate, p *nodepb.Prefill) (nodepb.Code, string) {
	if g.Pooling == nil {
		return nodepb.Code_CODE_MISMATCH, "a prefill node computes vectors and no tokens"
	}
	if code, msg := node.CheckPrompt(g, n.o.Engine.VectorSize(), n.o.Identity.Model); code != 0 {
		return code, msg
	}
	return n.checkPrompt(p)
}

// pool computes the vector of a job's prompt. No push reads the blocks of the prompt, so that they
// are free, or cached, as soon as it is computed.
func (n *Node) pool(ctx context.Context, j *job) (proto.Message, error) {
	n.update(func(l *line.Line) { l.Grant(j.ticket) })
	g, done := j.vector, make(chan engine.Token, 1)
	digest, _ := kvcache.ParseRootDigest(g.PrefixDigest) // checked
	id, cached, err := n.o.Engine.Add(&engine.Request{
		Root: kvcache.Hash(g.PrefixRoot), RootDigest: digest, Prompt: g.Prompt, Output: g.Output, MaxTokens: 1, Priority: int(g.Priority), Ticket: j.ticket,
		Pool: node.Pool(g.Pooling), PoolTokens: g.Pooling.Tokens, Adapter: g.Adapter.GetName(), AdapterDigest: g.Adapter.GetDigest(),
		Emit: func(t engine.Token) {
			n.update(func(l *line.Line) { l.Remove(j.ticket) })
			done <- t
		},
		OnFinish: func(l engine.RequestStats) { n.engineSpans(j, l) },
	})
	if err != nil {
		return nil, err
	}
	n.update(func(l *line.Line) { l.Cached(j.ticket, cached) })
	if cached > 0 {
		n.send(j.key, rpc.FrameAccepted, &nodepb.Accepted{Attempt: g.Attempt, CachedTokens: uint32(cached)})
	}
	select {
	case t := <-done:
		return &nodepb.Vector{Attempt: g.Attempt, Values: t.Vector}, t.Err
	case <-ctx.Done():
		n.o.Engine.Abort(id)
		return nil, context.Cause(ctx)
	}
}
