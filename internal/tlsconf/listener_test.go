package tlsconf

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A node's files do for a client-facing certificate in tests.
func clientFiles(t *testing.T, dir, name string) (cert, key string) {
	t.Helper()
	node, err := IssueNode(dir, name, []string{"localhost"})
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(node, NodeCertFile), filepath.Join(node, NodeKeyFile)
}

func TestClientFacingFollowsItsFiles(t *testing.T) {
	dir := t.TempDir()
	if err := CreateCA(dir); err != nil {
		t.Fatal(err)
	}
	certA, keyA := clientFiles(t, dir, "a")
	certB, keyB := clientFiles(t, dir, "b")
	l := &listener{certFile: certA, keyFile: keyA, log: slog.New(slog.DiscardHandler)}
	if err := l.read(); err != nil {
		t.Fatal(err)
	}
	before := string(l.current().Certificate[0])
	move := func(from, to string, at time.Time) {
		t.Helper()
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(to, at, at); err != nil {
			t.Fatal(err)
		}
		l.checked = time.Time{}
	}
	// Half a renewal does not load, and the old one stays.
	move(certB, certA, time.Now().Add(time.Hour))
	if got := string(l.current().Certificate[0]); got != before {
		t.Error("a certificate without its key was taken")
	}
	move(keyB, keyA, time.Now().Add(time.Hour))
	if got := string(l.current().Certificate[0]); got == before {
		t.Error("a renewal was not taken")
	}
}

func TestClientFacingRefuses(t *testing.T) {
	if _, err := ClientFacing("/nonexistent.crt", "/nonexistent.key", slog.New(slog.DiscardHandler)); !errors.Is(err, ErrMaterial) {
		t.Errorf("got %v, want ErrMaterial", err)
	}
}
