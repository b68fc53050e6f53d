package scheduler

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

var root = kvcache.Root("m", "", "")

func newScheduler(t testing.TB, cfg Config) *Scheduler {
	t.Helper()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func add(t testing.TB, s *Scheduler, q Request, now time.Duration) (cached int) {
	t.Helper()
	q.Root = root
	cached, err := s.Add(q, now)
	if err != nil {
		t.Fatal(err)
	}
	return cached
}

// text is n tokens that start with a token of their own.
func text(first, n int) []int32 {
	tokens := make([]int32, n)
	tokens[0] = int32(first)
	return tokens
}

// step runs one step in which the given requests finish, and all sampled tokens are 0.
func step(t testing.TB, s *Scheduler, now time.Duration, finish ...RequestID) (b Batch, done []RequestID) {
	t.Helper()
	b = s.Schedule(now)
	var results []Result
	for _, seq := range b.Seqs {
		if seq.Sample {
			results = append(results, Result{Tokens: []int32{0}, Finished: slices.Contains(finish, seq.ID)})
		}
	}
	b.Seqs, b.Preempted, b.Completed = slices.Clone(b.Seqs), slices.Clone(b.Preempted), slices.Clone(b.Completed)
	done = s.Update(b, results)
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	return b, done
}

// spans writes a batch as "id:start+n" per Seq, with ! where it samples.
func spans(b Batch) (out []string) {
	for _, seq := range b.Seqs {
		s := fmt.Sprintf("%d:%d+%d", seq.ID, seq.Start, len(seq.Tokens))
		if seq.Sample {
			s += "!"
		}
		out = append(out, s)
	}
	return out
}

func want(t testing.TB, b Batch, spansWanted ...string) {
	t.Helper()
	if got := spans(b); !slices.Equal(got, spansWanted) {
		t.Errorf("batch is %v, want %v", got, spansWanted)
	}
}

// A reservation that can never fit returns another error than one that has to wait.
func TestReserveNeverFits(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 10, BlockTokens: 1}, ArrivingFraction: 0.4})
	add(t, s, Request{ID: 1, Tokens: text(1, 6), Hold: true}, 0)
	if _, err := s.Reserve(1, 5); !errors.Is(err, ErrNoRoom) || !errors.Is(err, ErrNeverFits) {
		t.Errorf("5 blocks where 4 may arrive: %v", err)
	}
	if _, err := s.Reserve(1, 4); err != nil {
		t.Error(err)
	}
	add(t, s, Request{ID: 2, Tokens: text(2, 6)}, 0)
	for _, id := range []RequestID{2, 3} { // waits, and is not known
		if res, err := s.Reserve(id, 4); err == nil || res.size() != 0 {
			t.Errorf("request %d, which is not held, reserves %+v: %v", id, res, err)
		}
	}
}

// A failed step leaves no trace in the cache, and its requests are gone.
func TestDiscard(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 10, BlockTokens: 2}})
	add(t, s, Request{ID: 1, Tokens: text(1, 7)}, 0)
	add(t, s, Request{ID: 2, Tokens: text(2, 5)}, 0)
	b := s.Schedule(0)
	if len(b.Seqs) != 2 {
		t.Fatalf("batch of %d, want both", len(b.Seqs))
	}
	if err := s.Abort(2); err != nil {
		t.Fatal(err)
	}
	if gone := s.Discard(b); !slices.Equal(gone, []RequestID{1}) {
		t.Errorf("gone %v, want 1; 2 had been aborted before", gone)
	}
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	if u := s.Stats().Blocks; u.Free != 10 {
		t.Errorf("blocks %+v, want all free and none cached", u)
	}
	if cached := add(t, s, Request{ID: 1, Tokens: text(1, 7)}, 0); cached != 0 {
		t.Errorf("%d tokens of a failed step are in the cache", cached)
	}
	step(t, s, 0, 1)
}

// A long prompt takes what decoding leaves, and decoding never waits for it.
func TestChunksDoNotStallDecoding(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 64}, MaxBatchedTokens: 32, MaxSeqs: 4})
	add(t, s, Request{ID: 1, Tokens: text(1, 5)}, 0)
	add(t, s, Request{ID: 2, Tokens: text(2, 5)}, 0)
	b, _ := step(t, s, 0)
	want(t, b, "1:0+5!", "2:0+5!")
	add(t, s, Request{ID: 3, Tokens: text(3, 100)}, 0)
	for i := range 3 {
		b, _ = step(t, s, 0)
		want(t, b, fmt.Sprintf("1:%d+1!", 5+i), fmt.Sprintf("2:%d+1!", 5+i), fmt.Sprintf("3:%d+30", 30*i))
	}
	b, _ = step(t, s, 0)
	want(t, b, "1:8+1!", "2:8+1!", "3:90+10!")
}

// A full hit still computes the last token, in a block of its own.
func TestFullHitComputesTheLastBlockPrivately(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 8}})
	prompt := text(1, 32)
	add(t, s, Request{ID: 1, Tokens: prompt}, 0)
	b, _ := step(t, s, 0)
	first := slices.Clone(b.Seqs[0].Tables[0])
	if got := add(t, s, Request{ID: 2, Tokens: prompt}, 0); got != 16 {
		t.Errorf("%d tokens cached, want 16", got)
	}
	b = s.Schedule(0)
	want(t, b, "1:32+1!", "2:16+16!")
	if blocks := b.Seqs[1].Tables[0]; blocks[0] != first[0] || blocks[1] == first[1] {
		t.Errorf("second request writes in blocks %v, the first has %v", blocks, first)
	}
	s.Update(b, []Result{{Tokens: []int32{0}}, {Tokens: []int32{0}}})
	if got := s.Tables(2)[0]; !slices.Equal(got[:2], first[:2]) {
		t.Errorf("equal content is kept twice: %v and %v", got, first)
	}
}

func TestComputeOnly(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 8}, MaxBatchedTokens: 20, MaxSeqs: 2})
	prompt := text(1, 32)
	add(t, s, Request{ID: 1, Tokens: prompt, ComputeOnly: true}, 0)
	b, done := step(t, s, 0)
	want(t, b, "1:0+20")
	if len(done) > 0 {
		t.Errorf("%v are done after a chunk", done)
	}
	b, done = step(t, s, 0)
	want(t, b, "1:20+12")
	if !slices.Equal(done, []RequestID{1}) {
		t.Errorf("%v are done, want 1", done)
	}
	if got := add(t, s, Request{ID: 2, Tokens: prompt, ComputeOnly: true}, 0); got != 32 {
		t.Errorf("%d tokens cached, want all", got)
	}
	b = s.Schedule(0)
	if len(b.Seqs) > 0 || !slices.Equal(b.Completed, []RequestID{2}) || len(s.Tables(2)[0]) != 2 {
		t.Errorf("batch %+v with blocks %v, want 2 completed with two blocks", b, s.Tables(2)[0])
	}
	s.PinOut(s.Tables(2)[0]) // as a push would
	pinned := slices.Clone(s.Tables(2)[0])
	if done = s.Update(b, nil); !slices.Equal(done, []RequestID{2}) {
		t.Errorf("%v are done, want 2", done)
	}
	if u := s.Stats().Blocks; u.Pinned != 2 {
		t.Errorf("usage %+v, want the push's two blocks kept", u)
	}
	s.UnpinOut(pinned)
}

// However busy the higher priority is, the lower one gets its turn after the head start
// and not before, also after the default head start.
func TestNoStarvation(t *testing.T) {
	for configured, headStart := range map[time.Duration]time.Duration{100 * time.Millisecond: 100 * time.Millisecond, 0: DefaultPriorityHeadStart} {
		s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 8}, MaxSeqs: 1, PriorityHeadStart: configured})
		add(t, s, Request{ID: 1, Tokens: text(1, 4), Priority: 1}, 0)
		now := time.Duration(0)
		for id := RequestID(2); ; id++ {
			add(t, s, Request{ID: id, Tokens: text(int(id), 4)}, now)
			add(t, s, Request{ID: id + 1000, Tokens: text(int(id), 4)}, now)
			b, _ := step(t, s, now, everybody(s)...)
			if b.Seqs[0].ID == 1 {
				break
			}
			if now > 3*headStart {
				t.Fatalf("head start %v: still %v after %v", headStart, spans(b), now)
			}
			now += headStart / 10
		}
		if now < headStart {
			t.Errorf("its turn came at %v, before the head start %v", now, headStart)
		}
	}
}

// everybody is who may run, so that who does finishes.
func everybody(s *Scheduler) (ids []RequestID) {
	for _, r := range append(slices.Clone(s.waiting), s.running...) {
		ids = append(ids, r.id)
	}
	return ids
}

// A lone request may have the whole pool, up to its last token.
func TestLoneRequestFillsThePool(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 4}, Watermark: 0.5})
	add(t, s, Request{ID: 1, Tokens: text(1, 60)}, 0)
	for range 3 {
		if _, done := step(t, s, 0); len(done) > 0 {
			t.Fatalf("%v are done early", done)
		}
	}
	if _, done := step(t, s, 0); !slices.Equal(done, []RequestID{1}) {
		t.Errorf("%v are done at MaxModelLen, want 1", done)
	}
}

// The latest arrival gives way, comes back before later ones, and continues
// where its output ended.
func TestPreemption(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 4, BlockTokens: 4}, MaxSeqs: 4, Watermark: 0.01})
	add(t, s, Request{ID: 1, Tokens: text(1, 7)}, 0)
	add(t, s, Request{ID: 2, Tokens: text(2, 7)}, 1)
	b, _ := step(t, s, 1)
	want(t, b, "1:0+7!", "2:0+7!")
	add(t, s, Request{ID: 3, Tokens: text(3, 2)}, 2)
	b, _ = step(t, s, 2)
	want(t, b, "1:7+1!", "2:7+1!")
	b, _ = step(t, s, 2)
	want(t, b, "1:8+1!")
	if !slices.Equal(b.Preempted, []RequestID{2}) {
		t.Errorf("preempted %v, want 2", b.Preempted)
	}
	b, done := step(t, s, 3, 1)
	want(t, b, "1:9+1!")
	if !slices.Equal(done, []RequestID{1}) {
		t.Errorf("done %v, want 1", done)
	}
	b, _ = step(t, s, 4)
	want(t, b, "2:4+5!", "3:0+2!") // its first block was still cached
}

// Running requests of a lower rank give way before waiting ones of a higher.
func TestPreemptionTakesTheLowestRank(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 6, BlockTokens: 4}, MaxSeqs: 2})
	add(t, s, Request{ID: 1, Tokens: text(1, 7)}, 0)
	add(t, s, Request{ID: 2, Tokens: text(2, 9), Hold: true}, 1)
	add(t, s, Request{ID: 3, Tokens: text(3, 4)}, 2)
	res, err := s.Reserve(2, 8)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := step(t, s, 3)
	want(t, b, "1:0+7!", "3:0+4!")
	if err := s.Arrived(res.ID); err != nil { // it waits for a slot, with two blocks
		t.Fatal(err)
	}
	b, _ = step(t, s, 3)
	want(t, b, "1:7+1!", "3:4+1!")
	b, _ = step(t, s, 3) // all six blocks are taken
	want(t, b, "1:8+1!")
	if !slices.Equal(b.Preempted, []RequestID{3}) || len(s.Tables(2)[0]) != 2 {
		t.Errorf("preempted %v, request 2 has %d blocks, want 3 preempted and two blocks", b.Preempted, len(s.Tables(2)[0]))
	}
}

// A preempted request is reported as admitted once, with its time in the queue;
// its return is no admission.
func TestAdmittedOnce(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 6, BlockTokens: 4}, MaxSeqs: 2})
	admitted := map[RequestID]int{}
	add(t, s, Request{ID: 1, Tokens: text(1, 8)}, 0)
	add(t, s, Request{ID: 2, Tokens: text(2, 8)}, 1)
	preempted := false
	for now := time.Duration(2); now < 40; now++ {
		var finish []RequestID
		if preempted && len(s.running) == 1 {
			finish = []RequestID{1}
		}
		b, _ := step(t, s, now, finish...)
		for _, a := range b.Admitted {
			admitted[a.ID]++
		}
		preempted = preempted || len(b.Preempted) > 0
		if _, there := s.byID[1]; !there && len(s.running) == 1 {
			break // the other one has returned
		}
	}
	if !preempted || len(s.running) != 1 {
		t.Fatalf("preempted %t, %d running: want the one that gave way", preempted, len(s.running))
	}
	if admitted[1] != 1 || admitted[2] != 1 {
		t.Errorf("admitted %v, want each once", admitted)
	}
	if got := s.Stats().QueueTime; got != 2+1 {
		t.Errorf("queued for %v, want 2 and 1 ns", got)
	}
}

// A batch takes as many results as it samples.
func TestUpdateCountsResults(t *testing.T) {
	for n, want := range map[int]bool{0: true, 1: false, 2: true} {
		s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 4}})
		add(t, s, Request{ID: 1, Tokens: text(1, 4)}, 0)
		b := s.Schedule(0)
		func() {
			defer func() {
				if got := recover() != nil; got != want {
					t.Errorf("%d results for one: panic %t, want %t", n, got, want)
				}
			}()
			s.Update(b, slices.Repeat([]Result{{Tokens: []int32{7}}}, n))
		}()
	}
}

// Guesses are asked for only where a step has room for one.
func TestGuessesOnlyWithRoom(t *testing.T) {
	for budget, want := range map[int]bool{2: false, 3: true} {
		asked := false
		s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 16}, MaxSeqs: 2, MaxOutputs: 6, MaxBatchedTokens: budget, MaxDrafts: 2, DraftAll: func([]DraftRequest) { asked = true }})
		add(t, s, Request{ID: 1, Tokens: text(1, 1)}, 0)
		add(t, s, Request{ID: 2, Tokens: text(2, 1)}, 0)
		for range 3 {
			step(t, s, 0)
		}
		if asked != want {
			t.Errorf("two sequences in steps of %d tokens: guesses asked for: %t, want %t", budget, asked, want)
		}
	}
}

// The cache loses the end of a finished request first.
func TestPrefixOutlivesItsEnd(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 8, BlockTokens: 4}})
	prompt := text(1, 20)
	add(t, s, Request{ID: 1, Tokens: prompt, ComputeOnly: true}, 0)
	step(t, s, 0)
	add(t, s, Request{ID: 2, Tokens: text(2, 20), ComputeOnly: true}, 0)
	step(t, s, 0)
	if got := s.Cached(root, prompt); got != 12 {
		t.Errorf("%d tokens are cached after 2 of 5 blocks were taken, want the first 12", got)
	}
}

// KV from another node: prefix kept, blocks granted, one token left to compute.
func TestRemotePrefill(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 16}})
	prompt := text(1, 50)
	add(t, s, Request{ID: 1, Tokens: prompt[:20], ComputeOnly: true}, 0)
	step(t, s, 0)
	if got := add(t, s, Request{ID: 2, Tokens: prompt, Hold: true}, 0); got != 16 {
		t.Errorf("%d tokens cached, want 16", got)
	}
	lost, err := s.Reserve(2, 49)
	if err != nil {
		t.Fatal(err)
	}
	if lost.From != 16 || lost.UpTo != 49 || lost.size() != 3 {
		t.Errorf("reservation %+v, want tokens 16 to 49 in 3 blocks", lost)
	}
	if err := s.Lost(lost.ID); err != nil {
		t.Fatal(err)
	}
	second, err := s.Reserve(2, 49)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range second.Groups[0].Blocks {
		if slices.Contains(lost.Groups[0].Blocks, id) {
			t.Errorf("block %d is granted twice", id)
		}
	}
	if b, _ := step(t, s, 0); len(b.Seqs) > 0 {
		t.Errorf("a held request runs: %v", spans(b))
	}
	if err := s.Arrived(second.ID); err != nil {
		t.Fatal(err)
	}
	b, _ := step(t, s, 0, 2)
	want(t, b, "2:49+1!")
	if u := s.Stats().Blocks; u.Arriving != 3 || u.Pinned != 3 {
		t.Errorf("usage %+v, want the lost blocks pinned", u)
	}
	if err := s.Release(lost.ID); err != nil {
		t.Fatal(err)
	}
	if got := s.Cached(root, prompt); got != 48 {
		t.Errorf("%d tokens cached, want the 48 of full blocks", got)
	}
	if u := s.Stats().Blocks; u.Free+u.Cached != u.Blocks {
		t.Errorf("usage %+v, want everything back", u)
	}
}

// A transfer is given up once: the second time returns an error and affects nothing that
// follows it.
func TestLostOnce(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 16}})
	add(t, s, Request{ID: 1, Tokens: text(1, 50), Hold: true}, 0)
	first, err := s.Reserve(1, 49)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Lost(first.ID); err != nil {
		t.Fatal(err)
	}
	second, err := s.Reserve(1, 49)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Lost(first.ID); !errors.Is(err, ErrLost) {
		t.Errorf("lost a second time: %v", err)
	}
	if err := s.Check(); err != nil {
		t.Error(err)
	}
	if err := s.Arrived(second.ID); err != nil {
		t.Errorf("the second transfer: %v", err)
	}
}

// Check detects every violation that it promises to detect, in a scheduler with requests of
// every kind.
func TestCheckFindsDamage(t *testing.T) {
	for name, damage := range map[string]func(*Scheduler){
		"order":             func(s *Scheduler) { s.running[0], s.running[1] = s.running[1], s.running[0] },
		"state":             func(s *Scheduler) { s.running[0].state = stateWaiting },
		"unknown":           func(s *Scheduler) { s.byID[s.running[0].id] = &request{} },
		"known, not queued": func(s *Scheduler) { s.byID[99] = &request{} },
		"too many":          func(s *Scheduler) { s.cfg.MaxSeqs = 1 },
		"computed":          func(s *Scheduler) { s.running[0].computed = -1 },
		"beyond its tokens": func(s *Scheduler) { s.running[0].computed = len(s.running[0].tokens) + 1 },
		"scored":            func(s *Scheduler) { s.running[0].scored = s.running[0].score + 1 },
		"too long":          func(s *Scheduler) { s.cfg.MaxModelLen = 1 },
		"ahead":             func(s *Scheduler) { s.running[0].ahead = true },
		"rows of nothing":   func(s *Scheduler) { s.running[0].extra = 1 },
		"in no step":        func(s *Scheduler) { s.running[0].inStep = true },
		"reservation":       func(s *Scheduler) { s.held[0].state = stateWaiting },
		"another's":         func(s *Scheduler) { s.held[0].reservation = nil },
		"dead":              func(s *Scheduler) { s.reservations[0].live = false },
		"an unknown one":    func(s *Scheduler) { s.held[2].reservation = new(reservation) },
		"reservations' order": func(s *Scheduler) {
			s.reservations[0], s.reservations[1] = s.reservations[1], s.reservations[0]
		},
		"a block too few": func(s *Scheduler) {
			t := &s.running[0].tables[0]
			t.blocks = t.blocks[:len(t.blocks)-1]
		},
		"hashed":          func(s *Scheduler) { s.running[0].tables[0].hashed++ },
		"gone":            func(s *Scheduler) { s.running[0].tables[0].gone++ },
		"a reference":     func(s *Scheduler) { s.pool.Ref(s.running[0].tables[0].blocks[0]) },
		"an incoming one": func(s *Scheduler) { s.pool.PinIn(s.running[0].tables[0].blocks[1]) },
		"shared":          func(s *Scheduler) { s.running[0].tables[0].blocks[1] = s.running[1].tables[0].blocks[1] },
	} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 32, BlockTokens: 4}, MaxSeqs: 4})
			for id := RequestID(1); id <= 2; id++ {
				add(t, s, Request{ID: id, Tokens: text(int(id), 6)}, time.Duration(id))
			}
			for id := RequestID(3); id <= 4; id++ {
				add(t, s, Request{ID: id, Tokens: text(int(id), 9), Hold: true}, time.Duration(id))
				if _, err := s.Reserve(id, 8); err != nil {
					t.Fatal(err)
				}
			}
			add(t, s, Request{ID: 5, Tokens: text(5, 9), Hold: true}, 5)
			step(t, s, 5)
			if err := s.Check(); err != nil || len(s.running) != 2 || len(s.held) != 3 || len(s.reservations) != 2 {
				t.Fatalf("%v; %d running, %d held, %d reservations", err, len(s.running), len(s.held), len(s.reservations))
			}
			damage(s)
			if err := s.Check(); !errors.Is(err, ErrBroken) {
				t.Errorf("Check = %v: want %v", err, ErrBroken)
			}
		})
	}
}

// KV that has arrived decodes at once, also while a long prompt takes every budget.
func TestArrivedDoesNotWaitForChunks(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 64}, MaxBatchedTokens: 16, MaxSeqs: 4})
	add(t, s, Request{ID: 1, Tokens: text(1, 100)}, 0)
	add(t, s, Request{ID: 2, Tokens: text(2, 30), Hold: true}, 0)
	res, err := s.Reserve(2, 29)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := step(t, s, 0)
	want(t, b, "1:0+16")
	if err := s.Arrived(res.ID); err != nil {
		t.Fatal(err)
	}
	b, _ = step(t, s, 0)
	want(t, b, "2:29+1!", "1:16+15")
}

func TestReserveLeavesRoom(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 10, BlockTokens: 1}, ArrivingFraction: 0.4, Watermark: 0.5})
	for id := RequestID(1); id <= 3; id++ {
		add(t, s, Request{ID: id, Tokens: text(int(id), 4), Hold: true}, 0)
	}
	if _, err := s.Reserve(1, 3); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Reserve(2, 3); !errors.Is(err, ErrNoRoom) || errors.Is(err, ErrNeverFits) {
		t.Errorf("6 of 10 blocks arriving with a fraction of 0.4: %v", err)
	}
	if _, err := s.Reserve(2, 1); err != nil {
		t.Fatal(err)
	}
	add(t, s, Request{ID: 4, Tokens: text(4, 2)}, 0)
	step(t, s, 0)
	if err := s.Release(1); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Reserve(3, 3); !errors.Is(err, ErrNoRoom) {
		t.Errorf("4 blocks left with a watermark of 5: %v", err)
	}
}

func TestConfig(t *testing.T) {
	pool := kvcache.Config{Blocks: 4}
	for name, cfg := range map[string]Config{
		"budget below seqs": {Pool: pool, MaxBatchedTokens: 3, MaxSeqs: 4},
		"longer than pool":  {Pool: pool, MaxModelLen: 65},
		"negative seqs":     {Pool: pool, MaxSeqs: -1},
		"fraction":          {Pool: pool, ArrivingFraction: 1.5},
		"watermark":         {Pool: pool, Watermark: 1},
		"head start":        {Pool: pool, PriorityHeadStart: 2 * time.Hour},
		"outputs":           {Pool: pool, MaxSeqs: 8, MaxOutputs: 7},
		"drafts":            {Pool: pool, MaxDrafts: DraftLimit + 1},
		"negative drafts":   {Pool: pool, MaxDrafts: -1},
	} {
		if _, err := New(cfg); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := New(Config{}); !errors.Is(err, kvcache.ErrConfig) {
		t.Errorf("no pool: %v", err)
	}
}

// A scored prompt takes the rows of logits that no other request needs, and always at least
// one. Drafts take what is left.
func TestRowsOfLogits(t *testing.T) {
	guesses := func(tokens []int32, n int) []int32 { return append(tokens, make([]int32, n)...) }
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 64}, MaxSeqs: 3, MaxOutputs: 6, MaxBatchedTokens: 20, Draft: guesses, MaxDrafts: 4})
	add(t, s, Request{ID: 1, Tokens: text(1, 9), Score: 8}, 0)
	rows := func(b Batch) (out []string) {
		for _, q := range b.Seqs {
			out = append(out, fmt.Sprintf("%d:%d+%d score %d-%d drafts %d", q.ID, q.Start, len(q.Tokens), q.ScoreFrom, q.ScoreTo, q.Drafts))
		}
		return out
	}
	for _, want := range [][]string{
		{"1:0+6 score 0-6 drafts 0"}, // one row of its own, five that the other two places leave
		{"1:6+6 score 6-8 drafts 3"},
		{"1:9+5 score 0-0 drafts 4"},
	} {
		s.byID[1].credit = 4
		b := s.Schedule(0)
		if got := rows(b); !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
		var results []Result
		if b.Seqs[0].Sample {
			results = []Result{{Tokens: []int32{7}}} // no guess is right
		}
		s.Update(b, results)
		if err := s.Check(); err != nil {
			t.Fatal(err)
		}
	}
	if st := s.Stats(); st.Drafts != 2 || st.Drafted != 7 || st.Accepted != [DraftLimit]uint64{} {
		t.Errorf("%+v", st)
	}
	add(t, s, Request{ID: 2, Tokens: text(2, 5)}, 0)
	add(t, s, Request{ID: 3, Tokens: text(3, 5)}, 0)
	s.byID[1].credit = 4
	b := s.Schedule(0)
	if got, want := rows(b), []string{"1:10+4 score 0-0 drafts 3", "2:0+5 score 0-0 drafts 0", "3:0+5 score 0-0 drafts 0"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	s.Update(b, []Result{{Tokens: []int32{0, 0, 5}}, {Tokens: []int32{0}}, {Tokens: []int32{0}}})
	if st := s.Stats(); st.Accepted != [DraftLimit]uint64{1, 1} {
		t.Errorf("%v were accepted", st.Accepted)
	}
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
}

// decoding is a scheduler with n running requests that lack one token each.
func decoding(t testing.TB, n int, groups ...kvcache.Group) *Scheduler {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: n * 256, Groups: groups}, MaxSeqs: n, MaxBatchedTokens: 64 * n, MaxQueued: n})
	for i := range n {
		add(t, s, Request{ID: RequestID(i), Tokens: text(i, 48), MaxNew: maxHint}, 0)
	}
	step(t, s, 0)
	if st := s.Stats(); st.Running != n {
		t.Fatalf("%d requests run, want %d", st.Running, n)
	}
	return s
}

// Steady decoding, with blocks filled, cached and allocated on the way, and some
// that fall out of a window.
func TestDecodeStepDoesNotAllocate(t *testing.T) {
	const n = 64
	for name, groups := range map[string][]kvcache.Group{
		"one group": nil, "windows": {{}, {Window: 40}, {BlockTokens: 32, Window: 70}},
	} {
		t.Run(name, func(t *testing.T) {
			s := decoding(t, n, groups...)
			results := slices.Repeat([]Result{{Tokens: []int32{0}}}, n)
			events := make([]kvcache.Event, 0, 8*n)
			if allocs := testing.AllocsPerRun(500, func() {
				b := s.Schedule(0)
				if len(b.Seqs) != n {
					t.Fatalf("%d sequences run, want %d", len(b.Seqs), n)
				}
				s.Update(b, results)
				events, _ = s.Events(events[:0])
			}); allocs != 0 {
				t.Errorf("a decode step allocates %v times", allocs)
			}
			if err := s.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

func BenchmarkDecodeStep256(b *testing.B) {
	const n, tokens = 256, 4000
	results := slices.Repeat([]Result{{Tokens: []int32{0}}}, n)
	s := decoding(b, n)
	steps := 0
	for b.Loop() {
		if steps++; steps == tokens-48 {
			b.StopTimer()
			s, steps = decoding(b, n), 0
			b.StartTimer()
		}
		s.Update(s.Schedule(0), results)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/token")
}

// LimitScores bounds what a step scores in all, by rank; what is admitted scores one
// row at least, so that the requests behind it do not wait for the prompts before.
func TestLimitScores(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 64}, MaxSeqs: 4, MaxOutputs: 40, MaxBatchedTokens: 40})
	s.LimitScores(3)
	add(t, s, Request{ID: 1, Tokens: text(1, 9), Score: 8}, 0)
	add(t, s, Request{ID: 2, Tokens: text(2, 4), Score: 3}, 0)
	add(t, s, Request{ID: 3, Tokens: text(3, 12)}, 0)
	for step, want := range [][]string{
		{"1: 0-3 of 3", "2: 0-1 of 1", "3: 0-0 of 12"},
		{"3: 0-0 of 1", "1: 3-6 of 3"},
		{"3: 0-0 of 1", "1: 6-8 of 3", "2: 1-2 of 1"},
		{"1: 0-0 of 1", "3: 0-0 of 1", "2: 2-3 of 2"},
	} {
		b := s.Schedule(0)
		var got []string
		var results []Result
		for _, q := range b.Seqs {
			got = append(got, fmt.Sprintf("%d: %d-%d of %d", q.ID, q.ScoreFrom, q.ScoreTo, len(q.Tokens)))
			if q.Sample {
				results = append(results, Result{Tokens: []int32{7}})
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("step %d: %q, want %q", step, got, want)
		}
		s.Update(b, results)
		if err := s.Check(); err != nil {
			t.Fatal(err)
		}
	}
}

// If no request waits for room, ReserveInTurn reserves at once.
func TestReserveInTurnAtOnce(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 16}})
	add(t, s, Request{ID: 1, Tokens: text(1, 50), Hold: true}, 0)
	res, err := s.ReserveInTurn(1, 49)
	if err != nil || res.size() != 4 {
		t.Errorf("%+v, %v, want 4 blocks", res, err)
	}
	if _, _, err, ok := s.NextReserved(); ok {
		t.Errorf("one waits: %v", err)
	}
}

// An unknown reservation is refused, and existing ones are not affected.
func TestUnknownReservation(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 16}})
	add(t, s, Request{ID: 1, Tokens: text(1, 50), Hold: true}, 0)
	res, err := s.Reserve(1, 49)
	if err != nil {
		t.Fatal(err)
	}
	for name, do := range map[string]func(ReservationID) error{"Lost": s.Lost, "Arrived": s.Arrived, "Release": s.Release} {
		if err := do(res.ID + 7); !errors.Is(err, ErrUnknownReservation) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := s.Arrived(res.ID); err != nil {
		t.Error(err)
	}
}

// A request that samples once may fill the context, ends with its sample whatever that is, and is
// never guessed for.
func TestOnce(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 8, BlockTokens: 4}, MaxModelLen: 16, MaxBatchedTokens: 64, MaxSeqs: 8, MaxOutputs: 32, MaxDrafts: 4,
		Draft: func(tokens []int32, n int) []int32 { return append(tokens, make([]int32, n)...) }})
	if _, err := s.Add(Request{ID: 1, Root: root, Tokens: text(1, 16)}, 0); !errors.Is(err, ErrTooLong) {
		t.Errorf("a request with output: %v", err)
	}
	if _, err := s.Add(Request{ID: 1, Root: root, Tokens: text(1, 17), Once: true}, 0); !errors.Is(err, ErrTooLong) {
		t.Errorf("one token more than the context: %v", err)
	}
	add(t, s, Request{ID: 1, Tokens: text(1, 16), Once: true, Score: 15}, 0)
	add(t, s, Request{ID: 2, Tokens: text(2, 5), Once: true}, 0)
	b, done := step(t, s, 0)
	want(t, b, "1:0+16!", "2:0+5!")
	if !slices.Equal(done, []RequestID{1, 2}) || b.Seqs[0].Drafts+b.Seqs[1].Drafts != 0 {
		t.Errorf("%v left, %+v", done, b)
	}
	if u := s.Stats().Blocks; u.Used != 0 || u.Cached != 5 {
		t.Errorf("%+v", u)
	}
}

// A request without tokens is refused, and nothing of it is cached.
func TestEmptyRequest(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 4}})
	if cached, err := s.Add(Request{ID: 1, Root: root}, 0); !errors.Is(err, ErrEmpty) || cached != 0 {
		t.Errorf("%d cached, %v", cached, err)
	}
}

// Check names a block of a running request that the network may write, though it may
// do so once only.
func TestCheckFindsIncomingPins(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 4}})
	add(t, s, Request{ID: 1, Tokens: text(1, 6)}, 0)
	step(t, s, 0)
	s.pool.PinIn(s.running[0].tables[0].blocks[0])
	if err := s.Check(); !errors.Is(err, ErrBroken) || !strings.Contains(err.Error(), "has an incoming pin") {
		t.Errorf("Check = %v", err)
	}
}

// An id that a request had which ended while it waited is another's now: only that one
// stops waiting.
func TestStopWaitingOfReusedID(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 16}})
	wait := func(id RequestID) {
		t.Helper()
		add(t, s, Request{ID: id, Tokens: text(int(id), 100), Hold: true}, 0)
		if _, err := s.ReserveInTurn(id, 99); !errors.Is(err, ErrNoRoom) {
			t.Fatal(err)
		}
	}
	add(t, s, Request{ID: 1, Tokens: text(1, 100), Hold: true}, 0)
	if _, err := s.ReserveInTurn(1, 99); err != nil {
		t.Fatal(err)
	}
	wait(2)
	if err := s.Abort(2); err != nil {
		t.Fatal(err)
	}
	wait(2)
	if !s.StopWaiting(2) || s.StopWaiting(2) {
		t.Error("the request that has the id does not wait once")
	}
}

// BenchmarkStats is a snapshot of 64 running and 1,000 waiting requests, which an engine makes
// twice a step.
func BenchmarkStats(b *testing.B) {
	const running, waiting = 64, 1000
	s := newScheduler(b, Config{Pool: kvcache.Config{Blocks: running * 64}, MaxSeqs: running, MaxBatchedTokens: 64 * running, MaxQueued: running + waiting})
	for i := range running + waiting {
		add(b, s, Request{ID: RequestID(i), Tokens: text(i, 48), MaxNew: maxHint}, 0)
	}
	step(b, s, 0)
	if st := s.Stats(); st.Running != running || st.Waiting != waiting {
		b.Fatalf("%d run and %d wait", st.Running, st.Waiting)
	}
	for b.Loop() {
		s.Stats()
	}
}
