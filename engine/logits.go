package engine

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/memory"
)

// Logits runs tokens through the model without a scheduler. It calls visit with the
// logits [vocab] of each position from from on; the slice is valid during the call. An
// Engine must not use l at the same time.
func (l *Loaded) Logits(tokens []int32, from int, visit func(position int, logits []float32) error) error {
	vocab := l.Model.VocabSize()
	for i, t := range tokens {
		if t < 0 || int(t) >= vocab {
			return fmt.Errorf("%w: %d at position %d, the vocabulary has %d", ErrToken, t, i, vocab)
		}
	}
	if len(tokens) > l.Scheduler.MaxModelLen {
		return fmt.Errorf("%w: %d tokens, the context holds %d", ErrOption, len(tokens), l.Scheduler.MaxModelLen)
	}
	// Each group gets blocks of its own: as many as the whole text needs if there are
	// enough, else a ring as long as its window needs.
	tables, next := make([][]int32, len(l.KV.Groups)), 0
	for g, spec := range memory.Groups(l.KV) {
		most := spec.Peak(len(tokens), l.Scheduler.MaxBatchedTokens)
		for place := range spec.End(len(tokens)) {
			tables[g] = append(tables[g], int32(next+place%most))
		}
		next += most
	}
	chunk := min(l.Scheduler.MaxBatchedTokens, l.Scheduler.MaxSeqs)
	var logits []float32
	for start := 0; start < len(tokens); start += chunk {
		end := min(start+chunk, len(tokens))
		span := backend.Span{Tokens: int32(end - start), Start: int32(start)}
		for g, spec := range memory.Groups(l.KV) {
			span.Tables = append(span.Tables, tables[g][:spec.End(end)])
		}
		step := backend.Step{Spans: []backend.Span{span}}
		for pos := start; pos < end; pos++ {
			step.Tokens = append(step.Tokens, tokens[pos])
			step.Positions = append(step.Positions, int32(pos))
			if pos >= from {
				step.Outputs = append(step.Outputs, backend.Output{Row: int32(pos - start), Position: int32(pos + 1)})
			}
		}
		step.Sampled = make([]int32, len(step.Outputs))
		if err := l.Model.Step(&step, nil); err != nil {
			return fmt.Errorf("%w: positions %d to %d: %w", ErrStep, start, end-1, err)
		}
		if len(step.Outputs) == 0 {
			continue
		}
		logits = l.Backend.Download(logits, l.Model.Logits())
		for i := range step.Outputs {
			if err := visit(start+int(step.Outputs[i].Row), logits[i*vocab:(i+1)*vocab]); err != nil {
				return err
			}
		}
	}
	return nil
}
