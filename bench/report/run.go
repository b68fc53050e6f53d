package report

import (
	"fmt"
	"html"
	"io"
	"slices"
	"strconv"
	"strings"
)

// Chart is a plot of figures over a run that are not of its requests.
type Chart struct {
	Title, X, Y, Note string
	Lines             []Line
}

// Line is one line of a Chart.
type Line struct {
	Name string
	X, Y []float64
}

// WriteRun writes one run as a page that needs no other file: a summary, facts, the figures, plots
// of the requests, and charts.
func WriteRun(w io.Writer, title, summary string, facts []string, p Point, charts []Chart) error {
	var b strings.Builder
	writeHead(&b, title, summary, facts)
	points := []Point{p}
	writeRuns(&b, points)
	b.WriteString("<main>\n")
	for i := range charts {
		plot := charts[i].plotted()
		b.WriteString(plot.svg())
	}
	for _, plot := range requestPlots(points) {
		b.WriteString(plot.svg())
	}
	b.WriteString("</main></html>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// writeHead writes the begin of a page. summary may be empty.
func writeHead(b *strings.Builder, title, summary string, facts []string) {
	t := html.EscapeString(title)
	fmt.Fprintf(b, "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>%s</title><style>%s</style>\n<h1>%s</h1>\n", t, style, t)
	if summary != "" {
		fmt.Fprintf(b, "<p><b>%s</b></p>\n", html.EscapeString(summary))
	}
	b.WriteString("<ul>")
	for _, f := range facts {
		fmt.Fprintf(b, "<li>%s</li>", html.EscapeString(f))
	}
	b.WriteString("</ul>\n")
}

// ParseGoodput parses service level objectives such as ttft:200, in milliseconds.
func ParseGoodput(specs []string) (map[string]float64, error) {
	slo := map[string]float64{}
	for _, spec := range specs {
		key, value, _ := strings.Cut(spec, ":")
		v, err := strconv.ParseFloat(value, 64)
		if err != nil || !(v >= 0) || !slices.Contains([]string{"ttft", "tpot", "e2el"}, key) {
			return nil, fmt.Errorf("--goodput %s: want ttft:200, tpot:50 or e2el:2000, in milliseconds", spec)
		}
		slo[key] = v
	}
	return slo, nil
}

// CheckFigures returns an error for unknown metrics and percentiles out of range.
func CheckFigures(metrics []string, percentiles []float64) error {
	if err := CheckMetrics(metrics); err != nil {
		return err
	}
	for _, p := range percentiles {
		if !(p >= 0 && p <= 100) {
			return fmt.Errorf("--metric-percentiles %g: want 0 to 100", p)
		}
	}
	return nil
}
