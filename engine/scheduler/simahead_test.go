package scheduler

import (
	"fmt"
	"slices"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// flight is a step that was given out ahead, as the device has it: with block
// tables of its own, and for each Seq who it is of.
type flight struct {
	batch  Batch
	who    []*simRequest
	tables [][][]kvcache.BlockID
}

// fly asks for the step after the running one, now and then.
func (m *sim) fly() (*flight, error) {
	if m.rng.IntN(4) == 0 {
		return nil, nil
	}
	ends := map[RequestID]bool{}
	b, ok := m.s.Ahead(func(id RequestID) Next {
		q := m.find(id)
		switch {
		case len(q.output())+1 == q.maxNew && m.rng.IntN(2) == 0:
			ends[id] = true
			return Ends
		case m.rng.IntN(40) == 0:
			return Waits
		}
		return Continues
	})
	if !ok {
		return nil, nil
	}
	m.n["ahead"]++
	f := &flight{batch: b}
	for _, seq := range b.Seqs {
		q := m.find(seq.ID)
		if q == nil || ends[seq.ID] || !slices.Contains(m.batch, q) || slices.Contains(f.who, q) {
			return nil, fmt.Errorf("has request %d, which is gone, about to end, not in the step, or there twice", seq.ID)
		}
		if seq.Start != len(q.Tokens) || len(seq.Tokens) != 1 || seq.Tokens[0] != Unknown || !seq.Sample || seq.Start+1 >= m.cfg.MaxModelLen {
			return nil, fmt.Errorf("computes %v at %d of request %d with %d tokens", seq.Tokens, seq.Start, seq.ID, len(q.Tokens))
		}
		var tables [][]kvcache.BlockID
		for g, spec := range m.groups {
			if len(seq.Tables[g]) != spec.End(seq.Start+1) {
				return nil, fmt.Errorf("has %d places in group %d for request %d at %d", len(seq.Tables[g]), g, seq.ID, seq.Start)
			}
			tables = append(tables, slices.Clone(seq.Tables[g]))
		}
		f.who, f.tables = append(f.who, q), append(f.tables, tables)
	}
	return f, m.after("Ahead")
}

// land gives a flight the tokens that the step before it sampled, and makes it the
// running step.
func (m *sim) land(f *flight, before Batch, results []Result) (Batch, error) {
	b := Batch{Tokens: f.batch.Tokens}
	for i, seq := range f.batch.Seqs {
		row := 0
		for _, was := range before.Seqs {
			if was.ID == seq.ID {
				break
			}
			if was.Sample {
				row++
			}
		}
		seq.Tokens, seq.Tables = results[row].Tokens, f.tables[i]
		if len(seq.Tokens) != 1 {
			return b, fmt.Errorf("ahead of request %d with %v", seq.ID, seq.Tokens)
		}
		if f.who[i].aborted {
			m.n["ahead-aborted"]++
			if q := f.who[i]; len(q.cells) == seq.Start {
				q.cells = append(q.cells, next(q.Root, q.cells[seq.Start-1], seq.Start, seq.Tokens[0]))
			}
		} else if !slices.Contains(m.live, f.who[i]) {
			m.n["ahead-overrun"]++
		}
		b.Seqs = append(b.Seqs, seq)
	}
	m.batch, m.completed = f.who, nil
	return b, nil
}
