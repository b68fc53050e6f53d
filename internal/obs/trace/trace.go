// Package trace records a request's way through the fleet as OpenTelemetry spans.
//
// A Tracer batches ended spans and sends them over OTLP (HTTP, protobuf) to a
// collector. Each process passes the W3C context of its span to the next, so that
// gateway, decode node, prefill node and transfer are in one trace. The package adds
// a disabled state to OpenTelemetry's SDK: a nil *Tracer starts zero Spans, whose
// methods do nothing and allocate nothing, so that callers need no check.
//
// Invariant: nothing here blocks a request. Spans that cannot be sent in time
// are dropped by the SDK's bounded queue.
//
// The package does not define the spans and never sees text of a prompt.
package trace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	api "go.opentelemetry.io/otel/trace"

	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// ErrOption is wrapped by refusals of Options.
var ErrOption = errors.New("trace: bad option")

// Options of a Tracer.
type Options struct {
	// Endpoint is the collector's URL, whose default path is /v1/traces. Empty: the URL of
	// OpenTelemetry's environment variables, or no tracing.
	Endpoint string
	// Getenv reads those variables. The SDK reads more of them by itself:
	// headers, sampler, batch sizes and timeouts.
	Getenv              func(string) string
	Role, Node, Version string
	Log                 *slog.Logger     // of failed exports; nil: discarded
	Exporter            sdk.SpanExporter // nil: OTLP over HTTP
}

// Tracer sends spans. A nil Tracer is off.
type Tracer struct {
	t                api.Tracer
	provider         *sdk.TracerProvider
	exported, failed atomic.Uint64
}

// New returns a tracer, or nil if tracing is not configured. It connects to the collector when
// the first span has ended.
func New(o Options) (*Tracer, error) {
	endpoint := o.Endpoint
	if endpoint == "" {
		if o.Getenv("OTEL_SDK_DISABLED") == "true" || o.Getenv("OTEL_TRACES_EXPORTER") == "none" ||
			o.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT")+o.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" {
			return nil, nil
		}
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"} {
		if p := o.Getenv(name); p != "" && p != "http/protobuf" {
			return nil, fmt.Errorf("%w: %s=%s: traces are sent as http/protobuf only; collectors accept that on port 4318", ErrOption, name, p)
		}
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	exporter := o.Exporter
	if exporter == nil {
		collector, err := newUploader(endpoint, o.Version, o.Getenv)
		if err != nil {
			return nil, err
		}
		if exporter, err = otlptrace.New(context.Background(), collector); err != nil {
			return nil, fmt.Errorf("trace: exporter: %w", err)
		}
	}
	// The SDK has one handler per process for errors after its queue.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { o.Log.Warn("traces not sent", "err", err) }))
	r, err := resource.New(context.Background(),
		resource.WithTelemetrySDK(),
		resource.WithAttributes(attribute.String("service.name", "tandem"), attribute.String("service.version", o.Version),
			attribute.String("service.instance.id", o.Node), attribute.String("tandem.role", o.Role)),
		resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("%w: OTEL_RESOURCE_ATTRIBUTES: %w", ErrOption, err)
	}
	t := new(Tracer)
	t.provider = sdk.NewTracerProvider(sdk.WithResource(r), sdk.WithBatcher(counted{exporter, t}))
	t.t = t.provider.Tracer("github.com/tandem-serving/tandem", api.WithInstrumentationVersion(o.Version))
	return t, nil
}

// Check returns the error with which New would refuse an endpoint; an empty one is none.
func Check(endpoint string) error {
	if endpoint == "" {
		return nil
	}
	_, err := newUploader(endpoint, "", func(string) string { return "" })
	return err
}

// counted counts the spans that an exporter sends.
type counted struct {
	sdk.SpanExporter
	t *Tracer
}

func (c counted) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	err := c.SpanExporter.ExportSpans(ctx, spans)
	if err != nil {
		c.t.failed.Add(uint64(len(spans)))
	} else {
		c.t.exported.Add(uint64(len(spans)))
	}
	return err
}

// Counts returns how many spans were sent, and how many could not be sent.
func (t *Tracer) Counts() (exported, failed uint64) {
	if t == nil {
		return 0, 0
	}
	return t.exported.Load(), t.failed.Load()
}

// Close sends the remaining spans, until ctx ends.
func (t *Tracer) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	return t.provider.Shutdown(ctx)
}

// maxState bounds a tracestate, as the standard does.
const maxState = 512

// Incoming returns the W3C context of a caller's headers or message; nil if it is malformed.
// Processes without tracing pass it on.
func Incoming(parent, state string) *nodepb.TraceContext {
	if parent == "" || len(parent) > 256 || len(state) > maxState {
		return nil
	}
	if c := (&nodepb.TraceContext{Traceparent: parent, Tracestate: state}); spanOf(c).IsValid() {
		return c
	}
	return nil
}

func spanOf(c *nodepb.TraceContext) api.SpanContext {
	if c == nil {
		return api.SpanContext{}
	}
	ctx := propagation.TraceContext{}.Extract(context.Background(), propagation.MapCarrier{"traceparent": c.Traceparent, "tracestate": c.Tracestate})
	return api.SpanContextFromContext(ctx)
}

// Kind is the side of a call that a span describes.
type Kind = api.SpanKind

// Kinds.
const (
	Internal = api.SpanKindInternal
	Server   = api.SpanKindServer
	Client   = api.SpanKindClient
)

// Attr is an attribute of a span or event.
type Attr = attribute.KeyValue

// Start starts a span below parent, or a new trace if that is nil.
func (t *Tracer) Start(parent *nodepb.TraceContext, name string, kind Kind, at time.Time) Span {
	if t == nil {
		return Span{from: parent}
	}
	ctx := context.Background()
	if sc := spanOf(parent); sc.IsValid() {
		ctx = api.ContextWithRemoteSpanContext(ctx, sc)
	}
	_, s := t.t.Start(ctx, name, api.WithSpanKind(kind), api.WithTimestamp(at))
	return Span{s: s, t: t, from: parent}
}

// Span is one operation. Its methods may be called from any goroutine; those of
// the zero Span do nothing.
type Span struct {
	s    api.Span
	t    *Tracer
	from *nodepb.TraceContext // of the parent
}

// On reports whether the span is sampled. Otherwise callers can skip attributes and children.
func (s Span) On() bool { return s.s != nil && s.s.SpanContext().IsSampled() }

// Context returns the context for children in other processes. A span that is off returns the
// context of its parent; nil: there is none.
func (s Span) Context() *nodepb.TraceContext {
	if s.s == nil {
		return s.from
	}
	c := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(api.ContextWithSpan(context.Background(), s.s), c)
	return &nodepb.TraceContext{Traceparent: c["traceparent"], Tracestate: c["tracestate"]}
}

// Child starts a span below this one.
func (s Span) Child(name string, kind Kind, at time.Time) Span {
	if s.s == nil {
		return s
	}
	_, c := s.t.t.Start(api.ContextWithSpan(context.Background(), s.s), name, api.WithSpanKind(kind), api.WithTimestamp(at))
	return Span{s: c, t: s.t}
}

// Name changes the span's name.
func (s Span) Name(name string) {
	if s.s != nil {
		s.s.SetName(name)
	}
}

// Set adds attributes.
func (s Span) Set(attrs ...Attr) {
	if s.s != nil {
		s.s.SetAttributes(attrs...)
	}
}

// Event adds an event with its time.
func (s Span) Event(name string, at time.Time) {
	if s.s != nil {
		s.s.AddEvent(name, api.WithTimestamp(at))
	}
}

// Fail marks the operation as failed. kind is the value of error.type, which has few values.
func (s Span) Fail(kind, message string) {
	if s.s != nil {
		s.s.SetAttributes(attribute.String("error.type", kind))
		s.s.SetStatus(codes.Error, message)
	}
}

// End ends the span; a second call does nothing.
func (s Span) End(at time.Time) {
	if s.s != nil {
		s.s.End(api.WithTimestamp(at))
	}
}
