package scheduler

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// One prompt of 32k tokens and 255 short requests that grow share a pool with blocks for the
// prompt and about one in ten of the others, so that they preempt each other repeatedly. Each
// still gets the output that it gets alone, from KV that only the fake device wrote. The
// scheduler's memory stays within the pool and the requests themselves.
func TestLongPromptAmong256InAShortPool(t *testing.T) {
	const seeds = 3
	for seed := range uint64(seeds) {
		n := counts{}
		m, err := crowd(seed, n)
		for steps := 0; err == nil && len(m.live) > 0; steps++ {
			if steps > 10_000 {
				err = fmt.Errorf("%d requests after %d steps: %+v", len(m.live), steps, m.s.Stats())
				break
			}
			if err = m.step(); err == nil {
				err = m.bounded()
			}
		}
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if n["finished"] != crowdSize || n["preempted-running"]+n["preempted-in-batch"] == 0 || n["finished-after-preemption"] == 0 {
			t.Errorf("seed %d: of %d requests: %v", seed, crowdSize, n)
		}
		st := m.s.Stats()
		if u := st.Blocks; u.Free+u.Cached != u.Blocks || st.Running+st.Waiting+len(m.s.byID) != 0 {
			t.Errorf("seed %d: left behind: %+v", seed, st)
		}
		t.Logf("seed %d: %d preemptions, %d of them in a batch", seed, st.Preemptions, n["preempted-in-batch"])
	}
}

const (
	crowdSize   = 256
	crowdPrompt = 32 << 10 // tokens of the long one
)

// crowd adds the requests, with the long one at a random place among them.
func crowd(seed uint64, n counts) (*sim, error) {
	rng := rand.New(rand.NewPCG(seed, 0x32c0ffee))
	const blockTokens = 4
	cfg := Config{
		Pool:             kvcache.Config{Blocks: (crowdPrompt+256)/blockTokens + rng.IntN(200), BlockTokens: blockTokens},
		Watermark:        1e-6, // no block of this pool
		MaxSeqs:          crowdSize,
		MaxBatchedTokens: 512 + rng.IntN(1024),
		MaxModelLen:      crowdPrompt + 256,
	}
	s, err := New(cfg)
	if err != nil {
		return nil, err
	}
	m := &sim{
		device: device{groups: s.groups, stride: blockTokens, mem: make([]cell, cfg.Pool.Blocks*blockTokens)},
		rng:    rng, s: s, cfg: cfg, n: n,
		owners:   make([]owner, cfg.Pool.Blocks),
		view:     map[name]bool{},
		unending: true,
		draining: true, // no other events
	}
	for i := range m.mem {
		m.mem[i] = poison
	}
	long := rng.IntN(crowdSize / 4)
	for i := range crowdSize {
		q := &simRequest{Request: Request{ID: RequestID(i + 1), Root: kvcache.Root("m", "", "")}, maxNew: 30 + rng.IntN(40)}
		size := 1 + rng.IntN(8)
		if i == long {
			size, q.maxNew = crowdPrompt, 8
		}
		for range size {
			q.Tokens = append(q.Tokens, int32(rng.IntN(1000)))
		}
		q.prompt, q.cells = size, trueCells(q.Root, q.Tokens)
		if _, err := s.Add(q.Request, 0); err != nil {
			return nil, err
		}
		q.r = s.byID[q.ID]
		m.live = append(m.live, q)
	}
	return m, nil
}

// bounded returns an error if the scheduler holds more than it has to.
func (m *sim) bounded() error {
	s := m.s
	if len(s.byID) != len(m.live) || len(s.running)+len(s.waiting) != len(m.live) {
		return fmt.Errorf("knows %d requests, %d run and %d wait, %d are live", len(s.byID), len(s.running), len(s.waiting), len(m.live))
	}
	if cap(s.placed)+cap(s.inStep)+cap(s.batch.Seqs) > 3*4*crowdSize {
		return fmt.Errorf("step buffers for %d, %d and %d requests", cap(s.placed), cap(s.inStep), cap(s.batch.Seqs))
	}
	for _, r := range slices.Concat(s.running, s.waiting) {
		if most := m.groups[0].End(m.cfg.MaxModelLen); cap(r.tokens) > 2*m.cfg.MaxModelLen || cap(r.tables[0].blocks) > 2*most {
			return fmt.Errorf("request %d has room for %d tokens in %d blocks", r.id, cap(r.tokens), cap(r.tables[0].blocks))
		}
	}
	return nil
}
