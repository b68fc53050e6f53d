package gateway

import (
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// span is a request's: the root of its trace, unless the client sent one.
type span struct {
	trace.Span
	operation string // as OpenTelemetry names it
}

// startSpan begins a request's span.
func (g *Gateway) startSpan(ctx *fasthttp.RequestCtx, on openai.Endpoint, start time.Time) span {
	parent := ctx.Request.Header.Peek("Traceparent")
	if g.o.Tracer == nil && len(parent) == 0 {
		return span{}
	}
	operation := "text_completion"
	if on == openai.Chat {
		operation = "chat"
	}
	s := g.o.Tracer.Start(trace.Incoming(string(parent), string(ctx.Request.Header.Peek("Tracestate"))), operation, trace.Server, start)
	if s.On() {
		s.Set(trace.Operation.String(operation), trace.Provider.String("tandem"), trace.Method.String("POST"), trace.Path.String(string(ctx.Path())))
	}
	return span{s, operation}
}

// describe adds to the job's span what the request asks and why its choices ended.
func (j *job) describe() {
	s, r := &j.span, j.req
	if !s.On() {
		return
	}
	var reasons []string
	for i := range j.choices {
		if c := &j.choices[i]; c.done() {
			reasons = append(reasons, c.finish.Reason)
		}
	}
	s.Set(trace.ResponseModel.String(j.model.Name), trace.ResponseID.String(j.answerID), trace.FinishReasons.StringSlice(reasons))
	if r.Temperature != nil {
		s.Set(trace.Temperature.Float64(float64(*r.Temperature)))
	}
	if r.TopP != nil {
		s.Set(trace.TopP.Float64(float64(*r.TopP)))
	}
	if r.TopK != nil {
		s.Set(trace.TopK.Int(int(*r.TopK)))
	}
	if r.Seed != nil {
		s.Set(trace.Seed.Int64(int64(*r.Seed)))
	}
}

// endSpan ends the request's span with what came of it.
func (x *exchange) endSpan(e *ending) {
	s := &x.span
	if !s.On() {
		return
	}
	if e.model != "" {
		s.Name(s.operation + " " + e.model)
		s.Set(trace.RequestModel.String(e.model), trace.RequestID.String(string(x.id)), trace.Choices.Int(e.choices), trace.OutputTokens.Int(e.output))
		if e.prompt > 0 {
			s.Set(trace.InputTokens.Int(e.prompt), trace.CachedTokens.Int(e.cached))
		}
		if e.maxTokens > 0 {
			s.Set(trace.MaxTokens.Int(e.maxTokens))
		}
		if !e.first.IsZero() {
			s.Set(trace.FirstToken.Float64(e.first.Sub(x.start).Seconds()))
		}
	}
	if x.cause != "" {
		s.Fail(x.cause, "")
	}
	s.Set(trace.Status.Int(x.status))
	if x.status >= 400 {
		s.Fail(strconv.Itoa(x.status), "")
	}
	s.End(time.Now())
}

// attemptSpan begins the span of a choice's next attempt.
func (j *job) attemptSpan(c *choice, node *nodes.Node, d route.Decision) {
	c.span = j.span.Child("attempt", trace.Client, c.since)
	if c.span.On() {
		c.span.Set(trace.Peer.String(node.Name), trace.Choice.Int(c.index), trace.Attempt.Int(int(c.state.Attempt())), trace.Resumed.Int(c.state.From()),
			trace.RouteReason.String(string(d.Reason)), trace.PrefillReason.String(string(d.PrefillReason)))
	}
}

// failSpan says why an attempt failed, and ends its span.
func failSpan(s *trace.Span, f *failure) {
	if s.On() {
		s.Fail(f.kind, f.err.Error())
		s.End(time.Now())
	}
}

// attemptSpan begins the span of a relayed request's next attempt.
func (r *relay) attemptSpan(s, prefill *upstream.Server) {
	if !r.span.On() {
		return
	}
	r.try = r.span.Child("attempt", trace.Client, time.Now())
	r.try.Set(trace.Peer.String(s.Name), trace.Attempt.Int(int(r.life.Attempt())), trace.RequestModel.String(r.model.Name))
	if prefill != nil {
		r.try.Set(trace.PrefillPeer.String(prefill.Name))
	}
}

// answeredSpan records when the attempt's answer began.
func (r *relay) answeredSpan() {
	if r.try.On() {
		r.try.Event("first byte", time.Now())
	}
}
