package nodes

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/internal/breaker"
)

// An hour of probes a second makes a line in 30 s, and what opens or closes the
// breaker is logged at once.
func TestProbesAreLoggedSparsely(t *testing.T) {
	var out strings.Builder
	b := &breakerLog{log: slog.New(slog.NewTextHandler(&out, nil)), node: "d1"}
	now := time.Unix(1e9, 0)
	b.changed(now, breaker.Closed, breaker.Open)
	for range 3600 {
		now = now.Add(time.Second)
		b.changed(now, breaker.Open, breaker.HalfOpen)
		b.changed(now, breaker.HalfOpen, breaker.Open)
	}
	b.changed(now, breaker.Open, breaker.HalfOpen)
	b.changed(now, breaker.HalfOpen, breaker.Closed)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 1+120+1 || !strings.Contains(lines[1], "omitted=58") || !strings.Contains(lines[0], "from=closed to=open omitted=0") {
		t.Errorf("%d lines:\n%s", len(lines), strings.Join(lines[:min(3, len(lines))], "\n"))
	}
	if last := lines[len(lines)-1]; !strings.Contains(last, "to=closed") || !strings.Contains(last, "omitted=2") {
		t.Errorf("%s", last)
	}
}
