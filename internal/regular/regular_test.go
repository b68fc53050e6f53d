package regular

import (
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// within fails the test where f has not returned after a while.
func within(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("the call waits")
	}
}

func TestOnlyRegularFiles(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := os.WriteFile(at("file"), []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(at("fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", at("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for link, to := range map[string]string{"to-file": "file", "to-fifo": "fifo", "to-zero": "/dev/zero", "loop": "loop", "dangling": "nothing"} {
		if err := os.Symlink(to, at(link)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name, refusal string
		is            error
	}{
		{"file", "", nil},
		{"to-file", "", nil},
		{"fifo", "a FIFO", ErrKind},
		{"to-fifo", "a FIFO", ErrKind},
		{"socket", "a socket", ErrKind},
		{"to-zero", "a device", ErrKind},
		{"../" + filepath.Base(dir), "a folder", ErrKind},
		{"loop", "loop", nil},
		{"dangling", "dangling", fs.ErrNotExist},
		{"absent", "absent", fs.ErrNotExist},
	} {
		within(t, func() {
			text, err := ReadFile(at(c.name), 4)
			switch {
			case c.refusal == "":
				if err != nil || string(text) != "text" {
					t.Errorf("%s: %q, %v", c.name, text, err)
				}
			case err == nil || c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.refusal) || !strings.Contains(err.Error(), filepath.Base(c.name)):
				t.Errorf("%s: %v", c.name, err)
			}
			if strings.Contains(c.name, "/") {
				return
			}
			f, err := Dir(dir).Open(c.name)
			if (err == nil) != (c.refusal == "") || (f == nil) != (err != nil) {
				t.Errorf("Dir, %s: %v, %v", c.name, f, err)
			}
			if f != nil {
				f.Close()
			}
		})
	}
	if _, err := ReadFile(at("file"), 3); !errors.Is(err, ErrSize) {
		t.Errorf("4 bytes of at most 3: %v", err)
	}
	if names, err := fs.Glob(Dir(dir), "f*"); err != nil || len(names) != 2 {
		t.Errorf("%q, %v", names, err)
	}
	if _, err := Dir(dir).Open("../x"); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("outside of the folder: %v", err)
	}
}

func TestWarnExposed(t *testing.T) {
	dir := t.TempDir()
	var paths []string
	for i, mode := range []fs.FileMode{0o600, 0o640, 0o604, 0o666} {
		path := filepath.Join(dir, string(rune('a'+i)))
		if err := os.WriteFile(path, []byte("secret"), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil { // whatever the umask
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	var log strings.Builder
	WarnExposed(slog.New(slog.NewTextHandler(&log, nil)), append(paths, filepath.Join(dir, "absent"))...)
	for i, path := range paths {
		if warned := strings.Contains(log.String(), "file="+path+" "); warned != (i >= 2) {
			t.Errorf("%s: warned %v\n%s", path, warned, log.String())
		}
	}
	if strings.Contains(log.String(), "absent") || strings.Contains(log.String(), "secret\n") {
		t.Errorf("%s", log.String())
	}
}
