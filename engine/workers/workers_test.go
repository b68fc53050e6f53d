//go:build linux

package workers

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
)

var limits = backend.Limits{Tokens: 8, Outputs: 4, Seqs: 3, Blocks: 5}

// group is n ranks, each with a mapping of its own as processes have.
func group(t testing.TB, n int, timeout time.Duration) []*Group {
	t.Helper()
	mailbox := Mailbox(limits, 2)
	f, err := NewFile(n, mailbox)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var all []*Group
	for r := range n {
		g, err := Open(f, r, n, mailbox, timeout)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		})
		all = append(all, g)
	}
	return all
}

// together runs f as each worker and returns their errors.
func together(all []*Group, f func(g *Group) error) []error {
	errs := make([]error, len(all))
	var done sync.WaitGroup
	for r, g := range all {
		done.Go(func() { errs[r] = f(g) })
	}
	done.Wait()
	return errs
}

// Sums and gathered rows are those of a plain loop in order of ranks, to the bit and on every
// worker, whatever the size and whichever worker is late.
func TestMeetings(t *testing.T) {
	for _, n := range []int{1, 2, 4} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			all := group(t, n, time.Minute)
			sizes := []int{0, 1, 7, slotFloats + 1, 600, 0, 3}
			for _, err := range together(all, func(g *Group) error {
				late := rand.New(rand.NewPCG(uint64(g.rank), 1))
				for i, size := range sizes {
					if late.IntN(3) == 0 {
						time.Sleep(time.Duration(late.IntN(3000)) * time.Microsecond)
					}
					x, want := brought(i, g.rank, size), brought(i, 0, size)
					for r := 1; r < n; r++ {
						for j, v := range brought(i, r, size) {
							want[j] += v
						}
					}
					if err := g.AllReduce(x); err != nil {
						return err
					}
					if !slices.Equal(x, want) {
						return fmt.Errorf("rank %d, meeting %d: another sum of %d", g.rank, i, size)
					}
				}
				return nil
			}) {
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// brought is what a rank brings to a meeting.
func brought(meeting, rank, n int) []float32 {
	r := rand.New(rand.NewPCG(uint64(meeting), uint64(rank)))
	x := make([]float32, n)
	for i := range x {
		x[i] = r.Float32() - 0.5
	}
	return x
}

func TestGather(t *testing.T) {
	for _, c := range []struct{ n, rows, cols int }{{1, 2, 3}, {2, 1, 2}, {2, 3, 5}, {3, 4, 11}, {4, 0, 9}, {2, 3, 2*slotFloats/3 + 5}, {2, 40, 4001}} {
		all := group(t, c.n, time.Minute)
		for _, err := range together(all, func(g *Group) error {
			from, end := backend.Cut(c.cols, 1, g.rank, c.n)
			dst, src := make([]float32, c.rows*c.cols), []float32{}
			for row := range c.rows {
				for col := from; col < end; col++ {
					src = append(src, float32(row*c.cols+col))
				}
			}
			if err := g.AllGather(dst, src, c.rows); err != nil {
				return err
			}
			for i, v := range dst {
				if v != float32(i) {
					return fmt.Errorf("%+v: rank %d has %v in place %d", c, g.rank, v, i)
				}
			}
			return nil
		}) {
			if err != nil {
				t.Error(err)
			}
		}
	}
}

// Every rank runs the steps that rank 0 hands out, each whole.
func TestSteps(t *testing.T) {
	all := group(t, 3, time.Minute)
	steps := []backend.Step{
		{Tokens: []int32{5}, Positions: []int32{0}, Spans: []backend.Span{{Tokens: 1, Tables: [][]int32{{3}, {4, -1}}}}, Sampled: []int32{}},
		{
			Tokens: []int32{1, 2, 3}, Positions: []int32{7, 8, 0},
			Spans:   []backend.Span{{Tokens: 2, Start: 7, Adapter: 2, Tables: [][]int32{{1, 2, 3}, {}}}, {Row: 2, Tokens: 1, Tables: [][]int32{{9}, {8}}}},
			Outputs: []backend.Output{{Row: 1, Position: 9}, {Row: 2, Position: 1}}, Sampled: []int32{0, 0},
		},
	}
	for _, err := range together(all, func(g *Group) error {
		if g.rank == 0 {
			for i := range steps {
				if err := g.Begin(&steps[i]); err != nil {
					return err
				}
				if err := g.AllReduce(nil); err != nil {
					return err
				}
			}
			g.End()
			return nil
		}
		var step backend.Step
		for i := range steps {
			if err := g.Next(&step); err != nil {
				return err
			}
			for j := range step.Spans {
				for k, table := range step.Spans[j].Tables {
					step.Spans[j].Tables[k] = slices.Clone(table)
				}
			}
			if err := g.AllReduce(nil); err != nil {
				return err
			}
			if got := fmt.Sprintf("%+v", step); got != fmt.Sprintf("%+v", steps[i]) {
				return fmt.Errorf("rank %d ran %s, want %+v", g.rank, got, steps[i])
			}
		}
		if err := g.Next(&step); !errors.Is(err, ErrClosed) {
			return fmt.Errorf("behind the last step: %v", err)
		}
		return nil
	}) {
		if err != nil {
			t.Error(err)
		}
	}
}

// A step that limits do not allow is refused, and none is handed out.
func TestStepTooLarge(t *testing.T) {
	g := group(t, 2, time.Minute)[0]
	if err := g.Begin(&backend.Step{Tokens: make([]int32, 5000), Positions: make([]int32, 5000)}); !errors.Is(err, backend.ErrShape) {
		t.Errorf("got %v", err)
	}
	if g.head.step.value.Load() != 0 {
		t.Error("it was handed out")
	}
}

// A worker that does not respond is lost. All others end within the timeout with its rank in
// the error, and every later call of any worker fails at once.
func TestLost(t *testing.T) {
	all := group(t, 3, 50*time.Millisecond)
	for r, err := range together(all[:2], func(g *Group) error { return g.AllReduce(nil) }) {
		if !errors.Is(err, backend.ErrLost) || !strings.Contains(err.Error(), "rank 2 of 3") {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	for r, err := range together(all, func(g *Group) error { return g.AllReduce(nil) }) {
		if !errors.Is(err, backend.ErrLost) {
			t.Errorf("rank %d afterwards: %v", r, err)
		}
	}
	if err := all[0].Begin(&backend.Step{}); !errors.Is(err, backend.ErrLost) {
		t.Errorf("a step afterwards: %v", err)
	}
}

// Who waits for a step, or in a meeting, is woken when a rank is lost.
func TestLose(t *testing.T) {
	all := group(t, 3, time.Hour)
	time.AfterFunc(10*time.Millisecond, func() { all[0].MarkLost(2, "it has ended: signal: killed") })
	errs := together(all[:2], func(g *Group) error {
		if g.rank == 0 {
			return g.AllReduce(make([]float32, 10))
		}
		return g.Next(new(backend.Step))
	})
	if want := "rank 2 of 3: it has ended: signal: killed"; !errors.Is(errs[0], backend.ErrLost) || !strings.Contains(errs[0].Error(), want) {
		t.Errorf("rank 0: %v", errs[0])
	}
	if !errors.Is(errs[1], backend.ErrLost) {
		t.Errorf("rank 1: %v", errs[1])
	}
}

func TestCut(t *testing.T) {
	for _, c := range []struct {
		of, unit, ranks int
		want            []int
	}{{10, 1, 2, []int{0, 5, 10}}, {7, 1, 3, []int{0, 2, 4, 7}}, {90 * 32, 32, 4, []int{0, 22 * 32, 45 * 32, 67 * 32, 90 * 32}}, {33, 32, 1, []int{0, 33}}} {
		got := []int{0}
		for r := range c.ranks {
			from, end := backend.Cut(c.of, c.unit, r, c.ranks)
			if from != got[r] {
				t.Errorf("%+v: rank %d begins at %d", c, r, from)
			}
			got = append(got, end)
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
