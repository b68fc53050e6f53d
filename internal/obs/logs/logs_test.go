package logs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestOneRecordIsOneLine(t *testing.T) {
	var b bytes.Buffer
	log := slog.New(New(&b, slog.LevelInfo)).With("node", "a b").WithGroup("kv")
	log.Debug("hidden")
	log.Warn("late\nERROR forged", "err", errors.New("x\ny"), "d", 1500*time.Millisecond, "n", 3, slog.Group("g", "k", `q"`))
	got := b.String()
	if strings.Count(got, "\n") != 1 || !strings.HasPrefix(got, "WARNING ") {
		t.Fatalf("want one WARNING line, got %q", got)
	}
	for _, want := range []string{`"late\nERROR forged"`, `node="a b"`, `kv.err="x\ny"`, " kv.d=1.5s", " kv.n=3", `kv.g.k="q\""`} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in %q", want, got)
		}
	}
}

// Errors are logged without the names of packages, other values as they are.
func TestWithoutPackages(t *testing.T) {
	var b bytes.Buffer
	log := slog.New(New(&b, slog.LevelInfo))
	log.Info("m", "error", fmt.Errorf("gateway: bad file: %w", errors.New("config: bad value: line 3 (model: x)")), "text", "gateway: x")
	if got := b.String(); !strings.HasSuffix(got, ` m error="bad file: bad value: line 3 (x)" text="gateway: x"`+"\n") {
		t.Errorf("got %q", got)
	}
	joined := errors.Join(errors.New("config: line 1"), errors.New("quantize: line 2")).Error()
	if got := WithoutPackages(joined); got != "line 1\nline 2" {
		t.Errorf("of joined errors: %q", got)
	}
}

func TestLine(t *testing.T) {
	a := Counts{PromptTokens: 100, GeneratedTokens: 10, PrefixQueries: 50, PrefixHits: 50}
	b := Counts{PromptTokens: 300, GeneratedTokens: 60, PrefixQueries: 150, PrefixHits: 75, Running: 2, Waiting: 1, KVUsage: 0.125}
	want := "Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 2 reqs, Waiting: 1 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
	if got := Line(a, b, 10*time.Second); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := Line(b, b, time.Second); !strings.HasSuffix(got, "n/a") {
		t.Errorf("no look-ups: got %s", got)
	}
	b.Preemptions, b.Deferred, b.ExternalQueries, b.ExternalHits = 3, 1, 200, 150
	want = "Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 2 reqs, Waiting: 1 reqs, Deferred: 1 reqs, Preemptions: 3, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%, External prefix cache hit rate: 75.0%"
	if got := Line(a, b, 10*time.Second); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// shared is a buffer and counts for two goroutines.
type shared struct {
	mu sync.Mutex
	b  bytes.Buffer
	c  Counts
}

func (s *shared) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *shared) counts() Counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.c
}

func TestRatesAreSilentWhenIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s shared
		ctx, cancel := context.WithCancel(t.Context())
		go Rates(ctx, slog.New(New(&s, slog.LevelInfo)), time.Second, s.counts)
		lines := func(d time.Duration, generated uint64) int {
			s.mu.Lock()
			s.b.Reset()
			s.c.GeneratedTokens += generated
			s.mu.Unlock()
			time.Sleep(d)
			synctest.Wait()
			s.mu.Lock()
			defer s.mu.Unlock()
			return strings.Count(s.b.String(), "\n")
		}
		if n := lines(5*time.Second+time.Millisecond, 0); n != 0 {
			t.Errorf("%d lines from an idle node", n)
		}
		if n := lines(5*time.Second, 7); n != 2 {
			t.Errorf("%d lines, want one for the work and one that says it is over", n)
		}
		cancel()
		synctest.Wait()
	})
}

func TestTransferLine(t *testing.T) {
	a := Counts{Transfers: 1, TransferBytes: 1 << 20}
	if got := TransferLine(a, a, time.Second); got != "" {
		t.Errorf("no transfers: %s", got)
	}
	b := Counts{Transfers: 5, TransferBytes: 9 << 20, TransferFailures: 1, TransferHidden: 40 * time.Millisecond, TransferExposed: 2 * time.Millisecond}
	want := "KV Transfer metrics: Num successful transfers=4, Avg MB per transfer=2.000, Avg hidden time (ms)=10.000, Avg exposed time (ms)=0.500, Throughput (MB/s)=0.800, Num failed transfers=1"
	if got := TransferLine(a, b, 10*time.Second); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestFormats(t *testing.T) {
	var b bytes.Buffer
	var v slog.LevelVar
	log, ok := Log(&b, &v, JSON)
	if !ok {
		t.Fatal("no JSON")
	}
	log.Debug("hidden")
	v.Set(slog.LevelDebug)
	log.Debug("shown\nhere", "n", 1)
	if got := b.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, `"msg":"shown\nhere","n":1}`) {
		t.Errorf("got %s", got)
	}
	if _, ok := Log(&b, &v, "yaml"); ok {
		t.Error("any format will do")
	}
	for name, want := range map[string]slog.Level{"debug": slog.LevelDebug, "Info": slog.LevelInfo, "warning": slog.LevelWarn, "error": slog.LevelError} {
		if got, err := ParseLevel(name); err != nil || got != want {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	if _, err := ParseLevel("loud"); err == nil {
		t.Error("loud is a level")
	}
}
