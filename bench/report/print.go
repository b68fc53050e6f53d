package report

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// width of the printed block.
const width = 50

// centred returns a title between fill characters, with an odd one at the right.
func centred(title string, fill string) string {
	n := width - len(title)
	return strings.Repeat(fill, max(0, n/2)) + title + strings.Repeat(fill, max(0, n-n/2))
}

// Probe is the result of the probe requests.
type Probe struct {
	Completed, Failed int
	Median, P99, Max  float64 // end-to-end, milliseconds
}

// Print writes the block of results. probe and spec may be nil. Without a successful request there
// are no throughputs and latencies, which would be zeros.
func (s *Summary) Print(w io.Writer, probe *Probe, spec *Spec) error {
	b := bufio.NewWriter(w)
	count := func(name string, n int) { fmt.Fprintf(b, "%-40s %-10d\n", name, n) }
	value := func(name string, v float64) { fmt.Fprintf(b, "%-40s %-10.2f\n", name, v) }
	fmt.Fprintln(b, centred(" Serving Benchmark Result ", "="))
	count("Successful requests:", s.Completed)
	count("Failed requests:", s.Failed)
	if s.Options.Concurrency > 0 {
		count("Maximum request concurrency:", s.Options.Concurrency)
	}
	if !math.IsInf(s.Options.RequestRate, 1) {
		value("Request rate configured (RPS):", s.Options.RequestRate)
	}
	value("Benchmark duration (s):", s.Duration.Seconds())
	if s.Completed == 0 {
		fmt.Fprintln(b, "No request succeeded, so that there is no result.")
		fmt.Fprintln(b, strings.Repeat("=", width))
		return b.Flush()
	}
	count("Total input tokens:", s.Input)
	count("Total generated tokens:", s.Output)
	value("Request throughput (req/s):", s.RequestThroughput())
	if len(s.Options.Goodput) > 0 {
		value("Request goodput (req/s):", s.Goodput())
	}
	value("Output token throughput (tok/s):", s.Throughput())
	value("Peak output token throughput (tok/s):", float64(s.PeakTokens))
	value("Peak concurrent requests:", float64(s.PeakConcurrent))
	value("Total token throughput (tok/s):", s.perSecond(s.Input+s.Output))
	if probe != nil {
		fmt.Fprintln(b, centred("Probe Requests", "-"))
		count("Probe requests completed:", probe.Completed)
		count("Probe requests failed:", probe.Failed)
		value("Median probe E2EL (ms):", probe.Median)
		value("P99 probe E2EL (ms):", probe.P99)
		value("Max probe E2EL (ms):", probe.Max)
	}
	for _, m := range metricTable {
		if !s.shown(m.key) {
			continue
		}
		st := s.Stats[m.key]
		fmt.Fprintln(b, centred(m.title, "-"))
		value("Mean "+m.name+" (ms):", st.Mean)
		value("Median "+m.name+" (ms):", st.Median)
		for i, p := range s.Options.Percentiles {
			value("P"+percentName(p)+" "+m.name+" (ms):", st.Percentiles[i])
		}
	}
	if spec != nil {
		spec.print(func(t string) { fmt.Fprintln(b, centred(t, "-")) }, count, value, func(l string) { fmt.Fprintln(b, l) })
	}
	fmt.Fprintln(b, strings.Repeat("=", width))
	return b.Flush()
}

// shown reports whether a latency is requested and meaningful in this run.
func (s *Summary) shown(key string) bool {
	switch {
	case !slices.Contains(s.Options.Metrics, key):
		return false
	case key == "client_queue_time":
		return s.Options.Concurrency > 0
	case key == "e2el_including_client_queue":
		return s.Options.Concurrency > 0 || !math.IsInf(s.Options.RequestRate, 1)
	}
	return true
}
