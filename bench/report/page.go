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
)

// Point is one run of a sweep.
type Point struct {
	Rate        float64 // requests per second, +Inf: all at once
	Concurrency int     // 0: no bound
	Summary     *Summary
	Limited     string // why the client was the limit; empty: it was not
}

// Name says which run it is.
func (p *Point) Name() string {
	n := "rate inf"
	if !math.IsInf(p.Rate, 1) {
		n = "rate " + strconv.FormatFloat(p.Rate, 'g', -1, 64)
	}
	if p.Concurrency > 0 {
		n += ", concurrency " + strconv.Itoa(p.Concurrency)
	}
	return n
}

// sweepColumns are the columns of the table and the CSV.
var sweepColumns = []struct {
	name string
	of   func(*Summary) float64
}{
	{"completed", func(s *Summary) float64 { return float64(s.Completed) }},
	{"failed", func(s *Summary) float64 { return float64(s.Failed) }},
	{"request_throughput", (*Summary).RequestThroughput},
	{"output_throughput", (*Summary).Throughput},
	{"request_goodput", (*Summary).Goodput},
	{"median_ttft_ms", func(s *Summary) float64 { return s.quantile("ttft", 50) }},
	{"p99_ttft_ms", func(s *Summary) float64 { return s.quantile("ttft", 99) }},
	{"median_tpot_ms", func(s *Summary) float64 { return s.quantile("tpot", 50) }},
	{"p99_tpot_ms", func(s *Summary) float64 { return s.quantile("tpot", 99) }},
	{"p99_itl_ms", func(s *Summary) float64 { return s.quantile("itl", 99) }},
	{"p99_e2el_including_client_queue_ms", func(s *Summary) float64 { return s.quantile("e2el_including_client_queue", 99) }},
}

func (s *Summary) quantile(key string, percent float64) float64 {
	v := s.Samples(key)
	slices.Sort(v)
	return Quantile(v, percent)
}

// WriteCSV writes a line per run.
func WriteCSV(w io.Writer, points []Point) error {
	c := csv.NewWriter(w)
	head := []string{"request_rate", "max_concurrency"}
	for _, col := range sweepColumns {
		head = append(head, col.name)
	}
	if err := c.Write(append(head, "client_was_limit")); err != nil {
		return err
	}
	for i := range points {
		p := &points[i]
		line := []string{fmt.Sprint(rateValue(p.Rate)), strconv.Itoa(p.Concurrency)}
		for _, col := range sweepColumns {
			line = append(line, strconv.FormatFloat(col.of(p.Summary), 'g', 8, 64))
		}
		if err := c.Write(append(line, p.Limited)); err != nil {
			return err
		}
	}
	c.Flush()
	return c.Error()
}

// series is one line of a plot.
type series struct {
	name string
	x, y []float64
	dots bool // no line between the points
}

// Size of a plot in pixels, and the room for its labels.
const (
	plotWidth, plotHeight          = 560, 320
	plotLeft, plotBottom, plotEdge = 64, 44, 14
)

var colours = []string{"#0b6e99", "#c4541a", "#2e8540", "#7b4ab5", "#b8860b", "#c2185b", "#00838f", "#5d4037"}

// plot is a figure as SVG. Both axes begin at 0.
func plot(title, xName, yName string, all []series) string {
	xMax, yMax := 0.0, 0.0
	for _, s := range all {
		for i := range s.x {
			xMax, yMax = max(xMax, s.x[i]), max(yMax, s.y[i])
		}
	}
	if xMax == 0 {
		xMax = 1
	}
	if yMax == 0 {
		yMax = 1
	}
	px := func(x float64) float64 { return plotLeft + x/xMax*(plotWidth-plotLeft-plotEdge) }
	py := func(y float64) float64 { return plotHeight - plotBottom - y/yMax*(plotHeight-plotBottom-plotEdge) }
	var b strings.Builder
	fmt.Fprintf(&b, "<figure><figcaption>%s</figcaption><svg viewBox=\"0 0 %d %d\" role=\"img\">", html.EscapeString(title), plotWidth, plotHeight)
	for i := range 5 {
		x, y := xMax*float64(i)/4, yMax*float64(i)/4
		fmt.Fprintf(&b, `<path class="grid" d="M%d %.1fH%d"/><text x="%d" y="%.1f" text-anchor="end">%.4g</text><text x="%.1f" y="%d" text-anchor="middle">%.4g</text>`,
			plotLeft, py(y), plotWidth-plotEdge, plotLeft-6, py(y)+4, y, px(x), plotHeight-plotBottom+16, x)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">%s</text><text transform="translate(14 %d) rotate(-90)" text-anchor="middle">%s</text>`,
		(plotWidth+plotLeft)/2, plotHeight-6, html.EscapeString(xName), (plotHeight-plotBottom)/2, html.EscapeString(yName))
	for n, s := range all {
		colour := colours[n%len(colours)]
		if !s.dots && len(s.x) > 1 {
			fmt.Fprintf(&b, `<polyline fill="none" stroke="%s" stroke-width="1.5" points="`, colour)
			for i := range s.x {
				fmt.Fprintf(&b, "%.1f,%.1f ", px(s.x[i]), py(s.y[i]))
			}
			b.WriteString(`"/>`)
		}
		if s.dots || len(s.x) <= 64 {
			for i := range s.x {
				fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="2.5" fill="%s"/>`, px(s.x[i]), py(s.y[i]), colour)
			}
		}
	}
	b.WriteString("</svg><p class=\"key\">")
	for n, s := range all {
		fmt.Fprintf(&b, `<span style="color:%s">■ %s</span> `, colours[n%len(colours)], html.EscapeString(s.name))
	}
	b.WriteString("</p></figure>\n")
	return b.String()
}

// curvePoints is how many points a distribution is drawn with, and timelinePoints
// how many requests a timeline shows at most, evenly chosen.
const (
	curvePoints    = 200
	timelinePoints = 2000
)

// distribution is the share of values up to x, as a line.
func distribution(name string, v []float64) series {
	slices.Sort(v)
	s := series{name: name}
	for i := 0; i <= curvePoints && len(v) > 0; i++ {
		percent := 100 * float64(i) / curvePoints
		s.x, s.y = append(s.x, Quantile(v, percent)), append(s.y, percent)
	}
	return s
}

// timeline is each request's TTFT at its sending.
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

const style = `body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:1em}figure{margin:0}figcaption{font-weight:600}
svg{width:100%}svg text{font-size:11px;fill:#555}.grid{stroke:#ddd}.key{font-size:12px;margin:0}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}td,th{padding:.3em .7em;text-align:right;border-bottom:1px solid #ddd}`

// WritePage writes the sweep as one page that needs no other file.
func WritePage(w io.Writer, title string, facts []string, points []Point) error {
	var b strings.Builder
	t := html.EscapeString(title)
	fmt.Fprintf(&b, "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>%s</title><style>%s</style>\n<h1>%s</h1>\n<ul>", t, style, t)
	for _, f := range facts {
		fmt.Fprintf(&b, "<li>%s</li>", html.EscapeString(f))
	}
	b.WriteString("</ul>\n<table><tr><th>run</th>")
	for _, c := range sweepColumns {
		fmt.Fprintf(&b, "<th>%s</th>", strings.ReplaceAll(c.name, "_", " "))
	}
	b.WriteString("<th>note</th></tr>\n")
	median, tail := series{name: "median TTFT"}, series{name: "P99 TTFT"}
	tpot, good, done := series{name: "P99 TPOT"}, series{name: "requests that met every objective"}, series{name: "completed requests"}
	var ttfts, itls, lines []series
	for i := range points {
		p := &points[i]
		s := p.Summary
		fmt.Fprintf(&b, "<tr><th>%s</th>", html.EscapeString(p.Name()))
		for _, c := range sweepColumns {
			fmt.Fprintf(&b, "<td>%.5g</td>", c.of(s))
		}
		note := ""
		if p.Limited != "" {
			note = "the client was the limit: " + p.Limited
		}
		fmt.Fprintf(&b, "<td>%s</td></tr>\n", html.EscapeString(note))
		x := s.Throughput()
		median.x, median.y = append(median.x, x), append(median.y, s.quantile("ttft", 50))
		tail.x, tail.y = append(tail.x, x), append(tail.y, s.quantile("ttft", 99))
		tpot.x, tpot.y = append(tpot.x, x), append(tpot.y, s.quantile("tpot", 99))
		if !math.IsInf(p.Rate, 1) {
			good.x, good.y = append(good.x, p.Rate), append(good.y, s.Goodput())
			done.x, done.y = append(done.x, p.Rate), append(done.y, s.RequestThroughput())
		}
		ttfts, itls = append(ttfts, distribution(p.Name(), s.Samples("ttft"))), append(itls, distribution(p.Name(), s.Samples("itl")))
		lines = append(lines, timeline(p))
	}
	b.WriteString("</table>\n<main>\n")
	b.WriteString(plot("Time to first token against throughput", "output tokens/s", "ms", []series{median, tail}))
	b.WriteString(plot("Time per output token against throughput", "output tokens/s", "ms", []series{tpot}))
	b.WriteString(plot("Goodput against offered load", "requests/s offered", "requests/s", []series{good, done}))
	b.WriteString(plot("Distribution of time to first token", "ms", "% of requests", ttfts))
	b.WriteString(plot("Distribution of inter-token latency", "ms", "% of gaps", itls))
	b.WriteString(plot("Time to first token over the run", "s since the run's start", "ms", lines))
	b.WriteString("</main></html>\n")
	_, err := io.WriteString(w, b.String())
	return err
}
