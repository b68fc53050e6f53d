package quantize

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/safetensors"
	"github.com/tandem-serving/tandem/engine/sample"
)

// tapped is a backend whose matrices are loaded before their products and dropped after them, so
// that their memory is that of one operation. It stops before each product with such matrices.
type tapped struct {
	*cpu.CPU
	files  *safetensors.Checkpoint
	want   map[string]scaling // by name, the matrices of which rows are looked at
	budget int64              // bytes of matrices that are loaded at once and stay
	logits bool               // steps compute logits; else they end before the output projection

	resident bool // of tests: what is loaded stays

	late   map[backend.Weight]*late
	tables []vocabulary
	heads  map[backend.Weight]backend.Weight // the whole matrices of tables
	taps   []tap

	used map[backend.Weight]bool // late matrices of the recorded products
	read []int                   // KV layers that the operations since the last tap read
	once map[int]int             // KV layers that are read, by the tap after it; -1: more than once
	open []backend.Weight        // late matrices that are loaded
}

// late is a matrix without its numbers, which read returns.
type late struct {
	backend.Tensor
	read func(rows []int) backend.Tensor
	stay bool // it has several products in a step
}

// vocabulary is an embedding. Its table has the rows of the tokens of a step, in their order.
type vocabulary struct {
	table backend.Weight
	whole late
}

// tap is a place before an operation at which the backend stops.
type tap struct {
	rows     backend.Buf
	visit    []backend.Weight // matrices that are wanted and multiply rows
	matrices []backend.Weight // late ones that the operation reads
	drop     []int            // KV layers of operations before it
	end      bool             // the step needs no further operation
}

// reserve is model.Options.Late.
func (t *tapped) reserve(tn backend.Tensor, read func(rows []int) backend.Tensor) (backend.Weight, error) {
	if tn.Of == 0 {
		return t.matrix(tn, read)
	}
	table := backend.Tensor{Name: tn.Name, DType: tn.DType, Shape: []int{t.Limits().Tokens, tn.Shape[1]}}
	w, err := t.Reserve(table)
	t.tables = append(t.tables, vocabulary{w, late{Tensor: tn, read: read}})
	return w, err
}

// matrix loads a matrix if the budget has room for it, else before each of its products.
func (t *tapped) matrix(tn backend.Tensor, read func(rows []int) backend.Tensor) (backend.Weight, error) {
	if t.budget -= int64(tn.DType.MatrixBytes(tn.Shape[0], tn.Shape[1])); t.budget >= 0 {
		defer t.release(tn.Name)
		return t.Load(read(nil))
	}
	tn.First, tn.Of = 0, 0
	w, err := t.Reserve(tn)
	if err == nil {
		t.late[w] = &late{Tensor: tn, read: read}
	}
	return w, err
}

// release takes the pages of a tensor out of the memory of the process.
func (t *tapped) release(name string) {
	name, _, _ = strings.Cut(name, "[") // of an expert
	if f, ok := t.files.Tensor(name); ok {
		t.files.Release(f.Data)
	}
}

// Linear records a stop before a product. The output projection is the end of steps without logits.
func (t *tapped) Linear(dst, x backend.Buf, w, bias backend.Weight) {
	if at := slices.IndexFunc(t.tables, func(v vocabulary) bool { return v.table == w }); at >= 0 {
		if !t.logits {
			t.stop(tap{end: true})
			return
		}
		if _, ok := t.heads[w]; !ok {
			v := t.tables[at].whole
			head, err := t.matrix(v.Tensor, v.read)
			if err != nil {
				panic(halt{err})
			}
			t.heads[w] = head
		}
		w = t.heads[w]
	}
	t.before(x, []backend.Weight{w}, w)
	t.CPU.Linear(dst, x, w, bias)
}

// HeadLinear records a stop before the products of all heads.
func (t *tapped) HeadLinear(dst, x backend.Buf, s backend.HeadSpec) {
	t.before(x, nil, s.Weights...)
	t.CPU.HeadLinear(dst, x, s)
}

// MoE records a stop before the products of all experts, of which some read x.
func (t *tapped) MoE(dst, x, router backend.Buf, m backend.MoESpec) {
	var read []backend.Weight
	for i := range m.Gate {
		read = append(read, m.Gate[i], m.Up[i])
	}
	t.before(x, read, slices.Concat(m.Gate, m.Up, m.Down)...)
	t.CPU.MoE(dst, x, router, m)
}

// before records a stop, if the operation has matrices that are late. Those of read multiply x.
func (t *tapped) before(x backend.Buf, read []backend.Weight, all ...backend.Weight) {
	stop := tap{rows: x}
	for _, w := range all {
		l, ok := t.late[w]
		if !ok {
			continue
		}
		stop.matrices = append(stop.matrices, w)
		if t.used != nil {
			l.stay = l.stay || t.used[w]
			t.used[w] = true
		}
	}
	for _, w := range read {
		if l, ok := t.late[w]; ok && t.want[l.Name].bits > 0 {
			stop.visit = append(stop.visit, w)
		}
	}
	if stop.matrices != nil {
		t.stop(stop)
	}
}

func (t *tapped) stop(s tap) {
	s.drop, t.read = t.read, nil
	for _, layer := range s.drop {
		if _, twice := t.once[layer]; twice {
			t.once[layer] = -1
		} else {
			t.once[layer] = len(t.taps)
		}
	}
	t.CPU.Mark(len(t.taps))
	t.taps = append(t.taps, s)
}

// Attention notes the layer that is read.
func (t *tapped) Attention(dst, q backend.Buf, a backend.AttentionSpec) {
	t.read = append(t.read, a.Layer)
	t.CPU.Attention(dst, q, a)
}

// DeltaRule notes the layers that are read.
func (t *tapped) DeltaRule(dst, qkv, beta, alpha backend.Buf, s backend.DeltaSpec) {
	for part := range s.Parts {
		t.read = append(t.read, s.Layer+part)
	}
	t.CPU.DeltaRule(dst, qkv, beta, alpha, s)
}

// Mark leaves the model's own marks out.
func (t *tapped) Mark(int) {}

// pass drops the matrices of the operation before a tap. In a step without logits it also drops the
// buffers and the KV that no later operation reads.
func (t *tapped) pass(at int) {
	if t.resident {
		return
	}
	for _, w := range t.open {
		t.Unload(w)
	}
	t.open = t.open[:0]
	if t.logits {
		return // later steps read the KV
	}
	t.UnloadIdle()
	if slices.Contains(slices.Collect(maps.Values(t.once)), -1) {
		return // regions have layers that are read later
	}
	for _, layer := range t.taps[at].drop {
		t.UnloadKV(layer)
	}
}

// fill loads a late matrix, from data where that is not nil.
func (t *tapped) fill(w backend.Weight, data []byte) error {
	l := t.late[w]
	if data == nil {
		data = l.read(nil).Data
		defer t.release(l.Name)
	}
	if !l.stay {
		t.open = append(t.open, w)
	}
	return t.Reload(w, data)
}

// load loads the late matrices of a tap.
func (t *tapped) load(at int) error {
	for _, w := range t.taps[at].matrices {
		if err := t.fill(w, nil); err != nil {
			return err
		}
	}
	return nil
}

// embed fills the tables with the rows of a step's tokens, which become the places of these rows.
func (t *tapped) embed(step *backend.Step) error {
	for _, v := range t.tables {
		rows := make([]int, t.Limits().Tokens)
		for i, id := range step.Tokens {
			if id < 0 || int(id) >= v.whole.Of {
				return fmt.Errorf("%w: token id %d is outside the vocabulary of %d", ErrOption, id, v.whole.Of)
			}
			rows[i] = int(id)
		}
		err := t.Reload(v.table, v.whole.read(rows).Data)
		if t.release(v.whole.Name); err != nil {
			return err
		}
	}
	for i := range step.Tokens {
		step.Tokens[i] = int32(i)
	}
	return nil
}

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

// limitsOf returns the limits of the step of whole sequences, whose outputs are those rows that the
// last layer's products have.
func limitsOf(src *model.Source, sequences, length int) backend.Limits {
	tokens := sequences * length
	return backend.Limits{Tokens: tokens, Seqs: sequences, Outputs: min(tokens, max(sequences, logitBytes/4/src.Config.Vocab))}
}

// newCalibration loads a model for sequences of so many tokens. The backend has everything but the
// fields of its CPU.
func newCalibration(src *model.Source, back *tapped, limits backend.Limits, length, threads int) (c *calibration, err error) {
	const blockTokens = 16
	kv := memory.Arrange(memory.Need{
		Layers: src.Config.KVLayers(), BlockTokens: blockTokens, DType: backend.F32,
		MaxModelLen: length, MaxBatchedTokens: limits.Seqs * length,
	})
	c = &calibration{back: back, kv: kv, length: length, outputs: limits.Outputs, tables: make([][][]int32, limits.Seqs)}
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
	back.CPU, back.late, back.heads, back.once = dev, map[backend.Weight]*late{}, map[backend.Weight]backend.Weight{}, map[int]int{}
	if c.model, err = model.Load(src, back, limits, model.Options{Late: back.reserve}); err == nil {
		err = dev.AllocKV(c.kv)
	}
	if err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	return c, nil
}

// sampleText has the model continue prefix in each sequence, of which the first one has the number
// first, with a temperature of 1. Without a prefix a sequence begins with any token.
func (c *calibration) sampleText(ctx context.Context, prefix []int32, seed uint64, first int, draw *rand.Rand) ([][]int32, error) {
	all := make([][]int32, len(c.tables))
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
				Row: int32(len(step.Tokens) - 1), Position: int32(len(all[i])), Params: sample.Params{Temperature: 1, Seed: seed + uint64(first+i)},
			})
		}
		at = len(all[0])
		err := errors.Join(ctx.Err(), c.run(&step, func(i int) error { return errors.Join(ctx.Err(), c.back.load(i)) }))
		if err != nil {
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

// run runs a step. It calls load with each tap, to load what the tap needs.
func (c *calibration) run(step *backend.Step, load func(at int) error) error {
	if err := c.back.embed(step); err != nil {
		return err
	}
	return halting(func() error {
		return c.model.Step(step, func(at int) {
			if c.back.pass(at); c.back.taps[at].end {
				panic(halt{})
			}
			if err := load(at); err != nil {
				panic(halt{err})
			}
		})
	})
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

// errEnded ends a step whose counterpart has ended.
var errEnded = errors.New("quantize: the model ended before its copy")

// start runs sequences in one step. It sends the rows of each tap with matrices to visit to rows,
// and waits before the product until next, which ends the step if it is false. rows is closed when
// the step has ended, with its error in failed.
func (c *calibration) start(sequences [][]int32) (rows <-chan []float32, next chan<- bool, failed <-chan error) {
	out, in, ended := make(chan []float32), make(chan bool), make(chan error, 1)
	go func() {
		err := c.run(c.step(sequences), func(at int) error {
			if t := &c.back.taps[at]; t.visit != nil {
				out <- c.back.View(t.rows)
				if !<-in {
					return errEnded
				}
			}
			return c.back.load(at)
		})
		if errors.Is(err, errEnded) {
			err = nil // the counterpart has it
		}
		ended <- err
		close(out)
	}()
	return out, in, ended
}

// fit runs sequences in one step. It calls round with each matrix, and the factor of its inputs,
// before the model multiplies with it. round returns the Data that replaces the matrix. exact has
// the same model, of which no matrix changes. The step ends at the first error.
func (c *calibration) fit(exact *calibration, sequences [][]int32, on workers, round func(t *backend.Tensor, f *factor) ([]byte, error)) error {
	was, next, failed := exact.start(sequences)
	var last [2][sha256.Size]byte
	var f *factor
	seen := map[backend.Weight][]byte{} // Data of a tap
	visit := func(w backend.Weight, rows, exactly []float32) error {
		l := c.back.late[w]
		if _, ok := seen[w]; ok {
			return nil
		}
		t := l.read(nil)
		if now := [2][sha256.Size]byte{sha256.Sum256(raw(rows)), sha256.Sum256(raw(exactly))}; f == nil || now != last {
			last, f = now, nil // the old one's memory is free now
			var err error
			if f, err = factorOf(rows, exactly, t.Shape[1], on); err != nil {
				return fmt.Errorf("%s: %w", t.Name, err)
			}
		}
		data, err := round(&t, f)
		c.back.release(t.Name)
		seen[w] = data
		return err
	}
	c.back.used = map[backend.Weight]bool{}
	err := c.run(c.step(sequences), func(at int) error {
		t := &c.back.taps[at]
		if t.visit != nil {
			exactly, ok := <-was
			if !ok {
				return errEnded
			}
			var err error
			for i := 0; i < len(t.visit) && err == nil; i++ {
				err = visit(t.visit[i], c.back.View(t.rows), exactly)
			}
			if next <- err == nil; err != nil {
				return err
			}
		}
		for _, w := range t.matrices {
			data, ok := seen[w]
			if ok && data == nil {
				continue // a matrix that stays
			}
			if err := c.back.fill(w, data); err != nil {
				return err
			}
			if ok {
				seen[w] = nil
			}
		}
		return nil
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
	f, err := undrifted(rows, n, on)
	if err != nil || bytes.Equal(raw(rows), raw(before)) {
		return f, err
	}
	f.drift, err = driftOf(rows, before, n, on)
	return f, err
}

// undrifted returns the factor of rows [., n].
func undrifted(rows []float32, n int, on workers) (*factor, error) {
	moments, err := triangleOf(rows, n, on)
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(moments, func(row []float32) bool { return !finite(row) }) {
		return nil, fmt.Errorf("%w: its inputs overflow float32, or are NaN, for the calibration text", ErrOption)
	}
	f := newFactor(moments, n, on)
	return f, on.ctx.Err()
}

// driftOf returns the mean products [n, n] of each column of rows and what each column of before
// has more than that of rows.
func driftOf(rows, before []float32, n int, on workers) (moments []float32, err error) {
	moments = make([]float32, n*n)
	err = meanProducts(rows, before, n, false, on, func(i, from int, values []float32) { copy(moments[i*n+from:], values) })
	return moments, err
}

// triangleOf returns the mean products of each column i of rows [., n] and each column from i on.
func triangleOf(rows []float32, n int, on workers) (moments [][]float32, err error) {
	moments = make([][]float32, n)
	for i := range moments {
		moments[i] = make([]float32, n-i)
	}
	err = meanProducts(rows, nil, n, true, on, func(i, from int, values []float32) {
		if from < i {
			values = values[min(i-from, len(values)):]
		}
		copy(moments[i][max(0, from-i):], values)
	})
	return moments, err
}

// Columns that are multiplied together. The memory of a product does not depend on their number.
const (
	leftColumns  = 512
	rightColumns = 2048
)

// meanProducts passes the mean products of each column i of rows and columns from on of the drift
// of rows, or of rows where before is nil, to put. All are [., n]. With half it may leave out
// columns before i. A backend computes them, because it is fast: each is one chain of sums,
// whatever is computed with it.
func meanProducts(rows, before []float32, n int, half bool, on workers, put func(i, from int, values []float32)) (err error) {
	count, left, right := len(rows)/n, min(n, leftColumns), min(n, rightColumns)
	dev, err := cpu.New(cpu.Options{Threads: on.threads, Limits: backend.Limits{Tokens: left, Outputs: 1, Seqs: 1, Blocks: 1}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	by := float32(1 / math.Sqrt(float64(count)))
	turned := make([]byte, 4*right*count)
	load := func(w backend.Weight, before []float32, from, columns int) error {
		const block = 32 // rows, so that a worker reads and writes whole lines
		part := turned[:4*columns*count]
		on.each((count+block-1)/block, func(b int) {
			lo, hi := b*block, min((b+1)*block, count)
			for i := range min(columns, n-from) {
				at, to := lo*n+from+i, part[4*(i*count+lo):4*(i*count+hi)]
				for ; len(to) >= 4; at, to = at+n, to[4:] {
					v := rows[at]
					if before != nil {
						v = before[at] - v
					}
					binary.LittleEndian.PutUint32(to, math.Float32bits(v*by))
				}
			}
		})
		return errors.Join(on.ctx.Err(), dev.Reload(w, part))
	}
	reserve := func(columns int) (backend.Weight, error) {
		return dev.Reserve(backend.Tensor{Name: "inputs", DType: backend.F32, Shape: []int{columns, count}})
	}
	table, err := reserve(left)
	if err != nil {
		return err
	}
	w, err := reserve(right)
	if err != nil {
		return err
	}
	x, err := dev.Alloc(backend.TokenRows, count)
	if err != nil {
		return err
	}
	y, err := dev.Alloc(backend.TokenRows, right)
	if err != nil {
		return err
	}
	step := backend.Step{Tokens: make([]int32, left), Positions: make([]int32, left)}
	for i := range step.Tokens {
		step.Tokens[i] = int32(i)
	}
	for from := 0; from < n; from += right {
		if err := load(w, before, from, right); err != nil {
			return err
		}
		to := min(from+right, n)
		for at := 0; at < n && (!half || at < to); at += left {
			if err := load(table, nil, at, left); err != nil {
				return err
			}
			err := dev.Replay(backend.Key{Tokens: left}, &step, func() {
				dev.Embed(x, table)
				dev.Linear(y, x, w, backend.NoWeight)
			}, nil)
			if err != nil {
				return fmt.Errorf("moments of %d inputs: %w", n, err)
			}
			out := dev.View(y)
			for i := range min(left, n-at) {
				put(at+i, from, out[i*right:][:to-from])
			}
		}
	}
	return nil
}

// raw returns the bytes of numbers.
func raw(s []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), 4*len(s))
}
