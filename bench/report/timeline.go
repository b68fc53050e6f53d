package report

import (
	"fmt"
	"html"
	"io"
	"math"
	"strings"
	"time"
)

// Bounds of a timeline's page.
const (
	timelineRows   = 400  // requests that are drawn, evenly chosen
	timelineWidth  = 1100 // pixels for the run
	timelineHeight = 6    // pixels of a row
	timelineEdge   = 24   // pixels above and below the rows, for the axis
)

// Colours of a request's parts: until its first token, and gaps by their length.
const (
	waitColour = "#9aa7b1"
	lowColour  = "#2e8540"
	midColour  = "#e6a23c"
	highColour = "#c62828"
)

// WriteTimeline draws each request as a row from its sending to its last chunk: grey until
// the first token, then its gaps: green below low, red from high on and orange between.
func WriteTimeline(w io.Writer, s *Summary, low, high time.Duration) error {
	last := time.Duration(1)
	for _, r := range s.Requests {
		last = max(last, r.Outcome.Last)
	}
	step := roundStep(last.Seconds() / 10)
	ticks := int(math.Ceil(last.Seconds()/step*(1-1e-9))) + 1
	scale := timelineWidth / (step * float64(ticks-1))
	every := len(s.Requests)/timelineRows + 1
	var b strings.Builder
	rows := 0
	for i := 0; i < len(s.Requests); i += every {
		o := s.Requests[i].Outcome
		if o.Err != nil {
			continue
		}
		y := rows * timelineHeight
		rows++
		part := func(from, to time.Duration, colour string) {
			fmt.Fprintf(&b, `<path d="M%.1f %dH%.1f" stroke="%s"/>`, from.Seconds()*scale, y, max(to.Seconds()*scale, from.Seconds()*scale+0.1), colour)
		}
		fmt.Fprintf(&b, "<g><title>Request %d: sent at %.3f s, first token after %s ms, %d output tokens in %s ms</title>",
			i+1, o.Sent.Seconds(), Figure(ms(o.TTFT())), s.Requests[i].Output, Figure(ms(o.Last-o.Sent)))
		part(o.Sent, o.First, waitColour)
		// Neighbours of one colour are one line.
		at, from, colour := o.First, o.First, ""
		for _, gap := range o.ITL {
			c := midColour
			if gap < low {
				c = lowColour
			} else if gap >= high {
				c = highColour
			}
			if c != colour && colour != "" {
				part(from, at, colour)
				from = at
			}
			colour = c
			at += gap
		}
		if colour != "" {
			part(from, at, colour)
		}
		b.WriteString("</g>\n")
	}
	var axis strings.Builder
	for i := range ticks {
		x, label := float64(i)*step*scale, Figure(float64(i)*step)
		anchor := "middle"
		switch i {
		case 0:
			anchor = "start"
		case ticks - 1:
			anchor, label = "end", label+" s"
		}
		fmt.Fprintf(&axis, `<line class="grid" x1="%.1f" x2="%.1f" y1="-6" y2="%d"/>`, x, x, rows*timelineHeight)
		for _, y := range []int{-10, rows*timelineHeight + 14} {
			fmt.Fprintf(&axis, `<text x="%.1f" y="%d" text-anchor="%s">%s</text>`, x, y, anchor, label)
		}
	}
	_, err := fmt.Fprintf(w, `<!doctype html><html lang="en"><meta charset="utf-8"><title>Timeline</title><style>%s path{stroke-width:4}</style><h1>Timeline</h1>
<p>%d of %d requests over %.1f s: a row each, in the order of their start; the axis is the time since the run's start. Grey: to the first token. Gaps between tokens: <span style="color:%s">below %v</span>, <span style="color:%s">between</span>, <span style="color:%s">%v or more</span>.</p>
<svg viewBox="0 %d %d %d" role="img">%s%s</svg></html>
`, style, rows, len(s.Requests), last.Seconds(), lowColour, low, midColour, highColour, high, -timelineEdge, timelineWidth, rows*timelineHeight+2*timelineEdge, axis.String(), b.String())
	return err
}

// lengthBins is the number of bins of the lengths.
const lengthBins = 40

// WriteLengths draws the lengths of prompts and outputs.
func WriteLengths(w io.Writer, s *Summary) error {
	histogram := func(title string, of func(*Request) int) plotted {
		p := plotted{title: title, x: "tokens", y: "requests"}
		low, high := math.MaxInt, 0
		for i := range s.Requests {
			if s.Requests[i].Outcome.Err == nil {
				low, high = min(low, of(&s.Requests[i])), max(high, of(&s.Requests[i]))
			}
		}
		if low > high {
			return p
		}
		width := max(1, (high-low+lengthBins)/lengthBins)
		counts := make([]float64, (high-low)/width+1)
		for i := range s.Requests {
			if s.Requests[i].Outcome.Err == nil {
				counts[(of(&s.Requests[i])-low)/width]++
			}
		}
		line := series{name: fmt.Sprintf("%d to %d tokens, in steps of %d", low, high, width)}
		for i, n := range counts { // steps, drawn as a line
			from, to := float64(low+i*width), float64(low+(i+1)*width)
			line.x, line.y = append(line.x, from, from, to, to), append(line.y, 0, n, n, 0)
		}
		p.all = []series{line}
		return p
	}
	in := histogram("Prompts", func(r *Request) int { return r.Input })
	out := histogram("Outputs", func(r *Request) int { return r.Output })
	_, err := fmt.Fprintf(w, `<!doctype html><html lang="en"><meta charset="utf-8"><title>%s</title><style>%s</style><h1>Lengths</h1><main>%s%s</main></html>
`, html.EscapeString("Lengths of prompts and outputs"), style, in.svg(), out.svg())
	return err
}
