package process

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// A part is read anew when a file of its changes and at SIGHUP; who is told hears
// of failures.
func TestFollow(t *testing.T) {
	p, err := Start(Options{Role: "test", LogLevel: "info", LogFormat: "text", Out: io.Discard})
	if err != nil {
		t.Fatal(err)
	}
	defer p.End()
	file := filepath.Join(t.TempDir(), "f")
	write := func(text string) {
		t.Helper()
		err := os.WriteFile(file+".new", []byte(text), 0o600)
		if err == nil {
			err = os.Rename(file+".new", file) // never half of it
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	write("good")
	loads, told := make(chan string, 10), make(chan error, 10)
	errBad := errors.New("bad")
	p.Follow(Reload{Part: "f", Files: []string{file}, OnLoad: func(err error) { told <- err }, Load: func() error {
		text, err := os.ReadFile(file)
		if err == nil && string(text) == "bad" {
			err = errBad
		}
		loads <- string(text)
		return err
	}})
	want := func(text string, failed error) {
		t.Helper()
		select {
		case got := <-loads:
			if err := <-told; got != text || !errors.Is(err, failed) {
				t.Fatalf("loaded %q, %v, want %q, %v", got, err, text, failed)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%q was not loaded", text)
		}
	}
	write("bad")
	want("bad", errBad)
	write("better")
	want("better", nil)
	self, err := os.FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if err := self.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	want("better", nil)
}
