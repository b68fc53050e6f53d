package decode

import (
	"errors"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// startSpan starts an attempt's span below the gateway's.
func (n *Node) startSpan(g *nodepb.Generate) trace.Span {
	s := n.o.Tracer.Start(trace.Incoming(g.Trace.GetTraceparent(), g.Trace.GetTracestate()), "decode", trace.Server, time.Now())
	if s.On() {
		s.Set(trace.RequestID.String(g.RequestId), trace.Attempt.Int(int(g.Attempt)), trace.Choice.Int(int(g.GetSampling().GetChoice())),
			trace.InputTokens.Int(len(g.Prompt)), trace.Resumed.Int(len(g.Output)))
	}
	return s
}

// failSpan records why an attempt ended, unless it finished or was cancelled.
func (a *attempt) failSpan(cause error) {
	if cause != nil && !errors.Is(cause, ErrCancelled) && a.span.On() {
		a.span.Fail(codeOf(cause).String(), cause.Error())
	}
}

// endSpan ends an attempt's span with the engine's times.
func (n *Node) endSpan(a *attempt, l engine.RequestStats) {
	if !a.span.On() {
		return
	}
	at := n.o.Engine.At
	if l.Admitted > 0 {
		a.span.Child("queue", trace.Internal, at(l.Added)).End(at(l.Admitted))
	}
	if l.First > 0 {
		s := a.span.Child("prompt", trace.Internal, at(l.Admitted))
		s.Set(trace.Cached.Int(l.Cached), trace.Arrived.Int(l.Arrived), trace.Computed.Int(l.Prompt-l.Cached-l.Arrived))
		s.End(at(l.First))
		s = a.span.Child("tokens", trace.Internal, at(l.First))
		s.Set(trace.OutputTokens.Int(l.Output))
		s.End(at(l.Last))
	}
	finish := "abort"
	switch l.Finish {
	case engine.FinishStop:
		finish = "stop"
	case engine.FinishLength:
		finish = "length"
	case engine.FinishError:
		finish = "error"
	}
	a.span.Set(trace.Finish.String(finish), trace.OutputTokens.Int(l.Output), trace.Preemptions.Int(l.Preemptions))
	a.span.End(at(l.Ended))
}

// fetchSpan starts the span of one Prefill sent to one node.
func (a *attempt) fetchSpan(addr string, have int) trace.Span {
	s := a.span.Child("fetch KV", trace.Client, time.Now())
	if s.On() {
		s.Set(trace.Peer.String(addr), trace.Cached.Int(have))
	}
	return s
}
