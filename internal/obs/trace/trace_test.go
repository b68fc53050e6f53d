package trace

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

func env(kv ...string) func(string) string {
	return func(name string) string {
		for i := 0; i < len(kv); i += 2 {
			if kv[i] == name {
				return kv[i+1]
			}
		}
		return ""
	}
}

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func TestOffUnlessAsked(t *testing.T) {
	for _, c := range []struct {
		endpoint string
		env      []string
		on       bool
		bad      string // part of the refusal
	}{
		{},
		{endpoint: "http://127.0.0.1:1", on: true},
		{env: []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"}, on: true},
		{env: []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1"}, on: true},
		{env: []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1", "OTEL_SDK_DISABLED", "true"}},
		{env: []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER", "none"}},
		{endpoint: "127.0.0.1:4317", bad: "http://127.0.0.1:4318"},
		{endpoint: "grpc://127.0.0.1:4317", bad: "http://127.0.0.1:4318"},
		{endpoint: "http://127.0.0.1:1", env: []string{"OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"}, bad: "4318"},
	} {
		tr, err := New(Options{Endpoint: c.endpoint, Getenv: env(c.env...)})
		if c.bad != "" {
			if !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), c.bad) {
				t.Errorf("%+v: %v", c, err)
			}
			continue
		}
		if err != nil || (tr != nil) != c.on {
			t.Errorf("%+v: on %v, %v", c, tr != nil, err)
		}
		if err := tr.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// What is off costs nothing, and passes a trace on all the same.
func TestOffIsFree(t *testing.T) {
	var tr *Tracer
	at := time.Now()
	if n := testing.AllocsPerRun(100, func() {
		s := tr.Start(nil, "x", Server, at)
		c := s.Child("y", Internal, at)
		c.Event("z", at)
		c.Fail("a", "b")
		c.End(at)
		if s.On() {
			t.Error("a span of no tracer is on")
		}
		s.End(at)
	}); n != 0 {
		t.Errorf("%g allocations", n)
	}
	in := Incoming(parent, "a=b")
	if got := tr.Start(in, "x", Server, at).Child("y", Client, at).Context(); got != in {
		t.Errorf("passes %+v on as %+v", in, got)
	}
}

func TestIncoming(t *testing.T) {
	for p, ok := range map[string]bool{
		parent: true, "": false, "x": false, strings.Repeat("0", 55): false,
		"00-00000000000000000000000000000000-b7ad6b7169203331-01": false,
		parent + strings.Repeat("-x", 200):                        false,
		"ff" + parent[2:]:                                         false,
	} {
		if got := Incoming(p, ""); (got != nil) != ok {
			t.Errorf("%q: %+v", p, got)
		}
	}
	if got := Incoming(parent, strings.Repeat("a", 600)); got != nil {
		t.Errorf("a long tracestate is kept: %+v", got)
	}
}

// Spans of two tracers make one trace, with the parents that were meant.
func TestOneTraceAcrossProcesses(t *testing.T) {
	mem := tracetest.NewInMemoryExporter()
	first, err := New(Options{Endpoint: "http://127.0.0.1:1", Getenv: env(), Node: "a", Exporter: keep{mem}})
	if err != nil {
		t.Fatal(err)
	}
	second, err := New(Options{Endpoint: "http://127.0.0.1:1", Getenv: env(), Node: "b", Exporter: keep{mem}})
	if err != nil {
		t.Fatal(err)
	}
	at := time.Unix(1000, 0)
	root := first.Start(Incoming(parent, "v=1"), "root", Server, at)
	call := root.Child("call", Client, at.Add(time.Second))
	there := second.Start(call.Context(), "there", Server, at.Add(2*time.Second))
	there.Set(OutputTokens.Int(7))
	there.Fail("timeout", "late")
	there.End(at.Add(3 * time.Second))
	call.End(at.Add(4 * time.Second))
	root.End(at.Add(5 * time.Second))
	for _, tr := range []*Tracer{first, second} {
		if err := tr.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	spans := map[string]tracetest.SpanStub{}
	for _, s := range mem.GetSpans() {
		spans[s.Name] = s
		if got := s.SpanContext.TraceID().String(); got != parent[3:35] {
			t.Errorf("%s is of trace %s", s.Name, got)
		}
	}
	if r, c, th := spans["root"], spans["call"], spans["there"]; r.Parent.SpanID().String() != parent[36:52] || c.Parent.SpanID() != r.SpanContext.SpanID() ||
		th.Parent.SpanID() != c.SpanContext.SpanID() || th.SpanContext.TraceState().Get("v") != "1" || !th.EndTime.Equal(at.Add(3*time.Second)) {
		t.Errorf("spans are %+v", spans)
	}
	if n, failed := first.Counts(); n != 2 || failed != 0 {
		t.Errorf("counted %d sent, %d failed", n, failed)
	}
}

// keep does not forget at Shutdown.
type keep struct{ sdk.SpanExporter }

func (keep) Shutdown(context.Context) error { return nil }
