package truth

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
)

// Row is one figure with its reported and its true value.
type Row struct {
	Name       string
	Got, Truth float64
	Slack      float64 // allowed difference
}

// Deviation returns the difference in units of the slack. Up to 1 is right.
func (r Row) Deviation() float64 {
	d := math.Abs(r.Got - r.Truth)
	if d == 0 {
		return 0
	}
	return d / r.Slack
}

// Record returns what a perfect observer at the server would have recorded of the requests
// of got, in their order. mockStart is the origin of the streams' times. Only the
// schedule, which the server cannot know, is copied from got.
func Record(got *load.Record, streams []*Stream, mockStart time.Time, id func(i int) string) (*load.Record, error) {
	byID := make(map[string]*Stream, len(streams))
	for _, s := range streams {
		byID[s.ID] = s
	}
	offset := mockStart.Sub(got.Start)
	r := &load.Record{Start: got.Start, Outcomes: make([]load.Outcome, len(got.Outcomes))}
	for i := range r.Outcomes {
		o, s := &r.Outcomes[i], byID[id(i)]
		if s == nil || len(s.Sent) == 0 {
			return nil, fmt.Errorf("truth: the server has no answer to request %q", id(i))
		}
		o.Scheduled, o.Ready = got.Outcomes[i].Scheduled, got.Outcomes[i].Ready
		o.Sent, o.First, o.Last = s.Came+offset, s.Sent[0]+offset, s.Sent[len(s.Sent)-1]+offset
		for k, at := range s.Sent[1:] {
			o.ITL = append(o.ITL, at-s.Sent[k])
		}
		o.Chunks, o.Output, o.Prompt = len(s.Sent), len(s.Sent), s.Prompt
		r.Duration = max(r.Duration, o.Last)
	}
	return r, nil
}

// A figure is right within 1 %, or within millis milliseconds. The two figures that are
// counts within whole seconds may differ by one, at the edge of a second.
const (
	tolerance = 0.01
	oneMore   = 1
)

// Compare compares every figure of two summaries. millis is the slack of times below
// 100·millis.
func Compare(got, truth *report.Summary, millis float64) []Row {
	var rows []Row
	add := func(name string, g, t, least float64) {
		rows = append(rows, Row{name, g, t, max(math.Abs(t)*tolerance, least)})
	}
	add("Benchmark duration (ms)", got.Duration.Seconds()*1e3, truth.Duration.Seconds()*1e3, millis)
	add("Total input tokens", float64(got.Input), float64(truth.Input), 0)
	add("Total generated tokens", float64(got.Output), float64(truth.Output), 0)
	add("Request throughput (req/s)", got.RequestThroughput(), truth.RequestThroughput(), 0)
	add("Request goodput (req/s)", got.Goodput(), truth.Goodput(), 0)
	add("Output token throughput (tok/s)", got.Throughput(), truth.Throughput(), 0)
	add("Peak output token throughput (tok/s)", float64(got.PeakTokens), float64(truth.PeakTokens), oneMore)
	add("Peak concurrent requests", float64(got.PeakConcurrent), float64(truth.PeakConcurrent), oneMore)
	for _, key := range report.MetricNames() {
		g, t := got.Stats[key], truth.Stats[key]
		name := report.MetricName(key)
		add("Mean "+name+" (ms)", g.Mean, t.Mean, millis)
		add("Median "+name+" (ms)", g.Median, t.Median, millis)
		add("Std "+name+" (ms)", g.Std, t.Std, millis)
		for i, p := range got.Options.Percentiles {
			add(fmt.Sprintf("P%g %s (ms)", p, name), g.Percentiles[i], t.Percentiles[i], millis)
		}
	}
	return rows
}

// Worst returns the row with the largest deviation.
func Worst(rows []Row) Row {
	return slices.MaxFunc(rows, func(a, b Row) int { return cmp.Compare(a.Deviation(), b.Deviation()) })
}
