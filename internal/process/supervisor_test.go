package process

import (
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A unit is starting until ready first succeeds, and its watchdog is fed only while alive does.
func TestReports(t *testing.T) {
	var sent []string
	r := reporter{send: func(s string) { sent = append(sent, s) }}
	var ready, alive error
	checks := &probes{func() error { return ready }, func() error { return alive }}
	for _, step := range []struct {
		checks       *probes
		ready, alive error
		ending       bool
		want         string
	}{
		{nil, nil, nil, false, "EXTEND_TIMEOUT_USEC=30000000 WATCHDOG=1 STATUS=starting"},
		{nil, nil, nil, false, "EXTEND_TIMEOUT_USEC=30000000 WATCHDOG=1 STATUS=loading weights: 1 GiB of 2 GiB"},
		{checks, errors.New("not\njoined"), nil, false, "EXTEND_TIMEOUT_USEC=30000000 WATCHDOG=1 STATUS=not ready: not joined"},
		{checks, nil, nil, false, "READY=1 WATCHDOG=1 STATUS=serving"},
		{checks, nil, nil, false, "WATCHDOG=1"},
		{checks, errors.New("no node"), nil, false, "WATCHDOG=1 STATUS=not ready: no node"},
		{checks, nil, errors.New("no step"), false, "STATUS=not alive: no step"},
		{checks, nil, nil, true, "STOPPING=1 WATCHDOG=1 STATUS=draining"},
		{checks, errors.New("draining"), nil, true, "WATCHDOG=1"},
	} {
		ready, alive = step.ready, step.alive
		var loading *string
		if state := "loading weights: 1 GiB of 2 GiB"; len(sent) > 0 {
			loading = &state
		}
		r.report(step.checks, loading, step.ending)
		if got := strings.ReplaceAll(sent[len(sent)-1], "\n", " "); got != step.want {
			t.Errorf("report %d is %q, want %q", len(sent), got, step.want)
		}
	}
}

func TestResponsive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		alive := Responsive(time.Minute, time.Now, func() { <-hang })
		check := func(ok bool) {
			t.Helper()
			synctest.Wait()
			if err := alive(); (err == nil) != ok {
				t.Errorf("%v, want success %v", err, ok)
			}
		}
		check(true)
		time.Sleep(time.Minute)
		check(true)
		time.Sleep(time.Second)
		check(false)
		hang <- struct{}{}
		check(true) // the loop answered, and is asked again
		time.Sleep(time.Hour)
		check(false)
		close(hang)
		check(true)
	})
}

// A process under a notification socket becomes ready there, and says that it stops.
func TestNotifySocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "30000")
	t.Setenv("WATCHDOG_PID", "")
	p, err := Start(Options{Role: "test", LogLevel: "info", LogFormat: "text", Out: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	p.Watch(func() error { return nil }, nil)
	await := func(word string) {
		t.Helper()
		buf := make([]byte, 4096)
		if err := l.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		for {
			n, err := l.Read(buf)
			if err != nil {
				t.Fatalf("no %s: %v", word, err)
			}
			if strings.Contains(string(buf[:n]), word) {
				return
			}
		}
	}
	await("READY=1")
	await("WATCHDOG=1")
	p.End()
}
