package scheduler

import "testing"

// A prefill node has nothing but jobs, and none of them ever loses what it has
// computed, whatever is pinned, shared, aborted or of a better priority: a job is
// let in when all of it fits beside what those before it still need, or alone, and a
// step leaves at most one in its middle. So nobody who ranks behind another has
// blocks to give when that one runs out. The same load with output does preempt.
func TestJobsAloneLoseNothing(t *testing.T) {
	const seeds = 120
	lost := map[bool]uint64{}
	n := counts{}
	short := 0 // steps in which a job got less than the step had left
	for _, jobs := range []bool{true, false} {
		for seed := range uint64(seeds) {
			m, err := newSim(seed, 0, n)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			m.jobs = jobs
			for range 120 {
				if m.rng.IntN(5) < 2 {
					err = m.step()
				} else {
					err = m.event()
				}
				if err != nil {
					t.Fatalf("seed %d, jobs %v: %v", seed, jobs, err)
				}
				middle := 0
				for _, r := range m.s.running {
					if r.holds() > 0 {
						middle++
					}
				}
				if jobs && middle > 1 {
					t.Fatalf("seed %d: %d jobs are in their middle", seed, middle)
				}
				if jobs && middle == 1 && m.s.pool.Available() == 0 {
					short++
				}
			}
			if lost[jobs] += m.s.Stats().Preemptions; jobs && lost[jobs] > 0 {
				t.Fatalf("seed %d: a job lost its KV", seed)
			}
		}
	}
	t.Logf("%d steps with no block left, with output %d preemptions", short, lost[false])
	if short < seeds/10 || lost[false] < seeds/10 {
		t.Errorf("%d steps had no block left, with output %d preemptions: the load presses no more", short, lost[false])
	}
}
