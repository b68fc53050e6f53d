package pools

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/deploy/planner"
)

// glossary explains the words of the page to readers who do not know them.
var glossary = []string{
	"Prefill: a node reads a prompt and computes its KV, the model's memory of the prompt. Decode: a node writes the answer, one token after the other. Colocated nodes do both.",
	"Token: a part of a word; a page of English text has about 700.",
	"TTFT: time to first token, from the arrival of a request until its answer begins.",
	"TPOT: time per output token, the mean time between the tokens of one answer. ITL: the time between two tokens, of all answers together; it shows pauses.",
	"p50, p90, p99: half, 90 % and 99 % of the requests are at or below the value.",
	"Goodput: the share of requests that are within every limit.",
	"KV memory: where nodes keep the KV of running requests. If it is full, further requests wait.",
	"Prefix cache: KV of earlier prompts. A prompt that begins with the same text needs less work.",
}

// page writes the plan as one HTML page.
func (r *run) page(w io.Writer) error {
	p := r.plan
	lines := r.summary()
	facts := lines[1:]
	chosen := r.chosen()
	neighbours := report.Section{Title: "The fleet and its neighbours", Text: []string{legend}, Table: [][]string{r.head(""), r.cells(&chosen)}, Marked: 1}
	for i := range p.Neighbours {
		neighbours.Table = append(neighbours.Table, r.cells(&p.Neighbours[i]))
	}
	sections := []report.Section{{Title: "Words", List: glossary}, neighbours, r.growthSection(), r.gridSection(), r.errorSection()}
	if len(p.Losses) > 0 {
		loss := report.Section{Title: "If a node dies", Text: []string{"It dies " + r.lossText() + "."}, Table: [][]string{r.head("")}}
		for i := range p.Losses {
			loss.Table = append(loss.Table, r.cells(&p.Losses[i]))
		}
		sections = append(sections, loss)
	}
	start := r.settingLines()
	if r.profileOf(p.Fleet).prefill == nil {
		start = append(start, "On one machine: "+r.upCommand())
	}
	sections = append(sections,
		report.Section{Title: "Cost", List: r.costLines()},
		report.Section{Title: "Other kinds of fleets", List: r.others()},
		report.Section{Title: "Start it", List: append(start, "On Kubernetes: tandem plan pools with --helm FILE writes the values of the chart.")},
		report.Section{Title: "How the numbers came about", List: r.explanation()},
		report.Section{Title: "What the figures rest on", List: r.inputs()},
	)
	return report.WriteSections(w, "Plan of a fleet: "+r.sizes(p.Fleet), lines[0], facts, sections)
}

// note returns the remark of a plot about an estimate, and about the part of the load.
func (r *run) note(part bool) string {
	text := ""
	if part && len(r.part) < len(r.whole) {
		text = fmt.Sprintf("Simulated with %s of the load. ", count(len(r.part), "request"))
	}
	return text + "Step times: " + r.profileOf(r.plan.Fleet).sources() + "."
}

// Units of plots.
const (
	inPercent      = "% of requests within every limit"
	inMilliseconds = "ms"
	clampAt        = 4 // times the limit; larger values are drawn there
)

// goodputLine returns the goodput of rows.
func goodputLine(rows []planner.Row, x func(*planner.Row) float64) report.Line {
	l := report.Line{Name: "goodput"}
	for i := range rows {
		l.X, l.Y = append(l.X, x(&rows[i])), append(l.Y, 100*rows[i].Goodput)
	}
	return l
}

// latencyLines returns latencies of rows, and the limit that they are compared with.
func (r *run) latencyLines(rows []planner.Row, x func(*planner.Row) float64, limit time.Duration, series ...latency) (lines []report.Line, clamped bool) {
	most := planner.Failing
	if limit > 0 {
		most = clampAt * limit
	}
	for _, s := range series {
		l := report.Line{Name: s.name}
		for i := range rows {
			d := s.of(rows[i].Outcome)
			if d > most {
				d, clamped = most, true
			}
			if d != planner.Failing {
				l.X, l.Y = append(l.X, x(&rows[i])), append(l.Y, d.Seconds()*1e3)
			}
		}
		lines = append(lines, l)
	}
	if limit > 0 && len(rows) > 1 {
		y := limit.Seconds() * 1e3
		lines = append(lines, report.Line{Name: "limit", X: []float64{x(&rows[0]), x(&rows[len(rows)-1])}, Y: []float64{y, y}})
	}
	return lines, clamped
}

// latency is one line of a plot of latencies.
type latency struct {
	name string
	of   func(*planner.Outcome) time.Duration
}

var (
	ttfts = []latency{
		{"p50", func(o *planner.Outcome) time.Duration { return o.TTFT.P50 }}, {"p90", func(o *planner.Outcome) time.Duration { return o.TTFT.P90 }}, {"p99", func(o *planner.Outcome) time.Duration { return o.TTFT.P99 }},
	}
	itls = []latency{
		{"TPOT p90", func(o *planner.Outcome) time.Duration { return o.TPOT.P90 }}, {"ITL p50", func(o *planner.Outcome) time.Duration { return o.ITL.P50 }}, {"ITL p99", func(o *planner.Outcome) time.Duration { return o.ITL.P99 }},
	}
)

// limitOf returns the limit of the first objective of the metrics; 0: there is none.
func (r *run) limitOf(of ...planner.Metric) time.Duration {
	for _, g := range r.problem.Objectives {
		if slices.Contains(of, g.Metric) {
			return g.Limit
		}
	}
	return 0
}

// latencyChart returns a plot of latencies.
func (r *run) latencyChart(title, x string, part bool, rows []planner.Row, at func(*planner.Row) float64, limit time.Duration, series []latency) report.Chart {
	lines, clamped := r.latencyLines(rows, at, limit, series...)
	note := r.note(part)
	if clamped {
		note = fmt.Sprintf("Values above %d times the limit are drawn there. ", clampAt) + note
	}
	return report.Chart{Title: title, X: x, Y: inMilliseconds, Note: note, Lines: lines}
}

// growthSection shows the fleet by load.
func (r *run) growthSection() report.Section {
	p := r.plan
	s := report.Section{Title: "If the load grows"}
	if len(p.Growth) < 2 {
		return s
	}
	load := func(row *planner.Row) float64 { return row.Load }
	const x = "factor on the pace of the load"
	s.Text = []string{r.cliff()}
	good := report.Chart{Title: "Goodput by load", X: x, Y: inPercent, Note: r.note(false), Lines: []report.Line{goodputLine(p.Growth, load)}}
	if p.Holds > 0 && p.Fails > p.Holds && len(p.Breaks) > 0 {
		good.Lines = append(good.Lines, report.Line{Name: fmt.Sprintf("fails from here on: %s", p.Breaks[0].Objective), X: []float64{p.Fails, p.Fails}, Y: []float64{0, 100}})
	}
	s.Charts = []report.Chart{good, r.latencyChart("Time to first token by load", x, false, p.Growth, load, r.limitOf(planner.TTFT), ttfts)}
	for _, b := range p.Breaks {
		s.List = append(s.List, fmt.Sprintf("%s fails from %.2f times this pace on: %s.", b.Objective, b.Load, b.Cause))
	}
	return s
}

// gridSection shows fleets with other numbers of nodes.
func (r *run) gridSection() report.Section {
	p := r.plan
	f := p.Fleet
	s := report.Section{Title: "With other numbers of nodes"}
	if len(p.Grid) == 0 {
		return s
	}
	if f.Prefill > 0 {
		s.Grids = []report.Grid{r.heatMap()}
	}
	pick := func(same func(*planner.Row) bool) (rows []planner.Row) {
		for i := range p.Grid {
			if same(&p.Grid[i]) {
				rows = append(rows, p.Grid[i])
			}
		}
		return rows
	}
	prefill := func(row *planner.Row) float64 { return float64(row.Prefill) }
	decode := func(row *planner.Row) float64 { return float64(row.Decode) }
	byPrefill := pick(func(row *planner.Row) bool { return row.Decode == f.Decode })
	byDecode := pick(func(row *planner.Row) bool { return row.Prefill == f.Prefill })
	if f.Prefill > 0 {
		s.Charts = append(s.Charts, r.latencyChart(fmt.Sprintf("Time to first token by prefill nodes, with %s", count(f.Decode, "decode node")), "prefill nodes", true, byPrefill, prefill, r.limitOf(planner.TTFT), ttfts))
	} else {
		s.Charts = append(s.Charts, r.latencyChart("Time to first token by nodes", "nodes", true, byDecode, decode, r.limitOf(planner.TTFT), ttfts))
	}
	title, x := "Time between tokens by nodes", "nodes"
	if f.Prefill > 0 {
		title, x = fmt.Sprintf("Time between tokens by decode nodes, with %s", count(f.Prefill, "prefill node")), "decode nodes"
	}
	s.Charts = append(s.Charts, r.latencyChart(title, x, true, byDecode, decode, r.limitOf(planner.TPOT, planner.ITL), itls))
	return s
}

// heatMap returns the goodput by the numbers of prefill and decode nodes.
func (r *run) heatMap() report.Grid {
	p := r.plan
	g := report.Grid{Title: "Goodput by the numbers of nodes", X: "decode nodes", Y: "prefill nodes",
		Note: "Green fleets meet every objective, red ones fail. The framed one is the plan. Fleets on a diagonal have the same number of nodes. " + r.note(true)}
	var rows, columns []int
	for i := range p.Grid {
		rows, columns = append(rows, p.Grid[i].Prefill), append(columns, p.Grid[i].Decode)
	}
	for _, list := range []*[]int{&rows, &columns} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	for _, d := range columns {
		g.Columns = append(g.Columns, fmt.Sprint(d))
	}
	for _, n := range rows {
		g.Rows = append(g.Rows, fmt.Sprint(n))
		line := make([]report.Cell, len(columns))
		for i := range p.Grid {
			row := &p.Grid[i]
			if row.Prefill != n {
				continue
			}
			small := count(r.gpus(row.Fleet), "GPU")
			if r.problem.Priced() {
				small = fmt.Sprintf("$%.2f/h", row.Price)
			}
			strength := row.Goodput
			if !row.Meets {
				strength = 1 - row.Goodput
			}
			line[slices.Index(columns, row.Decode)] = report.Cell{Text: fmt.Sprintf("%.1f %%", 100*row.Goodput), Small: small, Good: row.Meets, Value: strength, Marked: row.Fleet == p.Fleet}
		}
		g.Cells = append(g.Cells, line)
	}
	return g
}

// errorSection shows what other step times and prefixes than assumed do.
func (r *run) errorSection() report.Section {
	p := r.plan
	s := report.Section{Title: "If the figures are wrong"}
	if r.estimated(p.Fleet) {
		s.Text = []string{r.doubt()}
	} else if p.Slow > 0 {
		s.Text = []string{fmt.Sprintf("The plan holds while steps take at most %.2f times as long as in the profile.", cmp.Or(p.Slow, 1))}
	}
	if len(p.Steps) > 0 {
		s.Charts = append(s.Charts, report.Chart{Title: "Goodput by the duration of steps", X: "factor on the profile's step times", Y: inPercent, Note: r.note(true),
			Lines: []report.Line{goodputLine(p.Steps, func(row *planner.Row) float64 { return row.Slow })}})
	}
	if len(p.Prefixes) > 0 {
		s.Charts = append(s.Charts, report.Chart{Title: "Goodput by shared beginnings of prompts", X: "% of requests that share as in the load", Y: inPercent,
			Note:  "At 0 no prompt begins as another one does, so that prefix caches have nothing. " + r.note(true),
			Lines: []report.Line{goodputLine(p.Prefixes, func(row *planner.Row) float64 { return 100 * (1 - row.Unshared) })}})
	}
	return s
}
