package main

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/model"
)

const (
	promptTokens = 512
	context      = 64 // tokens before the timed ones
	decodeSteps  = 24
	batch        = 8
	blockTokens  = 16
	blocks       = 64 // of a sequence: more than it needs
)

// side is our engine with the model loaded.
type side struct {
	src     *model.Source
	dev     *cpu.CPU
	m       *model.Model
	weights int64
	seqs    [batch]seq
}

// seq is one sequence's tokens so far and its blocks.
type seq struct {
	done  int
	table []int32
}

func newOurs(dir, quantization, kernels string, threads int) (s *side, err error) {
	s = &side{}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.src, err = model.OpenDir(dir); err != nil {
		return s, err
	}
	limits := backend.Limits{Tokens: promptTokens, Outputs: batch, Seqs: batch, Blocks: blocks}
	if s.dev, err = cpu.New(cpu.Options{Threads: threads, Limits: limits, Kernels: kernels, Mapped: true}); err != nil {
		return s, err
	}
	q := map[string]model.Quantization{"none": model.AsStored, "int8": model.INT8, "int4": model.INT4}[quantization]
	if s.m, err = model.Load(s.src, s.dev, limits, model.Options{Quantization: q}); err != nil {
		return s, err
	}
	c := s.m.Config()
	s.weights = c.WeightBytes(q)
	if err = s.dev.AllocKV(backend.UniformKV(c.Layers, batch*blocks, blockTokens, c.KVHeads, c.HeadDim, backend.BF16)); err != nil {
		return s, err
	}
	for i := range s.seqs {
		for b := range blocks {
			s.seqs[i].table = append(s.seqs[i].table, int32(i*blocks+b))
		}
	}
	return s, nil
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
func (s *side) step(n, seqs int) error {
	st := &backend.Step{Sampled: make([]int32, seqs)}
	for i := range seqs {
		q := &s.seqs[i]
		st.Spans = append(st.Spans, backend.Span{Row: int32(len(st.Tokens)), Tokens: int32(n), Start: int32(q.done),
			Tables: [][]int32{q.table[:(q.done+n+blockTokens-1)/blockTokens]}})
		for range n {
			st.Tokens = append(st.Tokens, int32((q.done*7919+i*104729)%s.m.VocabSize()))
			st.Positions = append(st.Positions, int32(q.done))
			q.done++
		}
		st.Outputs = append(st.Outputs, backend.Output{Row: int32(len(st.Tokens) - 1), Position: int32(q.done)})
	}
	return s.m.Step(st, nil)
}

// measure times one prompt, and decoding of one and of eight sequences. Between the steps
// of one sequence it reads memory and measures bandwidth in bytes per second, so that other
// load on the machine slows both alike.
func (s *side) measure(r *reader) (f figures, bandwidth float64, err error) {
	rate := func(seqs, n, steps int, between func()) float64 {
		var took time.Duration
		for range steps {
			between()
			began := time.Now()
			err = errors.Join(err, s.step(n, seqs))
			took += time.Since(began)
		}
		return float64(seqs*n*steps) / took.Seconds()
	}
	rewind := func(to int) {
		for i := range s.seqs {
			s.seqs[i].done = to
		}
	}
	nothing := func() {}
	for _, seqs := range []int{1, batch} {
		rewind(0)
		rate(seqs, context, 1, nothing) // also records the plans
		rate(seqs, 1, 1, nothing)
		rewind(context)
		if seqs > 1 {
			f.Decode8 = rate(seqs, 1, decodeSteps, nothing)
			continue
		}
		var reading time.Duration
		f.Decode1 = rate(seqs, 1, decodeSteps, func() { reading += r.pass() })
		bandwidth = float64(decodeSteps*r.bytes()) / reading.Seconds()
	}
	rewind(context) // as llama-bench does with the same depth
	f.Prefill = rate(1, promptTokens, 1, nothing)
	return f, bandwidth, err
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
