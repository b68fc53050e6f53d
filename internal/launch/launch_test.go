package launch

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestMain lets the test binary play a node: it runs until SIGTERM, or does
// what its first argument says.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && strings.HasPrefix(os.Args[1], "node-") {
		os.Exit(playNode(os.Args[1]))
	}
	os.Exit(m.Run())
}

func playNode(kind string) int {
	switch kind {
	case "node-fails":
		os.Stderr.WriteString("cannot bind\n")
		return 3
	}
	wait := onTerm()
	if kind == "node-stubborn" {
		ignoreTerm()
	}
	os.Stdout.WriteString("started\n") // it may be told to stop at once
	wait(kind == "node-stubborn")
	os.Stdout.WriteString("stopped\n")
	return 0
}

// syncBuffer is a bytes.Buffer for two goroutines.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func options(out *syncBuffer, kinds ...string) Options {
	o := Options{Binary: os.Args[0], Out: out, Logger: slog.New(slog.NewTextHandler(out, nil)), Grace: 10 * time.Second}
	for i, k := range kinds {
		o.Processes = append(o.Processes, Process{Name: string(rune('a' + i)), Args: []string{k}})
	}
	return o
}

// waitFor polls the output for something a node printed.
func waitFor(t *testing.T, out *syncBuffer, want string, times int) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); strings.Count(out.String(), want) < times; {
		if time.Now().After(deadline) {
			t.Fatalf("no %q (%d times) in output:\n%s", want, times, out)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestStopsTheFirstFirst(t *testing.T) {
	var out syncBuffer
	ctx, cancel := context.WithCancel(context.Background())
	o := options(&out, "node-ok", "node-ok")
	o.Started = func(context.Context) error {
		waitFor(t, &out, "started", 2)
		cancel()
		return nil
	}
	if err := Run(ctx, o, nil); err != nil {
		t.Fatal(err)
	}
	got := out.String()
	a, b := strings.Index(got, "a          | stopped"), strings.Index(got, "b          | stopped")
	if a < 0 || b < 0 || a > b {
		t.Errorf("want a to stop, then b; got:\n%s", got)
	}
}

func TestFailedStartStopsTheRest(t *testing.T) {
	var out syncBuffer
	o := options(&out, "node-ok", "node-fails")
	o.Started = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	err := Run(context.Background(), o, nil)
	if !errors.Is(err, ErrStart) || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("got %v, want ErrStart with the exit status", err)
	}
	if !strings.Contains(out.String(), "b          | cannot bind") {
		t.Errorf("the node's own words are missing:\n%s", &out)
	}
}

func TestDeathAfterStartLeavesTheRest(t *testing.T) {
	var out syncBuffer
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	o := options(&out, "node-ok", "node-ok")
	up := make(chan struct{})
	o.Started = func(context.Context) error { close(up); return nil }
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, o, nil) }()
	<-up
	waitFor(t, &out, "started", 2)
	killOne(t)
	waitFor(t, &out, "node has ended", 1)
	select {
	case err := <-ended:
		t.Fatalf("Run returned (%v) with a node left", err)
	case <-time.After(50 * time.Millisecond):
	}
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

// Nodes that have all ended by themselves are no success.
func TestNoneIsLeft(t *testing.T) {
	var out syncBuffer
	if err := Run(t.Context(), options(&out, "node-fails", "node-fails"), nil); !errors.Is(err, ErrGone) {
		t.Errorf("%v, want ErrGone:\n%s", err, &out)
	}
}

func TestStubbornNodeIsKilled(t *testing.T) {
	for _, how := range []string{"grace", "second signal"} {
		var out syncBuffer
		ctx, cancel := context.WithCancel(context.Background())
		kill := make(chan struct{})
		o := options(&out, "node-stubborn")
		if how == "grace" {
			o.Grace = 50 * time.Millisecond
		} else {
			close(kill)
		}
		o.Started = func(context.Context) error {
			waitFor(t, &out, "started", 1)
			cancel()
			return nil
		}
		began := time.Now()
		if err := Run(ctx, o, kill); err != nil {
			t.Fatal(how, err)
		}
		if d := time.Since(began); d > 8*time.Second {
			t.Errorf("%s: took %v", how, d)
		}
	}
}
