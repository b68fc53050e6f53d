package tlsconf

import (
	"bytes"
	"context"
	"crypto/x509"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// lockedBuffer is a bytes.Buffer for several goroutines.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// The warning begins 30 days before the end, comes once a day, and ends with a renewal.
func TestWarnExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const day = 24 * time.Hour
		var out lockedBuffer
		var end atomic.Pointer[time.Time]
		until := func(d time.Duration) {
			at := time.Now().Add(d)
			end.Store(&at)
		}
		until(40*day + time.Minute)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			WarnExpiry(ctx, slog.New(slog.NewTextHandler(&out, nil)), "certs/d1", "renew it", func() time.Time { return *end.Load() })
		}()
		after := func(d time.Duration, lines int, last string) {
			t.Helper()
			time.Sleep(d)
			synctest.Wait()
			text := out.String()
			got := strings.Split(strings.TrimSpace(text), "\n")
			if n := strings.Count(text, "\n"); n != lines || !strings.Contains(got[len(got)-1], last) {
				t.Errorf("%d lines, want %d, the last with %q: %s", n, lines, last, text)
			}
		}
		after(10*day-time.Minute, 0, "")
		after(2*time.Hour, 1, `msg="certificate expires soon" certificate=certs/d1 until=2000-02-10T00:01:00Z days=29 advice="renew it"`)
		after(day, 2, "days=28")
		after(29*day, 31, "certificate has expired")
		until(365 * day)
		after(30*day, 31, "expired")
		cancel()
		<-done
	})
}

// The end is that of the first certificate of a chain, and follows renewals; a listed certificate
// keeps its hosts.
func TestExpiry(t *testing.T) {
	dir := t.TempDir()
	if err := CreateCA(dir); err != nil {
		t.Fatal(err)
	}
	node, err := IssueNode(dir, "node/d1", []string{"d1.example", "10.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	m, err := Load(node, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if left := time.Until(m.Expiry()); left > NodeLifetime || left < NodeLifetime-time.Minute {
		t.Errorf("%v left", left)
	}
	cert := m.now.Load().cert.Leaf
	authority, _, err := loadCA(dir)
	if err != nil {
		t.Fatal(err)
	}
	early := *authority
	early.NotAfter = cert.NotAfter.Add(-time.Hour)
	if got := expiry([]*x509.Certificate{cert, &early}); !got.Equal(early.NotAfter) {
		t.Errorf("the chain ends at %v", got)
	}
	held, err := Inspect(dir)
	if err != nil || len(held) != 2 || strings.Join(held[1].Hosts, " ") != "d1.example 10.0.0.1" {
		t.Errorf("%+v, %v", held, err)
	}
	l, err := ClientFacing(ClientFiles{Cert: filepath.Join(node, NodeCertFile), Key: filepath.Join(node, NodeKeyFile)})
	if err != nil || !l.Expiry().Equal(cert.NotAfter) {
		t.Errorf("for clients: %v, %v", l, err)
	}
}
