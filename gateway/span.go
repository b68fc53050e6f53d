package gateway

import (
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/foreign"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/gateway/upstream"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/openai"
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

// end ends the span of a request that became no job, or of a job.
func (s span) end(status int) {
	if !s.On() {
		return
	}
	s.Set(trace.Status.Int(status))
	if status >= 400 {
		s.Fail(strconv.Itoa(status), "")
	}
	s.End(time.Now())
}

// describe gives the job its span, with what the request asks.
func (j *job) describe(s span) {
	j.span = s
	if !s.On() {
		return
	}
	r, tokens := j.req, 0
	for i := range j.prompts {
		tokens += len(j.prompts[i].tokens)
	}
	s.Name(s.operation + " " + j.model.name)
	s.Set(trace.RequestModel.String(j.model.name), trace.ResponseModel.String(j.model.name), trace.ResponseID.String(j.id), trace.RequestID.String(r.RequestID),
		trace.InputTokens.Int(tokens), trace.Choices.Int(r.N), trace.MaxTokens.Int(j.prompts[0].maxTokens))
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

// endSpan ends the job's span with what came of it.
func (j *job) endSpan() {
	if !j.span.On() {
		return
	}
	var reasons []string
	var first time.Time
	for i := range j.choices {
		c := &j.choices[i]
		if c.done() {
			reasons = append(reasons, c.finish.Reason)
		}
		if !c.firstTok.IsZero() && (first.IsZero() || c.firstTok.Before(first)) {
			first = c.firstTok
		}
	}
	u := j.usage()
	j.span.Set(trace.FinishReasons.StringSlice(reasons), trace.OutputTokens.Int(u.Completion), trace.CachedTokens.Int(u.Cached))
	if !first.IsZero() {
		j.span.Set(trace.FirstToken.Float64(first.Sub(j.start).Seconds()))
	}
	if j.cause != "" {
		j.span.Fail(j.cause, "")
	}
	if j.status == 0 {
		j.status = fasthttp.StatusOK
	}
	j.span.end(j.status)
}

// attemptSpan begins the span of a choice's next attempt.
func (j *job) attemptSpan(c *choice, node *upstream.Node, d route.Decision) {
	c.span = j.span.Child("attempt", trace.Client, c.since)
	if c.span.On() {
		c.span.Set(trace.Peer.String(node.Name), trace.Choice.Int(c.index), trace.Attempt.Int(int(c.state.Attempt())), trace.Resumed.Int(c.state.From()),
			trace.RouteReason.String(string(d.Reason)), trace.PrefillReason.String(string(d.PrefillReason)))
	}
}

// failSpan says why the current attempt failed.
func (c *choice) failSpan(f *failure) {
	if c.span.On() {
		c.span.Fail(f.kind, f.err.Error())
		c.span.End(time.Now())
	}
}

// attemptSpan begins the span of a relayed request's next attempt.
func (r *relay) attemptSpan(s, prefill *foreign.Server) {
	r.nTries++
	if !r.span.On() {
		return
	}
	r.try = r.span.Child("attempt", trace.Client, time.Now())
	r.try.Set(trace.Peer.String(s.Name), trace.Attempt.Int(r.nTries), trace.RequestModel.String(r.model.Name))
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

// failSpan says why the attempt failed, and ends its span.
func (r *relay) failSpan(f *failure) {
	if r.try.On() {
		r.try.Fail(f.kind, f.err.Error())
		r.try.End(time.Now())
	}
}

// endSpan ends the request's span with what came of it.
func (r *relay) endSpan() {
	if r.span.On() && r.model != nil {
		r.span.Name(r.span.operation + " " + r.model.Name)
		r.span.Set(trace.RequestModel.String(r.model.Name), trace.RequestID.String(string(r.id)), trace.Choices.Int(r.look.N), trace.OutputTokens.Int(r.nOutput()))
		if u := &r.told.usage; u.Completion > 0 {
			r.span.Set(trace.InputTokens.Int(u.Prompt), trace.CachedTokens.Int(u.Cached))
		}
		if !r.first.IsZero() {
			r.span.Set(trace.FirstToken.Float64(r.first.Sub(r.start).Seconds()))
		}
		if r.cause != "" {
			r.span.Fail(r.cause, "")
		}
	}
	r.span.end(r.status)
}
