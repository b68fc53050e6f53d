package quantize

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/sample"
)

// tapped is a backend that stops before the products of some matrices. visit gets the matrix and
// the rows that it multiplies, and may replace the matrix before the product.
type tapped struct {
	*cpu.CPU
	want  map[string]scaling // by name
	loads map[backend.Weight]backend.Tensor
	taps  []tap
}

// tap is a product before which the backend stops.
type tap struct {
	weight backend.Weight
	rows   backend.Buf
}

// Load loads a tensor and keeps those that are wanted. Their data stays mapped.
func (t *tapped) Load(tn backend.Tensor) (backend.Weight, error) {
	w, err := t.CPU.Load(tn)
	if _, ok := t.want[tn.Name]; err == nil && ok {
		t.loads[w] = tn
	}
	return w, err
}

// Linear records a stop before the first product of each matrix.
func (t *tapped) Linear(dst, x backend.Buf, w, bias backend.Weight) {
	t.stop(x, w)
	t.CPU.Linear(dst, x, w, bias)
}

// MoE records stops for the matrices of experts that read x.
func (t *tapped) MoE(dst, x, router backend.Buf, m backend.MoESpec) {
	for i := range m.Gate {
		t.stop(x, m.Gate[i])
		t.stop(x, m.Up[i])
	}
	t.CPU.MoE(dst, x, router, m)
}

func (t *tapped) stop(x backend.Buf, w backend.Weight) {
	if _, ok := t.loads[w]; ok {
		t.CPU.Mark(len(t.taps))
		t.taps = append(t.taps, tap{w, x})
	}
}

// Mark leaves the model's own marks out.
func (t *tapped) Mark(int) {}

// calibration is a model with the sequences that run through it.
type calibration struct {
	back    *tapped
	model   *model.Model
	kv      backend.KVSpec
	tables  [][][]int32 // of a sequence, by KV group
	length  int         // tokens of a sequence
	outputs int         // most rows of logits
}

// logitBytes bounds the memory of the logits of a calibration.
const logitBytes = 512 << 20

// newCalibration loads a model for sequences of so many tokens.
func newCalibration(src *model.Source, want map[string]scaling, sequences, length, threads int) (c *calibration, err error) {
	const blockTokens = 16
	tokens, vocab := sequences*length, src.Config.Vocab
	limits := backend.Limits{Tokens: tokens, Seqs: sequences, Outputs: min(tokens, max(sequences, logitBytes/4/vocab))}
	kv := memory.Arrange(memory.Need{
		Layers: src.Config.KVLayers(), BlockTokens: blockTokens, DType: backend.F32,
		MaxModelLen: length, MaxBatchedTokens: tokens,
	})
	c = &calibration{kv: kv, length: length, outputs: limits.Outputs, tables: make([][][]int32, sequences)}
	next := int32(0)
	for i := range c.tables {
		for _, g := range memory.Groups(kv) {
			n := g.End(length)
			limits.Blocks = max(limits.Blocks, n)
			table := make([]int32, n)
			for j := range table {
				table[j], next = next, next+1
			}
			c.tables[i] = append(c.tables[i], table)
		}
	}
	c.kv.Blocks = int(next)
	dev, err := cpu.New(cpu.Options{Threads: threads, Limits: limits})
	if err != nil {
		return nil, err
	}
	c.back = &tapped{CPU: dev, want: want, loads: map[backend.Weight]backend.Tensor{}}
	if c.model, err = model.Load(src, c.back, limits, model.Options{}); err == nil {
		err = dev.AllocKV(c.kv)
	}
	if err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	return c, nil
}

// sampleText has the model continue prefix in each sequence, with a temperature of 1. Without a
// prefix a sequence begins with any token.
func (c *calibration) sampleText(ctx context.Context, prefix []int32, seed uint64) ([][]int32, error) {
	all := make([][]int32, len(c.tables))
	draw := rand.New(rand.NewPCG(seed, 0))
	for i := range all {
		if all[i] = append(all[i], prefix...); len(prefix) == 0 {
			all[i] = append(all[i], draw.Int32N(int32(c.model.VocabSize())))
		}
	}
	for at := 0; len(all[0]) < c.length; {
		step := backend.Step{Sampled: make([]int32, len(all))}
		for i := range all {
			c.add(&step, i, all[i][at:], at)
			step.Outputs = append(step.Outputs, backend.Output{
				Row: int32(len(step.Tokens) - 1), Position: int32(len(all[i])), Params: sample.Params{Temperature: 1, Seed: seed + uint64(i)},
			})
		}
		at = len(all[0])
		if err := errors.Join(ctx.Err(), c.model.Step(&step, nil)); err != nil {
			return nil, err
		}
		for i := range all {
			all[i] = append(all[i], step.Sampled[i])
		}
	}
	return all, nil
}

// add appends a sequence's tokens, of which the first has the position at, to a step.
func (c *calibration) add(step *backend.Step, sequence int, tokens []int32, at int) {
	span := backend.Span{Row: int32(len(step.Tokens)), Tokens: int32(len(tokens)), Start: int32(at)}
	for g, spec := range memory.Groups(c.kv) {
		span.Tables = append(span.Tables, c.tables[sequence][g][:spec.End(at+len(tokens))])
	}
	for i, id := range tokens {
		step.Tokens, step.Positions = append(step.Tokens, id), append(step.Positions, int32(at+i))
	}
	step.Spans = append(step.Spans, span)
}

// step returns the step of whole sequences.
func (c *calibration) step(sequences [][]int32) *backend.Step {
	step := &backend.Step{}
	for i, s := range sequences {
		c.add(step, i, s, 0)
	}
	outputs := min(len(step.Tokens), c.outputs)
	for i := range outputs { // evenly, because the last layer's products have only their rows
		row := int32(i * len(step.Tokens) / outputs)
		step.Outputs = append(step.Outputs, backend.Output{Row: row, Position: step.Positions[row] + 1})
	}
	step.Sampled = make([]int32, outputs)
	return step
}

// halt ends a step when it is a panic of a mark's callback.
type halt struct{ err error }

// halting runs a step, and returns the error of a halt.
func halting(step func() error) (err error) {
	defer func() {
		if e := recover(); e != nil {
			h, ok := e.(halt)
			if !ok {
				panic(e)
			}
			err = h.err
		}
	}()
	return step()
}

// start runs sequences in one step. It sends the rows of each product to rows, and waits before the
// product until next, which ends the step if it is false. rows is closed when the step has ended,
// with its error in failed.
func (c *calibration) start(sequences [][]int32) (rows <-chan []float32, next chan<- bool, failed <-chan error) {
	out, in, ended := make(chan []float32), make(chan bool), make(chan error, 1)
	go func() {
		ended <- halting(func() error {
			return c.model.Step(c.step(sequences), func(i int) {
				out <- c.back.View(c.back.taps[i].rows)
				if !<-in {
					panic(halt{})
				}
			})
		})
		close(out)
	}()
	return out, in, ended
}

// run runs sequences in one step. It calls round with each matrix, and the factor of its inputs,
// before the model multiplies with it. round returns the Data that replaces the matrix. exact has
// the same model, of which no matrix changes. The step ends at the first error.
func (c *calibration) run(exact *calibration, sequences [][]int32, on workers, round func(t *backend.Tensor, f *factor) ([]byte, error)) error {
	was, next, failed := exact.start(sequences)
	var last, before []float32
	var f *factor
	seen := map[backend.Weight]bool{}
	visit := func(tap tap, rows, exactly []float32) error {
		if seen[tap.weight] {
			return nil
		}
		seen[tap.weight] = true
		t := c.back.loads[tap.weight]
		if f == nil || !bytes.Equal(raw(last), raw(rows)) || !bytes.Equal(raw(before), raw(exactly)) {
			last, before = append(last[:0], rows...), append(before[:0], exactly...)
			var err error
			if f, err = factorOf(rows, exactly, t.Shape[1], on); err != nil {
				return fmt.Errorf("%s: %w", t.Name, err)
			}
		}
		data, err := round(&t, f)
		if err != nil {
			return err
		}
		return c.back.Reload(tap.weight, data)
	}
	err := halting(func() error {
		return c.model.Step(c.step(sequences), func(i int) {
			exactly, ok := <-was
			if !ok {
				panic(halt{errors.New("quantize: the model ended before its copy")})
			}
			tap := c.back.taps[i]
			err := visit(tap, c.back.View(tap.rows), exactly)
			if next <- err == nil; err != nil {
				panic(halt{err})
			}
		})
	})
	if err != nil { // also that of a step of which nothing ran
		if _, ok := <-was; ok {
			next <- false
		}
	}
	return errors.Join(err, <-failed)
}

// factorOf returns the factor of rows [., n], and their drift from what they were before.
func factorOf(rows, before []float32, n int, on workers) (*factor, error) {
	moments, err := momentsOf(rows, rows, n, on)
	if err != nil {
		return nil, err
	}
	if !finite(moments) {
		return nil, fmt.Errorf("%w: its inputs overflow float32, or are NaN, for the calibration text", ErrOption)
	}
	f := newFactor(moments, n, on)
	if err := on.ctx.Err(); err != nil {
		return nil, err
	}
	if bytes.Equal(raw(rows), raw(before)) {
		return f, nil
	}
	drift := make([]float32, len(rows))
	for i, v := range rows {
		drift[i] = before[i] - v
	}
	f.drift, err = momentsOf(rows, drift, n, on)
	return f, err
}

// momentsOf returns the mean products [n, n] of each column of a and each of b, both [., n]. A
// backend computes them as the product of the transposed rows.
func momentsOf(a, b []float32, n int, on workers) (moments []float32, err error) {
	count := len(a) / n
	dev, err := cpu.New(cpu.Options{Threads: on.threads, Limits: backend.Limits{Tokens: n, Outputs: 1, Seqs: 1, Blocks: 1}})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	load := func(rows []float32) (backend.Weight, error) {
		turned := make([]byte, 4*len(rows))
		by := float32(1 / math.Sqrt(float64(count)))
		on.each(n, func(i int) {
			for j := range count {
				binary.LittleEndian.PutUint32(turned[4*(i*count+j):], math.Float32bits(rows[j*n+i]*by))
			}
		})
		return dev.Load(backend.Tensor{Name: "inputs", DType: backend.F32, Shape: []int{n, count}, Data: turned})
	}
	table, err := load(a)
	if err != nil {
		return nil, err
	}
	w, err := load(b)
	if err != nil {
		return nil, err
	}
	x, err := dev.Alloc(backend.TokenRows, count)
	if err != nil {
		return nil, err
	}
	y, err := dev.Alloc(backend.TokenRows, n)
	if err != nil {
		return nil, err
	}
	step := backend.Step{Tokens: make([]int32, n), Positions: make([]int32, n)}
	for i := range step.Tokens {
		step.Tokens[i] = int32(i)
	}
	err = dev.Replay(backend.Key{Tokens: n}, &step, func() {
		dev.Embed(x, table)
		dev.Linear(y, x, w, backend.NoWeight)
	}, nil)
	if err != nil {
		return nil, fmt.Errorf("moments of %d inputs: %w", n, err)
	}
	return dev.Download(nil, y), nil
}

// raw returns the bytes of numbers.
func raw(s []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), 4*len(s))
}
