package simulate

import (
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
)

// kept is what a simulation keeps until its report is written.
type kept struct {
	*run
	*fleet.Result
	*report.Summary
}

// memory returns the bytes that a simulation keeps, and those that its report allocates.
func memory(t *testing.T, o *Options) (keeps, allocates int) {
	t.Helper()
	live := func() (m runtime.MemStats) {
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m
	}
	before := live()
	k := kept{run: &run{Options: o}}
	if err := k.prepare(); err != nil {
		t.Fatal(err)
	}
	var err error
	if k.Result, err = fleet.Run(k.trace, k.fleet); err != nil {
		t.Fatal(err)
	}
	simulated := live()
	k.Summary = k.summarize(k.Result)
	after := live()
	runtime.KeepAlive(k)
	return int(after.HeapAlloc) - int(before.HeapAlloc), int(after.TotalAlloc) - int(simulated.TotalAlloc)
}

// A simulation keeps so many bytes for a request and for a token of its answer, whose times the
// percentiles need, and its report allocates as much again.
func TestBytesOfARequest(t *testing.T) {
	const (
		ofRequest = 680
		ofToken   = 9
	)
	of := func(requests, output string) (keeps, allocates int) {
		o := options()
		o.Load = "rps=30,n=" + requests + ",in=16,out=" + output
		return memory(t, &o)
	}
	of("100", "2") // what is made once
	for _, c := range []struct {
		output string
		tokens int
	}{{"2", 2}, {"120", 120}} {
		few, fewReport := of("500", c.output)
		many, manyReport := of("4500", c.output)
		most := ofRequest + ofToken*c.tokens
		perRequest, perReport := (many-few)/4000, (manyReport-fewReport)/4000
		t.Logf("%d tokens: %d bytes for a request, %d for its report", c.tokens, perRequest, perReport)
		if perRequest > most || perReport > most {
			t.Errorf("a request with %d tokens keeps %d bytes, and its report allocates %d: want at most %d", c.tokens, perRequest, perReport, most)
		}
	}
}

// The heap next to many pools has little garbage, and the setting is that of before after the run.
func TestGarbageIsBounded(t *testing.T) {
	old := debug.SetGCPercent(80)
	defer debug.SetGCPercent(old)
	percent := func() int {
		p := debug.SetGCPercent(100)
		debug.SetGCPercent(p)
		return p
	}
	for _, c := range []struct{ nodes, blocks, want int }{{4, 1000, 80}, {1000, 2000, 80}, {1000, 28_000, 12}, {10_000, 28_000, 5}} {
		r := &run{Options: &Options{}, fleet: fleet.Options{Prefill: c.nodes / 4, Decode: c.nodes - c.nodes/4, Blocks: c.blocks}}
		end := r.boundGarbage()
		if got := percent(); got != c.want {
			t.Errorf("%d nodes of %d blocks: the heap grows by %d %%, want %d", c.nodes, c.blocks, got, c.want)
		}
		if end(); percent() != 80 {
			t.Errorf("the heap grows by %d %% after the run, want 80", percent())
		}
	}
}
