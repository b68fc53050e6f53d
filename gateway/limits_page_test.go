package gateway

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// A connection too many is refused while all others have requests.
func TestMaxConnections(t *testing.T) {
	gate := make(chan struct{})
	b := newBed(t, Options{MaxConns: 1}, one(nodestest.Options{Gate: gate}))
	first := b.dial()
	defer first.Close()
	first.send("POST", "/v1/completions", `{"prompt":"x","max_tokens":1}`)
	b.until(func() bool { return b.nodes["d1"].Running() == 1 })
	second := b.dial()
	defer second.Close()
	r := second.receive()
	if r.StatusCode != 503 || !strings.Contains(r.body, "limit exceeded") {
		t.Fatal(r.StatusCode, r.body)
	}
	if _, err := second.r.ReadByte(); err != io.EOF {
		t.Error(err)
	}
	if n := b.refused("connections"); n != 1 {
		t.Errorf("%g refusals", n)
	}
	close(gate)
	if r := first.receive(); r.StatusCode != 200 {
		t.Error(r.StatusCode, r.body)
	}
}

// Before a node has come a request is told when to ask again.
func TestNoNodeYet(t *testing.T) {
	b := newBed(t, Options{}, nil)
	b.post("/v1/completions", `{"prompt":"x"}`).wantError(t, 503, "no model is loaded yet")
}

// The page of limits names tests, flags and counters that exist, and misses none of
// the flags that bound requests.
func TestLimitsPage(t *testing.T) {
	read := func(file string) string {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	page, flags, tests := read("../docs/limits.md"), read("../docs/flags.md"), ""
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		tests += read(f)
	}
	rows := 0
	flag, word := regexp.MustCompile("`(--[a-z-]+)`"), regexp.MustCompile(`Test\w+`)
	for line := range strings.Lines(page) {
		cells := strings.Split(line, "|")
		if len(cells) != 8 || strings.HasPrefix(line, "|---") || strings.Contains(line, "| limit |") {
			continue
		}
		rows++
		for _, m := range flag.FindAllStringSubmatch(cells[2], -1) {
			if !strings.Contains(flags, "| `"+m[1]+"` |") {
				t.Errorf("no flag is called %s", m[1])
			}
		}
		if name := word.FindString(cells[6]); name == "" || !strings.Contains(tests, "func "+name+"(t *testing.T)") {
			t.Errorf("no test is called %q: %s", name, line)
		}
		if after := strings.TrimSpace(cells[4]); (strings.Contains(cells[3], "429") || strings.Contains(cells[3], "503") && !strings.Contains(cells[3], "plain")) == (after == "no" || after == "") {
			t.Errorf("Retry-After is %q: %s", after, line)
		}
	}
	for _, limit := range metrics.Rows[metrics.GatewayRefused].Labels[0].Values {
		if !strings.Contains(page, "| `"+limit+"` |") {
			t.Errorf("the page does not have %s", limit)
		}
	}
	notOfRequests := []string{"--max-attempts", "--max-log-len"} // of the latter nothing is refused
	for line := range strings.Lines(flags) {
		m := regexp.MustCompile("^\\| `(--max-[a-z-]+)` \\|([^|]*)\\|").FindStringSubmatch(line)
		if m != nil && strings.Contains(m[2], "gateway") && !slices.Contains(notOfRequests, m[1]) && !strings.Contains(page, "`"+m[1]+"`") {
			t.Errorf("the page does not have %s", m[1])
		}
	}
	if rows < 30 {
		t.Errorf("%d rows", rows)
	}
}

// For one connection too many the one that is longest without a request is closed,
// be it silent or in the middle of a head; those with requests never are.
func TestIdleConnectionsGiveWay(t *testing.T) {
	gate := make(chan struct{})
	b := newBed(t, Options{MaxConns: 4}, one(nodestest.Options{Gate: gate}))
	waiting := func(n int) {
		t.Helper()
		b.until(func() bool {
			_, idle, _ := b.g.http.Connections()
			return idle == n
		})
	}
	get := func(c *client) {
		t.Helper()
		c.send("GET", "/livez", "")
		if r := c.receive(); r.StatusCode != 200 {
			t.Fatal(r.StatusCode, r.body)
		}
	}
	dial := func() *client { c := b.dial(); t.Cleanup(func() { c.Close() }); return c }
	busy, sending := dial(), dial()
	busy.send("POST", "/v1/completions", `{"prompt":"x","max_tokens":1}`)
	b.until(func() bool { return b.nodes["d1"].Running() == 1 })
	body := `{"prompt":"x","max_tokens":1}`
	if _, err := io.WriteString(sending, "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"+body[:5]); err != nil {
		t.Fatal(err)
	}
	waiting(0)
	half := dial()
	if _, err := io.WriteString(half, "GET /livez HTTP/1.1\r\nHost: t\r\n"); err != nil {
		t.Fatal(err)
	}
	waiting(1)
	kept := dial()
	get(kept)
	waiting(2)
	for i, victim := range []*client{half, kept} {
		next := dial()
		get(next)
		waiting(2)
		if _, err := victim.r.ReadByte(); err == nil {
			t.Errorf("connection %d was not closed", i)
		}
	}
	if n := b.g.Meters.Counter(metrics.GatewayEvictedConns).Get(); n != 2 {
		t.Errorf("%g connections were closed, want 2", n)
	}
	if _, err := io.WriteString(sending, body[5:]); err != nil {
		t.Fatal(err)
	}
	close(gate)
	for _, c := range []*client{busy, sending} {
		if r := c.receive(); r.StatusCode != 200 {
			t.Error(r.StatusCode, r.body)
		}
	}
	waiting(4)
}

// The table of routes in docs/commands.md has every route.
func TestRoutesPage(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "docs", "commands.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "\n## API\n")
	for _, o := range operations() {
		if path, _, _ := strings.Cut(o.Path, "/{"); !strings.Contains(table, "`"+path) {
			t.Errorf("docs/commands.md lacks %s", o.Path)
		}
	}
}
