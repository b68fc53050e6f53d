//go:build linux

package e2e

import (
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// collector is an OTLP collector that keeps what it gets.
type collector struct {
	*httptest.Server
	refuse atomic.Bool // takes nothing

	mu      sync.Mutex
	spans   []span
	refused []span // that were not taken
}

// span is one that was received, with what the process said of itself.
type span struct {
	*tracepb.Span
	node string
}

func newCollector(t *testing.T) *collector {
	c := new(collector)
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := io.Reader(r.Body)
		if r.Header.Get("Content-Encoding") == "gzip" {
			z, err := gzip.NewReader(body)
			if err != nil {
				t.Error(err)
				return
			}
			body = z
		}
		b, err := io.ReadAll(body)
		var data tracepb.TracesData // on the wire the same as the request that carries it
		if err == nil {
			err = proto.Unmarshal(b, &data)
		}
		if err != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
		refuse := c.refuse.Load()
		if refuse {
			w.WriteHeader(http.StatusBadRequest) // which nobody tries again
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, rs := range data.ResourceSpans {
			node := ""
			for _, a := range rs.Resource.Attributes {
				if a.Key == "service.instance.id" {
					node = a.Value.GetStringValue()
				}
			}
			for _, ss := range rs.ScopeSpans {
				for _, s := range ss.Spans {
					if refuse {
						c.refused = append(c.refused, span{s, node})
					} else {
						c.spans = append(c.spans, span{s, node})
					}
				}
			}
		}
	}))
	t.Cleanup(c.Close)
	return c
}

// trace is the spans of one trace, each under the path of its ancestors' names.
func (c *collector) trace(id string) map[string][]span {
	c.mu.Lock()
	defer c.mu.Unlock()
	by := map[string]span{}
	for _, s := range c.spans {
		by[string(s.SpanId)] = s
	}
	out := map[string][]span{}
	for _, s := range c.spans {
		if hex.EncodeToString(s.TraceId) != id {
			continue
		}
		path := s.Name
		for p, ok := by[string(s.ParentSpanId)]; ok; p, ok = by[string(p.ParentSpanId)] {
			path = p.Name + " > " + path
		}
		out[path] = append(out[path], s)
	}
	return out
}

// of counts the spans that nodes of a role have sent, and how many seconds they
// last; name: only those, "" all.
func (c *collector) of(role, name string) (n int, seconds float64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		if strings.HasPrefix(s.node, role) && (name == "" || s.Name == name) {
			n++
			seconds += s.seconds()
		}
	}
	return n, seconds
}

// lost counts the spans of a role's nodes that were not taken, and those of a trace
// among them.
func (c *collector) lost(role, trace string) (n, of float64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.refused {
		if strings.HasPrefix(s.node, role) {
			n++
			if hex.EncodeToString(s.TraceId) == trace {
				of++
			}
		}
	}
	return n, of
}

// named are all spans of a name.
func (c *collector) named(name string) (all []span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		if s.Name == name {
			all = append(all, s)
		}
	}
	return all
}

// attr is an attribute as text; empty where there is none.
func (s span) attr(name string) string {
	for _, a := range s.Attributes {
		if a.Key == name {
			return text(a.Value)
		}
	}
	return ""
}

func text(v *commonpb.AnyValue) string {
	switch v := v.Value.(type) {
	case *commonpb.AnyValue_ArrayValue:
		var all []string
		for _, one := range v.ArrayValue.Values {
			all = append(all, text(one))
		}
		return strings.Join(all, ",")
	case *commonpb.AnyValue_DoubleValue:
		return strconv.FormatFloat(v.DoubleValue, 'g', -1, 64)
	case *commonpb.AnyValue_IntValue:
		return strconv.FormatInt(v.IntValue, 10)
	case *commonpb.AnyValue_StringValue:
		return v.StringValue
	}
	return v.String()
}

// seconds is how long the span lasted.
func (s span) seconds() float64 { return float64(s.EndTimeUnixNano-s.StartTimeUnixNano) / 1e9 }

// traced is the one request of the load whose spans are held against what it was.
type traced struct {
	id, answer string // of the request and of its answer, as the client was told
	model      string
	seconds    float64 // that the client waited for the answer
}

// sendTraced sends it, with every parameter that a span tells of.
func (c *cluster) sendTraced(prompt []int32) traced {
	c.t.Helper()
	c.traceparent = oParent
	defer func() { c.traceparent = "" }()
	began := time.Now()
	resp, err := c.post("/v1/completions", map[string]any{"prompt": prompt, "max_tokens": oOutput, "ignore_eos": true,
		"temperature": 0.5, "top_p": 0.75, "top_k": 40, "seed": 4711})
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	var a struct {
		ID, Model string
		Usage     struct {
			Completion int `json:"completion_tokens"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil || a.Usage.Completion != oOutput {
		c.t.Fatalf("%s: %v, %+v", resp.Status, err, a)
	}
	return traced{resp.Header.Get("X-Request-Id"), a.ID, a.Model, time.Since(began).Seconds()}
}

// wantSpan is a span with all of its attributes: a text, or what has to hold.
type wantSpan struct {
	path, node string
	attrs      map[string]any
	events     string
}

// spansOf is every span of the traced request.
func (w traced) spansOf(c *cluster) []wantSpan {
	const root = "text_completion " + oModel
	const attempt = root + " > attempt"
	const decode, fetch = attempt + " > decode", attempt + " > decode > fetch KV"
	const prefill = fetch + " > prefill"
	within := func(text string) bool { // of what the client waited
		v, err := strconv.ParseFloat(text, 64)
		return err == nil && v > 0 && v < w.seconds
	}
	nodes := c.addresses()
	of := func(role string) any {
		return func(text string) bool { return strings.HasPrefix(nodes[text], role) }
	}
	number := strconv.Itoa
	return []wantSpan{
		{root, "gateway", map[string]any{
			"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "tandem", "gen_ai.request.model": oModel, "gen_ai.response.model": w.model, "gen_ai.response.id": w.answer,
			"gen_ai.request.id": w.id, "gen_ai.request.choice.count": "1", "gen_ai.request.max_tokens": number(oOutput),
			"gen_ai.request.temperature": "0.5", "gen_ai.request.top_p": "0.75", "gen_ai.request.top_k": "40", "gen_ai.request.seed": "4711",
			"gen_ai.usage.input_tokens": number(oPrompt), "gen_ai.usage.output_tokens": number(oOutput), "gen_ai.usage.cache_read.input_tokens": "0",
			"gen_ai.response.finish_reasons": "length", "gen_ai.latency.time_to_first_token": within,
			"http.request.method": "POST", "url.path": "/v1/completions", "http.response.status_code": "200"}, ""},
		{attempt, "gateway", map[string]any{"server.address": of("decode-"), "tandem.choice": "0", "tandem.attempt": "1", "tandem.resumed_tokens": "0",
			"tandem.route.reason": func(text string) bool { return text == "prefix" || text == "load" }, "tandem.route.prefill_reason": "remote"}, "first token"},
		{decode, "decode-", map[string]any{"gen_ai.request.id": w.id, "tandem.attempt": "1", "tandem.choice": "0", "gen_ai.usage.input_tokens": number(oPrompt),
			"tandem.resumed_tokens": "0", "tandem.finish": "length", "gen_ai.usage.output_tokens": number(oOutput), "tandem.preemptions": "0"}, ""},
		{decode + " > queue", "decode-", nil, ""},
		{decode + " > prompt", "decode-", map[string]any{"tandem.cached_tokens": "0", "tandem.arrived_tokens": number(oPrompt - 1), "tandem.computed_tokens": "1"}, ""},
		{decode + " > tokens", "decode-", map[string]any{"gen_ai.usage.output_tokens": number(oOutput)}, ""},
		{fetch, "decode-", map[string]any{"server.address": of("prefill-"), "tandem.cached_tokens": "0"}, "granted"},
		{prefill, "prefill-", map[string]any{"gen_ai.request.id": w.id, "tandem.attempt": "1", "gen_ai.usage.input_tokens": number(oPrompt - 1)}, "asked for a grant"},
		{prefill + " > queue", "prefill-", nil, ""},
		{prefill + " > prompt", "prefill-", map[string]any{"tandem.cached_tokens": "0", "tandem.computed_tokens": number(oPrompt - 1), "tandem.preemptions": "0"}, ""},
		{prefill + " > KV transfer", "prefill-", map[string]any{"tandem.kv.bytes": strconv.FormatInt((oPrompt-1+15)/16*blockBytes(c.t), 10),
			"tandem.kv.hidden_seconds": within, "tandem.kv.exposed_seconds": func(text string) bool { return text == "0" || within(text) }}, ""},
	}
}

// holdTrace holds the spans of a request against what it was, whose client has sent
// a traceparent: each is there once, where it belongs, within its parent, and says
// all that it is to say and nothing that nobody has looked at.
func (c *cluster) holdTrace(otlp *collector, parent string, want []wantSpan) (spans map[string][]span) {
	c.t.Helper()
	id := parent[3:35]
	c.wait(20*time.Second, "all spans have come", func() bool {
		spans = otlp.trace(id)
		return !slices.ContainsFunc(want, func(w wantSpan) bool { return len(spans[w.path]) == 0 })
	})
	if len(spans) != len(want) {
		c.t.Errorf("%d kinds of spans, want %d: %v", len(spans), len(want), slices.Sorted(maps.Keys(spans)))
	}
	for _, w := range want {
		if len(spans[w.path]) != 1 {
			c.t.Errorf("%d spans %s", len(spans[w.path]), w.path)
			continue
		}
		s := spans[w.path][0]
		if !strings.HasPrefix(s.node, w.node) || s.EndTimeUnixNano < s.StartTimeUnixNano || s.Status.GetCode() == tracepb.Status_STATUS_CODE_ERROR {
			c.t.Errorf("span %s of %s, want one of %s* that ends well after it begins: %v", w.path, s.node, w.node, s)
		}
		for _, a := range s.Attributes {
			got := text(a.Value)
			switch want := w.attrs[a.Key].(type) {
			case string:
				if got != want {
					c.t.Errorf("span %s: %s = %s, want %s", w.path, a.Key, got, want)
				}
			case func(string) bool:
				if !want(got) {
					c.t.Errorf("span %s: %s = %s", w.path, a.Key, got)
				}
			default:
				c.t.Errorf("span %s: nobody has said what %s is, which is %s", w.path, a.Key, got)
			}
		}
		if len(s.Attributes) != len(w.attrs) {
			c.t.Errorf("span %s has %d attributes, want %d: %v", w.path, len(s.Attributes), len(w.attrs), s.Attributes)
		}
		if len(s.Events) > 1 || len(s.Events) == 1 && s.Events[0].Name != w.events || len(s.Events) == 0 && w.events != "" {
			c.t.Errorf("span %s has the events %v, want %q", w.path, s.Events, w.events)
		}
		up := w.path[:max(0, strings.LastIndex(w.path, " > "))]
		if up == "" {
			if hex.EncodeToString(s.ParentSpanId) != parent[36:52] {
				c.t.Errorf("the root's parent is %x, the client said %s", s.ParentSpanId, parent)
			}
		} else if p := spans[up]; len(p) == 1 && p[0].StartTimeUnixNano > s.StartTimeUnixNano {
			c.t.Errorf("span %s begins before its parent", w.path)
		}
	}
	return spans
}

// holdTrace is that for the traced request, whose times are held against its
// client's too.
func (w traced) holdTrace(c *cluster, otlp *collector) {
	c.t.Helper()
	spans := c.holdTrace(otlp, oParent, w.spansOf(c))
	only := func(path string) span { return spans["text_completion "+oModel+path][0] }
	if root := only(""); root.seconds() > w.seconds {
		c.t.Errorf("the root lasts %g s, its client waited %g s", root.seconds(), w.seconds)
	}
	// What a transfer hides and exposes is what it lasts.
	transfer := only(" > attempt > decode > fetch KV > prefill > KV transfer")
	hidden, _ := strconv.ParseFloat(transfer.attr("tandem.kv.hidden_seconds"), 64)
	exposed, _ := strconv.ParseFloat(transfer.attr("tandem.kv.exposed_seconds"), 64)
	if off := hidden + exposed - transfer.seconds(); off > 1e-3 || off < -1e-3 {
		c.t.Errorf("a transfer of %g s hides %g s and exposes %g s", transfer.seconds(), hidden, exposed)
	}
}
