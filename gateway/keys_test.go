package gateway

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

func TestParseKeys(t *testing.T) {
	keys, err := parseKeys(fmt.Sprintf("# people\n\nalpha name=Ann concurrency=3\n  sha256:%x tokens-per-second=2.5\n", sha256.Sum256([]byte("beta"))))
	if err != nil || len(keys) != 2 || keys[0].name != "Ann" || keys[0].limits.concurrency != 3 || keys[0].tokens != nil ||
		keys[1].hash != sha256.Sum256([]byte("beta")) || keys[1].tokens.Burst() != 25 {
		t.Fatalf("%+v, %v", keys, err)
	}
	for text, says := range map[string]string{
		"":                                  "no key",
		"# only a comment":                  "no key",
		"secret concurrency=many":           `line 1: concurrency is "many"`,
		"secret concurrency=1.5":            `concurrency is "1.5"`,
		"secret tokens-per-second=-1":       `tokens-per-second is "-1"`,
		"secret tokens-per-second=NaN":      `tokens-per-second is "NaN"`,
		"a\nsecret friends=2":               `line 2: "friends" is none of`,
		"secret\nother\nsecret":             "line 3 has the key of line 1",
		"sha256:abc":                        "64 hexadecimal digits",
		"secret name=":                      "is none of",
		"sha256:" + strings.Repeat("g", 64): "64 hexadecimal digits",
	} {
		if _, err := parseKeys(text); err == nil || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
}

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
	if e := r.parse(t).Error; r.StatusCode != 429 || r.Header.Get("Retry-After") != "1" || e.Type != "RateLimitError" || !strings.Contains(e.Message, "1 requests running") {
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
	refused := func(limit string) float64 { return b.g.meters.set.Counter(metrics.GatewayRefused, limit).Get() }
	if refused("concurrency") != 1 || refused("tokens") != 1 {
		t.Errorf("%g and %g refusals counted", refused("concurrency"), refused("tokens"))
	}
	if log := b.log.String(); !strings.Contains(log, "key=One") || strings.Contains(log, "slow") {
		t.Errorf("the log has keys, or no names:\n%s", log)
	}
}

// A changed file is taken without a restart, a bad one is not; what a key has
// running counts on.
func TestKeyFileIsReadAgain(t *testing.T) {
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
	bad := b.g.meters.set.Gauge(metrics.GatewayKeyFileBad)
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
}

// A key that the file has and that is given besides has the file's limits, before
// and after the file has changed; so does a change before anyone looks.
func TestKeyFileLimitsHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file, plain := keyFile(t, "both concurrency=1\n"), []string{"both", "other"}
		keys, err := newKeyring(plain, file)
		if err != nil {
			t.Fatal(err)
		}
		g := &Gateway{o: Options{APIKeys: plain, APIKeyFile: file}, keys: keys, log: slog.New(slog.DiscardHandler),
			meters: newMeters(metrics.New(metrics.Gateway, "")), admission: newAdmission(admit.Limits{})}
		hold := func(limit int) {
			t.Helper()
			k, other := keys.find([]byte("Bearer both")), keys.find([]byte("Bearer other"))
			if keys.len() != 2 || k == nil || other == nil || k.limits.concurrency != limit || other.limits.concurrency != 0 {
				t.Fatalf("%d keys, %+v and %+v, want a limit of %d", keys.len(), k, other, limit)
			}
		}
		hold(1)
		for limit := 2; limit < 4; limit++ {
			if err := os.WriteFile(file, fmt.Appendf(nil, "both concurrency=%d\n", limit), 0o600); err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			go g.keepKeys(ctx)
			time.Sleep(2 * keyFilePoll)
			synctest.Wait()
			hold(limit)
			stop()
		}
	})
}

// A FIFO instead of a file of keys is refused at once.
func TestKeyFileIsRegular(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := newKeyring(nil, path); !errors.Is(err, ErrKeyFile) || !strings.Contains(err.Error(), "FIFO") {
		t.Errorf("%v", err)
	}
}
