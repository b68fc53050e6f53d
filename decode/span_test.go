package decode

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// keep is an exporter whose spans outlive its shutdown.
type keep struct{ *tracetest.InMemoryExporter }

func (keep) Shutdown(context.Context) error { return nil }

// traced runs f with a tracer and returns the spans that ended, by name.
func traced(t *testing.T, f func(*testing.T, *trace.Tracer)) map[string][]tracetest.SpanStub {
	mem := tracetest.NewInMemoryExporter()
	tr, err := trace.New(trace.Options{Endpoint: "http://127.0.0.1:1", Getenv: func(string) string { return "" }, Exporter: keep{mem}})
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) { f(t, tr) })
	if err := tr.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	spans := map[string][]tracetest.SpanStub{}
	for _, s := range mem.GetSpans() {
		spans[s.Name] = append(spans[s.Name], s)
	}
	return spans
}

// value is a span's attribute; nil: it has none.
func value(s tracetest.SpanStub, k attribute.Key) any {
	for _, a := range s.Attributes {
		if a.Key == k {
			return a.Value.AsInterface()
		}
	}
	return nil
}

// An attempt's spans: what waited, what computed the prompt, where its KV came
// from, and how it ended.
func TestSpans(t *testing.T) {
	spans := traced(t, func(t *testing.T, tr *trace.Tracer) {
		b := newBed(t, func(o *Options, _ *scheduler.Config, _ *rpc.Options) { o.Tracer = tr })
		defer b.close()
		b.delivers("p1")
		b.want(b.gw.ask(generate(40, 1, 5, "p1")), 5, length)
		late := generate(8, 2, 100)
		late.DeadlineMs = 1
		b.wantEnd(b.gw.ask(late), nodepb.Code_CODE_DEADLINE)
		ends := generate(8, 4, 5)
		ends.IgnoreEos = false
		for id := range int32(vocab) {
			ends.StopTokenIds = append(ends.StopTokenIds, id)
		}
		b.want(b.gw.ask(ends), 1, stop)
		b.n.StartDrain()
		b.wantEnd(b.gw.ask(generate(8, 3, 5)), nodepb.Code_CODE_DRAINING)
	})
	for name, want := range map[string]int{"decode": 4, "fetch KV": 1, "tokens": 1} {
		if len(spans[name]) < want {
			t.Fatalf("%d spans %q, want %d at least", len(spans[name]), name, want)
		}
	}
	good, bad := spans["decode"][0], spans["decode"][1]
	if value(good, trace.Finish) != "length" || value(good, trace.OutputTokens) != int64(5) || value(good, trace.InputTokens) != int64(40) || good.Status.Code != codes.Unset {
		t.Errorf("an attempt that ended well: %+v", good)
	}
	if bad.Status.Code != codes.Error {
		t.Errorf("an attempt past its deadline: %+v", bad)
	}
	if ended := spans["decode"][2]; value(ended, trace.Finish) != "stop" || value(ended, trace.OutputTokens) != int64(1) {
		t.Errorf("an attempt that a stop token ended: %+v", ended)
	}
	if refused := spans["decode"][3]; refused.Status.Code != codes.Error || value(refused, trace.InputTokens) != int64(8) {
		t.Errorf("an attempt that a draining node refused: %+v", refused)
	}
	if f := spans["fetch KV"][0]; !slices.ContainsFunc(f.Events, func(e sdktrace.Event) bool { return e.Name == "granted" }) {
		t.Errorf("a fetch whose grant was given has the events %v", f.Events)
	}
	if f := spans["fetch KV"][0]; value(f, trace.Peer) != "p1" || value(f, trace.Cached) != int64(0) || f.Status.Code != codes.Unset {
		t.Errorf("a fetch: %+v", f)
	}
	if got := value(spans["tokens"][0], trace.OutputTokens); got != int64(5) {
		t.Errorf("%v tokens, want 5", got)
	}
	prompt := false // of the first; the second may have had one
	for _, s := range spans["prompt"] {
		prompt = prompt || s.Parent.SpanID() == good.SpanContext.SpanID() && value(s, trace.Arrived) == int64(39) && value(s, trace.Computed) == int64(1)
	}
	if !prompt {
		t.Errorf("no prompt of 39 tokens that arrived and one that was computed: %+v", spans["prompt"])
	}
}
