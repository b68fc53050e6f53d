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

// Intervals of the progress bar, and of log lines without a terminal. A model that loads
// within the first interval shows no progress.
const (
	barInterval  = 200 * time.Millisecond
	lineInterval = 10 * time.Second
)

// loading returns a callback that shows the progress of loading weights: a bar on a
// terminal, else log lines.
func loading(w *os.File, log *slog.Logger) func(done, total int64) {
	return progress(w, term.IsTerminal(int(w.Fd())), log, time.Now)
}

func progress(w io.Writer, terminal bool, log *slog.Logger, now func() time.Time) func(done, total int64) {
	const width = 30
	began := now()
	last, drawn, interval := began, false, lineInterval
	if terminal {
		interval = barInterval
	}
	return func(done, total int64) {
		t := now()
		ended := done >= total
		if total <= 0 || t.Sub(last) < interval && !(ended && drawn) {
			return
		}
		last = t
		took := t.Sub(began)
		left := time.Duration(float64(took) * float64(total-done) / float64(max(done, 1))).Round(time.Second)
		switch {
		case !terminal && !ended:
			log.Info("loading weights", "done", memory.Bytes(done), "of", memory.Bytes(total), "left", left)
		case terminal && ended:
			fmt.Fprint(w, "\r\x1b[K") // the log has the result
		case terminal:
			drawn = true
			full := int(width * done / total)
			fmt.Fprintf(w, "\r\x1b[Kloading weights %s%s %s of %s, %s left", strings.Repeat("█", full), strings.Repeat("·", width-full),
				memory.Bytes(done), memory.Bytes(total), left)
		}
	}
}
