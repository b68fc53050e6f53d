package exchange

import (
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// span is a request's span: the root of its trace, unless the client sent one.
type span struct {
	trace.Span
	operation string // in OpenTelemetry's terms
}

// startSpan starts a request's span.
func (s *Service) startSpan(ctx *fasthttp.RequestCtx, on openai.Endpoint, start time.Time) span {
	parent := ctx.Request.Header.Peek("Traceparent")
	if s.Tracer == nil && len(parent) == 0 {
		return span{}
	}
	operation := "text_completion"
	switch {
	case on == openai.Chat:
		operation = "chat"
	case on.Vectors():
		operation = "embeddings"
	}
	started := s.Tracer.Start(trace.Incoming(string(parent), string(ctx.Request.Header.Peek("Tracestate"))), operation, trace.Server, start)
	if started.On() {
		started.Set(trace.Operation.String(operation), trace.Provider.String("tandem"), trace.Method.String("POST"), trace.Path.String(string(ctx.Path())))
	}
	return span{started, operation}
}

// endSpan ends the request's span with the request's result.
func (x *Exchange) endSpan(e *Ending) {
	s := &x.Span
	if !s.On() {
		return
	}
	if e.Model != "" {
		s.Name(s.operation + " " + e.Model)
		s.Set(trace.RequestModel.String(e.Model), trace.RequestID.String(string(x.ID)), trace.Choices.Int(e.Choices), trace.OutputTokens.Int(e.Output))
		if e.Prompt > 0 {
			s.Set(trace.InputTokens.Int(e.Prompt), trace.CachedTokens.Int(e.Cached))
		}
		if e.MaxTokens > 0 {
			s.Set(trace.MaxTokens.Int(e.MaxTokens))
		}
		if !e.First.IsZero() {
			s.Set(trace.FirstToken.Float64(e.First.Sub(x.Start).Seconds()))
		}
	}
	if x.Cause != "" {
		s.Fail(x.Cause, "")
	}
	s.Set(trace.Status.Int(x.Status))
	if x.Status >= 400 {
		s.Fail(strconv.Itoa(x.Status), "")
	}
	s.End(time.Now())
}

// FailSpan ends the span of an attempt with its failure.
func FailSpan(s *trace.Span, f *Failure) {
	if s.On() {
		s.Fail(f.Kind, f.Err.Error())
		s.End(time.Now())
	}
}
