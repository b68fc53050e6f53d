package workers

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/backend"
)

// Begin publishes a step to the other workers. They have read the last one, because
// they joined a meeting that ended it.
func (g *Group) Begin(step *backend.Step) error {
	if err := g.Err(); err != nil {
		return err
	}
	w := writer{to: g.mailbox}
	w.put(int32(len(step.Tokens)), int32(len(step.Outputs)), int32(len(step.Spans)))
	w.put(step.Tokens...)
	w.put(step.Positions...)
	for i := range step.Outputs {
		w.put(step.Outputs[i].Row, step.Outputs[i].Position)
	}
	for i := range step.Spans {
		s := &step.Spans[i]
		w.put(s.Row, s.Tokens, s.Start, s.Adapter, int32(len(s.Tables)))
		for _, table := range s.Tables {
			w.put(int32(len(table)))
			w.put(table...)
		}
	}
	if w.more > 0 {
		return fmt.Errorf("%w: a step of %d tokens and %d spans needs %d numbers, there is room for %d",
			backend.ErrShape, len(step.Tokens), len(step.Spans), w.at+w.more, len(g.mailbox))
	}
	g.steps++
	g.head.step.post(g.steps)
	return nil
}

// Next waits for a step and reads it into step, whose memory is reused. The sampling
// parameters of outputs are not transferred, because rank 0 samples.
func (g *Group) Next(step *backend.Step) error {
	g.steps++
	if err := g.await(&g.head.step, g.steps, 0, 0); err != nil {
		return err
	}
	r := reader{from: g.mailbox}
	tokens, outputs, spans := r.nextInt(), r.nextInt(), r.nextInt()
	step.Tokens = append(step.Tokens[:0], r.next(tokens)...)
	step.Positions = append(step.Positions[:0], r.next(tokens)...)
	step.Outputs, step.Spans = step.Outputs[:0], step.Spans[:0]
	for range outputs {
		step.Outputs = append(step.Outputs, backend.Output{Row: int32(r.nextInt()), Position: int32(r.nextInt())})
	}
	for range spans {
		s := backend.Span{Row: int32(r.nextInt()), Tokens: int32(r.nextInt()), Start: int32(r.nextInt()), Adapter: int32(r.nextInt())}
		for range r.nextInt() {
			s.Tables = append(s.Tables, r.next(r.nextInt())) // the backend copies it before its first meeting
		}
		step.Spans = append(step.Spans, s)
	}
	if cap(step.Sampled) < outputs {
		step.Sampled = make([]int32, outputs)
	}
	step.Sampled = step.Sampled[:outputs]
	return nil
}

// writer fills memory and counts the numbers that do not fit.
type writer struct {
	to       []int32
	at, more int
}

func (w *writer) put(v ...int32) {
	n := copy(w.to[w.at:], v)
	w.at += n
	w.more += len(v) - n
}

// reader reads numbers that rank 0 wrote. It does not check them, because rank 0 is the same
// program.
type reader struct{ from []int32 }

func (r *reader) next(n int) []int32 {
	v := r.from[:n:n]
	r.from = r.from[n:]
	return v
}

func (r *reader) nextInt() int { return int(r.next(1)[0]) }
