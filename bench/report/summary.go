// Package report turns the outcomes of a load test into figures: the printed block, the
// JSON with the names that other tools read, comparisons of runs, and the page of a
// sweep.
//
// Invariant: every figure is a plain function of the outcomes. Nothing is smoothed, and
// nothing is left out that the definitions include. The package sends nothing and reads
// no clock.
package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
)

// Options are the requested figures.
type Options struct {
	Metrics     []string           // of metricTable, those to print
	Percentiles []float64          // e.g. 99
	Goodput     map[string]float64 // SLOs in milliseconds by ttft, tpot, e2el
	RequestRate float64            // +Inf: all at once
	Concurrency int                // 0: no bound
}

// metric is one of the latencies.
type metric struct {
	key, name, title string
}

var metricTable = []metric{
	{"ttft", "TTFT", "Time to First Token"},
	{"tpot", "TPOT", "Time per Output Token (excl. 1st token)"},
	{"itl", "ITL", "Inter-token Latency"},
	{"e2el", "E2EL", "End-to-end Latency"},
	{"client_queue_time", "Client Queue Time", "Client-side Queueing"},
	{"e2el_including_client_queue", "E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"},
}

// MetricNames returns the names that --percentile-metrics accepts.
func MetricNames() (names []string) {
	for _, m := range metricTable {
		names = append(names, m.key)
	}
	return names
}

// MetricName returns a latency's name in the printed block.
func MetricName(key string) string {
	for _, m := range metricTable {
		if m.key == key {
			return m.name
		}
	}
	return key
}

// Stats are one latency's figures in milliseconds.
type Stats struct {
	Mean, Median, Std float64
	Percentiles       []float64 // as Options.Percentiles
}

// Request is one request with its counts.
type Request struct {
	Outcome       *load.Outcome
	Input, Output int // tokens; output is 0 for a failed request
}

// Summary is the figures of a run.
type Summary struct {
	Options           Options
	Completed, Failed int
	Duration          time.Duration
	Input, Output     int
	Good              int // requests that met every SLO
	PeakTokens        int // in one second
	PeakConcurrent    int
	Stats             map[string]Stats
	Requests          []Request
}

// ms converts a duration to milliseconds.
func ms(d time.Duration) float64 { return d.Seconds() * 1e3 }

// tpot returns the time per output token after the first, in milliseconds.
func (r *Request) tpot() float64 {
	if r.Output < 2 {
		return 0
	}
	return ms(r.Outcome.Latency()-r.Outcome.TTFT()) / float64(r.Output-1)
}

// Samples returns all values of a latency in milliseconds, of requests that succeeded.
func (s *Summary) Samples(key string) []float64 {
	n := len(s.Requests)
	if key == "itl" {
		n = 0
		for i := range s.Requests {
			if o := s.Requests[i].Outcome; o.Err == nil {
				n += len(o.ITL)
			}
		}
	}
	v := make([]float64, 0, n)
	for i := range s.Requests {
		r := &s.Requests[i]
		o := r.Outcome
		if o.Err != nil {
			continue
		}
		switch key {
		case "ttft":
			v = append(v, ms(o.TTFT()))
		case "tpot":
			if r.Output > 1 {
				v = append(v, r.tpot())
			}
		case "itl":
			for _, d := range o.ITL {
				v = append(v, ms(d))
			}
		case "e2el":
			v = append(v, ms(o.Latency()))
		case "client_queue_time":
			v = append(v, ms(o.Sent-o.Scheduled))
		case "e2el_including_client_queue":
			v = append(v, ms(o.Last-o.Scheduled))
		case "ttft_from_schedule":
			v = append(v, ms(o.First-o.Scheduled))
		}
	}
	return v
}

// Summarize computes the figures. input and output return the tokens of request i of the
// record.
func Summarize(r *load.Record, o Options, input, output func(i int) int) *Summary {
	s := &Summary{Options: o, Duration: r.Duration, Stats: map[string]Stats{}, Requests: make([]Request, 0, len(r.Outcomes))}
	for i := range r.Outcomes {
		q := Request{Outcome: &r.Outcomes[i], Input: input(i)}
		if q.Outcome.Err != nil {
			s.Failed++
			s.Requests = append(s.Requests, q)
			continue
		}
		q.Output = output(i)
		s.Completed++
		s.Input += q.Input
		s.Output += q.Output
		if q.good(o.Goodput) {
			s.Good++
		}
		s.Requests = append(s.Requests, q)
	}
	s.peaks()
	for _, m := range metricTable {
		s.Stats[m.key] = stats(s.Samples(m.key), o.Percentiles)
	}
	return s
}

// good reports whether a request met every SLO.
func (r *Request) good(slo map[string]float64) bool {
	for key, most := range slo {
		v := ms(r.Outcome.Latency())
		switch key {
		case "ttft":
			v = ms(r.Outcome.TTFT())
		case "tpot":
			v = r.tpot()
		}
		if v > most {
			return false
		}
	}
	return true
}

// peaks counts the chunks and requests of each second from the first sending on.
func (s *Summary) peaks() {
	first, last := time.Duration(math.MaxInt64), time.Duration(0)
	for _, r := range s.Requests {
		if r.Outcome.Err == nil {
			first, last = min(first, r.Outcome.Sent), max(last, r.Outcome.Last)
		}
	}
	if s.Completed == 0 {
		return
	}
	tokens, running := s.chunks(first, last), make([]int, int((last-first)/time.Second)+1)
	for _, r := range s.Requests {
		o := r.Outcome
		if o.Err != nil {
			continue
		}
		for i := (o.Sent - first) / time.Second; i <= (o.Last-first)/time.Second; i++ {
			running[i]++
		}
	}
	s.PeakTokens, s.PeakConcurrent = slices.Max(tokens), slices.Max(running)
}

// chunks counts the chunks of each second from first to last.
func (s *Summary) chunks(first, last time.Duration) []int {
	n := make([]int, int((last-first)/time.Second)+1)
	for _, r := range s.Requests {
		if o := r.Outcome; o.Err == nil {
			at := o.First - first
			n[at/time.Second]++
			for _, gap := range o.ITL {
				at += gap
				n[at/time.Second]++
			}
		}
	}
	return n
}

// perSecondOfRun returns the chunks of each second since the run's start.
func (s *Summary) perSecondOfRun() []int {
	last := time.Duration(0)
	for _, r := range s.Requests {
		last = max(last, r.Outcome.Last)
	}
	return s.chunks(0, last)
}

// stats computes the figures of values; all are 0 if there are none.
func stats(v []float64, percentiles []float64) Stats {
	s := Stats{Percentiles: make([]float64, len(percentiles))}
	if len(v) == 0 {
		return s
	}
	slices.Sort(v)
	for _, x := range v {
		s.Mean += x / float64(len(v))
	}
	for _, x := range v {
		s.Std += (x - s.Mean) * (x - s.Mean) / float64(len(v))
	}
	s.Std = math.Sqrt(s.Std)
	s.Median = Quantile(v, 50)
	for i, p := range percentiles {
		s.Percentiles[i] = Quantile(v, p)
	}
	return s
}

// Quantile returns a percentile of sorted values, interpolated between neighbours.
func Quantile(sorted []float64, percent float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	at := percent / 100 * float64(len(sorted)-1)
	i := min(int(at), len(sorted)-1)
	if i+1 >= len(sorted) {
		return sorted[i]
	}
	return sorted[i] + (sorted[i+1]-sorted[i])*(at-float64(i))
}

// perSecond returns a count per second of the run.
func (s *Summary) perSecond(n int) float64 {
	if s.Duration <= 0 {
		return 0
	}
	return float64(n) / s.Duration.Seconds()
}

// Throughput returns the output tokens per second.
func (s *Summary) Throughput() float64 { return s.perSecond(s.Output) }

// RequestThroughput returns the completed requests per second.
func (s *Summary) RequestThroughput() float64 { return s.perSecond(s.Completed) }

// Goodput returns the requests per second that met every SLO.
func (s *Summary) Goodput() float64 { return s.perSecond(s.Good) }

// percentName formats a percentile for a name: 99, 99.9.
func percentName(p float64) string { return strconv.FormatFloat(p, 'f', -1, 64) }

// CheckMetrics returns an error for unknown names.
func CheckMetrics(names []string) error {
	for _, n := range names {
		if !slices.Contains(MetricNames(), n) {
			return fmt.Errorf("--percentile-metrics %s: want some of %v", n, MetricNames())
		}
	}
	return nil
}
