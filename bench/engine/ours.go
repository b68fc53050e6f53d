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
	context      = 64 // tokens before those that are timed
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

// step computes the next n tokens of some sequences and draws behind each.
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

// measure times one prompt, and decoding of one and of eight sequences.
func (s *side) measure() (f figures, err error) {
	rate := func(seqs, n, steps int) float64 {
		began := time.Now()
		for range steps {
			err = errors.Join(err, s.step(n, seqs))
		}
		return float64(seqs*n*steps) / time.Since(began).Seconds()
	}
	rewind := func(to int) {
		for i := range s.seqs {
			s.seqs[i].done = to
		}
	}
	for _, seqs := range []int{1, batch} {
		rewind(0)
		rate(seqs, context, 1) // also records the plans
		rate(seqs, 1, 1)
		rewind(context)
		if r := rate(seqs, 1, decodeSteps); seqs == 1 {
			f.Decode1 = r
		} else {
			f.Decode8 = r
		}
	}
	rewind(context) // as llama-bench does with the same depth
	f.Prefill = rate(1, promptTokens, 1)
	return f, err
}

// bandwidth is what so many threads read of memory, in bytes per second: the best
// of some passes over blocks far larger than any cache.
func bandwidth(threads int) float64 {
	const each = 1 << 27 // words, 1 GiB
	data := make([][]uint64, threads)
	var wg sync.WaitGroup
	all := func(f func(i int)) time.Duration {
		began := time.Now()
		for i := range threads {
			wg.Go(func() { f(i) })
		}
		wg.Wait()
		return time.Since(began)
	}
	all(func(i int) { data[i] = slices.Repeat([]uint64{1}, each) })
	sums := make([]uint64, threads)
	best := time.Hour
	for range 4 {
		best = min(best, all(func(i int) { sums[i] = read(data[i]) }))
	}
	return float64(threads) * each * 8 / best.Seconds()
}
