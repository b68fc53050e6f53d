package explainlog

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// The page loads nothing and runs no script; its policy forbids both.
const pageHead = `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%s explained</title>
<style>
:root { --ink: #1f2328; --dim: #59636e; --line: #d1d9e0; --soft: #f6f8fa; --page: #fff; --blue: #0969da; --amber: #9a6700; --red: #d1242f; --amberbg: #fff8c5; --redbg: #ffebe9; --bluebg: #ddf4ff; }
@media (prefers-color-scheme: dark) { :root { --ink: #f0f6fc; --dim: #9198a1; --line: #3d444d; --soft: #151b23; --page: #0d1117; --blue: #4493f8; --amber: #d29922; --red: #f85149; --amberbg: #272115; --redbg: #25171c; --bluebg: #121d2f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1.5rem; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); } h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
p { margin: .2rem 0; } .dim { color: var(--dim); }
ul.facts { margin: .4rem 0; padding-left: 1.2rem; }
.finding { border-left: 4px solid var(--blue); background: var(--bluebg); padding: .5rem .8rem; margin: .5rem 0; border-radius: 0 6px 6px 0; }
.finding.warning { border-color: var(--amber); background: var(--amberbg); } .finding.problem { border-color: var(--red); background: var(--redbg); }
.kind { font-weight: 600; text-transform: uppercase; font-size: .75rem; letter-spacing: .04em; margin-right: .5rem; }
.math { font-family: ui-monospace, monospace; font-size: .82rem; color: var(--dim); display: block; padding-left: 1.2em; text-indent: -1.2em; overflow-wrap: anywhere; }
.math::before { content: "= "; } .change { display: block; } .change::before { content: "→ "; font-weight: 600; }
.lines { border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
.entry { display: grid; grid-template-columns: 6rem 1fr; border-top: 1px solid var(--line); padding: .45rem .8rem; } .entry:first-child { border-top: 0; }
.entry:target { background: var(--bluebg); } .entry.note { background: var(--bluebg); } .entry.warning { background: var(--amberbg); } .entry.problem { background: var(--redbg); }
.no { color: var(--dim); font: .8rem/1.6 ui-monospace, monospace; } .no small { display: block; font-size: .7rem; }
.text { font: .8rem/1.5 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; } .lv { font-weight: 600; } .lv.WARNING { color: var(--amber); } .lv.ERROR, .lv.CRITICAL { color: var(--red); }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: .5rem 0; } figcaption { font-size: .85rem; color: var(--dim); }
svg { max-width: 100%%; height: auto; background: var(--soft); border: 1px solid var(--line); border-radius: 6px; } svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
a { color: var(--blue); } summary { cursor: pointer; font-weight: 600; margin: .8rem 0 .4rem; }
@media (max-width: 40rem) { body { padding: 1rem; } .entry { grid-template-columns: 1fr; } }
</style>
</head>
<body>
`

// HTML returns the report as one page that loads nothing.
func (r *Report) HTML(name string) string {
	var b strings.Builder
	title := html.EscapeString(printable(name))
	fmt.Fprintf(&b, pageHead, title)
	fmt.Fprintf(&b, "<h1>%s</h1>\n<p class=\"dim\">%s lines, %s of them explained by their shape alone.", title, thousands(r.Lines), thousands(r.ByShape))
	if r.Cut > 0 {
		fmt.Fprintf(&b, " %s lines are longer than %d KiB: only their beginning was read.", thousands(r.Cut), MaxLine>>10)
	}
	if r.Omitted > 0 {
		fmt.Fprintf(&b, " %s lines are counted and not shown.", thousands(r.Omitted))
	}
	b.WriteString("</p>\n")
	if len(r.Runs) > 1 {
		b.WriteString("<ul class=\"facts\">\n")
		for i := range r.Runs {
			fmt.Fprintf(&b, "<li><a href=\"#run%d\">Run %d: %s</a></li>\n", i+1, i+1, html.EscapeString(r.Runs[i].Title))
		}
		b.WriteString("</ul>\n")
	}
	if len(r.Across) > 0 {
		b.WriteString("<h3>Runs compared</h3>\n")
		htmlFindings(&b, r.Across)
	}
	for i := range r.Runs {
		r.Runs[i].html(&b, i+1, len(r.Runs) > 1)
	}
	b.WriteString("</body>\n</html>\n")
	return b.String()
}

func (r *Run) html(b *strings.Builder, number int, several bool) {
	title := r.Title
	if several {
		title = fmt.Sprintf("Run %d: %s", number, r.Title)
	}
	fmt.Fprintf(b, "<h2 id=\"run%d\">%s</h2>\n<ul class=\"facts\">\n", number, html.EscapeString(title))
	for _, f := range r.Facts {
		fmt.Fprintf(b, "<li>%s</li>\n", html.EscapeString(f))
	}
	b.WriteString("</ul>\n")
	if len(r.Findings) > 0 {
		b.WriteString("<h3>Unusual, and what to change</h3>\n")
		htmlFindings(b, r.Findings)
	}
	r.charts(b)
	fmt.Fprintf(b, "<details open><summary>Line by line</summary>\n<div class=\"lines\">\n")
	for i := range r.Entries {
		r.Entries[i].html(b)
	}
	b.WriteString("</div>\n</details>\n")
}

func htmlFindings(b *strings.Builder, all []Finding) {
	for _, f := range all {
		fmt.Fprintf(b, "<div class=\"finding %s\"><span class=\"kind\">%s</span>%s", f.Severity, f.Severity, html.EscapeString(f.Text))
		if f.Line > 0 {
			fmt.Fprintf(b, " <a href=\"#L%d\">line %d</a>", f.Line, f.Line)
		}
		htmlMath(b, f.Math)
		if f.Change != "" {
			fmt.Fprintf(b, "<span class=\"change\">%s</span>", html.EscapeString(f.Change))
		}
		b.WriteString("</div>\n")
	}
}

func htmlMath(b *strings.Builder, all []string) {
	for _, m := range all {
		fmt.Fprintf(b, "<span class=\"math\">%s</span>", html.EscapeString(m))
	}
}

func (e *Entry) html(b *strings.Builder) {
	number := fmt.Sprint(e.First)
	if e.Last > e.First {
		number += fmt.Sprintf("–%d", e.Last)
	}
	fmt.Fprintf(b, "<div class=\"entry %s\" id=\"L%d\"><div class=\"no\">%s<small>%s</small></div><div>", e.Severity, e.First, number, html.EscapeString(e.Topic))
	fmt.Fprintf(b, "<div class=\"text\">")
	if e.Level != "" {
		fmt.Fprintf(b, "<span class=\"lv %s\">%s</span> ", html.EscapeString(e.Level), html.EscapeString(e.Level))
	}
	fmt.Fprintf(b, "%s</div>", html.EscapeString(e.node()+shorten(e.Text, 600)))
	if e.What != "" {
		fmt.Fprintf(b, "<p>%s</p>", html.EscapeString(e.What))
	}
	htmlMath(b, e.Math)
	if e.Unusual != "" {
		fmt.Fprintf(b, "<p><span class=\"kind\">%s</span>%s</p>", e.Severity, html.EscapeString(e.Unusual))
	}
	if e.Change != "" {
		fmt.Fprintf(b, "<span class=\"change\">%s</span>", html.EscapeString(e.Change))
	}
	b.WriteString("</div></div>\n")
}

// Sizes of a chart, in pixels.
const (
	chartWide, chartHigh  = 520, 260
	chartLeft, chartBelow = 52, 40
	chartRight, chartTop  = 14, 14
)

// axis is a scale with round ticks.
type axis struct{ from, to, step float64 }

// round returns an axis with about five ticks, 1, 2 or 5 times a power of ten apart.
func round(low, high float64) axis {
	if !(high > low) {
		high = low + 1
	}
	step := math.Pow(10, math.Floor(math.Log10((high-low)/5)))
	for _, m := range []float64{1, 2, 5, 10} {
		if (high-low)/(step*m) <= 6 {
			step *= m
			break
		}
	}
	return axis{math.Floor(low/step) * step, math.Ceil(high/step) * step, step}
}

// plot draws one chart of points; lines joins them, and fitted draws a curve.
func plot(b *strings.Builder, caption, xName, yName string, xs, ys []float64, joined bool, fitted func(float64) float64) {
	lowX, highX, highY := math.Inf(1), math.Inf(-1), 0.0
	for i, x := range xs {
		lowX, highX, highY = min(lowX, x), max(highX, x), max(highY, ys[i])
	}
	ax, ay := round(lowX, highX), round(0, highY)
	px := func(x float64) float64 {
		return chartLeft + (x-ax.from)/(ax.to-ax.from)*(chartWide-chartLeft-chartRight)
	}
	py := func(y float64) float64 {
		return chartHigh - chartBelow - (y-ay.from)/(ay.to-ay.from)*(chartHigh-chartBelow-chartTop)
	}
	fmt.Fprintf(b, "<figure><svg width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s\">\n", chartWide, chartHigh, chartWide, chartHigh, html.EscapeString(caption))
	for i := 0; ay.from+float64(i)*ay.step <= ay.to+ay.step/2 && i < 20; i++ {
		y := ay.from + float64(i)*ay.step
		fmt.Fprintf(b, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"var(--line)\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.6g</text>\n", chartLeft, chartWide-chartRight, py(y), py(y), chartLeft-6, py(y)+4, y)
	}
	for i := 0; ax.from+float64(i)*ax.step <= ax.to+ax.step/2 && i < 20; i++ {
		x := ax.from + float64(i)*ax.step
		fmt.Fprintf(b, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.6g</text>\n", px(x), chartHigh-chartBelow+16, x)
	}
	fmt.Fprintf(b, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text><text x=\"12\" y=\"%d\" text-anchor=\"middle\" transform=\"rotate(-90 12 %d)\">%s</text>\n",
		(chartLeft+chartWide-chartRight)/2, chartHigh-8, html.EscapeString(xName), (chartHigh-chartBelow)/2, (chartHigh-chartBelow)/2, html.EscapeString(yName))
	if fitted != nil {
		b.WriteString("<polyline fill=\"none\" stroke=\"var(--amber)\" stroke-dasharray=\"5 4\" points=\"")
		for i := range 41 {
			x := ax.from + (ax.to-ax.from)*float64(i)/40
			if y := fitted(x); y >= ay.from && y <= ay.to {
				fmt.Fprintf(b, "%.1f,%.1f ", px(x), py(y))
			}
		}
		b.WriteString("\"/>\n")
	}
	if joined {
		b.WriteString("<polyline fill=\"none\" stroke=\"var(--blue)\" stroke-width=\"1.5\" points=\"")
		for i, x := range xs {
			fmt.Fprintf(b, "%.1f,%.1f ", px(x), py(ys[i]))
		}
		b.WriteString("\"/>\n")
	}
	for i, x := range xs {
		fmt.Fprintf(b, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"var(--blue)\"><title>%.6g, %.6g</title></circle>\n", px(x), py(ys[i]), x, ys[i])
	}
	fmt.Fprintf(b, "</svg><figcaption>%s</figcaption></figure>\n", html.EscapeString(caption))
}

const maxCharts = 4 // series with charts

// charts draws the rates of a run.
func (r *Run) charts(b *strings.Builder) {
	b.WriteString("<div class=\"charts\">\n")
	for i := range r.Series {
		z := &r.Series[i]
		if i >= maxCharts || len(z.Samples) < 3 {
			continue
		}
		of := ""
		if z.Name != "" {
			of = z.Name + ": "
		}
		var at, use, overTime, overUse []float64
		for _, p := range z.Samples {
			if p.At > 0 {
				at, overTime = append(at, (p.At-z.Samples[0].At).Seconds()), append(overTime, p.Generate)
			}
			if p.KV >= 0 && p.Generate > 0 && p.Running != 0 {
				use, overUse = append(use, p.KV), append(overUse, p.Generate)
			}
		}
		if len(use) > 2 {
			var fitted func(float64) float64
			caption := of + "throughput against KV use"
			if r.Fit != nil && r.Fit.Series == z.Name && r.Fit.Slope > 0 {
				fitted = r.Fit.At
				caption += fmt.Sprintf("; dashed: 1 ÷ (%.3f ms + %.4f ms x use)", 1000*r.Fit.Base, 1000*r.Fit.Slope)
			}
			plot(b, caption, "KV cache in use, %", "tokens/s generated", use, overUse, false, fitted)
		}
		if len(at) > 2 {
			plot(b, of+"throughput over time", "seconds since the first of these lines", "tokens/s generated", at, overTime, true, nil)
		}
	}
	b.WriteString("</div>\n")
}
