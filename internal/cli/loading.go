package cli

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/tandem-serving/tandem/engine/memory"
)

// Progress is shown by a bar, which is drawn each barInterval, or by a log line for each of
// lineParts of the bytes. A model that loads within quickLoad has no log lines.
const (
	barInterval = 200 * time.Millisecond
	lineParts   = 10
	quickLoad   = 2 * time.Second
)

// Draws reports whether a file is a terminal that can move its cursor.
func Draws(f *os.File) bool { return term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb" }

// loading returns a callback that shows the progress of loading weights: a bar on a
// terminal, else log lines.
func loading(w *os.File, log *slog.Logger) func(done, total int64) {
	return progress(w, Draws(w), "loading weights", false, memory.Bytes, log, time.Now)
}

// downloading returns a callback that shows the progress of a download: a bar on a terminal, else a
// log line for each tenth.
func downloading(w *os.File, log *slog.Logger) func(done, total int64) {
	return progress(w, Draws(w), "downloading", true, memory.Bytes, log, time.Now)
}

// Requests returns a callback that shows how many requests are answered: a bar on a terminal, else
// a log line for each tenth.
func Requests(w *os.File, log *slog.Logger) func(done, total int64) {
	count := func(n int64) string { return strconv.FormatInt(n, 10) }
	return progress(w, Draws(w), "requests", true, count, log, time.Now)
}

// progress returns a callback that draws a bar on a terminal and logs lines elsewhere. text returns
// an amount as it is shown. A total below 0 is not known: a terminal shows the amount alone. A
// download that is resumed starts at the done bytes of the first call; it also logs its end,
// however quick.
func progress(w io.Writer, terminal bool, what string, download bool, text func(int64) string, log *slog.Logger, now func() time.Time) func(done, total int64) {
	const width = 30
	began := now()
	last, drawn, from, logged := began, false, int64(-1), int64(0)
	return func(done, total int64) {
		t := now()
		ended := done >= total && total > 0
		if total == 0 || total < 0 && !terminal {
			return
		}
		part := lineParts * done / total
		if from < 0 {
			from = done
			if download {
				logged = part
			}
		}
		if terminal && t.Sub(last) < barInterval && !(ended && drawn) {
			return
		}
		last = t
		took := t.Sub(began)
		left := time.Duration(float64(took) * float64(total-done) / float64(max(done-from, 1))).Round(time.Second)
		switch {
		case !terminal && part > logged && (download || !ended && took >= quickLoad):
			logged = part
			log.Info(what, "done", text(done), "of", text(total), "left", left, "percent", 100*done/total)
		case !terminal:
		case ended:
			fmt.Fprint(w, "\r\x1b[K") // the log has the result
		default:
			drawn = true
			if total < 0 {
				fmt.Fprintf(w, "\r\x1b[K%s: %s", what, text(done))
				return
			}
			full := int(width * done / total)
			fmt.Fprintf(w, "\r\x1b[K%s %s%s %3d%% %s of %s, %s left", what, strings.Repeat("█", full), strings.Repeat("·", width-full),
				100*done/total, text(done), text(total), left)
		}
	}
}
