package bench

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
)

// thresholds parses --timeline-itl-thresholds.
func (o *Options) thresholds() (low, high time.Duration, err error) {
	a, b, ok := strings.Cut(o.TimelineThresholds, ",")
	x, errA := strconv.ParseFloat(strings.TrimSpace(a), 64)
	y, errB := strconv.ParseFloat(strings.TrimSpace(b), 64)
	if !ok || errA != nil || errB != nil || !(x > 0 && x <= y && y < 1e9) {
		return 0, 0, fmt.Errorf("%w: --timeline-itl-thresholds %q: want two times in milliseconds such as 25,50", ErrOption, o.TimelineThresholds)
	}
	return time.Duration(x * float64(time.Millisecond)), time.Duration(y * float64(time.Millisecond)), nil
}

// plots writes the HTML pages of a run, next to its JSON of this name.
func (r *run) plots(s *report.Summary, name string) error {
	base := strings.TrimSuffix(name, ".json")
	if r.PlotTimeline {
		low, high, err := r.thresholds()
		if err != nil {
			return err
		}
		if err := r.page(base+".timeline.html", func(w io.Writer) error { return report.WriteTimeline(w, s, low, high) }); err != nil {
			return err
		}
	}
	if r.PlotStats {
		return r.page(base+".dataset_stats.html", func(w io.Writer) error { return report.WriteLengths(w, s) })
	}
	return nil
}

func (r *run) page(name string, write func(io.Writer) error) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	b := bufio.NewWriter(f)
	if err := errors.Join(write(b), b.Flush(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	_, err = fmt.Fprintf(r.out, "Wrote %s\n", name)
	return err
}
