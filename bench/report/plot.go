package report

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
)

// series is one line of a plot.
type series struct {
	name string
	x, y []float64
	dots bool // no line between the points
}

// plotted is a plot. Its axes begin at 0, except for a logarithmic one.
type plotted struct {
	title, x, y, note string
	logX              bool
	all               []series
}

// Size of a plot in pixels, and the room for its labels.
const (
	plotWidth, plotHeight          = 560, 320
	plotLeft, plotBottom, plotEdge = 64, 44, 14
)

var colours = []string{"#0b6e99", "#c4541a", "#2e8540", "#7b4ab5", "#b8860b", "#c2185b", "#00838f", "#5d4037"}

// axis is linear or logarithmic.
type axis struct {
	low, high float64
	step      float64 // between the ticks of a linear axis
	log       bool
}

// roundStep returns the least of 1, 2, 2.5, 5 and their multiples by powers of ten that is not less
// than v.
func roundStep(v float64) float64 {
	unit := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 2.5, 5} {
		if v <= m*unit*(1+1e-9) {
			return m * unit
		}
	}
	return 10 * unit
}

// Figure formats a figure with four significant digits, and with commas between thousands.
func Figure(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return fmt.Sprint(v)
	}
	digits := 3
	if a := math.Abs(v); a > 0 {
		digits -= int(math.Floor(math.Log10(a)))
	}
	text := strconv.FormatFloat(v, 'f', min(max(0, digits), 12), 64)
	whole, fraction, _ := strings.Cut(text, ".")
	if fraction = strings.TrimRight(fraction, "0"); fraction != "" {
		fraction = "." + fraction
	}
	for at := len(whole) - 3; at > 0 && whole[at-1] != '-'; at -= 3 {
		whole = whole[:at] + "," + whole[at:]
	}
	if whole == "-0" && fraction == "" {
		whole = "0"
	}
	return whole + fraction
}

// newAxis returns an axis that spans all values.
func newAxis(log bool, of func(*series) []float64, all []series) axis {
	a := axis{log: log, low: math.Inf(1)}
	for i := range all {
		for _, v := range of(&all[i]) {
			a.high = max(a.high, v)
			if v > 0 {
				a.low = min(a.low, v)
			}
		}
	}
	if a.high == 0 {
		a.high, a.low = 1, 0.1
	}
	if !log {
		a.low, a.step = 0, roundStep(a.high/4)
		a.high = a.step * math.Ceil(a.high/a.step*(1-1e-9))
		return a
	}
	a.low, a.high = math.Pow(10, math.Floor(math.Log10(a.low))), math.Pow(10, math.Ceil(math.Log10(a.high)))
	if a.low == a.high {
		a.high *= 10
	}
	return a
}

// place returns a value's position in [0, 1].
func (a axis) place(v float64) float64 {
	if !a.log {
		return v / a.high
	}
	return math.Log(max(v, a.low)/a.low) / math.Log(a.high/a.low)
}

// ticks returns the values with a label.
func (a axis) ticks() (ts []float64) {
	if a.log {
		for t := a.low; t < a.high*1.001; t *= 10 {
			ts = append(ts, t)
		}
		return ts
	}
	for i := range int(math.Round(a.high/a.step)) + 1 {
		ts = append(ts, a.step*float64(i))
	}
	return ts
}

// svg returns the plot as SVG.
func (p *plotted) svg() string {
	ax := newAxis(p.logX, func(s *series) []float64 { return s.x }, p.all)
	ay := newAxis(false, func(s *series) []float64 { return s.y }, p.all)
	px := func(x float64) float64 { return plotLeft + ax.place(x)*(plotWidth-plotLeft-plotEdge) }
	py := func(y float64) float64 {
		return plotHeight - plotBottom - ay.place(y)*(plotHeight-plotBottom-plotEdge)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "<figure><figcaption>%s</figcaption><svg viewBox=\"0 0 %d %d\" role=\"img\">", html.EscapeString(p.title), plotWidth, plotHeight)
	for _, y := range ay.ticks() {
		fmt.Fprintf(&b, `<path class="grid" d="M%d %.1fH%d"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`, plotLeft, py(y), plotWidth-plotEdge, plotLeft-6, py(y)+4, Figure(y))
	}
	for _, x := range ax.ticks() {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%s</text>`, px(x), plotHeight-plotBottom+16, Figure(x))
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">%s</text><text transform="translate(14 %d) rotate(-90)" text-anchor="middle">%s</text>`,
		(plotWidth+plotLeft)/2, plotHeight-6, html.EscapeString(p.x), (plotHeight-plotBottom)/2, html.EscapeString(p.y))
	for n, s := range p.all {
		colour := colours[n%len(colours)]
		if !s.dots && len(s.x) > 1 {
			fmt.Fprintf(&b, `<polyline fill="none" stroke="%s" stroke-width="1.5" points="`, colour)
			for i := range s.x {
				fmt.Fprintf(&b, "%.1f,%.1f ", px(s.x[i]), py(s.y[i]))
			}
			b.WriteString(`"/>`)
		}
		if s.dots || len(s.x) <= 24 {
			// One path for all of them: each is a line of length 0 with round ends.
			fmt.Fprintf(&b, `<path class="dots" stroke="%s" d="`, colour)
			for i := range s.x {
				fmt.Fprintf(&b, "M%.1f %.1fh0", px(s.x[i]), py(s.y[i]))
			}
			b.WriteString(`"/>`)
		}
	}
	b.WriteString("</svg><p class=\"key\">")
	for n, s := range p.all {
		fmt.Fprintf(&b, `<span style="color:%s">■ %s</span> `, colours[n%len(colours)], html.EscapeString(s.name))
	}
	if p.note != "" {
		fmt.Fprintf(&b, "<br>%s", html.EscapeString(p.note))
	}
	b.WriteString("</p></figure>\n")
	return b.String()
}
