package gateway

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/upstream/upstreamtest"
	"github.com/tandem-serving/tandem/internal/metrics"
)

// Connections beyond their number are told so, and closed.
func TestMaxConnections(t *testing.T) {
	gate := make(chan struct{})
	b := newBed(t, Options{MaxConns: 1}, one(upstreamtest.Options{Gate: gate}))
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
