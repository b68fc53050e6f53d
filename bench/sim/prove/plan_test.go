package prove

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/deploy/planner/pools"
	"github.com/tandem-serving/tandem/internal/cost"
)

// plan is the part of the JSON of tandem plan pools that is proven.
type plan struct {
	Fleet      plannedFleet `json:"fleet"`
	Meets      bool         `json:"meets_objectives"`
	Neighbours []plannedFleet
	Objectives []struct {
		Metric     string
		Percentile float64
		Limit      float64 `json:"limit_ms"`
		Value      float64 `json:"value_ms"`
	}
}

type plannedFleet struct {
	Name            string
	Prefill, Decode int
	Meets           bool `json:"meets_objectives"`
}

// The real roles in virtual time meet the objectives of the fleet that was planned. With one node
// less, of the pool that the plan says so of, they fail.
func TestVirtualPlan(t *testing.T) {
	s := newSleepers(t, 1, 1, 1, 1)
	file := filepath.Join(t.TempDir(), "node.yaml")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.profile.Write(f), f.Close()); err != nil {
		t.Fatal(err)
	}
	const spec, seed = "rps=100,n=250,in=lognormal(6.5,0.8),out=50-150", 5
	o := pools.Options{
		Profiles: []string{file}, Loads: []string{spec}, Growth: 1, Seed: seed, TTFT: "p90=120ms", TPOT: "p90=8600us", Shape: "pools", MaxNodes: 12, Budget: 6_000,
		BatchedTokens: []int{s.batched}, MaxSeqs: s.seqs, MinRemote: []int{16}, Gateways: 1, Workers: 1, JSON: true, Machine: cost.Machine{Years: 4, Availability: .95, PUE: 1.3},
	}
	var out bytes.Buffer
	if err := pools.Run(&o, &out); err != nil {
		t.Fatal(err)
	}
	var p plan
	if err := json.Unmarshal(out.Bytes(), &p); err != nil || !p.Meets {
		t.Fatal(err, p)
	}
	l, err := sim.ParseLoad(spec)
	if err != nil {
		t.Fatal(err)
	}
	if s.trace, err = l.Trace(seed); err != nil {
		t.Fatal(err)
	}
	s.prompts = Tokens(s.trace, sleepVocab)
	meets := func(f plannedFleet) bool {
		s.prefill, s.decode = f.Prefill, f.Decode
		rec, met := s.play(t), true
		for _, g := range p.Objectives {
			v := measured(rec, g.Metric, g.Percentile)
			t.Logf("%s, %dP%dD: %s p%g %.1f ms, limit %.1f", f.Name, f.Prefill, f.Decode, g.Metric, g.Percentile, v, g.Limit)
			met = met && v <= g.Limit
		}
		return met
	}
	if !meets(p.Fleet) {
		t.Error("the planned fleet fails")
	}
	var fewer []string
	for _, f := range p.Neighbours {
		if f.Meets || f.Prefill+f.Decode >= p.Fleet.Prefill+p.Fleet.Decode {
			continue
		}
		if fewer = append(fewer, f.Name); meets(f) {
			t.Errorf("%s: %dP%dD meets the objectives", f.Name, f.Prefill, f.Decode)
		}
	}
	if len(fewer) != 2 {
		t.Errorf("the plan says that fleets with a node less fail: %q, want one of each pool", fewer)
	}
}

// measured returns a percentile of a latency in milliseconds.
func measured(rec *load.Record, metric string, percentile float64) float64 {
	o := report.Options{Metrics: []string{metric}, Percentiles: []float64{percentile}, RequestRate: math.Inf(1)}
	s := report.Summarize(rec, o, func(i int) int { return rec.Outcomes[i].Prompt }, func(i int) int { return rec.Outcomes[i].Output })
	return s.Stats[metric].Percentiles[0]
}
