package scheduler

import (
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// A request that sits out computes all tokens but the last, keeps its place and its blocks, and keeps
// no other request from starting.
func TestSitOut(t *testing.T) {
	s := newScheduler(t, Config{Pool: kvcache.Config{Blocks: 64, BlockTokens: 4}, MaxSeqs: 3, MaxBatchedTokens: 8})
	add := func(id RequestID, n int) {
		t.Helper()
		tokens := make([]int32, n)
		for i := range tokens {
			tokens[i] = int32(id)*100 + int32(i)
		}
		if _, err := s.Add(Request{ID: id, Tokens: tokens}, 0); err != nil {
			t.Fatal(err)
		}
	}
	step := func(want ...Seq) {
		t.Helper()
		b := s.Schedule(0)
		var results []Result
		if len(b.Seqs) != len(want) {
			t.Fatalf("%d sequences, want %d: %+v", len(b.Seqs), len(want), b.Seqs)
		}
		for i, q := range b.Seqs {
			if w := want[i]; q.ID != w.ID || q.Start != w.Start || len(q.Tokens) != len(w.Tokens) || q.Sample != w.Sample {
				t.Fatalf("sequence %d: %+v, want %+v", i, q, w)
			}
			if q.Sample {
				results = append(results, Result{Tokens: []int32{7}})
			}
		}
		if err := s.Check(); err != nil {
			t.Fatal(err)
		}
		s.Update(b, results)
		if err := s.Check(); err != nil {
			t.Fatal(err)
		}
	}
	n := func(k int) []int32 { return make([]int32, k) }
	add(1, 6)
	s.SitOut(1, true)
	step(Seq{ID: 1, Tokens: n(5)})
	step()
	add(2, 1) // with one token, it only waits to sample
	s.SitOut(2, true)
	add(3, 3)
	step(Seq{ID: 3, Tokens: n(3), Sample: true})
	step(Seq{ID: 3, Start: 3, Tokens: n(1), Sample: true})
	if st := s.Stats(); st.Running != 3 || st.Waiting != 0 {
		t.Fatalf("%+v", st)
	}
	s.SitOut(1, false)
	step(Seq{ID: 1, Start: 5, Tokens: n(1), Sample: true}, Seq{ID: 3, Start: 4, Tokens: n(1), Sample: true})
	s.SitOut(2, false)
	step(Seq{ID: 1, Start: 6, Tokens: n(1), Sample: true}, Seq{ID: 2, Tokens: n(1), Sample: true}, Seq{ID: 3, Start: 5, Tokens: n(1), Sample: true})
	if _, ok := s.Ahead(func(RequestID) Next { return Continues }); ok {
		t.Error("a step ahead while none runs")
	}
	b := s.Schedule(0)
	s.SitOut(9, true) // unknown: ignored
	if _, ok := s.Ahead(func(RequestID) Next { return Continues }); !ok {
		t.Error("no step ahead")
	}
	s.Discard(b)
}

// Guide drafts for guided requests only, at most what the step has room for, and Draft for the others.
func TestGuide(t *testing.T) {
	asked := map[RequestID][2]int{}
	s := newScheduler(t, Config{
		Pool: kvcache.Config{Blocks: 64}, MaxSeqs: 2, MaxOutputs: 8, MaxBatchedTokens: 32, MaxDrafts: 2,
		Draft: func(tokens []int32, n int) []int32 { return append(tokens, make([]int32, n)...) },
		Guide: func(id RequestID, tokens []int32, n, guesses int) []int32 {
			asked[id] = [2]int{n, guesses}
			return append(tokens, []int32{5, 6, 7, 8, 9, 10, 11}[:min(n, 7)]...)
		},
	})
	for id := range RequestID(2) {
		if _, err := s.Add(Request{ID: id + 1, Tokens: []int32{1, 2, int32(id)}, Guided: id == 1}, 0); err != nil {
			t.Fatal(err)
		}
	}
	b := s.Schedule(0)
	if len(b.Seqs) != 2 || !slices.Equal(b.Seqs[1].Tokens, []int32{1, 2, 1, 5, 6, 7, 8, 9, 10}) || b.Seqs[0].Drafts != 0 || b.Seqs[1].Drafts != 6 || len(asked) != 1 || asked[2] != [2]int{6, 1} {
		t.Fatalf("%+v, asked %v", b.Seqs, asked)
	}
	s.Update(b, []Result{{Tokens: []int32{0}}, {Tokens: []int32{5, 6, 7, 4}}})
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	if st := s.Stats(); st.Drafted != 6 || st.Accepted[2] != 1 || st.Accepted[3] != 0 {
		t.Errorf("%+v", st)
	}
}
