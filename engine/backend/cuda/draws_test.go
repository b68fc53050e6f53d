//go:build cgo && linux

package cuda

import (
	"encoding/binary"
	"math"
	"math/rand/v2"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
)

// drawVocab is more than the threads of a block have once.
const drawVocab = 700

// drawCase draws from rows of logits in every way, with ties, and tells
// log-probabilities.
func drawCase() kernelCase {
	return kernelCase{name: "draws", rows: 12, draws: true, make: func(b *bench) func() {
		x, table := b.buf(drawVocab), b.steps(b.rows, drawVocab)
		b.inputs = append(b.inputs, func() { b.Embed(x, table) })
		var err error
		b.logits, err = b.Alloc(backend.OutputRows, drawVocab)
		b.must(err)
		return func() {
			b.Rows(b.logits, x)
			b.Sample(b.logits)
		}
	}}
}

// steps is a table whose rows have numbers of all sizes and, in turn, few, so that many
// share one: of those that tie at an edge of top_p some stay and some do not.
func (b *bench) steps(rows, cols int) backend.Weight {
	var data []byte
	for i := range rows {
		for range cols {
			v := 3 * b.rng.NormFloat64()
			if i%3 == 1 { // the rows that top_p cuts
				v = math.Round(v/4) * 4
			}
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(v)))
		}
	}
	w, err := b.Load(backend.Tensor{Name: "steps", DType: backend.F32, Shape: []int{rows, cols}, Data: data})
	b.must(err)
	return w
}

// drawAll makes every row of a step an output.
func drawAll(rng *rand.Rand, s *backend.Step) {
	for i := range s.Tokens {
		p := sample.Params{Seed: rng.Uint64(), Choice: uint32(i % 3), Temperature: 0.4 + rng.Float32()}
		if i%2 == 1 {
			p.TopK = int32(1 + rng.IntN(60))
		}
		if i%3 == 1 {
			p.TopP = 0.3 + 0.6*rng.Float32()
		}
		if i%4 == 2 {
			p.MinP = 0.05
		}
		if i == 6 {
			p.Temperature = 0
		}
		s.Outputs = append(s.Outputs, backend.Output{Row: int32(i), Position: int32(rng.IntN(5000)), Params: p, Probs: i * 5 % 22})
	}
	s.Sampled = make([]int32, len(s.Outputs))
}

// drawn is what came of the outputs of a step: tokens, ranks, log-probabilities, the
// best tokens and theirs. A backend that tells none has them made of its logits.
func drawn(dev backend.Backend, logits backend.Buf, s *backend.Step) (results [][]float32) {
	var tokens, ranks, own []float32
	rows := dev.Download(nil, logits)
	for i, token := range s.Sampled {
		n := s.Outputs[i].Probs - 1
		lp, rank, top := sample.LogProbs(rows[i*drawVocab:(i+1)*drawVocab], token, max(n, 0), nil, nil)
		if scorer, ok := dev.(backend.Scorer); ok && n >= 0 {
			if lp, rank, top, ok = scorer.LogProbs(i, nil); !ok {
				lp = float32(math.NaN())
			}
		}
		tokens, ranks, own = append(tokens, float32(token)), append(ranks, float32(rank)), append(own, lp)
		best, probs := []float32{1}, []float32{1}
		for _, t := range top {
			best, probs = append(best, float32(t.Token)), append(probs, t.LogProb)
		}
		results = append(results, best, probs)
	}
	return append(results, tokens, ranks, own)
}
