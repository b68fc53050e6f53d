package report

import (
	"encoding/csv"
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Point is one run of a sweep.
type Point struct {
	Server      string  // server of the sweep; empty: the only one
	Rate        float64 // requests per second, +Inf: all at once
	Concurrency int     // 0: no bound
	Repetition  int     // of this load, from 0
	Summary     *Summary
	Limited     string // why the client was the limit; empty: it was not
	Start       time.Time
	Nodes       []Node  // the server's processes and their samples
	Client      float64 // cores that the client used on average
}

// Load returns the load's name.
func (p *Point) Load() string {
	n := "rate inf"
	if !math.IsInf(p.Rate, 1) {
		n = "rate " + strconv.FormatFloat(p.Rate, 'g', -1, 64)
	}
	if p.Concurrency > 0 {
		n += ", concurrency " + strconv.Itoa(p.Concurrency)
	}
	return n
}

// Name returns the run's name.
func (p *Point) Name() string {
	if p.Server == "" {
		return p.Load()
	}
	return p.Server + ": " + p.Load()
}

// sweepColumns are the columns of the table and the CSV. better is 1 if larger figures
// are better, -1 if smaller ones are, and 0 if neither.
var sweepColumns = []struct {
	name       string // in the CSV
	head, unit string // in the table
	better     int
	of         func(*Summary) float64
}{
	{"completed", "Completed", "requests", 0, func(s *Summary) float64 { return float64(s.Completed) }},
	{"failed", "Failed", "requests", -1, func(s *Summary) float64 { return float64(s.Failed) }},
	{"request_throughput", "Throughput", "requests/s", 1, (*Summary).RequestThroughput},
	{"output_throughput", "Output", "tokens/s", 1, (*Summary).Throughput},
	{"request_goodput", "Goodput", "requests/s", 1, (*Summary).Goodput},
	{"median_ttft_ms", "Median TTFT", "ms", -1, func(s *Summary) float64 { return s.quantile("ttft", 50) }},
	{"p99_ttft_ms", "P99 TTFT", "ms", -1, func(s *Summary) float64 { return s.quantile("ttft", 99) }},
	{"median_tpot_ms", "Median TPOT", "ms", -1, func(s *Summary) float64 { return s.quantile("tpot", 50) }},
	{"p99_tpot_ms", "P99 TPOT", "ms", -1, func(s *Summary) float64 { return s.quantile("tpot", 99) }},
	{"p99_itl_ms", "P99 ITL", "ms", -1, func(s *Summary) float64 { return s.quantile("itl", 99) }},
	{"p99_e2el_including_client_queue_ms", "P99 latency, client queue included", "ms", -1, func(s *Summary) float64 { return s.quantile("e2el_including_client_queue", 99) }},
}

// Figure returns a column of the run by its name in the CSV; NaN: there is none.
func (p *Point) Figure(name string) float64 {
	for _, c := range sweepColumns {
		if c.name == name {
			return c.of(p.Summary)
		}
	}
	return math.NaN()
}

func (s *Summary) quantile(key string, percent float64) float64 {
	v := s.Samples(key)
	slices.Sort(v)
	return Quantile(v, percent)
}

// WriteCSV writes a line per run.
func WriteCSV(w io.Writer, points []Point) error {
	c := csv.NewWriter(w)
	head := []string{"server", "request_rate", "max_concurrency"}
	for _, col := range sweepColumns {
		head = append(head, col.name)
	}
	if err := c.Write(append(head, "peak_kv_fill", "client_was_limit", "repetition")); err != nil {
		return err
	}
	for i := range points {
		p := &points[i]
		line := []string{p.Server, fmt.Sprint(rateValue(p.Rate)), strconv.Itoa(p.Concurrency)}
		for _, col := range sweepColumns {
			line = append(line, strconv.FormatFloat(col.of(p.Summary), 'g', 8, 64))
		}
		if err := c.Write(append(line, strconv.FormatFloat(p.peakFill(), 'g', 4, 64), p.Limited, strconv.Itoa(p.Repetition))); err != nil {
			return err
		}
	}
	c.Flush()
	return c.Error()
}

// peakFill returns the largest fill of the nodes that generate.
func (p *Point) peakFill() (most float64) {
	for i := range p.Nodes {
		if p.Nodes[i].Generated() > 0 {
			most = max(most, p.Nodes[i].PeakFill())
		}
	}
	return most
}

// curvePoints is the number of points of a distribution, and timelinePoints the most
// requests of a timeline, evenly chosen.
const (
	curvePoints    = 100
	timelinePoints = 300
)

// distribution returns the share of values up to x, as a line.
func distribution(name string, v []float64) series {
	slices.Sort(v)
	s := series{name: name}
	for i := 0; i <= curvePoints && len(v) > 0; i++ {
		percent := 100 * float64(i) / curvePoints
		s.x, s.y = append(s.x, Quantile(v, percent)), append(s.y, percent)
	}
	return s
}

// timeline returns each request's TTFT at its sending time.
func timeline(p *Point) series {
	s := series{name: p.Name(), dots: true}
	step := len(p.Summary.Requests)/timelinePoints + 1
	for i := 0; i < len(p.Summary.Requests); i += step {
		if o := p.Summary.Requests[i].Outcome; o.Err == nil {
			s.x, s.y = append(s.x, o.Sent.Seconds()), append(s.y, ms(o.TTFT()))
		}
	}
	return s
}

// tokenTimeline returns the chunks of each second.
func tokenTimeline(p *Point) series {
	s := series{name: p.Name()}
	for i, n := range p.Summary.perSecondOfRun() {
		s.x, s.y = append(s.x, float64(i)+0.5), append(s.y, float64(n))
	}
	return s
}

// groups returns the points of each server, in order.
func groups(points []Point) (servers []string, of map[string][]*Point) {
	of = map[string][]*Point{}
	for i := range points {
		p := &points[i]
		if of[p.Server] == nil {
			servers = append(servers, p.Server)
		}
		of[p.Server] = append(of[p.Server], p)
	}
	return servers, of
}

// prefixed returns a series' name, unique among those of other servers.
func prefixed(server, name string) string {
	if server == "" {
		return name
	}
	return server + ": " + name
}

// kneeShare is the share of completed requests that must meet the objectives for a rate
// to count as served.
const kneeShare = 0.9

// Knee returns the highest offered rate that a server served in every run, and whether
// there is one.
func Knee(points []*Point) (rate float64, found bool) {
	short := func(p *Point) bool {
		s := p.Summary
		return s.Failed > 0 || s.Completed == 0 || float64(s.Good) < kneeShare*float64(s.Completed)
	}
	for _, r := range loads(points) {
		if at := r[0].Rate; !math.IsInf(at, 1) && at > rate && !slices.ContainsFunc(r, short) {
			rate, found = at, true
		}
	}
	return rate, found
}

// curves returns the plots with a line per server.
func curves(points []Point, objectives bool) []plotted {
	ttft := plotted{title: "Time to first token against throughput", x: "output tokens/s", y: "ms"}
	tpot := plotted{title: "Time per output token against throughput", x: "output tokens/s", y: "ms"}
	good := plotted{title: "Goodput against offered load", x: "requests/s offered", y: "requests/s"}
	servers, of := groups(points)
	for _, server := range servers {
		add := func(p *plotted, name string, x, y func(*Point) float64) {
			s := series{name: prefixed(server, name)}
			for _, r := range loads(of[server]) {
				vx, _, _ := r.figure(x)
				vy, _, _ := r.figure(y)
				if !math.IsInf(vx, 1) {
					s.x, s.y = append(s.x, vx), append(s.y, vy)
				}
			}
			p.all = append(p.all, s)
		}
		quantile := func(key string, percent float64) func(*Point) float64 {
			return func(p *Point) float64 { return p.Summary.quantile(key, percent) }
		}
		tokens := func(p *Point) float64 { return p.Summary.Throughput() }
		rate := func(p *Point) float64 { return p.Rate }
		add(&ttft, "median TTFT", tokens, quantile("ttft", 50))
		add(&ttft, "P99 TTFT", tokens, quantile("ttft", 99))
		add(&tpot, "median TPOT", tokens, quantile("tpot", 50))
		add(&tpot, "P99 TPOT", tokens, quantile("tpot", 99))
		add(&good, "completed", rate, func(p *Point) float64 { return p.Summary.RequestThroughput() })
		if objectives {
			add(&good, "met every objective", rate, func(p *Point) float64 { return p.Summary.Goodput() })
			knee := "its knee is below every rate of the sweep"
			if r, found := Knee(of[server]); found {
				knee = fmt.Sprintf("knee at %g requests/s", r)
			}
			good.note += prefixed(server, knee) + ". "
		}
	}
	if objectives {
		good.note += fmt.Sprintf("The knee is the highest rate of the sweep at which %.0f %% of the requests meet every objective.", 100*kneeShare)
	}
	return []plotted{ttft, tpot, good}
}

// requestPlots returns the plots of the requests, with a line per run.
func requestPlots(points []Point) []plotted {
	ps := []plotted{
		{title: "Distribution of time to first token", x: "ms", y: "% of requests", logX: true},
		{title: "Distribution of inter-token latency", x: "ms", y: "% of gaps", logX: true},
		{title: "Time to first token over the run", x: "s since the run's start", y: "ms"},
		{title: "Tokens over the run", x: "s since the run's start", y: "chunks in one second"},
	}
	for i := range points {
		p := &points[i]
		for n, s := range []series{distribution(p.Name(), p.Summary.Samples("ttft")), distribution(p.Name(), p.Summary.Samples("itl")), timeline(p), tokenTimeline(p)} {
			ps[n].all = append(ps[n].all, s)
		}
	}
	return ps
}

// runPlots returns the plots of the requests and of the nodes, with a line per run.
func runPlots(points []Point) []plotted {
	load := plotted{title: "Throughput against KV fill", x: "% of the node's KV blocks in use", y: "tokens/s of the node"}
	over := plotted{title: "KV fill over the run", x: "s since the run's start", y: "% of KV blocks in use"}
	hasFill := false
	for i := range points {
		load.all, over.all = append(load.all, fillSeries(&points[i])), append(over.all, fillTimeline(&points[i]))
		hasFill = hasFill || len(load.all[i].x) > 0
	}
	load.note = "Each point is half a second of a node. Where the load is below what the node can do, it shows the load."
	if !hasFill {
		load.note = "The server does not export vllm:kv_cache_usage_perc and vllm:generation_tokens_total, or the runs were too short."
	}
	return append(requestPlots(points), load, over)
}

const style = `body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:1em}figure{margin:0}figcaption{font-weight:600}
svg{width:100%}svg text{font-size:11px;fill:#555}.grid{stroke:#ddd}.dots{stroke-width:4;stroke-linecap:round;fill:none}.key{font-size:12px;margin:0}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto;margin-bottom:1em}td,th{padding:.3em .7em;text-align:right;border-bottom:1px solid #ddd}th:first-child{white-space:nowrap}
.ahead{color:#2e8540}.behind{color:#b3261e}`

// WritePage writes the sweep as one page that needs no other file.
func WritePage(w io.Writer, title string, facts []string, points []Point) error {
	var b strings.Builder
	writeHead(&b, title, "", facts)
	writeRuns(&b, points)
	writeContest(&b, points)
	writeNodes(&b, points)
	b.WriteString("<main>\n")
	objectives := len(points) > 0 && len(points[0].Summary.Options.Goodput) > 0
	for _, p := range append(curves(points, objectives), runPlots(representatives(points))...) {
		b.WriteString(p.svg())
	}
	b.WriteString("</main></html>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// writeRuns writes the table of all runs.
func writeRuns(b *strings.Builder, points []Point) {
	b.WriteString("<table><tr><th>Run</th>")
	for _, c := range sweepColumns {
		fmt.Fprintf(b, "<th>%s<br><small>%s</small></th>", c.head, c.unit)
	}
	b.WriteString("<th>Note</th></tr>\n")
	most := 0
	for _, r := range loads(pointers(points)) {
		fmt.Fprintf(b, "<tr><th>%s</th>", html.EscapeString(r[0].Name()))
		for _, c := range sweepColumns {
			fmt.Fprintf(b, "<td>%s</td>", r.cell(func(p *Point) float64 { return c.of(p.Summary) }))
		}
		note := ""
		for _, p := range r {
			if p.Limited != "" {
				note = "the client was the limit: " + p.Limited
			}
		}
		fmt.Fprintf(b, "<td>%s</td></tr>\n", html.EscapeString(note))
		most = max(most, len(r))
	}
	b.WriteString("</table>\n")
	if most > 1 {
		fmt.Fprintf(b, "<p>Each load was run %d times. The table has medians, with minimum and maximum below. Plots by throughput or load show medians; all others show the run with the middle median TTFT.</p>\n", most)
	}
}

// leastDifference is the least relative difference of two servers' figures that counts, because
// the noise of single runs is of this size. If runs were repeated, all runs of one server
// must also be on the same side of all runs of the other.
const leastDifference = 0.05

// writeContest compares the first server with each other one under equal load.
func writeContest(b *strings.Builder, points []Point) {
	servers, of := groups(points)
	if len(servers) < 2 {
		return
	}
	for _, server := range servers[1:] {
		fmt.Fprintf(b, "<h2>%s against %s</h2>\n<p>Figures of %s as a share of the other's. Green: better by more than %.0f %%; red: worse.</p>\n<table><tr><th>Load</th>",
			html.EscapeString(servers[0]), html.EscapeString(server), html.EscapeString(servers[0]), 100*leastDifference)
		for _, c := range sweepColumns {
			if c.better != 0 {
				fmt.Fprintf(b, "<th>%s</th>", c.head)
			}
		}
		b.WriteString("</tr>\n")
		others := loads(of[server])
		for _, r := range loads(of[servers[0]]) {
			q := sameLoad(others, r)
			if q == nil {
				continue
			}
			fmt.Fprintf(b, "<tr><th>%s</th>", html.EscapeString(r[0].Load()))
			for _, c := range sweepColumns {
				if c.better != 0 {
					b.WriteString(contestCell(r, q, func(p *Point) float64 { return c.of(p.Summary) }, c.better))
				}
			}
			b.WriteString("</tr>\n")
		}
		b.WriteString("</table>\n")
		writeCauses(b, loads(of[servers[0]]), others)
	}
}

// sameLoad returns the runs under the load of r, or nil.
func sameLoad(all []repeated, r repeated) repeated {
	i := slices.IndexFunc(all, func(q repeated) bool { return q[0].Rate == r[0].Rate && q[0].Concurrency == r[0].Concurrency })
	if i < 0 {
		return nil
	}
	return all[i]
}

// contestCell returns one figure of two servers as a share.
func contestCell(mine, others repeated, of func(*Point) float64, better int) string {
	a, least, most := mine.figure(of)
	other, otherLeast, otherMost := others.figure(of)
	apart := least > otherMost || most < otherLeast
	if other == 0 {
		if a == 0 {
			return "<td>=</td>"
		}
		return fmt.Sprintf("<td>%s : 0</td>", Figure(a))
	}
	class := ""
	switch d := (a/other - 1) * float64(better); {
	case !apart:
	case d > leastDifference:
		class = ` class="ahead"`
	case d < -leastDifference:
		class = ` class="behind"`
	}
	return fmt.Sprintf("<td%s>%.0f %%</td>", class, 100*a/other)
}

// writeNodes writes the table of what the server's processes used.
func writeNodes(b *strings.Builder, points []Point) {
	if !slices.ContainsFunc(points, func(p Point) bool { return len(p.Nodes) > 0 }) {
		return
	}
	b.WriteString("<h2>What the server's processes and the client used</h2>\n<table><tr><th>Run</th><th>Process</th><th>CPU<br><small>cores</small></th><th>Generated<br><small>tokens</small></th><th>Prompts computed<br><small>tokens</small></th><th>In its steps<br><small>requests</small></th><th>Step<br><small>ms</small></th><th>Queue<br><small>ms</small></th><th>Prompt<br><small>ms</small></th><th>KV exposed<br><small>ms</small></th><th>Peak KV fill</th></tr>\n")
	for _, p := range representatives(points) {
		for k := range p.Nodes {
			n := &p.Nodes[k]
			fmt.Fprintf(b, "<tr><th>%s</th><td>%s</td><td>%.2f</td><td>%s</td><td>%s</td><td>%.1f</td>",
				html.EscapeString(p.Name()), html.EscapeString(n.Name), n.Cores(), Figure(math.Round(n.Generated())), Figure(math.Round(n.prompted())), n.running())
			for _, of := range []func(*Sample) Total{
				func(s *Sample) Total { return s.Steps }, func(s *Sample) Total { return s.Queue },
				func(s *Sample) Total { return s.Prompt }, func(s *Sample) Total { return s.Exposed },
			} {
				if t := n.during(of); t.Count > 0 {
					fmt.Fprintf(b, "<td>%s</td>", Figure(1e3*t.Sum/t.Count))
				} else {
					b.WriteString("<td></td>")
				}
			}
			fmt.Fprintf(b, "<td>%.1f %%</td></tr>\n", 100*n.PeakFill())
		}
		fmt.Fprintf(b, "<tr><th>%s</th><td>client</td><td>%.2f</td></tr>\n", html.EscapeString(p.Name()), p.Client)
	}
	b.WriteString("</table>\n")
}
