package scheduler

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// namedPair is two schedulers that get the same requests, of which one repeats its steady steps.
type namedPair struct {
	step, repeat *Scheduler
	left         map[RequestID]int // tokens until the answer ends
}

func (p *namedPair) add(t *testing.T, id RequestID, tokens, answer int, hold bool) {
	t.Helper()
	for _, s := range []*Scheduler{p.step, p.repeat} {
		c := s.pool.NewChain(0, 0)
		for b := range (tokens + answer) / 4 {
			c.Name(kvcache.Hash(uint64(id%8)<<32 | uint64(b))) // others have the same content
		}
		if _, err := s.Add(Request{ID: id, Tokens: make([]int32, tokens, tokens+answer), Chain: &c, MaxNew: answer, Hold: hold}, 0); err != nil {
			t.Fatal(err)
		}
	}
	p.left[id] = answer
}

// reserve makes a held request reserve blocks, or wait for room. Its KV arrives at once.
func (p *namedPair) reserve(t *testing.T, id RequestID, upTo int) {
	t.Helper()
	for _, s := range []*Scheduler{p.step, p.repeat} {
		res, err := s.ReserveInTurn(id, upTo)
		if err == nil {
			err = s.Arrived(res.ID)
		} else if errors.Is(err, ErrNothingMissing) || errors.Is(err, ErrNeverFits) {
			err = s.Proceed(id)
		} else if errors.Is(err, ErrNoRoom) {
			err = nil
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// end ends the running step of a scheduler and begins the next one.
func (p *namedPair) end(s *Scheduler, b Batch, count bool) Batch {
	var results []Result
	for i := range b.Seqs {
		if q := &b.Seqs[i]; q.Sample {
			if count {
				p.left[q.ID]--
			}
			results = append(results, Result{Tokens: make([]int32, 1), Finished: p.left[q.ID] == 0})
		}
	}
	s.Update(b, results)
	for {
		id, res, err, ok := s.NextReserved()
		switch {
		case !ok:
			return s.Schedule(0)
		case err == nil:
			s.Arrived(res.ID)
		default:
			s.Proceed(id)
		}
	}
}

// Repeat has the effect of as many steps, however many are repeated at once, while requests arrive,
// end, fill blocks, wait for memory and get KV from other nodes.
func TestRepeat(t *testing.T) {
	total := 0
	for seed := range uint64(200) {
		draw := rand.New(rand.NewPCG(seed, 7))
		cfg := Config{Pool: kvcache.Config{Blocks: 12 + draw.IntN(30), BlockTokens: 4}, MaxBatchedTokens: 16, MaxSeqs: 1 + draw.IntN(5), MaxModelLen: 40}
		p := namedPair{left: map[RequestID]int{}}
		for _, s := range []**Scheduler{&p.step, &p.repeat} {
			var err error
			if *s, err = New(cfg); err != nil {
				t.Fatal(err)
			}
		}
		var held []int // tokens of the prompts, by the order of arrival; 0: not held
		a, b := p.step.Schedule(0), p.repeat.Schedule(0)
		for id, step := RequestID(1), 0; step < 200; step++ {
			if id < 20 && draw.IntN(4) == 0 {
				tokens, hold := 1+draw.IntN(20), draw.IntN(2) == 0
				p.add(t, id, tokens, 1+draw.IntN(25), hold)
				if held = append(held, tokens); !hold {
					held[id-1] = 0
				}
				id++
			}
			if i := draw.IntN(20); i < len(held) && held[i] > 0 {
				if held[i] > 1 {
					p.reserve(t, RequestID(i+1), held[i]-1)
				} else if err := errors.Join(p.step.Proceed(RequestID(i+1)), p.repeat.Proceed(RequestID(i+1))); err != nil {
					t.Fatal(err)
				}
				held[i] = 0
			}
			n := p.repeat.Steady()
			for i := range b.Seqs {
				n = min(n, p.left[b.Seqs[i].ID]-1)
			}
			if n > 0 {
				n = 1 + draw.IntN(n)
				total += n
				p.repeat.Repeat(n)
				for range n {
					a = p.end(p.step, a, true)
				}
			} else {
				b = p.end(p.repeat, b, true)
				a = p.end(p.step, a, false)
			}
			if err := p.repeat.Check(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if x, y := fmt.Sprintf("%+v", p.step.Stats()), fmt.Sprintf("%+v", p.repeat.Stats()); x != y || len(a.Seqs) != len(b.Seqs) {
				t.Fatalf("seed %d, step %d:\n%s and\n%s", seed, step, x, y)
			}
			for i := range a.Seqs {
				if x, y := a.Seqs[i], b.Seqs[i]; x.ID != y.ID || x.Start != y.Start || len(x.Tokens) != len(y.Tokens) || fmt.Sprint(x.Tables) != fmt.Sprint(y.Tables) {
					t.Fatalf("seed %d, step %d: %+v and %+v", seed, step, x, y)
				}
			}
			x, _ := p.step.Events(nil)
			y, _ := p.repeat.Events(nil)
			if fmt.Sprint(x) != fmt.Sprint(y) {
				t.Fatalf("seed %d, step %d: events %v and %v", seed, step, x, y)
			}
		}
	}
	if total < 300 {
		t.Errorf("%d steps were repeated", total)
	}
}

// A step of a request whose tokens count is not steady.
func TestContentIsNotSteady(t *testing.T) {
	s, err := New(Config{Pool: kvcache.Config{Blocks: 8}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Add(Request{ID: 1, Tokens: []int32{1}}, 0); err != nil {
		t.Fatal(err)
	}
	if s.Schedule(0); s.Steady() != 0 {
		t.Errorf("steady for %d steps", s.Steady())
	}
}
