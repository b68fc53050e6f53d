package scheduler

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// stateDevice is a device whose state is the number of tokens so far and their hash. It is updated
// in place, so that a token that is computed twice, or from another state, shows.
type stateDevice struct {
	group kvcache.Group
	mem   []tokenState // [blocks]
}

type tokenState struct {
	n    int
	hash uint64
}

func stateOf(tokens []int32) (s tokenState) {
	for _, t := range tokens {
		s = tokenState{s.n + 1, mix(s.hash, uint64(t)+1)}
	}
	return s
}

// compute runs a sequence's part of a step and compares the state before each token.
func (d *stateDevice) compute(q Seq, group int, before tokenState) error {
	table, bt := q.Tables[group], d.group.BlockTokens
	for i, token := range q.Tokens {
		pos := q.Start + i
		at := table[pos/bt]
		switch {
		case pos == 0:
			d.mem[at] = tokenState{}
		case pos%bt == 0:
			d.mem[at] = d.mem[table[pos/bt-1]]
		}
		if d.mem[at] != before {
			return fmt.Errorf("request %d reads state %+v at token %d, want %+v", q.ID, d.mem[at], pos, before)
		}
		before = tokenState{before.n + 1, mix(before.hash, uint64(token)+1)}
		d.mem[at] = before
	}
	return nil
}

// stateSim runs requests over a pool with a full group and two of states.
type stateSim struct {
	*Scheduler
	rng       *rand.Rand
	devices   []stateDevice
	truth     map[RequestID][]int32
	left      map[RequestID]int // tokens still to sample
	arriving  []Reservation
	texts     [][]int32
	last      RequestID
	now       time.Duration
	hits      int // tokens
	shortHits int // that end where only a prompt's end is kept
	preempts  int
	shipped   int
	aheads    int // steps given out ahead
}

func newStateSim(t *testing.T, seed uint64) *stateSim {
	rng := rand.New(rand.NewPCG(seed, 81))
	bt := 1 + rng.IntN(4)
	states := kvcache.Group{BlockTokens: bt, Window: 2, Every: bt * (1 + rng.IntN(6))}
	cfg := Config{
		Pool:    kvcache.Config{Blocks: 24 + rng.IntN(40), BlockTokens: bt, Groups: []kvcache.Group{{BlockTokens: bt}, states, states}},
		MaxSeqs: 1 + rng.IntN(5), MaxQueued: 64, Watermark: 0.001 + 0.1*rng.Float64(),
	}
	cfg.MaxBatchedTokens = cfg.MaxSeqs + rng.IntN(5*bt)
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	m := &stateSim{Scheduler: s, rng: rng, truth: map[RequestID][]int32{}, left: map[RequestID]int{}}
	for range s.groups[1:] {
		m.devices = append(m.devices, stateDevice{states, make([]tokenState, cfg.Pool.Blocks)})
	}
	return m
}

func (m *stateSim) add() {
	var tokens []int32
	if len(m.texts) > 0 && m.rng.IntN(3) > 0 { // continues, or repeats a part of, an earlier one
		tokens = slices.Clone(m.texts[m.rng.IntN(len(m.texts))])
		tokens = tokens[:len(tokens)-m.rng.IntN(2)*m.rng.IntN(len(tokens))]
	}
	for range 1 + m.rng.IntN(12) {
		tokens = append(tokens, int32(m.rng.IntN(3)))
	}
	tokens = tokens[:min(len(tokens), m.cfg.MaxModelLen-1)]
	m.last++
	q := Request{ID: m.last, Tokens: tokens, ComputeOnly: m.rng.IntN(5) == 0, Hold: m.rng.IntN(3) == 0}
	hit, err := m.Add(q, m.now)
	if err != nil {
		return // no room in the queue, or too long
	}
	m.hits += hit
	if hit > 0 && hit%m.groups[1].Every != 0 {
		m.shortHits++
	}
	m.truth[q.ID], m.left[q.ID] = tokens, 1+m.rng.IntN(20)
	m.texts = append(m.texts, slices.Clone(tokens))
}

// network reserves for held requests, and has the states of a reservation arrive.
func (m *stateSim) network() error {
	for _, r := range slices.Clone(m.held) {
		if r.reservation == nil {
			if n := len(r.tokens); n < 2 || m.rng.IntN(3) == 0 {
				return m.Proceed(r.id)
			} else if res, err := m.Reserve(r.id, 1+m.rng.IntN(n-1)); err == nil {
				m.arriving = append(m.arriving, res)
			} else if m.rng.IntN(2) == 0 {
				return m.Proceed(r.id)
			}
		}
	}
	if len(m.arriving) == 0 {
		return nil
	}
	res := m.arriving[0]
	m.arriving = m.arriving[1:]
	if r := m.byID[res.Request]; r == nil || r.reservation == nil || r.reservation.ID != res.ID {
		return m.Release(res.ID)
	}
	for g := range m.devices {
		got := res.Groups[g+1]
		if len(got.Blocks) != 1 {
			return fmt.Errorf("%d states arrive up to token %d", len(got.Blocks), res.UpTo)
		}
		m.devices[g].mem[got.Blocks[0]] = stateOf(m.truth[res.Request][:res.UpTo])
	}
	m.shipped++
	return m.Arrived(res.ID)
}

// event is a call that is legal at any time.
func (m *stateSim) event() error {
	switch m.rng.IntN(5) {
	case 0, 1:
		m.add()
	case 2, 3:
		return m.network()
	default:
		if m.rng.IntN(3) == 0 {
			_ = m.Abort(1 + RequestID(m.rng.IntN(int(m.last)+1))) // it may have ended
		}
	}
	return nil
}

func (m *stateSim) step() error {
	b := m.Schedule(m.now)
	m.preempts += len(b.Preempted)
	if err := m.Check(); err != nil {
		return err
	}
	batches := []Batch{b}
	if next, ok := m.Ahead(func(id RequestID) Next {
		if m.left[id] == 1 && m.rng.IntN(2) == 0 {
			return Ends
		}
		return Continues
	}); ok {
		batches = append(batches, next)
		m.aheads++
	}
	if err := m.event(); err != nil { // while the step runs
		return err
	}
	var results [][]Result
	for _, b := range batches { // the device computes one after the other, whatever Update does
		r, err := m.compute(b)
		if err != nil {
			return err
		}
		results = append(results, r)
	}
	for i, b := range batches {
		for _, id := range m.Update(b, results[i]) {
			m.texts = append(m.texts, slices.Clone(m.truth[id]))
			delete(m.truth, id)
		}
		if err := m.Check(); err != nil {
			return err
		}
		if err := m.event(); err != nil {
			return err
		}
	}
	return m.Check()
}

// compute runs a step on the devices and samples.
func (m *stateSim) compute(b Batch) (results []Result, err error) {
	for _, q := range b.Seqs {
		tokens := m.truth[q.ID]
		if q.Tokens[0] == Unknown {
			q.Tokens = tokens[q.Start:]
		}
		for g, spec := range m.groups[1:] {
			t := table{blocks: q.Tables[g+1], gone: spec.First(q.Start)}
			if n, most := t.distinct(), spec.Touched(1+len(q.Tokens)); n > most {
				return nil, fmt.Errorf("request %d has %d states for tokens %d to %d, at most %d", q.ID, n, q.Start, q.Start+len(q.Tokens), most)
			}
		}
		for g := range m.devices {
			if err := m.devices[g].compute(q, g+1, stateOf(tokens[:q.Start])); err != nil {
				return nil, err
			}
		}
		// The state after the last token of a request that has ended may be kept.
		if q.Sample && m.left[q.ID] == 0 {
			results = append(results, Result{Tokens: []int32{0}})
		} else if q.Sample {
			next := int32(m.rng.IntN(3))
			m.truth[q.ID] = append(tokens, next)
			m.left[q.ID]--
			results = append(results, Result{Tokens: []int32{next}, Finished: m.left[q.ID] == 0})
		}
	}
	return results, nil
}

// TestStates: each token is computed once from the state after the token before it, whatever is
// cached, preempted, aborted, shipped or computed ahead, and every cached state is that of its prefix.
func TestStates(t *testing.T) {
	runs := uint64(150)
	if os.Getenv("TANDEM_SOAK") != "" {
		runs = 20_000
	}
	var hits, shortHits, preempts, shipped, aheads int
	for seed := range runs {
		m := newStateSim(t, seed)
		for range 150 {
			var err error
			m.now++
			if m.rng.IntN(2) == 0 {
				err = m.event()
			} else {
				err = m.step()
			}
			if err == nil {
				err = m.Check()
			}
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		hits, shortHits, preempts, shipped, aheads = hits+m.hits, shortHits+m.shortHits, preempts+m.preempts, shipped+m.shipped, aheads+m.aheads
	}
	t.Logf("note: %d runs: hits of %d tokens, %d of them up to a prompt's end, %d preemptions, %d shipped, %d steps ahead", runs, hits, shortHits, preempts, shipped, aheads)
	if least := int(runs); hits < least || shortHits < least/4 || preempts < least || shipped < least || aheads < least {
		t.Errorf("a path ran too rarely")
	}
}

// A conversation's next turn starts from the end of the turn before, however short that was.
func TestStateAtThePromptsEnd(t *testing.T) {
	states := kvcache.Group{BlockTokens: 4, Window: 2, Every: 64}
	s, err := New(Config{Pool: kvcache.Config{Blocks: 64, BlockTokens: 4, Groups: []kvcache.Group{{BlockTokens: 4}, states}}, MaxBatchedTokens: 256})
	if err != nil {
		t.Fatal(err)
	}
	prompt := slices.Repeat([]int32{1, 2, 3}, 10)
	if _, err := s.Add(Request{ID: 1, Tokens: prompt}, 0); err != nil {
		t.Fatal(err)
	}
	blocks := 0
	for i := range 9 {
		b := s.Schedule(0)
		blocks = max(blocks, s.pool.Usage().Used)
		prompt = append(prompt, int32(i))
		s.Update(b, []Result{{Tokens: []int32{int32(i)}, Finished: i == 8}})
	}
	if hit, err := s.Add(Request{ID: 2, Tokens: append(prompt, 7, 7, 7)}, 0); err != nil || hit != 28 {
		t.Errorf("the next turn starts after %d tokens, %v, want 28", hit, err)
	}
	if want := 30/4 + 1 + 2; blocks > want+2 { // of keys and values, and two states
		t.Errorf("%d blocks in use, want about %d: states do not move on", blocks, want)
	}
}

// A group of states is refused where its numbers do not fit together.
func TestStateGroupsRefused(t *testing.T) {
	for _, g := range []kvcache.Group{{BlockTokens: 4, Window: 2, Every: 6}, {BlockTokens: 4, Every: 8}, {BlockTokens: 4, Window: 2, Every: -4}} {
		if _, err := kvcache.NewPool(kvcache.Config{Blocks: 8, BlockTokens: 4, Groups: []kvcache.Group{g}}); err == nil {
			t.Errorf("%+v is accepted", g)
		}
	}
}
