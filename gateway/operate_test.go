package gateway

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// A browser that opens / is sent to the page of routes; programs get a 404 that names it. The
// operators' port has no such page, and without its key a browser is not sent either.
func TestRootOfBrowsers(t *testing.T) {
	const html = "Accept: text/html,application/xhtml+xml,*/*;q=0.8"
	b, keyed := newBed(t, Options{}, nil), newBed(t, Options{APIKeys: []string{"k"}}, nil)
	for _, c := range []struct {
		b                    *bed
		method, path, header string
		want                 int
		location, body       string
	}{
		{b, "GET", "/", html, 302, "/docs", ""},
		{b, "HEAD", "/", html, 302, "/docs", ""},
		{b, "GET", "/", "Accept: */*", 404, "", "there is nothing at /: /docs lists"},
		{b, "GET", "/", "X-A: b", 404, "", "there is nothing at /: /docs lists"},
		{b, "POST", "/", html, 404, "", "there is nothing at /: /docs lists"},
		{b, "GET", "/nowhere", html, 404, "", `there is nothing at /nowhere"`},
		{b, "POST", "/chat/completions", html, 404, "", `there is nothing at /chat/completions: the path is /v1/chat/completions"`},
		{b, "POST", "/v1/v1/messages", html, 404, "", `there is nothing at /v1/v1/messages: the path is /v1/messages"`},
		{b, "POST", "/v1/tokenize", html, 404, "", `there is nothing at /v1/tokenize: the path is /tokenize"`},
		{keyed, "GET", "/", html, 401, "", "API key"},
	} {
		conn := c.b.dial()
		conn.send(c.method, c.path, "", c.header)
		r := conn.response(c.method)
		conn.Close()
		if r.StatusCode != c.want || r.Header.Get("Location") != c.location || !strings.Contains(r.body, c.body) {
			t.Errorf("%s %s with %s: %d to %q: %s", c.method, c.path, c.header, r.StatusCode, r.Header.Get("Location"), r.body)
		}
	}
}

// The page lists every route and every field, begins with chat completions, and loads nothing.
func TestDocs(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	r := b.do("GET", "/docs", "")
	if r.StatusCode != 200 || r.Header.Get("Content-Type") != "text/html; charset=utf-8" || !strings.Contains(r.Header.Get("Content-Security-Policy"), "default-src 'none'") {
		t.Fatal(r.StatusCode, r.Header)
	}
	for i := range routes {
		if !strings.Contains(r.body, "<code>"+routes[i].Path+"</code>") {
			t.Errorf("%s is not on the page", routes[i].Path)
		}
	}
	if first := strings.Index(r.body, "<summary>"); !strings.HasPrefix(r.body[first:], `<summary><span class="m">POST</span> <code>/v1/chat/completions</code>`) {
		t.Error("the page does not begin with chat completions")
	}
	for _, want := range []string{"<code>frequency_penalty</code>", "&#34;name&#34;: &#34;weather&#34;", "<code>lora_path</code>", `href="openapi.json"`} {
		if !strings.Contains(r.body, want) {
			t.Errorf("%s is missing", want)
		}
	}
	for _, never := range []string{"<script", "http://", "https://", "src="} {
		if strings.Contains(r.body, never) {
			t.Errorf("%s is in it", never)
		}
	}
}

// Every route has an example on the page that the gateway answers.
func TestDocsExamples(t *testing.T) {
	b := newBed(t, Options{TokenizerInfo: true}, one(vectorNode("d1", nil)))
	used := 0
	for i := range routes {
		key, e, want := routes[i].Method+" "+routes[i].Path, exampleOf(&routes[i]), 200
		if _, own := examples[key]; own {
			used++
		}
		switch routes[i].Path {
		case openai.LoadAdapterPath, openai.UnloadAdapterPath:
			if e.body == "" {
				t.Errorf("%s has no body", key)
			}
			continue // the bed's node answers no requests for adapters
		case metrics.LevelPath:
			want = 403 // the bed's clients have no address of this machine
		case "/v1/responses/{response}":
			want = 404 // own nodes store none
		case "/admin/desired":
			want = 404 // the bed has no planner
		}
		r := b.do(routes[i].Method, strings.Replace(e.path, "tandem-builtin", "tiny", 1), e.body)
		if r.StatusCode != want {
			t.Errorf("%s: status %d, want %d: %s", key, r.StatusCode, want, r.body)
		}
	}
	if used != len(examples) {
		t.Errorf("%d of %d examples are of routes", used, len(examples))
	}
}

// A drained upstream gets nothing new while what it has goes on, also where all its
// probes are well; taken back, it works again.
func TestDrainUpstream(t *testing.T) {
	b := newRelayed(t, Options{Policy: "round_robin"}, "s1", "s2")
	gate := make(chan struct{})
	b.far["s1"].does(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		event(w, chunkEvent("one "))
		<-gate
		event(w, "data: [DONE]\n\n")
	})
	var begun []*client
	for len(b.far["s1"].requests()) == 0 {
		c := b.dial()
		defer c.Close()
		c.send("POST", "/v1/chat/completions", ask(true, "x"))
		if _, err := c.r.Peek(1); err != nil {
			t.Fatal(err)
		}
		begun = append(begun, c)
	}
	if r := b.post("/admin/drain/http://s1", ""); r.StatusCode != 200 || !strings.Contains(r.body, `"node":"http://s1","role":"serve","draining":true,"in_flight":1,"others":1`) {
		t.Fatal(r.StatusCode, r.body)
	}
	had := len(b.far["s1"].requests())
	for range 8 {
		if r := b.post("/v1/chat/completions", ask(true, "x")); r.StatusCode != 200 {
			t.Fatal(r.StatusCode, r.body)
		}
	}
	if n := len(b.far["s1"].requests()); n != had {
		t.Fatalf("%d new requests reached it", n-had)
	}
	if r := b.do("GET", "/debug/nodes", ""); !strings.Contains(r.body, `"draining":true`) {
		t.Error(r.body)
	}
	// With the other drained too there is nobody; with a bad answer of the last one, it is passed on.
	b.far["s2"].does(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) })
	if r := b.post("/v1/chat/completions", ask(true, "x")); r.StatusCode != 500 {
		t.Error(r.StatusCode, r.body)
	}
	b.post("/admin/drain/s2", "")
	b.post("/v1/chat/completions", ask(true, "x")).wantError(t, 503, `no upstream is available for model "m"`)
	b.post("/v1/completions", `{"prompt":"x"}`).wantError(t, 503, `no upstream is available for model "m"`)
	if r := b.do("GET", "/readyz", ""); r.StatusCode != 503 {
		t.Error(r.StatusCode, r.body)
	}
	close(gate)
	for _, c := range begun {
		if r := c.receive(); r.err != nil || !r.events(t).done {
			t.Error(r.body, r.err)
		}
	}
	b.far["s1"].does(streams)
	if r := b.do("DELETE", "/admin/drain/s1", ""); !strings.Contains(r.body, `"draining":false`) {
		t.Error(r.body)
	}
	if r := b.post("/v1/chat/completions", ask(true, "x")); r.StatusCode != 200 {
		t.Error(r.StatusCode, r.body)
	}
	if r := b.post("/admin/drain/s3", ""); r.StatusCode != 404 {
		t.Error(r.StatusCode, r.body)
	}
}

// Each request has one line, with who, what, where and how much, and without a word
// of its text or a key.
func TestRequestLines(t *testing.T) {
	file := keyFile(t, "secret-key name=alice\n")
	key := "Authorization: Bearer secret-key"
	t.Run("nodes", func(t *testing.T) {
		b := newBed(t, Options{APIKeyFile: file, LogRequests: true}, one(nodestest.Options{}))
		b.post("/v1/completions", `{"prompt":"a private word","max_tokens":4}`, key, "X-Request-Id: r1")
		b.post("/v1/completions", `{"prompt":"a private word","n":0}`, key, "X-Request-Id: r2")
		b.post("/v1/completions", `{"prompt":"a private word"}`, "X-Request-Id: r3")
		b.lines(t, map[string][]string{
			"r1": {"request ended", "path=/v1/completions", "status=200", "node=d1", "key=alice", "model=tiny", "output_tokens=4", "prompt_tokens=14", "finish=length", "total="},
			"r2": {"request refused", "status=400", "key=alice", "total="},
			"r3": {"request refused", "status=401"},
		})
	})
	t.Run("upstreams", func(t *testing.T) {
		b := newRelayed(t, Options{APIKeyFile: file, LogRequests: true, Limits: Limits{MaxN: 2}}, "s1")
		b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			event(w, chunkEvent("private"), `data: {"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":7,"completion_tokens":4}}`+"\n\n", "data: [DONE]\n\n")
		})
		b.post("/v1/completions", `{"model":"m","prompt":"a private word","stream":true}`, key, "X-Request-Id: r1")
		b.post("/v1/completions", `{"model":"m","prompt":"a private word","n":3}`, key, "X-Request-Id: r2")
		b.lines(t, map[string][]string{
			"r1": {"request ended", "path=/v1/completions", "status=200", "node=http://s1", "key=alice", "model=m", "output_tokens=4", "prompt_tokens=7", "finish=length", "total="},
			"r2": {"request refused", "status=400", "key=alice"},
		})
	})
}

// lines holds the log against what it should say of each request, in one line.
func (b *bed) lines(t *testing.T, want map[string][]string) {
	t.Helper()
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	log := b.log.String()
	for id, parts := range want {
		n := 0
		for line := range strings.Lines(log) {
			if !strings.Contains(line, "request="+id+" ") {
				continue
			}
			n++
			for _, p := range parts {
				if !strings.Contains(line, p) {
					t.Errorf("%s: no %q in %s", id, p, line)
				}
			}
		}
		if n != 1 {
			t.Errorf("%s has %d lines:\n%s", id, n, log)
		}
	}
	if strings.Contains(log, "private") || strings.Contains(log, "secret") {
		t.Errorf("the log tells too much:\n%s", log)
	}
}

// A relayed request's trace has a span for each attempt, below which the server's own
// belong.
func TestRelaySpans(t *testing.T) {
	var mu sync.Mutex
	var sent []byte
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		sent = append(sent, body...)
	}))
	defer collector.Close()
	tr, err := trace.New(trace.Options{Endpoint: collector.URL, Getenv: func(string) string { return "" }, Role: "gateway", Node: "gw"})
	if err != nil {
		t.Fatal(err)
	}
	b := newRelayed(t, Options{Tracer: tr, Policy: "round_robin"}, "s1", "s2")
	b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) })
	const id, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	for range 2 { // one of them meets s1 first
		if r := b.post("/v1/chat/completions", ask(true, "x"), "Traceparent: 00-"+id+"-"+span+"-01"); r.StatusCode != 200 {
			t.Fatal(r.StatusCode, r.body)
		}
	}
	parents := map[string]bool{}
	for _, s := range b.far {
		for _, r := range s.requests() {
			p := r.header.Get("Traceparent")
			if !strings.HasPrefix(p, "00-"+id+"-") || strings.Contains(p, span) || parents[p] {
				t.Errorf("%s got %q", s.name, p)
			}
			parents[p] = true
		}
	}
	if len(parents) < 3 {
		t.Errorf("%d attempts", len(parents))
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	if err := tr.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	for what, n := range map[string]int{"attempt": 3, "first byte": 2, "chat m": 2, "http://s1": 1, "error.type": 1} {
		if got := bytes.Count(sent, []byte(what)); got < n {
			t.Errorf("%q is in what was sent %d times, want %d", what, got, n)
		}
	}
}
