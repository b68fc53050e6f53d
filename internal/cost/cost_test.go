package cost

import (
	"fmt"
	"math"
	"testing"
)

// digits formats a price with three significant digits.
func digits(v float64) string { return fmt.Sprintf("%.3g", v) }

// Worked numbers of fleets that serve the Mooncake conversation trace at three times its pace.
func TestFleets(t *testing.T) {
	const in, out = 122_811, 3_496
	for _, c := range []struct {
		name                                            string
		f                                               Fleet
		hourly, blended, input, output, all, good, year string
	}{
		{"5P6D H100", Fleet{Prefill: 5 * 2.99, Decode: 6 * 2.99, In: in, Out: out, Good: .946}, "32.9", "0.0723", "0.0338", "1.43", "2.61", "0.0765", "2.4e+04"},
		{"8 H100", Fleet{Decode: 8 * 2.99, In: in, Out: out, Good: .878}, "23.9", "0.0526", "0.0526", "0.0526", "1.9", "0.0599", "1.75e+04"},
		{"4P3D H200", Fleet{Prefill: 4 * 3.80, Decode: 3 * 3.80, In: in, Out: out, Good: .918}, "26.6", "0.0585", "0.0344", "0.906", "2.11", "0.0637", "1.94e+04"},
	} {
		got := []string{digits(c.f.Hourly()), digits(c.f.Blended()), digits(c.f.Input()), digits(c.f.Output()), digits(c.f.AllOnOutput()), digits(c.f.GoodTokens()), digits(c.f.Monthly())}
		want := []string{c.hourly, c.blended, c.input, c.output, c.all, c.good, c.year}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", c.name, got, want)
		}
	}
	if h := fmt.Sprintf("%.2f", (Fleet{Prefill: 5 * 2.99, Decode: 6 * 2.99}).Hourly()); h != "32.89" {
		t.Errorf("5P6D costs %s an hour, want 32.89", h)
	}
}

// The pools' prices add up to the whole, and an overhead counts in each.
func TestParts(t *testing.T) {
	f := Fleet{Prefill: 10, Decode: 30, Overhead: .1, In: 1e5, Out: 2e3, Cached: 3e4, ReadCost: .02, Requests: 8, Good: .9}
	for _, c := range []struct {
		what      string
		got, want float64
	}{
		{"hourly", f.Hourly(), 44},
		{"an hour's tokens by pool", f.Of(1e5*3600, 2e3*3600), 44},
		{"a cached token", f.CachedInput(), .02 * f.Input()},
		{"a thousand requests", f.PerThousandRequests(), 44.0 / 3600 * 1000 / 8},
		{"the idle share", f.Idle(.6), 44 * .4},
		{"break-even tokens, at the API's prices", f.BreakEven(.5, 1.5) / 1e6 * (.5*1e5 + 1.5*2e3) / (1e5 + 2e3), 44 * HoursPerMonth},
	} {
		if math.Abs(c.got-c.want) > 1e-9*math.Abs(c.want) {
			t.Errorf("%s: %g, want %g", c.what, c.got, c.want)
		}
	}
	colocated := Fleet{Decode: 40, In: 1e5, Out: 2e3}
	if colocated.Input() != colocated.Blended() || colocated.Output() != colocated.Blended() {
		t.Error("colocated nodes have one price")
	}
}

// An H100 server of 8 GPUs for $280,000 over 4 years at 95 %, 10.2 kW, PUE 1.3, $0.12 a kWh and $2
// an hour for its place: 8.41 + 1.59 + 2.
func TestOnPremises(t *testing.T) {
	m := Machine{Capex: 280_000, Years: 4, Availability: .95, Watts: 10_200, PUE: 1.3, PerKWh: .12, Ops: 2}
	if got := digits(m.PerHour()); got != "12" {
		t.Errorf("an hour costs %s", got)
	}
	if got := digits(m.PerHour() / 8); got != "1.5" {
		t.Errorf("a GPU's hour costs %s", got)
	}
	if got := digits(Machine{Watts: 700, PUE: 1.2, PerKWh: .1}.PerHour()); got != "0.084" {
		t.Errorf("a machine that is paid costs %s an hour", got)
	}
}

// No figure is NaN or infinite, whatever is missing.
func TestNothing(t *testing.T) {
	for _, f := range []Fleet{{}, {Prefill: 1, Decode: 1}, {In: 1}, {Out: 1, Decode: math.MaxFloat64}} {
		for i, v := range []float64{f.Blended(), f.Input(), f.Output(), f.AllOnOutput(), f.CachedInput(), f.GoodTokens(), f.PerThousandRequests(), f.BreakEven(0, 0), Machine{}.PerHour()} {
			if math.IsNaN(v) || math.IsInf(v, 0) {
				t.Errorf("%+v: figure %d is %g", f, i, v)
			}
		}
	}
}
