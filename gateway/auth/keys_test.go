package auth

import (
	"github.com/valyala/fasthttp"

	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

func TestParseKeys(t *testing.T) {
	keys, err := parse(fmt.Sprintf("# people\n\nalpha name=Ann concurrency=3\n  sha256:%x tokens-per-second=2.5\n", sha256.Sum256([]byte("beta"))))
	if err != nil || len(keys) != 2 || keys[0].Name != "Ann" || keys[0].Limits.Concurrency != 3 || keys[0].tokens != nil ||
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
		"secret\nname=Ann admin=yes":        "line 2 begins with name=: its key is missing",
		" admin=yes":                        "line 1 begins with admin=: its key is missing",
		"sha256:" + strings.Repeat("g", 64): "64 hexadecimal digits",
	} {
		if _, err := parse(text); err == nil || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
}

// A key that the file has and that is given besides has the file's limits, before
// and after the file has changed; so does a change before anyone looks.
func TestKeyFileLimitsHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file, plain := filepath.Join(t.TempDir(), "keys"), []string{"both", "other"}
		if err := os.WriteFile(file, []byte("both concurrency=1\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		keys, err := New(plain, file)
		if err != nil {
			t.Fatal(err)
		}
		hold := func(limit int) {
			t.Helper()
			k, other := keys.Find(bearer("both")), keys.Find(bearer("other"))
			if keys.Len() != 2 || k == nil || other == nil || k.Limits.Concurrency != limit || other.Limits.Concurrency != 0 {
				t.Fatalf("%d keys, %+v and %+v, want a limit of %d", keys.Len(), k, other, limit)
			}
		}
		hold(1)
		for limit := 2; limit < 4; limit++ {
			if err := os.WriteFile(file, fmt.Appendf(nil, "both concurrency=%d\n", limit), 0o600); err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			go keys.Watch(ctx, slog.New(slog.DiscardHandler), metrics.New(metrics.Gateway, "").Gauge(metrics.GatewayKeyFileBad), func(*Key) {})
			time.Sleep(2 * filePoll)
			synctest.Wait()
			hold(limit)
			stop()
		}
	})
}

// Names have counters of their own, up to a bound, which stay when the file changes. All other keys
// have none.
func TestCounters(t *testing.T) {
	lines := []string{"a name=A", "a2 name=A", "plain", "broken name=\xff"}
	for i := range metrics.MaxNames {
		lines = append(lines, fmt.Sprintf("k%d name=N%d", i, i))
	}
	file := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	keys, err := New([]string{"operator"}, file)
	if err != nil {
		t.Fatal(err)
	}
	set := metrics.New(metrics.Gateway, "")
	keys.Meter(set)
	of := func(key string) *metrics.Value { return keys.Find(bearer(key)).Counter(metrics.KeyOutput) }
	other := set.Counter(metrics.GatewayKeyTokens, metrics.OtherKeys, metrics.KeyTokens[metrics.KeyOutput])
	first := of("a")
	switch {
	case first == nil || first == other || of("a2") != first:
		t.Error("keys of one name have different counters, or none")
	case of("broken") == nil || of("broken") == other || of("broken") == first:
		t.Error("a name that is no text has no counter")
	case of("plain") != nil || of("operator") != nil || of("unknown") != nil:
		t.Error("keys without a name have counters")
	case of("k97") == other || of("k98") != other || of("k99") != other:
		t.Error("names are not bounded")
	}
	first.Add(7)
	if err := os.WriteFile(file, []byte("a name=B\na3 name=A\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := keys.reload(func(*Key) {}); err != nil {
		t.Fatal(err)
	}
	if of("a3") != first || of("a") != other {
		t.Error("names of a changed file have other counters")
	}
	text := string(set.Append(nil))
	if !strings.Contains(text, `tandem:gateway_key_tokens_total{key="A",of="output"} 7`) || strings.Count(text, "\ntandem:gateway_key_tokens_total{") != 3*(metrics.MaxNames+1) {
		t.Error(text)
	}
}

// A file without keys is refused when it is read again, too, and the keys stay.
func TestReloadToNoKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(file, []byte("one\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	keys, err := New(nil, file)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"", "\n", "# one\n", "one\n name=Ann admin=yes\n"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		changed, err := keys.reload(func(*Key) {})
		if changed || !errors.Is(err, ErrFile) || keys.Len() != 1 || keys.Find(bearer("one")) == nil || keys.Allow(nil) {
			t.Errorf("%q: %d keys, changed %t, %v", text, keys.Len(), changed, err)
		}
	}
}

// A FIFO instead of a file of keys is refused at once.
func TestKeyFileIsRegular(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(nil, path); !errors.Is(err, ErrFile) || !strings.Contains(err.Error(), "FIFO") {
		t.Errorf("%v", err)
	}
}

// bearer returns the headers of a request with the key.
func bearer(key string) *fasthttp.RequestHeader {
	h := new(fasthttp.RequestHeader)
	h.Set("Authorization", "Bearer "+key)
	return h
}

// A key is found in each of three headers. Equal keys are one, and two that differ are none.
func TestFind(t *testing.T) {
	keys, err := New([]string{"one", "two"}, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		headers string // NAME: VALUE, separated by semicolons
		found   bool
	}{
		{"", false},
		{"Authorization: Bearer one", true},
		{"authorization: bEARER one", true},
		{"Authorization: Bearer", false},
		{"Authorization: one", false},
		{"Authorization: Basic one", false},
		{"x-api-key: one", true},
		{"api-key: two", true},
		{"x-api-key: three", false},
		{"x-api-key: Bearer one", false},
		{"x-api-key: ;api-key: one", true},
		{"Authorization: Bearer one;x-api-key: one;api-key: one", true},
		{"Authorization: Bearer one;x-api-key: two", false},
		{"Authorization: Bearer one;api-key: wrong", false},
		{"x-api-key: wrong;api-key: one", false},
		{"x-api-key: one;x-api-key: two", false},
		{"Authorization: Bearer one;Authorization: Bearer two", false},
		{"Authorization: Basic dXNlcg==;x-api-key: one", true},
		{"Cookie: x-api-key=one", false},
	} {
		h := new(fasthttp.RequestHeader)
		for line := range strings.SplitSeq(c.headers, ";") {
			name, value, _ := strings.Cut(line, ": ")
			h.Add(name, value)
		}
		if k := keys.Find(h); (k != nil) != c.found {
			t.Errorf("%q: found is %v, want %v", c.headers, k != nil, c.found)
		}
	}
}
