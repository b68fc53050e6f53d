package cli

import (
	"bytes"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/memory"
)

// A bar grows on a terminal and is gone in the end; elsewhere there is a line
// for each tenth; a model that is loaded at once shows neither.
func TestLoadingProgress(t *testing.T) {
	for name, c := range map[string]struct {
		terminal bool
		step     time.Duration // between eleven calls
		bars     int
		lines    int
	}{
		"terminal":       {true, time.Second, 10, 0},
		"terminal, fast": {true, time.Millisecond, 0, 0},
		"log":            {false, 5 * time.Second, 0, 9},
		"log, fast":      {false, 150 * time.Millisecond, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var out, log bytes.Buffer
			clock := time.Unix(0, 0)
			show := progress(&out, c.terminal, "loading weights", false, memory.Bytes, slog.New(slog.NewTextHandler(&log, nil)), func() time.Time { return clock })
			for i := range int64(11) {
				clock = clock.Add(c.step)
				show(i<<30, 10<<30)
			}
			if got := strings.Count(out.String(), "loading weights"); got != c.bars {
				t.Errorf("%d bars, want %d: %q", got, c.bars, out.String())
			}
			if got := strings.Count(log.String(), "loading weights"); got != c.lines {
				t.Errorf("%d lines, want %d: %s", got, c.lines, log.String())
			}
			if c.bars > 0 && (!strings.HasSuffix(out.String(), "\r\x1b[K") || !strings.Contains(out.String(), strings.Repeat("█", 15)+strings.Repeat("·", 15)+"  50% 5 GiB of 10 GiB, 6s left")) {
				t.Errorf("drawn: %q", out.String())
			}
		})
	}
}

// Without a terminal, a download logs a line for each tenth from where it starts; on one, it draws
// a bar with the time that is left at the speed of this download.
func TestDownloadProgress(t *testing.T) {
	for _, terminal := range []bool{false, true} {
		var out, log bytes.Buffer
		clock := time.Unix(0, 0)
		show := progress(&out, terminal, "downloading", true, memory.Bytes, slog.New(slog.NewTextHandler(&log, nil)), func() time.Time { return clock })
		for i := int64(50); i <= 100; i++ {
			show(i<<20, 100<<20)
			clock = clock.Add(time.Second)
		}
		lines := strings.Count(log.String(), "msg=downloading")
		if !terminal && (lines != 5 || !strings.Contains(log.String(), `done="60 MiB" of="100 MiB" left=40s percent=60`) || out.Len() > 0) {
			t.Errorf("%d lines: %s%s", lines, log.String(), out.String())
		}
		if terminal && (lines != 0 || !strings.Contains(out.String(), "downloading "+strings.Repeat("█", 18)+strings.Repeat("·", 12)+"  60% 60 MiB of 100 MiB, 40s left") || !strings.HasSuffix(out.String(), "\r\x1b[K")) {
			t.Errorf("%d lines, drawn: %q", lines, out.String())
		}
	}
}

// A total that is not known is shown as the amount so far, and the line is removed in the end.
// Elsewhere nothing is logged.
func TestProgressWithoutATotal(t *testing.T) {
	for _, terminal := range []bool{false, true} {
		var out bytes.Buffer
		clock := time.Unix(0, 0)
		show := progress(&out, terminal, "reading the log", false, memory.Bytes, nil, func() time.Time { return clock })
		for i := int64(1); i <= 3; i++ {
			clock = clock.Add(time.Second)
			show(i<<20, -1)
		}
		show(3<<20, 3<<20)
		want := ""
		if terminal {
			want = "\r\x1b[Kreading the log: 1 MiB\r\x1b[Kreading the log: 2 MiB\r\x1b[Kreading the log: 3 MiB\r\x1b[K"
		}
		if out.String() != want {
			t.Errorf("drawn %q, want %q", out.String(), want)
		}
	}
}

// The meter of a file knows the size; that of a pipe does not.
func TestReadMeter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte("12345"), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := w.WriteString("12345"); err != nil {
		t.Fatal(err)
	}
	w.Close()
	for in, total := range map[*os.File]int64{file: 5, r: -1} {
		m := newReadMeter(in, true)
		var last [2]int64
		m.show = func(done, total int64) { last = [2]int64{done, total} }
		if text, err := io.ReadAll(m); err != nil || string(text) != "12345" || last != [2]int64{5, total} {
			t.Errorf("read %q, %v, shown %v, want a total of %d", text, err, last, total)
		}
		if m.end(); last != [2]int64{5, 5} {
			t.Errorf("ended with %v", last)
		}
	}
}
