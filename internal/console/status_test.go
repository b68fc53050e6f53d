package console

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"
)

// Who may not see the fleet waits for the probes of its processes instead, all of them.
func TestWaitWithoutRights(t *testing.T) {
	var mu sync.Mutex
	asked := map[string]int{}
	process := func(name string, after int) *httptest.Server {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			switch {
			case r.URL.Path != "/readyz":
				w.WriteHeader(http.StatusForbidden)
			case asked[name] < after:
				asked[name]++
				w.WriteHeader(http.StatusServiceUnavailable)
			}
		}))
		t.Cleanup(s.Close)
		return s
	}
	gateway, p, d := process("gateway", 1), process("p", 0), process("d", 2)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	models, err := (&Client{URL: gateway.URL}).WaitFleet(ctx, []string{p.URL, d.URL})
	if err != nil || len(models) != 0 {
		t.Fatal(models, err)
	}
	if asked["gateway"] != 1 || asked["d"] != 2 {
		t.Errorf("it did not wait for all: %v", asked)
	}
	d.Close()
	short, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, err := (&Client{URL: gateway.URL}).WaitFleet(short, []string{p.URL, d.URL}); err == nil {
		t.Error("a node that is not there was not missed")
	}
}

// The node of tandem serve has no port of its own for metrics.
func TestStatusOfServe(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"version":"1","ready":true,"nodes":[{"id":"engine","role":"serve","model":"tiny","rpc":"engine","version":"1","ready":true,"connected":true}]}`)
	}))
	defer s.Close()
	var out strings.Builder
	if err := (&Client{URL: s.URL}).Status(t.Context(), false, 0, &out); err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(strings.Fields(out.String()), " "); !strings.HasSuffix(text, "MODEL RPC METRICS VERSION engine serve ready 0 0 0 0.0% 0.0 0.0 tiny engine - 1") {
		t.Error(text)
	}
}

// Upstreams are listed as nodes are, with what an upstream sends made harmless.
func TestStatusOfUpstreams(t *testing.T) {
	const nodes = `[{"id":"d1","role":"decode","model":"tiny","ready":true,"connected":true}]`
	const upstreams = `[{"name":"http://a:1","role":"serve","models":["m","b\u001b[2J"],"up":true,"breaker":"closed","requests":3},
		{"name":"http://b:1","role":"prefill","up":false,"reason":"no route","breaker":"closed","requests":0},
		{"name":"http://c:1","role":"decode","models":["1","2","3","4","5","6"],"up":true,"breaker":"open","draining":false,"requests":1},
		{"name":"http://d:1","role":"serve","up":true,"breaker":"closed","draining":true,"requests":0},
		{"name":"http://e:1","role":"serve","up":false,"breaker":"closed","requests":0}]`
	width := 0
	status := func(nodes, upstreams string) (string, []string) {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"version":"1","ready":true,"nodes":`+nodes+`,"upstreams":`+upstreams+`}`)
		}))
		defer s.Close()
		var out strings.Builder
		if err := (&Client{URL: s.URL}).Status(t.Context(), false, width, &out); err != nil {
			t.Fatal(err)
		}
		var lines []string
		for line := range strings.Lines(out.String()) {
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
		return out.String(), lines[2:] // behind the gateway's own
	}
	want := []string{"UPSTREAM TASK REQUESTS MODELS STATE", "http://a:1 serve 3 m,b?[2J ready", "http://b:1 prefill 0 - down: no route",
		"http://c:1 decode 1 1,2,3,4 and 2 more breaker open", "http://d:1 serve 0 - draining", "http://e:1 serve 0 - starting"}
	if out, lines := status("[]", upstreams); !slices.Equal(lines, want) {
		t.Errorf("got:\n%s\nwant:\n%s", out, strings.Join(want, "\n"))
	}
	if out, lines := status(nodes, upstreams); len(lines) != len(want)+3 || !strings.HasPrefix(lines[len(want)+1], "NODE ROLE") || !strings.HasPrefix(lines[len(want)+2], "d1 decode ready") {
		t.Errorf("with nodes:\n%s", out)
	}
	const loads = `[{"id":"p1","role":"prefill","ready":true,"connected":true,"running":1,"waiting":2,"queued_tokens":512,"kv_usage":0.25,"prompt_tokens_per_s":1234.56},
		{"id":"d1","role":"decode","ready":true,"connected":true,"running":3,"output_tokens_per_s":45.67},{"id":"d2","role":"decode","ready":true,"rpc":"r"}]`
	if out, lines := status(loads, "[]"); len(lines) != 4 || !strings.HasPrefix(lines[1], "p1 prefill ready 1 2 512 25.0% 1234.6 - ") ||
		!strings.HasPrefix(lines[2], "d1 decode ready 3 0 0 0.0% 0.0 45.7 ") || !strings.HasPrefix(lines[3], "d2 decode unreachable - - - - - - r") {
		t.Errorf("loads:\n%s", out)
	}
	if out, lines := status(nodes, "[]"); len(lines) != 2 || strings.Contains(out, "UPSTREAM") {
		t.Errorf("without upstreams:\n%s", out)
	}
	if out, lines := status("[]", "[]"); len(lines) != 1 || !strings.Contains(out, "The engine runs in the process of the gateway") {
		t.Errorf("without nodes:\n%s", out)
	}
	for _, width = range []int{80, 120, 160} {
		out, lines := status(strings.ReplaceAll(loads, `"rpc":"r"`, `"rpc":"10.0.0.1:7102","http":"10.0.0.1:7302","model":"tandem-builtin","version":"0.2.0-dev+g0123456789ab"`), "[]")
		for line := range strings.Lines(out) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > width && !strings.HasPrefix(line, "gateway") {
				t.Errorf("%d of %d columns: %s", n, width, line)
			}
		}
		if !strings.HasPrefix(lines[0], "NODE ROLE STATE RUNNING") || !strings.Contains(lines[0], "OUTPUT TOKENS/S") || !strings.Contains(out, "VERSION (see --json).") {
			t.Errorf("%d columns:\n%s", width, out)
		}
	}
}
