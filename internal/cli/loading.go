package cli

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/tandem-serving/tandem/engine/memory"
)

// Intervals of the progress bar, and of log lines without a terminal. What ends within the first
// interval shows no progress.
const (
	barInterval  = 200 * time.Millisecond
	lineInterval = 10 * time.Second
)

// loading returns a callback that shows the progress of loading weights: a bar on a
// terminal, else a log line every lineInterval.
func loading(w *os.File, log *slog.Logger) func(done, total int64) {
	return progress(w, term.IsTerminal(int(w.Fd())), "loading weights", false, log, time.Now)
}

// downloading returns a callback that shows the progress of a download: a bar on a terminal, else a
// log line for each tenth.
func downloading(w *os.File, log *slog.Logger) func(done, total int64) {
	return progress(w, term.IsTerminal(int(w.Fd())), "downloading", true, log, time.Now)
}

// progress returns a callback that draws a bar on a terminal. Otherwise it logs a line every
// lineInterval until the end, or with tenths a line for each tenth.
func progress(w io.Writer, terminal bool, what string, tenths bool, log *slog.Logger, now func() time.Time) func(done, total int64) {
	const width = 30
	began := now()
	last, drawn, interval := began, false, lineInterval
	if terminal {
		interval = barInterval
	}
	from, tenth := int64(-1), int64(0) // done at the first call; shown
	return func(done, total int64) {
		if total <= 0 {
			return
		}
		t := now()
		ended, due := done >= total, t.Sub(last) >= interval
		if from < 0 {
			from, tenth = done, done*10/total
		}
		if tenths && !terminal {
			due = done*10/total > tenth
		}
		if !due && !(ended && drawn) {
			return
		}
		last, tenth = t, done*10/total
		left := time.Duration(float64(t.Sub(began)) * float64(total-done) / float64(max(done-from, 1))).Round(time.Second)
		switch {
		case !terminal && (tenths || !ended):
			log.Info(what, "done", memory.Bytes(done), "of", memory.Bytes(total), "left", left)
		case terminal && ended:
			fmt.Fprint(w, "\r\x1b[K") // the log has the result
		case terminal:
			drawn = true
			full := int(width * done / total)
			fmt.Fprintf(w, "\r\x1b[K%s %s%s %s of %s, %s left", what, strings.Repeat("█", full), strings.Repeat("·", width-full),
				memory.Bytes(done), memory.Bytes(total), left)
		}
	}
}
