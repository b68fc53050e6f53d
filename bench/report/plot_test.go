package report

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
)

func TestFigureText(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 1: "1", 12.345678: "12.35", 0.063074: "0.06307", 999.96: "1,000", 1234.4: "1,234", 12345678: "12,345,678", 100000: "100,000",
		-1234.5: "-1,234", -123: "-123", -0.00001234: "-0.00001234", 2.5: "2.5", 1e-15: "0", -1e-15: "0", math.Inf(1): "+Inf",
	} {
		if got := Figure(v); got != want {
			t.Errorf("%v is %q, want %q", v, got, want)
		}
	}
}

// A linear axis has three to six ticks at round values, from 0 to just beyond the values.
func TestRoundTicks(t *testing.T) {
	for high := 1e-4; high < 1e9; high *= 1.07 {
		a := newAxis(false, func(s *series) []float64 { return s.x }, []series{{x: []float64{high / 3, high}}})
		ticks := a.ticks()
		if n := len(ticks); n < 3 || n > 6 || a.high < high || a.high > 1.5*high || math.Abs(ticks[n-1]-a.high) > 1e-9*a.high {
			t.Fatalf("to %v: %v, up to %v", high, ticks, a.high)
		}
		if m := strings.TrimLeft(strings.ReplaceAll(fmt.Sprintf("%.3e", a.step), ".", ""), "0")[:3]; m != "100" && m != "200" && m != "250" && m != "500" {
			t.Fatalf("to %v: steps of %v", high, a.step)
		}
	}
}

// A timeline has an axis with round seconds that ends beyond the last token, and tells what a row is.
func TestTimelineAxis(t *testing.T) {
	s := &Summary{}
	for i := range 3 {
		at := time.Duration(i) * time.Second
		s.Requests = append(s.Requests, Request{Output: 3, Outcome: &load.Outcome{
			Sent: at, First: at + 100*time.Millisecond, Last: at + 300*time.Millisecond, ITL: []time.Duration{100 * time.Millisecond, 100 * time.Millisecond},
		}})
	}
	var b strings.Builder
	if err := WriteTimeline(&b, s, 25*time.Millisecond, 50*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	var last float64
	for _, m := range regexp.MustCompile(`<text x="([\d.]+)" y="-10"[^>]*>([\d.]+)( s)?<`).FindAllStringSubmatch(page, -1) {
		x, _ := strconv.ParseFloat(m[1], 64)
		v, _ := strconv.ParseFloat(m[2], 64)
		if math.Abs(x-v/2.5*timelineWidth) > 0.1 {
			t.Errorf("%v s is at %v", v, x)
		}
		last = v
	}
	if last != 2.5 || !strings.Contains(page, "<title>Request 2: sent at 1.000 s, first token after 100 ms, 3 output tokens in 300 ms</title>") {
		t.Errorf("the axis ends at %v: %s", last, page)
	}
}
