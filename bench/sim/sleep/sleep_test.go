package sleep

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// A step has the shape of its batch, takes the profile's time, and marks its layers at equal
// distances.
func TestStep(t *testing.T) {
	batch := scheduler.Batch{Seqs: []scheduler.Seq{
		{Tokens: make([]int32, 1), Start: 99, Sample: true, Tables: [][]kvcache.BlockID{nil}},
		{Tokens: make([]int32, 300), Start: 64},
		{Tokens: make([]int32, 1), Start: 10},
		{Tokens: make([]int32, 20), Start: 5, Sample: true},
		{Tokens: make([]int32, 1), Start: 499, Sample: true},
	}}
	var s backend.Step
	row := int32(0)
	for _, q := range batch.Seqs {
		n := int32(len(q.Tokens))
		s.Spans = append(s.Spans, backend.Span{Row: row, Tokens: n, Start: int32(q.Start)})
		if row += n; q.Sample {
			s.Outputs = append(s.Outputs, backend.Output{Row: row - 1})
		}
	}
	s.Sampled = make([]int32, len(s.Outputs))
	want := batch.Shape()
	if got := Shape(&s); got != want {
		t.Errorf("shape %+v, want %+v", got, want)
	}
	p, _, err := profile.Named("h100:llama-8b")
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		m := &Model{Times: p.Times(), Layers: 3, Vocab: 10, Token: 7}
		whole, began := p.Times().Of(want), time.Now()
		var marks []time.Duration
		if err := m.Step(&s, func(int) { marks = append(marks, time.Since(began)) }); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(began); d != whole || len(marks) != 3 || marks[0] != whole/3 || marks[2] != whole {
			t.Errorf("the step took %v, marks at %v, want %v", d, marks, whole)
		}
	})
	for _, token := range s.Sampled {
		if token != 7 {
			t.Errorf("sampled %v", s.Sampled)
		}
	}
}
