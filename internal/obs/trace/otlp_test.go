package trace

import (
	"compress/gzip"
	"context"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// collector answers posts in turn, the last answer again and again, and keeps what came.
type collector struct {
	*httptest.Server
	posts atomic.Int64
	last  atomic.Pointer[http.Request]
	spans chan *tracepb.TracesData
}

func newCollector(t *testing.T, start func(*httptest.Server), answers ...http.HandlerFunc) *collector {
	c := &collector{spans: make(chan *tracepb.TracesData, 16)}
	c.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var in io.Reader = r.Body
		if r.Header.Get("Content-Encoding") == "gzip" {
			var err error
			if in, err = gzip.NewReader(r.Body); err != nil {
				t.Error(err)
				return
			}
		}
		body, err := io.ReadAll(in)
		data := new(tracepb.TracesData)
		if err = errors.Join(err, proto.Unmarshal(body, data)); err != nil {
			t.Error(err)
		}
		c.last.Store(r)
		c.spans <- data
		answers[min(int(c.posts.Add(1)), len(answers))-1](w, r)
	}))
	start(c.Server)
	t.Cleanup(c.Close)
	return c
}

func answer(status int, body string, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

// some are spans of one resource.
func some(n int) []*tracepb.ResourceSpans {
	var spans []*tracepb.Span
	for range n {
		spans = append(spans, &tracepb.Span{Name: "a span", TraceId: make([]byte, 16), SpanId: make([]byte, 8)})
	}
	return []*tracepb.ResourceSpans{{ScopeSpans: []*tracepb.ScopeSpans{{Spans: spans}}}}
}

// upload sends spans with short waits between retries.
func upload(t *testing.T, endpoint string, kv ...string) error {
	t.Helper()
	u, err := newUploader(endpoint, "1.2", env(kv...))
	if err != nil {
		t.Fatal(err)
	}
	u.retry = time.Millisecond
	defer u.Stop(t.Context())
	return u.UploadTraces(t.Context(), some(3))
}

func TestUpload(t *testing.T) {
	for _, c := range []struct {
		path, compression string // of the collector's URL, as a prefix
	}{{"", ""}, {"/", "gzip"}, {"/base", "none"}} {
		s := newCollector(t, (*httptest.Server).Start, answer(200, ""))
		err := upload(t, "", "OTEL_EXPORTER_OTLP_ENDPOINT", s.URL+c.path, "OTEL_EXPORTER_OTLP_COMPRESSION", c.compression,
			"OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x, a=1", "OTEL_EXPORTER_OTLP_TIMEOUT", "2000")
		if err != nil {
			t.Fatalf("%q: %v", c.path, err)
		}
		q, data := s.last.Load(), <-s.spans
		if want := strings.TrimSuffix(c.path, "/") + "/v1/traces"; q.URL.Path != want || q.Method != "POST" || q.Header.Get("Content-Type") != "application/x-protobuf" {
			t.Errorf("%s %s, %v; want the path %s", q.Method, q.URL.Path, q.Header, want)
		}
		if q.Header.Get("Authorization") != "Bearer x" || q.Header.Get("A") != "1" || q.Header.Get("User-Agent") != "tandem/1.2" {
			t.Errorf("headers are %v", q.Header)
		}
		if !proto.Equal(data, &tracepb.TracesData{ResourceSpans: some(3)}) {
			t.Errorf("the collector gets %v", data)
		}
	}
}

func TestCollectorURL(t *testing.T) {
	const all, traces = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	for _, c := range []struct {
		flag string
		env  []string
		want string // or part of the error
	}{
		{"http://h:1", nil, "http://h:1/v1/traces"},
		{"http://h:1/x", []string{all, "http://other"}, "http://h:1/x"},
		{"", []string{all, "http://h:1/x/"}, "http://h:1/x/v1/traces"},
		{"", []string{all, "http://other", traces, "https://h/own"}, "https://h/own"},
		{"", []string{traces, "h:4317"}, traces},
		{"", []string{all, "grpc://h:4317"}, all},
	} {
		u, err := collectorURL(c.flag, env(c.env...))
		if err != nil {
			if !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%+v: %v", c, err)
			}
		} else if u.String() != c.want {
			t.Errorf("%+v: %s", c, u)
		}
	}
}

// A collector that is busy gets the same spans again; one that refuses them does not.
func TestUploadRetries(t *testing.T) {
	part := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 2)
	part = protowire.AppendString(protowire.AppendTag(part, 2, protowire.BytesType), "too old")
	part = protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), part)
	for name, c := range map[string]struct {
		answers []http.HandlerFunc
		posts   int64
		err     string
	}{
		"busy":             {[]http.HandlerFunc{answer(503, ""), answer(429, ""), answer(502, ""), answer(504, ""), answer(200, "")}, 5, ""},
		"busy for a while": {[]http.HandlerFunc{answer(503, "", "Retry-After", "1"), answer(200, "")}, 2, ""},
		"busy for long":    {[]http.HandlerFunc{answer(503, "later", "Retry-After", "9000000000")}, 1, "503 Service Unavailable: later"},
		"refused":          {[]http.HandlerFunc{answer(400, " bad \xff span ")}, 1, "400 Bad Request: bad  span"},
		"no such path":     {[]http.HandlerFunc{answer(404, "")}, 1, "(no body)"},
		"rejected in part": {[]http.HandlerFunc{answer(200, string(part), "Content-Type", "application/x-protobuf")}, 1, "rejected 2 spans: too old"},
		"none rejected":    {[]http.HandlerFunc{answer(200, "\x0a\x00", "Content-Type", "application/x-protobuf")}, 1, ""},
		"not of the spec":  {[]http.HandlerFunc{answer(202, "\xff\xff", "Content-Type", "application/x-protobuf")}, 1, ""},
		"a page":           {[]http.HandlerFunc{answer(200, string(part), "Content-Type", "text/html")}, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newCollector(t, (*httptest.Server).Start, c.answers...)
			err := upload(t, s.URL)
			if n := s.posts.Load(); n != c.posts {
				t.Errorf("%d posts, want %d", n, c.posts)
			}
			if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Errorf("error %v, want one with %q", err, c.err)
			}
		})
	}
}

// A stop ends a wait for the next attempt, and a request.
func TestStopEndsUploads(t *testing.T) {
	hang := make(chan struct{})
	defer close(hang)
	for name, handler := range map[string]http.HandlerFunc{
		"waiting": answer(503, "", "Retry-After", "30"),
		"posting": func(http.ResponseWriter, *http.Request) { <-hang },
	} {
		s := newCollector(t, (*httptest.Server).Start, handler)
		u, err := newUploader(s.URL, "", env())
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- u.UploadTraces(context.Background(), some(1)) }()
		<-s.spans
		u.Stop(t.Context())
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUploadOverTLS(t *testing.T) {
	s := newCollector(t, (*httptest.Server).StartTLS, answer(200, ""))
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := upload(t, s.URL); err == nil {
		t.Error("a certificate of nobody's is taken")
	}
	if err := upload(t, s.URL, "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", ca); err != nil {
		t.Error(err)
	}
}

func TestBadSettings(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range [][]string{ // variable, value, part of the error
		{"OTEL_EXPORTER_OTLP_HEADERS", "a", "name=value"},
		{"OTEL_EXPORTER_OTLP_TRACES_HEADERS", "a=%zz", "TRACES_HEADERS"},
		{"OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "gzip or none"},
		{"OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "milliseconds"},
		{"OTEL_EXPORTER_OTLP_TIMEOUT", "0", "milliseconds"},
		{"OTEL_EXPORTER_OTLP_CERTIFICATE", filepath.Join(dir, "none"), "no such file"},
		{"OTEL_EXPORTER_OTLP_CERTIFICATE", empty, "no certificate"},
		{"OTEL_EXPORTER_OTLP_CERTIFICATE", dir, "OTEL_EXPORTER_OTLP_CERTIFICATE"},
		{"OTEL_EXPORTER_OTLP_CLIENT_KEY", empty, "both or none"},
	} {
		_, err := newUploader("http://127.0.0.1:1", "", env(c[0], c[1]))
		if !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), c[2]) || !strings.Contains(err.Error(), c[0]) {
			t.Errorf("%s=%s: %v", c[0], c[1], err)
		}
	}
}
