package main

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/model"
)

const (
	promptTokens = 512
	context      = 64 // tokens before the timed ones
	decodeSteps  = 24
	batch        = 8
	blockTokens  = 16
	longest      = 1024 // tokens of a sequence: more than it needs
)

// side is our engine with the model loaded.
type side struct {
	src     *model.Source
	dev     *cpu.CPU
	m       *model.Model
	weights int64
	groups  []backend.KVGroup
	seqs    []seq
}

// seq is one sequence's tokens so far and its blocks in each group.
type seq struct {
	number, done int
	tables       [][]int32
}

// newOurs loads a folder or a GGUF file, for steps of up to seqs sequences.
func newOurs(path, quantization, kernels string, threads, seqs int) (s *side, err error) {
	s = &side{}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.src, err = model.OpenDir(path); err != nil {
		return s, err
	}
	limits := backend.Limits{Tokens: promptTokens, Outputs: seqs, Seqs: seqs, Blocks: longest / blockTokens}
	if s.dev, err = cpu.New(cpu.Options{Threads: threads, Limits: limits, Kernels: kernels, Mapped: true}); err != nil {
		return s, err
	}
	q := map[string]model.Quantization{"none": model.AsStored, "int8": model.INT8, "int4": model.INT4}[quantization]
	if s.m, err = model.Load(s.src, s.dev, limits, model.Options{Quantization: q}); err != nil {
		return s, err
	}
	if s.weights, err = s.src.WeightBytes(q); err != nil {
		return s, err
	}
	c := s.m.Config()
	kv := memory.Arrange(memory.Need{
		Layers: c.KVLayers(), BlockTokens: blockTokens, DType: backend.BF16, MaxModelLen: longest, MaxBatchedTokens: promptTokens,
	})
	s.groups = kv.Groups
	for i := range seqs {
		q := seq{number: i}
		for _, g := range s.groups {
			var table []int32
			for range (longest + g.BlockTokens - 1) / g.BlockTokens {
				table = append(table, int32(kv.Blocks))
				kv.Blocks++
			}
			q.tables = append(q.tables, table)
		}
		s.seqs = append(s.seqs, q)
	}
	return s, s.dev.AllocKV(kv)
}

func (s *side) close() {
	var err error
	if s.dev != nil {
		err = s.dev.Close()
	}
	if s.src != nil {
		err = errors.Join(err, s.src.Close())
	}
	if err != nil {
		fmt.Println("closing:", err)
	}
}

// step computes the next n tokens of some sequences and samples after each.
func (s *side) step(n int, seqs []seq) error {
	st := &backend.Step{Sampled: make([]int32, len(seqs))}
	for i := range seqs {
		q := &seqs[i]
		span := backend.Span{Row: int32(len(st.Tokens)), Tokens: int32(n), Start: int32(q.done)}
		for g, table := range q.tables {
			span.Tables = append(span.Tables, table[:(q.done+n+s.groups[g].BlockTokens-1)/s.groups[g].BlockTokens])
		}
		st.Spans = append(st.Spans, span)
		for range n {
			st.Tokens = append(st.Tokens, int32((q.done*7919+q.number*104729)%s.m.VocabSize()))
			st.Positions = append(st.Positions, int32(q.done))
			q.done++
		}
		st.Outputs = append(st.Outputs, backend.Output{Row: int32(len(st.Tokens) - 1), Position: int32(q.done)})
	}
	return s.m.Step(st, nil)
}

// rewind sets the number of tokens that the sequences have.
func (s *side) rewind(to int) {
	for i := range s.seqs {
		s.seqs[i].done = to
	}
}

// rate returns the tokens per second of steps of n tokens of some sequences. between is called
// before each step and not timed.
func (s *side) rate(n int, seqs []seq, steps int, between func()) (float64, error) {
	var took time.Duration
	for range steps {
		between()
		began := time.Now()
		if err := s.step(n, seqs); err != nil {
			return 0, err
		}
		took += time.Since(began)
	}
	return float64(len(seqs)*n*steps) / took.Seconds(), nil
}

// decodeOne is the rate of decoding one sequence, and the bandwidth in bytes per second of reading
// memory between its steps. So other load on the machine slows both alike.
func (s *side) decodeOne(r *reader) (rate, bandwidth float64, err error) {
	var reading time.Duration
	rate, err = s.rate(1, s.seqs[:1], decodeSteps, func() { reading += r.pass() })
	return rate, float64(decodeSteps*r.bytes()) / reading.Seconds(), err
}

func nothing() {}

// measure times one prompt, and decoding of one and of eight sequences.
func (s *side) measure(r *reader) (f figures, bandwidth float64, err error) {
	for _, n := range []int{1, batch} {
		s.rewind(0)
		err = errors.Join(err, s.step(context, s.seqs[:n])) // also records the plans
		err = errors.Join(err, s.step(1, s.seqs[:n]))
		s.rewind(context)
		var e error
		if n > 1 {
			f.Decode8, e = s.rate(1, s.seqs[:n], decodeSteps, nothing)
		} else {
			f.Decode1, bandwidth, e = s.decodeOne(r)
		}
		err = errors.Join(err, e)
	}
	s.rewind(context) // as llama-bench does with the same depth
	var e error
	f.Prefill, e = s.rate(promptTokens, s.seqs[:1], 1, nothing)
	return f, bandwidth, errors.Join(err, e)
}

// passWords is the number of words that a thread reads in a pass, 128 MiB. Its memory is
// passes times as large, so that no cache holds it.
const (
	passWords = 1 << 24
	passes    = 8
)

// reader reads memory with several threads.
type reader struct {
	data  [][]uint64
	sums  []uint64
	words int // of a thread in a pass
	ahead int // words to prefetch: the fastest distance on this machine
	at    int // next pass
}

func newReader(threads, words int) *reader {
	r := &reader{data: make([][]uint64, threads), sums: make([]uint64, threads), words: words}
	r.onEachThread(func(i int) { r.data[i] = slices.Repeat([]uint64{1}, passes*words) })
	best, least := 0, time.Hour
	for try := range 2 * passes { // both ways in turn, so that others on the machine slow both
		r.ahead = try % 2 * 256
		if took := r.pass(); took < least {
			best, least = r.ahead, took
		}
	}
	r.ahead = best
	clear(r.sums)
	return r
}

// bytes returns the number of bytes that a pass reads.
func (r *reader) bytes() int { return len(r.data) * r.words * 8 }

// pass reads the next part of each thread's memory.
func (r *reader) pass() time.Duration {
	from := r.at * r.words
	r.at = (r.at + 1) % passes
	return r.onEachThread(func(i int) { r.sums[i] += read(r.data[i][from:from+r.words], r.ahead) })
}

// onEachThread calls do once on every thread.
func (r *reader) onEachThread(do func(i int)) time.Duration {
	began := time.Now()
	var wg sync.WaitGroup
	for i := range r.data {
		wg.Go(func() { do(i) })
	}
	wg.Wait()
	return time.Since(began)
}
