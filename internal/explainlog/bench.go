package explainlog

import "fmt"

// benchLine takes a line of a benchmark's result block.
func benchLine(s *state, _ record, m []string, n *note) {
	if len(s.results) < 64 {
		s.results[m[1]] = number(m[2])
	}
	v := s.results
	seconds := func() float64 { // of the benchmark
		if d := v["Benchmark duration (s)"]; d > 0 {
			return d
		}
		if rate := v["Request throughput (req/s)"]; rate > 0 {
			return v["Successful requests"] / rate
		}
		return 0
	}
	for _, b := range benchLines {
		if b.name == m[1] {
			n.what = b.what
		}
	}
	switch m[1] {
	case "Total input tokens", "Total generated tokens":
		if r := v["Successful requests"]; r > 0 {
			n.math("%s ÷ %s requests = %.1f a request", thousands(int(number(m[2]))), thousands(int(r)), number(m[2])/r)
		}
	case "Request throughput (req/s)":
		if d := seconds(); d > 0 {
			n.math("%s requests ÷ %s = %.2f s of benchmark", thousands(int(v["Successful requests"])), m[2], d)
		}
	case "Output token throughput (tok/s)":
		if d := seconds(); d > 0 {
			n.math("%s tokens ÷ %.2f s = %.1f tokens/s", thousands(int(v["Total generated tokens"])), d, v["Total generated tokens"]/d)
		}
	case "Total Token throughput (tok/s)", "Total token throughput (tok/s)":
		if d := seconds(); d > 0 {
			n.math("(%s + %s) ÷ %.2f s = %.1f tokens/s", thousands(int(v["Total input tokens"])), thousands(int(v["Total generated tokens"])), d, (v["Total input tokens"]+v["Total generated tokens"])/d)
		}
	case "P99 TTFT (ms)", "P99 TPOT (ms)", "P99 ITL (ms)":
		if mid := v["Median"+m[1][3:]]; mid > 0 {
			n.math("%s ÷ median %.2f = %.1f times", m[2], mid, number(m[2])/mid)
		}
	}
}

// benchLines explains the lines of a result block.
var benchLines = []struct{ name, what string }{
	{"Successful requests", "Requests that were answered in full."},
	{"Failed requests", "Requests that got an error or a broken stream."},
	{"Maximum request concurrency", "The bound on requests at once that the client kept."},
	{"Request rate configured (RPS)", "The rate at which the client started requests."},
	{"Benchmark duration (s)", "From the first request to the last answer."},
	{"Total input tokens", "Prompt tokens of the successful requests."},
	{"Total generated tokens", "Output tokens of the successful requests."},
	{"Request throughput (req/s)", "Successful requests divided by the duration."},
	{"Output token throughput (tok/s)", "Generated tokens divided by the duration."},
	{"Peak output token throughput (tok/s)", "Generated tokens in the best second."},
	{"Peak concurrent requests", "Most requests under way at once."},
	{"Total Token throughput (tok/s)", "Prompt and generated tokens divided by the duration."},
	{"Total token throughput (tok/s)", "Prompt and generated tokens divided by the duration."},
	{"Mean TTFT (ms)", "Time to first token, mean: queue, prefill and the first step."},
	{"Median TTFT (ms)", "Time to first token of half of the requests or less."},
	{"P99 TTFT (ms)", "Time to first token of all but 1 % of the requests or less."},
	{"Mean TPOT (ms)", "Time per output token after the first: (latency - TTFT) ÷ (tokens - 1) of each request, mean."},
	{"Median TPOT (ms)", "The same, median over requests."},
	{"P99 TPOT (ms)", "The same, 99th percentile over requests."},
	{"Mean ITL (ms)", "Time between two pieces of a stream, mean over all pieces of all requests."},
	{"Median ITL (ms)", "The same, median: a usual step of decoding."},
	{"P99 ITL (ms)", "The same, 99th percentile: pauses, such as a prefill between steps."},
	{"Mean E2EL (ms)", "From request to the end of the answer, mean."},
	{"Median E2EL (ms)", "The same, median."},
	{"P99 E2EL (ms)", "The same, 99th percentile."},
}

func (s *state) benchFacts() []string {
	v := s.results
	var all []string
	if v["Successful requests"] > 0 {
		all = append(all, fmt.Sprintf("%.0f requests, %.0f prompt and %.0f generated tokens", v["Successful requests"], v["Total input tokens"], v["Total generated tokens"]))
	}
	if v["Output token throughput (tok/s)"] > 0 {
		all = append(all, fmt.Sprintf("%.1f tokens/s generated; TTFT median %.1f ms; ITL median %.2f ms, P99 %.2f ms",
			v["Output token throughput (tok/s)"], v["Median TTFT (ms)"], v["Median ITL (ms)"], v["P99 ITL (ms)"]))
	}
	return all
}

// benchFindings adds what a result block shows.
func (s *state) benchFindings() {
	v := s.results
	if failed := v["Failed requests"]; failed > 0 {
		s.find(Finding{Severity: Problem, Text: fmt.Sprintf("%.0f requests failed.", failed), Change: "The server's log has the reason; figures of the others do not count them."})
	}
	if mid, p99 := v["Median ITL (ms)"], v["P99 ITL (ms)"]; mid > 0 && p99 > 5*mid {
		s.find(Finding{Severity: Warning, Text: fmt.Sprintf("P99 ITL is %.0f times the median: streams pause.", p99/mid),
			Math:   []string{fmt.Sprintf("%.2f ms ÷ %.2f ms", p99, mid)},
			Change: "Prefill of other requests, or graphs and kernels that are built at first use. Repeat with a warm-up; if it stays, lower --max-num-batched-tokens or move prefill to other nodes."})
	}
	if mid, mean := v["Median TPOT (ms)"], v["Mean TPOT (ms)"]; mid > 0 && mean > 1.5*mid {
		s.find(Finding{Severity: Note, Text: fmt.Sprintf("Mean TPOT is %.1f times the median: some requests were much slower than the others.", mean/mid)})
	}
	if n := v["Successful requests"]; n > 0 && n < 100 {
		s.find(Finding{Severity: Note, Text: fmt.Sprintf("The P99 of %.0f requests is that of the slowest one.", n), Change: "At least a few hundred requests for a P99."})
	}
}

// across compares the runs of a log.
func across(states []*state) (all []Finding) {
	var benches, served []*state
	for _, s := range states {
		if s.bench {
			benches = append(benches, s)
		} else if len(s.series) > 0 && s.model != "" {
			served = append(served, s)
		}
	}
	for i := 1; i < len(benches); i++ {
		a, b := benches[i-1].results, benches[i].results
		f := Finding{Severity: Note, Text: fmt.Sprintf("The results of runs %d and %d differ:", benches[i-1].number, benches[i].number)}
		for _, name := range []string{"Output token throughput (tok/s)", "Median TTFT (ms)", "Median TPOT (ms)", "Median ITL (ms)", "P99 ITL (ms)"} {
			if a[name] > 0 && b[name] > 0 {
				f.Math = append(f.Math, fmt.Sprintf("%s: %.2f and %.2f, %.2f times", name, a[name], b[name], b[name]/a[name]))
			}
		}
		if a["Total generated tokens"] != b["Total generated tokens"] {
			f.Math = append(f.Math, fmt.Sprintf("they generated %.0f and %.0f tokens: tokens/s compare only in part", a["Total generated tokens"], b["Total generated tokens"]))
			f.Change = "Use --ignore-eos for equal lengths."
		}
		if len(f.Math) > 0 {
			all = append(all, f)
		}
	}
	for i, a := range served {
		for _, b := range served[i+1:] {
			if a.model == b.model && a.eager != b.eager && len(all) < maxFindings {
				if b.eager {
					a, b = b, a
				}
				if x, y := a.peak(), b.peak(); x > 0 && y > 0 {
					all = append(all, Finding{Severity: Note, Text: fmt.Sprintf("%s: run %d is eager and reaches %.1f tokens/s, run %d with graphs %.1f: %.1f times.", a.model, a.number, x, b.number, y, y/x),
						Math: []string{fmt.Sprintf("quantization of the two: %s and %s", orNone(a.quantization), orNone(b.quantization))}})
				}
			}
		}
	}
	return all
}

func orNone(s string) string {
	if s == "" || s == "None" {
		return "none"
	}
	return s
}

func (s *state) peak() (rate float64) {
	for i := range s.series {
		rate = max(rate, s.series[i].top.Generate)
	}
	return rate
}
