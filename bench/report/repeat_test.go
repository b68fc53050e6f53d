package report

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
)

// pointOf is a run whose only request had its first token after d.
func pointOf(server string, rate float64, d time.Duration) Point {
	rec := &load.Record{Outcomes: []load.Outcome{{First: d, Last: d, Chunks: 1}}, Duration: d}
	s := Summarize(rec, Options{Percentiles: []float64{99}}, func(int) int { return 1 }, func(int) int { return 1 })
	return Point{Server: server, Rate: rate, Summary: s}
}

// Repeated runs are reported as their median and range. They differ clearly only if all
// runs of one side do, and the middle one represents them.
func TestRepeatedRuns(t *testing.T) {
	ttft := func(p *Point) float64 { return p.Summary.quantile("ttft", 50) }
	var points []Point
	for _, ms := range []time.Duration{30, 10, 20} {
		points = append(points, pointOf("a", 1, ms*time.Millisecond), pointOf("b", 1, (ms+15)*time.Millisecond), pointOf("c", 1, (ms+100)*time.Millisecond))
	}
	points = append(points, pointOf("a", math.Inf(1), 5*time.Millisecond))
	all := loads(pointers(points))
	if len(all) != 4 || len(all[0]) != 3 || len(all[3]) != 1 {
		t.Fatalf("%d loads", len(all))
	}
	if median, low, high := all[0].figure(ttft); median != 20 || low != 10 || high != 30 {
		t.Errorf("%g, %g to %g", median, low, high)
	}
	if p := all[0].representative(); p != all[0][2] {
		t.Errorf("the middle one is %+v", p)
	}
	if cell := all[0].cell(ttft); cell != "20<br><small>10 – 30</small>" {
		t.Error(cell)
	}
	if cell := all[3].cell(ttft); cell != "5" {
		t.Error(cell)
	}
	if cell := contestCell(all[0], all[1], ttft, -1); strings.Contains(cell, "class") {
		t.Errorf("ahead although they overlap: %s", cell)
	}
	if cell := contestCell(all[0], all[2], ttft, -1); !strings.Contains(cell, "ahead") {
		t.Errorf("not ahead although all are: %s", cell)
	}
	if cell := contestCell(all[2], all[0], ttft, -1); !strings.Contains(cell, "behind") {
		t.Errorf("not behind although all are: %s", cell)
	}
}
