package scheduler

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// A prefill node only has jobs and requests for vectors, and none of them ever loses what it has
// computed, whatever is pinned, shared, aborted or of a better priority. A job is admitted if all of
// it fits in addition to what running jobs still need, or if it is alone. So no job runs out of
// blocks. By arrival a step leaves at most one job incomplete. A random order, with vectors, leaves
// more, and a job that found no block after its cached prefix may lose the prefix to one that ranks
// before it. The same load with output does preempt.
func TestJobsAloneLoseNothing(t *testing.T) {
	const seeds = 120
	lost := map[bool]uint64{}
	n := counts{}
	short := 0 // steps in which a job got less than the step had left
	shared := 0
	for i, jobs := range []bool{true, true, false} {
		ordered := i == 1
		for seed := range uint64(seeds) {
			m, err := newSim(seed, 0, n)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			m.jobs, m.vectors = jobs, ordered
			if ordered {
				draw := rand.New(rand.NewPCG(seed, 7))
				m.s.OrderBy(func(work []Work) { draw.Shuffle(len(work), func(i, j int) { work[i], work[j] = work[j], work[i] }) })
			}
			for range 120 {
				if m.rng.IntN(5) < 2 {
					err = m.step()
				} else {
					err = m.event()
				}
				if err != nil {
					t.Fatalf("seed %d, jobs %v: %v", seed, jobs, err)
				}
				for _, id := range m.s.batch.Preempted {
					if q := m.find(id); jobs && (!ordered || q == nil || q.r.admitted) {
						t.Fatalf("seed %d, ordered %v: job %d lost its KV", seed, ordered, id)
					}
				}
				middle := 0
				for _, r := range m.s.running {
					if r.nBlocks() > 0 {
						middle++
					}
				}
				if jobs && middle > 1 && !ordered {
					t.Fatalf("seed %d: %d jobs are in their middle", seed, middle)
				}
				if middle > 1 && ordered {
					shared++
				}
				if jobs && middle >= 1 && m.s.pool.Available() == 0 {
					short++
				}
			}
			if lost[jobs] += m.s.Stats().Preemptions; jobs && !ordered && lost[jobs] > 0 {
				t.Fatalf("seed %d: a job lost its KV", seed)
			}
		}
	}
	t.Logf("%d steps with no block left, %d with several jobs in their middle, with output %d preemptions", short, shared, lost[false])
	if short < seeds/10 || shared < seeds || lost[false] < seeds/10 {
		t.Errorf("%d steps had no block left, %d several jobs in their middle, with output %d preemptions: the load presses no more", short, shared, lost[false])
	}
}

// The tokens of a step go by the order given: a job that waits starts before one that
// runs where it ranks before that, and the rest of the step is the running job's.
func TestOrderBy(t *testing.T) {
	s, err := New(Config{Pool: kvcache.Config{Blocks: 64, BlockTokens: 4}, MaxSeqs: 4, MaxBatchedTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	var first []uint64 // tickets, best first; others follow
	var left []Work
	s.OrderBy(func(work []Work) {
		left = slices.Clone(work)
		slices.SortStableFunc(work, func(a, b Work) int {
			at := func(w Work) int {
				if i := slices.Index(first, w.Ticket); i >= 0 {
					return i
				}
				return len(first)
			}
			return at(a) - at(b)
		})
	})
	add := func(id RequestID, n int) {
		t.Helper()
		tokens := make([]int32, n)
		for i := range tokens {
			tokens[i] = int32(id)
		}
		if _, err := s.Add(Request{ID: id, Ticket: uint64(100 + id), Tokens: tokens, ComputeOnly: true}, 0); err != nil {
			t.Fatal(err)
		}
	}
	type part struct {
		id   RequestID
		n    int
		done bool
	}
	step := func(want ...part) {
		t.Helper()
		b := s.Schedule(0)
		if err := s.Check(); err != nil {
			t.Fatal(err)
		}
		var got []part
		for _, q := range b.Seqs {
			got = append(got, part{q.ID, len(q.Tokens), false})
		}
		for _, id := range s.Update(b, nil) {
			got[slices.IndexFunc(got, func(p part) bool { return p.id == id })].done = true
		}
		if !slices.Equal(got, want) {
			t.Errorf("the step has %v, want %v", got, want)
		}
		if err := s.Check(); err != nil {
			t.Fatal(err)
		}
	}
	add(1, 60)
	step(part{1, 16, false})
	add(2, 5)
	add(3, 20)
	first = []uint64{102, 101}
	step(part{2, 5, true}, part{1, 11, false})
	if len(left) != 3 || left[0].Ticket != 101 || left[0].Left != 44 {
		t.Errorf("the order saw %+v", left)
	}
	first = []uint64{103, 101}
	step(part{3, 16, false})
	step(part{3, 4, true}, part{1, 12, false})
	first = nil
	step(part{1, 16, false})
	step(part{1, 5, true})
}
