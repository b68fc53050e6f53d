package cli

import (
	"bytes"
	"log/slog"
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
