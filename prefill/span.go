package prefill

import (
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// startSpan starts a job's span below the decode node's.
func (n *Node) startSpan(p *nodepb.Prefill) trace.Span {
	s := n.o.Tracer.Start(trace.Incoming(p.Trace.GetTraceparent(), p.Trace.GetTracestate()), "prefill", trace.Server, time.Now())
	if s.On() {
		s.Set(trace.RequestID.String(p.RequestId), trace.Attempt.Int(int(p.Attempt)), trace.InputTokens.Int(len(p.Tokens)))
	}
	return s
}

// endSpan ends a job's span.
func (j *job) endSpan(err error) {
	if err != nil && !unwanted(err) && j.span.On() {
		j.span.Fail(codeOf(err).String(), err.Error())
	}
	j.span.End(time.Now())
}

// engineSpans adds a job's times in the engine.
func (n *Node) engineSpans(j *job, l engine.RequestStats) {
	if !j.span.On() || l.Admitted == 0 {
		return
	}
	at := n.o.Engine.At
	j.span.Child("queue", trace.Internal, at(l.Added)).End(at(l.Admitted))
	s := j.span.Child("prompt", trace.Internal, at(l.Admitted))
	s.Set(trace.Cached.Int(l.Cached), trace.Computed.Int(l.Prompt-l.Cached), trace.Preemptions.Int(l.Preemptions))
	s.End(at(l.Ended))
}

// transferSpan adds a push, from its first block until all had arrived.
func (n *Node) transferSpan(j *job, t Transfer, landed time.Time, err error) {
	if !j.span.On() || t.First.IsZero() {
		return
	}
	s := j.span.Child("KV transfer", trace.Client, t.First)
	s.Set(trace.TransferBytes.Int64(t.Bytes))
	if err != nil {
		s.Fail(codeOf(err).String(), err.Error())
	} else {
		s.Set(trace.HiddenSeconds.Float64(t.Hidden.Seconds()), trace.ExposedSeconds.Float64(t.Exposed.Seconds()))
	}
	s.End(landed)
}
