// Package prove compares simulated fleets with real ones on the same trace: it makes the prompts of
// a trace, predicts what clients measure, and sets the figures side by side.
//
// Invariant: both sides' figures are computed by bench/report from outcomes of the same requests,
// so that no definition differs.
//
// The package starts no fleet and sends nothing.
package prove

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
)

// Tokens returns the prompts of a trace, of token ids below vocab. Blocks with equal ids have equal
// tokens.
func Tokens(trace []sim.Request, vocab int) [][]int32 {
	prompts := make([][]int32, len(trace))
	for i := range trace {
		q := &trace[i]
		size := q.IDTokens()
		prompt := make([]int32, q.Tokens)
		for at := range prompt {
			x := uint64(at % size)
			if at/size < len(q.Blocks) { // others are equal in all prompts
				x += uint64(q.Blocks[at/size]) * 0x9e3779b97f4a7c15
			}
			x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
			x = (x ^ x>>27) * 0x94d049bb133111eb
			prompt[at] = int32((x ^ x>>31) % uint64(vocab))
		}
		prompts[i] = prompt
	}
	return prompts
}

// Keys returns the ring keys by which a gateway places the prompts of a model with a fingerprint.
func Keys(prompts [][]int32, fingerprint uint64, blockTokens int) []kvcache.Hash {
	root := kvcache.Root(strconv.FormatUint(fingerprint, 16), "", "")
	keys := make([]kvcache.Hash, len(prompts))
	for i, p := range prompts {
		keys[i] = route.Key(root, kvcache.AppendHashes(nil, root, p, blockTokens), p)
	}
	return keys
}

// Capacity returns the requests per second that a fleet finishes while all of the trace's requests
// are there.
func Capacity(trace []sim.Request, o fleet.Options) (float64, error) {
	now := make([]sim.Request, len(trace))
	for i := range trace {
		now[i] = trace[i]
		now[i].At = 0
	}
	o.Limits, o.Speedup = nil, 0
	r, err := fleet.Run(now, o)
	if err != nil {
		return 0, err
	}
	return float64(len(trace)) / r.Span.Seconds(), nil
}

// Goals are the objectives of a good request.
type Goals = fleet.Goals

// percentiles are those of Figures.
var percentiles = []float64{50, 90, 99}

// Summarize computes the figures of outcomes.
func Summarize(rec *load.Record, g Goals) *report.Summary {
	o := report.Options{Metrics: []string{"ttft", "itl"}, Percentiles: percentiles, RequestRate: math.Inf(1),
		Goodput: map[string]float64{"ttft": g.TTFT.Seconds() * 1e3, "tpot": g.TPOT.Seconds() * 1e3}}
	return report.Summarize(rec, o, func(i int) int { return rec.Outcomes[i].Prompt }, func(i int) int { return rec.Outcomes[i].Output })
}

// Figure is a predicted figure next to the measured one.
type Figure struct {
	Name                string
	Predicted, Measured float64 // in milliseconds; goodput in percent
	Bound               float64 // largest relative error, or points of goodput over 100; 0: none
	share               bool
}

// Error returns the relative error of the prediction, or for goodput the difference in points over
// 100.
func (f *Figure) Error() float64 {
	switch {
	case f.share:
		return (f.Predicted - f.Measured) / 100
	case f.Predicted == f.Measured:
		return 0
	}
	return f.Predicted/f.Measured - 1
}

// Within reports whether the error is within the bound.
func (f *Figure) Within() bool { return f.Bound == 0 || math.Abs(f.Error()) <= f.Bound }

// Bounds are the largest errors of the figures; 0: none.
type Bounds struct{ P50, P90, P99, Goodput float64 }

// Compare sets the figures of both sides next to each other.
func Compare(predicted, measured *report.Summary, b Bounds) (figures []Figure) {
	bounds := []float64{b.P50, b.P90, b.P99}
	for _, key := range []string{"ttft", "itl"} {
		p, m := predicted.Stats[key], measured.Stats[key]
		for i, at := range percentiles {
			figures = append(figures, Figure{Name: fmt.Sprintf("%s p%g ms", report.MetricName(key), at), Predicted: p.Percentiles[i], Measured: m.Percentiles[i], Bound: bounds[i]})
		}
	}
	goodput := func(s *report.Summary) float64 { return 100 * float64(s.Good) / float64(max(1, s.Completed+s.Failed)) }
	return append(figures, Figure{Name: "goodput %", Predicted: goodput(predicted), Measured: goodput(measured), Bound: b.Goodput, share: true})
}

// TableHead is the head of a Markdown table with the rows of WriteRows.
const TableHead = "| run | figure | predicted | measured | error | bound |\n|---|---|---|---|---|---|\n"

// WriteRows writes the rows of a run. Errors beyond their bounds are bold.
func WriteRows(w io.Writer, run string, figures []Figure) error {
	for i := range figures {
		f := &figures[i]
		unit, text := " %", "" // of the error
		if f.share {
			unit = " points"
		}
		if text = fmt.Sprintf("%+.1f%s", 100*f.Error(), unit); !f.Within() {
			text = "**" + text + "**"
		}
		bound := ""
		if f.Bound > 0 {
			bound = fmt.Sprintf("%.0f%s", 100*f.Bound, unit)
		}
		if _, err := fmt.Fprintf(w, "| %s | %s | %.2f | %.2f | %s | %s |\n", run, f.Name, f.Predicted, f.Measured, text, bound); err != nil {
			return err
		}
	}
	return nil
}

// Pace returns the trace with its arrivals at another rate, in requests per second.
func Pace(trace []sim.Request, rate float64) []sim.Request {
	span := trace[len(trace)-1].At.Seconds()
	paced := make([]sim.Request, len(trace))
	for i := range trace {
		paced[i] = trace[i]
		paced[i].At = time.Duration(float64(trace[i].At) * float64(len(trace)) / rate / span)
	}
	return paced
}
