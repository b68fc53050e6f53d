package bench

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/bench/dataset"
	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
)

// terminal reports whether w is a terminal.
func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// progress returns a function that redraws one line, or nil if there is no terminal.
func (r *run) progress() func(done, failed, running int) {
	if r.DisableProgress || !terminal(r.errOut) {
		return nil
	}
	start, n := time.Now(), len(r.requests)
	return func(done, failed, running int) {
		took := time.Since(start)
		left := "?"
		if done > 0 {
			left = (took * time.Duration(n-done) / time.Duration(done)).Round(time.Second).String()
		}
		bar := make([]rune, 20)
		for i := range bar {
			bar[i] = '·'
			if i*n < done*len(bar) {
				bar[i] = '█'
			}
		}
		fmt.Fprintf(r.errOut, "\r\x1b[K%s %d/%d  %d running  %d failed  %.1f req/s  %s, %s left",
			string(bar), done, n, running, failed, float64(done)/took.Seconds(), took.Round(time.Second), left)
	}
}

func (r *run) endProgress() {
	if r.progress() != nil {
		fmt.Fprintln(r.errOut)
	}
}

// probePrompt is short, so that a probe costs the server next to nothing.
const probePrompt = "Hello"

// probes sends one-token requests in addition to the load until the returned function
// is called, which returns their results.
func (r *run) probes(ctx context.Context) func() *report.Probe {
	if r.ProbeRate == 0 {
		return func() *report.Probe { return nil }
	}
	q := dataset.Request{Text: probePrompt, OutputTokens: 1}
	b, err := r.encoder()
	if err != nil {
		panic(err) // cannot fail: the main load's bodies have the same flags
	}
	body, err := b.body(0, &q)
	if err != nil {
		panic(err)
	}
	stop := make(chan struct{})
	ended := make(chan []*load.Outcome, 1)
	go func() {
		var all []*load.Outcome
		var running []chan struct{}
		start := time.Now()
		t := time.NewTicker(time.Duration(float64(time.Second) / r.ProbeRate))
		defer t.Stop()
		defer func() {
			for _, d := range running {
				<-d
			}
			ended <- all
		}()
		for len(all) < maxProbes {
			select {
			case <-t.C:
			case <-stop:
				return
			case <-ctx.Done():
				return
			}
			o, done := &load.Outcome{}, make(chan struct{})
			all, running = append(all, o), append(running, done)
			go func() { r.client.Do(ctx, start, body, "", o); close(done) }()
		}
	}()
	return func() *report.Probe {
		close(stop)
		p := &report.Probe{}
		var took []float64
		for _, o := range <-ended {
			if o.Err != nil {
				p.Failed++
				continue
			}
			p.Completed++
			took = append(took, o.Latency().Seconds()*1e3)
		}
		slices.Sort(took)
		p.Median, p.P99, p.Max = report.Quantile(took, 50), report.Quantile(took, 99), report.Quantile(took, 100)
		return p
	}
}

// maxProbes bounds the probes of one run.
const maxProbes = 1 << 16
