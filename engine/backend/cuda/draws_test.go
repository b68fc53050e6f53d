//go:build cgo && linux

package cuda

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
)

// drawVocab is more than the threads of a block have once.
const drawVocab = 700

// drawCase samples from rows of logits in every way, with ties and log-probabilities. With
// rules it samples once more after the sampled tokens.
func drawCase(rules, masks bool) kernelCase {
	name, tokens := "draws", 12
	if rules {
		name, tokens = "rules", drawVocab // what was drawn is a token of the next step
	}
	if masks {
		name = "masks"
	}
	return kernelCase{name: name, rows: 12, vocab: drawVocab, draws: true, form: drawsAlone, rules: rules, masks: masks, make: func(b *bench) func() {
		x, table := b.buf(b.vocab), b.steps(tokens, b.vocab)
		b.inputs = append(b.inputs, func() { b.Embed(x, table) })
		var err error
		b.logits, err = b.Alloc(backend.OutputRows, b.vocab)
		b.must(err)
		return func() {
			b.Rows(b.logits, x)
			b.Sample(b.logits)
		}
	}}
}

// sliceCases draw by slices: what drawCase does, and from more than one slice.
func sliceCases() []kernelCase {
	all := []kernelCase{drawCase(false, false), drawCase(true, true), drawCase(false, true)}
	for i := range all {
		all[i].name, all[i].form = "slices/"+all[i].name, drawsSlices
	}
	all[2].name, all[2].vocab = "slices/long", 17_000
	return all
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
		s.Outputs = append(s.Outputs, backend.Output{Row: int32(i), Position: int32(rng.IntN(5000)), Params: p, LogProbs: i * 5 % 22})
	}
	s.Sampled = make([]int32, len(s.Outputs))
}

// ruleAll gives the outputs of a step rules of every kind that look at each other's
// tokens, so that one which comes too early, too late or twice draws another token.
func ruleAll(rng *rand.Rand, s *backend.Step) {
	some := func(n, of int) []int32 {
		all := make([]int32, n)
		for i := range all {
			all[i] = rng.Int32N(int32(of))
		}
		return all
	}
	for i := range s.Outputs {
		var r sample.Rules
		prompt, output := some(300, drawVocab), some(2, drawVocab)
		switch i % 6 {
		case 1: // five tokens, of which what was drawn decides which may follow
			few := some(5, 300)
			r.Allowed, r.Frequency = few, 3
			for j, a := range few {
				r.BadWords = append(r.BadWords, []int32{a, few[(j+1)%5]}, []int32{output[1], a, few[(j+3)%5]})
			}
			output = append(output, few[0])
		case 2: // many of what is banned is known, and pushed
			r.MinTokens, r.Stops, r.Repetition = 9, some(500, drawVocab), 0.4
			for t := range int32(drawVocab) {
				r.Bias = append(r.Bias, sample.Bias{Token: t, Value: 5 * rng.Float32()})
			}
		case 3:
			r.Presence, r.MinTokens, r.Stops = 9, 4, some(300, drawVocab)
		case 4: // the best token, which does not come again
			s.Outputs[i].Params.Temperature = 0
			r.Frequency, r.Repetition = 20, 1.5
		case 5: // the same, of those that are known
			s.Outputs[i].Params.Temperature = 0
			r.Frequency = 0.3
			for range 4 {
				output = append(output, some(drawVocab, drawVocab)...)
			}
		}
		s.Outputs[i].Params.Controls = sample.NewControls(r, prompt, output)
	}
}

// maskAll gives two of three outputs masks, of many tokens or of few.
func maskAll(rng *rand.Rand, s *backend.Step, vocab int) {
	for i := range s.Outputs {
		if i%3 < 2 {
			s.Outputs[i].Params.Mask = randomMask(rng, vocab, []float64{0.7, 0.02}[i%3])
		}
	}
}

// randomMask returns a mask with a share of the tokens.
func randomMask(rng *rand.Rand, vocab int, share float64) []uint64 {
	mask := make([]uint64, (vocab+63)/64)
	for token := range vocab {
		if rng.Float64() < share {
			mask[token/64] |= 1 << (token % 64)
		}
	}
	return mask
}

// follow runs a step and one after it, in which output i continues with the token of output
// i+1. A device gets the second before the first has ended.
func (c *kernelCase) follow(dev backend.Backend, key backend.Key, first, second *backend.Step, record func()) error {
	ahead, ok := dev.(backend.Ahead)
	if ok {
		if err := ahead.Start(key, first, record); err != nil {
			return err
		}
	} else if err := dev.Replay(key, first, record, nil); err != nil {
		return err
	}
	for i := range second.Outputs {
		from := (i + 1) % len(first.Outputs)
		p := &second.Outputs[i].Params
		*p = first.Outputs[from].Params
		if second.Tokens[i] = int32(-1 - from); !ok {
			second.Tokens[i] = first.Sampled[from]
			if p.Controls != nil {
				p.Controls = p.Controls.After(first.Sampled[from : from+1])
			}
		}
	}
	if !ok {
		return dev.Replay(key, second, record, nil)
	}
	if err := ahead.Start(key, second, record); err != nil {
		return err
	}
	if err := ahead.Finish(first.Sampled); err != nil {
		return err
	}
	return ahead.Finish(second.Sampled)
}

func numbers(tokens []int32) (all []float32) {
	for _, t := range tokens {
		all = append(all, float32(t))
	}
	return all
}

// drawn returns the results of a step's outputs: tokens, ranks, log-probabilities, the best
// tokens and theirs. If a backend has none, they are computed from its logits.
func drawn(dev backend.Backend, logits backend.Buf, vocab int, s *backend.Step) (results [][]float32) {
	var tokens, ranks, own []float32
	rows := dev.Download(nil, logits)
	for i, token := range s.Sampled {
		n := s.Outputs[i].LogProbs - 1
		lp, rank, top := sample.LogProbs(sample.Portable{}, rows[i*vocab:(i+1)*vocab], token, max(n, 0), nil, nil)
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

// TestDrawsAreTheDefinition: the device draws engine/sample's tokens, 1,350 of them on the host
// twin, from rows of one block of sums to more than are made at once, with ties, -Inf and NaN. As
// a soak and on a GPU it compares many more, and those of C: see drawMany.
func TestDrawsAreTheDefinition(t *testing.T) {
	t.Run("alone", func(t *testing.T) {
		drawsAreTheDefinition(t, drawsAlone, drawRows, map[int]int{90: 12, 1200: 6, 9000: 1})
	})
	t.Run("slices", func(t *testing.T) { drawsAreTheDefinition(t, 0, drawRows, map[int]int{90: 6, 9000: 1, 20_000: 1}) })
	t.Run("wide", func(t *testing.T) { drawsAreTheDefinition(t, 0, 4, map[int]int{330_000: 1}) })
	if draws, limit := manyDraws(); draws > 0 {
		t.Run("many", func(t *testing.T) { drawMany(t, draws, limit) })
	}
}

func drawsAreTheDefinition(t *testing.T, form int32, rows int, vocabularies map[int]int) {
	rng := rand.New(rand.NewPCG(5, 5))
	for vocab, steps := range vocabularies {
		steps = max(1, steps*rounds/14)
		data := make([]byte, 0, rows*vocab*4)
		logits := make([]float32, rows*vocab)
		for i := range logits {
			v := rng.NormFloat64() * math.Exp(float64(i/vocab%7)-3)
			switch i / vocab % 5 {
			case 1:
				v = math.Round(v)
			case 2:
				v = 1.5
			case 3:
				if rng.IntN(5) == 0 {
					v = []float64{math.NaN(), math.Inf(-1), 0}[rng.IntN(3)]
				}
			}
			logits[i] = float32(v)
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(logits[i]))
		}
		dev := openGPU(t, Options{Limits: backend.Limits{Tokens: rows, Outputs: rows, Seqs: 1, Blocks: 1}, draws: form})
		b := &bench{Backend: dev, rng: rng}
		table, err := b.Load(backend.Tensor{Name: "logits", DType: backend.F32, Shape: []int{rows, vocab}, Data: data})
		b.must(err)
		x := b.buf(vocab)
		out, err := b.Alloc(backend.OutputRows, vocab)
		b.must(err)
		var s sample.Scratch
		for n := range steps {
			step := plainStep(rng, rows)
			for i := range rows {
				step.Tokens[i] = int32(i)
				p := sample.Params{Seed: rng.Uint64(), Temperature: float32(math.Exp(rng.NormFloat64()))}
				if rng.IntN(3) == 0 {
					p.TopK = rng.Int32N(int32(vocab))
				}
				if rng.IntN(2) == 0 {
					p.TopP = rng.Float32()
				}
				if rng.IntN(4) == 0 {
					p.MinP = rng.Float32() * rng.Float32()
				}
				step.Outputs = append(step.Outputs, backend.Output{Row: int32(i), Position: int32(n), Params: p})
			}
			step.Sampled = make([]int32, rows)
			b.must(dev.Replay(backend.Key{Tokens: rows, Outputs: rows}, step, func() {
				b.Embed(x, table)
				b.Rows(out, x)
				b.Sample(out)
			}, nil))
			for i, got := range step.Sampled {
				if want := sample.Pick(logits[i*vocab:(i+1)*vocab], &step.Outputs[i].Params, int32(n), &s); got != want {
					t.Fatalf("step %d, row %d of %d tokens, %+v: token %d drawn, want %d", n, i, vocab, step.Outputs[i].Params, got, want)
				}
			}
		}
		dev.Close()
	}
}
