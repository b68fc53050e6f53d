package gateway

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

func keyFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A key's limits hold for it alone, and what it has used shows in 429 with the
// time to come back; another key and a request that has begun are not touched.
func TestKeyLimits(t *testing.T) {
	gate := make(chan struct{})
	file := keyFile(t, "one name=One concurrency=1\ntwo\nslow tokens-per-second=0.05\n")
	b := newBed(t, Options{APIKeyFile: file, LogRequests: true}, one(nodestest.Options{Gate: gate}))
	const body = `{"prompt":"x","max_tokens":6}`
	as := func(key string) string { return "Authorization: Bearer " + key }
	c := b.dial()
	defer c.Close()
	c.send("POST", "/v1/completions", body, as("one"))
	b.until(func() bool { return b.nodes["d1"].Running() == 1 })
	r := b.post("/v1/completions", body, as("one"))
	if e := r.parse(t).Error; r.StatusCode != 429 || r.Header.Get("Retry-After") != "1" || e.Type != "RateLimitError" || !strings.Contains(e.Message, "1 running requests") {
		t.Fatalf("%d %s", r.StatusCode, r.body)
	}
	close(gate)
	if r := c.receive(); r.StatusCode != 200 {
		t.Fatalf("%d %s", r.StatusCode, r.body)
	}
	for _, key := range []string{"one", "two", "slow"} {
		if r := b.post("/v1/completions", body, as(key)); r.StatusCode != 200 {
			t.Fatalf("%s: %d %s", key, r.StatusCode, r.body)
		}
	}
	// 7 tokens of a burst of one are used: it takes 140 s to be at one again.
	r = b.post("/v1/completions", body, as("slow"))
	if after, err := strconv.Atoi(r.Header.Get("Retry-After")); r.StatusCode != 429 || err != nil || after < 60 || after > 140 {
		t.Errorf("%d %s, Retry-After %d, %v", r.StatusCode, r.body, after, err)
	}
	if r := b.post("/v1/completions", body, as("three")); r.StatusCode != 401 {
		t.Errorf("an unknown key: %d", r.StatusCode)
	}
	refused := func(limit string) float64 { return b.g.Meters.Counter(metrics.GatewayRefused, limit).Get() }
	if refused("concurrency") != 1 || refused("tokens") != 1 {
		t.Errorf("%g and %g refusals counted", refused("concurrency"), refused("tokens"))
	}
	for name, want := range map[string][]float64{"One": {2, 0, 12}, metrics.OtherKeys: {2, 0, 12}} { // the latter: two and slow
		for i, of := range metrics.KeyTokens {
			if got := b.g.Meters.Named(metrics.GatewayKeyTokens, name, of).Get(); got != want[i] {
				t.Errorf("%s: %g %s tokens, want %g", name, got, of, want[i])
			}
		}
	}
	if log := b.log.String(); !strings.Contains(log, "key=One") || strings.Contains(log, "slow") {
		t.Errorf("the log has keys, or no names:\n%s", log)
	}
}

// A changed file is taken without a restart, a bad one is not; what a key has
// running counts on.
func TestKeyFileIsReadAgain(t *testing.T) {
	virtually(t, func(t *testing.T) {
		file := keyFile(t, "one\n")
		gate := make(chan struct{})
		b := newBed(t, Options{APIKeyFile: file, APIKeys: []string{"fixed"}}, one(nodestest.Options{Gate: gate}))
		status := func(key string) int {
			t.Helper()
			return b.do("GET", "/v1/models", "", "Authorization: Bearer "+key).StatusCode
		}
		write := func(text string) {
			t.Helper()
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		c := b.dial()
		defer c.Close()
		c.send("POST", "/v1/completions", `{"prompt":"x","max_tokens":2}`, "Authorization: Bearer one")
		b.until(func() bool { return b.nodes["d1"].Running() == 1 })
		write("one concurrency=1\ntwo\n")
		b.until(func() bool { return status("two") == 200 })
		if status("fixed") != 200 || status("one") != 200 {
			t.Error("keys are lost")
		}
		if r := b.post("/v1/completions", `{"prompt":"x"}`, "Authorization: Bearer one"); r.StatusCode != 429 {
			t.Errorf("what ran before the change does not count: %d", r.StatusCode)
		}
		write("two friends=1\n")
		bad := b.g.Meters.Gauge(metrics.GatewayKeyFileBad)
		b.until(func() bool { return bad.Get() == 1 })
		if status("one") != 200 || status("two") != 200 {
			t.Error("a bad file changed something")
		}
		write("two\n")
		b.until(func() bool { return bad.Get() == 0 && status("one") == 401 })
		close(gate)
		if r := c.receive(); r.StatusCode != 200 {
			t.Errorf("a running request of a key that is gone: %d %s", r.StatusCode, r.body)
		}
		if _, err := New(Options{APIKeyFile: keyFile(t, "")}); err == nil {
			t.Error("an empty file of keys opens the gateway")
		}
	})
}
