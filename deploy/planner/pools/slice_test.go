package pools

import (
	"math"
	"testing"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/deploy/planner"
)

// A slice has at most sliceNodes nodes, and its pools the fleet's proportions and their part of the
// load within half a percent. Small fleets and loads with much in common are simulated whole.
func TestSlice(t *testing.T) {
	r := &run{sliced: true}
	for _, f := range []planner.Fleet{{Decode: 475}, {Decode: 129}, {Prefill: 150, Decode: 325}, {Prefill: 149, Decode: 325}, {Prefill: 40, Decode: 90}, {Prefill: 3000, Decode: 7000}, {Prefill: 301, Decode: 97}} {
		p, d, share := r.slice(f)
		if p+d > sliceNodes || p+d < sliceNodes/2 || (p == 0) != (f.Prefill == 0) {
			t.Errorf("%s: a slice of %d and %d nodes", f.Size(), p, d)
		}
		for _, n := range [][2]int{{p, f.Prefill}, {d, f.Decode}} {
			if n[1] > 0 && math.Abs(float64(n[0])/float64(n[1])/share-1) > .005 {
				t.Errorf("%s: %d of %d nodes for %.4f of the load", f.Size(), n[0], n[1], share)
			}
		}
	}
	for _, f := range []planner.Fleet{{Decode: 128}, {Prefill: 100, Decode: 28}} {
		if p, d, share := r.slice(f); p != f.Prefill || d != f.Decode || share != 1 {
			t.Errorf("%s: %d and %d nodes, %g of the load", f.Size(), p, d, share)
		}
	}
	r.sliced = false
	if _, d, share := r.slice(planner.Fleet{Decode: 900}); d != 900 || share != 1 {
		t.Errorf("%d nodes for %g of a load with much in common", d, share)
	}
}

// A thinned Poisson process is one: the times between its requests vary as much as their mean.
func TestThinned(t *testing.T) {
	load, err := sim.ParseLoad("rps=100,n=20000,in=100,out=10")
	if err != nil {
		t.Fatal(err)
	}
	trace, err := load.Trace(1)
	if err != nil {
		t.Fatal(err)
	}
	for _, share := range []float64{.1, .5, .9} {
		list := thinned(trace, share)
		if got := float64(len(list)) / float64(len(trace)); math.Abs(got-share) > .01 {
			t.Errorf("%g of the requests, want %g", got, share)
		}
		var sum, square float64
		for i := range list[1:] {
			gap := (list[i+1].At - list[i].At).Seconds()
			sum, square = sum+gap, square+gap*gap
		}
		n := float64(len(list) - 1)
		if variation := square/n/(sum/n*sum/n) - 1; math.Abs(variation-1) > .1 {
			t.Errorf("%g of the requests: squared coefficient of variation %.2f, want 1", share, variation)
		}
	}
	if list := thinned(trace[:1], .001); len(list) != 1 {
		t.Errorf("%d requests", len(list))
	}
}

// A slice of a fleet has the fleet's figures.
func TestSliceIsAsTheFleet(t *testing.T) {
	o := options()
	o.Loads = []string{"rps=1100,n=5000,in=lognormal(7,0.8),out=20-60"}
	r := &run{Options: &o, longer: 1}
	if err := r.prepare(); err != nil {
		t.Fatal(err)
	}
	c := planner.Case{Fleet: planner.Fleet{Prefill: 96, Decode: 64, Settings: r.problem.Settings[0]}, Load: 1, Slow: 1}
	if !r.sliced {
		t.Fatal("the load is not sliced")
	}
	slice, err := r.one(c)
	if err != nil {
		t.Fatal(err)
	}
	r.sliced = false
	whole, err := r.one(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("note: slice %+v, fleet %+v", slice, whole)
	for _, v := range []struct {
		name      string
		got, want float64
		within    float64
	}{
		{"TTFT p50", slice.TTFT.P50.Seconds(), whole.TTFT.P50.Seconds(), .1}, {"TTFT p90", slice.TTFT.P90.Seconds(), whole.TTFT.P90.Seconds(), .1},
		{"TPOT p90", slice.TPOT.P90.Seconds(), whole.TPOT.P90.Seconds(), .1}, {"goodput", slice.Goodput, whole.Goodput, .01},
		{"prefill busy", slice.PrefillBusy, whole.PrefillBusy, .05}, {"decode busy", slice.DecodeBusy, whole.DecodeBusy, .05},
		{"input", slice.Input, whole.Input, .05}, {"output", slice.Output, whole.Output, .05}, {"rate", slice.RequestRate, whole.RequestRate, .05},
	} {
		if math.Abs(v.got-v.want) > v.within*v.want {
			t.Errorf("%s: %g, of the whole fleet %g", v.name, v.got, v.want)
		}
	}
}
