package prefill

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/obs/trace"
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

// A job's spans: the transfer with its bytes where one began, and the error of
// jobs that failed.
func TestSpans(t *testing.T) {
	spans := traced(t, func(t *testing.T, tr *trace.Tracer) {
		b := newBed(t, func(o *Options, _ *scheduler.Config) { o.Tracer = tr })
		defer b.close()
		time.Sleep(time.Second) // because the engine's time 0 means never
		a := b.dec.ask(tokens(77, 1), nil)
		a.grant(3, 0)
		a.arrived(77)
		again := b.dec.ask(tokens(77, 1), nil)
		again.grant(3, 0)
		again.arrived(5)
		halfway := b.dec.ask(tokens(90, 2), nil) // its second chunk fails
		halfway.grant(20, 0)
		time.Sleep(layerTime)
		b.model.fail <- errors.New("the device is on fire")
		halfway.ended(nodepb.Code_CODE_INTERNAL)
		halfway.lost()
		b.model.fail <- errors.New("the device is on fire")
		none := b.dec.ask(tokens(9, 3), nil)
		none.grant(40, 0)
		none.ended(nodepb.Code_CODE_INTERNAL)
		none.lost()
	})
	jobs, pushes := spans["prefill"], spans["KV transfer"]
	if len(jobs) != 4 || len(pushes) != 3 {
		t.Fatalf("%d jobs, %d transfers, want 4 and 3", len(jobs), len(pushes))
	}
	for i, want := range []struct {
		status codes.Code
		tokens int64
	}{{codes.Unset, 77}, {codes.Unset, 77}, {codes.Error, 90}, {codes.Error, 9}} {
		if jobs[i].Status.Code != want.status {
			t.Errorf("job %d: status %v, want %v", i, jobs[i].Status, want.status)
		}
		if value(jobs[i], trace.RequestID) != "r" || value(jobs[i], trace.Attempt) != int64(1) || value(jobs[i], trace.InputTokens) != want.tokens {
			t.Errorf("job %d: attributes %v, want request r, attempt 1 and %d tokens", i, jobs[i].Attributes, want.tokens)
		}
	}
	whole, half := pushes[0], pushes[2]
	if value(whole, trace.TransferBytes) != int64(layers*10*pageBytes) || value(whole, trace.HiddenSeconds) == nil || value(whole, trace.ExposedSeconds) == nil || whole.Status.Code != codes.Unset {
		t.Errorf("a push that landed: %+v", whole)
	}
	if half.Status.Code != codes.Error || value(half, trace.HiddenSeconds) != nil {
		t.Errorf("a push that was cut short: %+v", half)
	}
	queues, prompts := spans["queue"], spans["prompt"]
	if len(queues) != 4 || len(prompts) != 4 {
		t.Fatalf("%d queue and %d prompt spans of the engine, want one of each for 4 jobs", len(queues), len(prompts))
	}
	for i, p := range prompts {
		if job := p.Parent.SpanID(); queues[i].Parent.SpanID() != job || jobs[i].SpanContext.SpanID() != job || !queues[i].EndTime.Equal(p.StartTime) || p.EndTime.Before(p.StartTime) {
			t.Errorf("job %d: queue %v to %v, prompt %v to %v; want one after the other below the job's span", i, queues[i].StartTime, queues[i].EndTime, p.StartTime, p.EndTime)
		}
		if !slices.ContainsFunc(jobs[i].Events, func(e sdktrace.Event) bool { return e.Name == "asked for a grant" }) {
			t.Errorf("job %d: events %v, want that it asked for a grant", i, jobs[i].Events)
		}
	}
	for i, want := range [][2]int64{{77, 0}, {5, 72}} {
		if p := prompts[i]; value(p, trace.Computed) != want[0] || value(p, trace.Cached) != want[1] || value(p, trace.Preemptions) != int64(0) {
			t.Errorf("prompt %d: %v, want %d tokens computed and %d cached", i, p.Attributes, want[0], want[1])
		}
	}
}
