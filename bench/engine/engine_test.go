package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/bench/checkpoint"
)

// The model has the parameters of Llama-3.2-1B, and the length of every type of tensor
// matches its header.
func TestWeights(t *testing.T) {
	total := 0
	for _, m := range shape.Matrices() {
		total += m.Elements()
	}
	if total != 1_235_814_400 {
		t.Errorf("%d parameters", total)
	}
	random := checkpoint.Noise(3)
	for _, kind := range []uint32{typeF32, typeQ4, typeQ8, typeQ6K, typeBF16} {
		m := checkpoint.Matrix{Out: 3, In: 512}
		if kind == typeF32 {
			m.In = 0
		}
		var b bytes.Buffer
		if err := write(&b, &m, kind, &random); err != nil {
			t.Fatal(err)
		}
		if b.Len() != size(&m, kind) {
			t.Errorf("type %d: %d bytes, want %d", kind, b.Len(), size(&m, kind))
		}
	}
}

func TestTable(t *testing.T) {
	if got := median([]float64{5, 1, 3, 2}); got != 2.5 {
		t.Errorf("median = %v", got)
	}
	all := []result{
		{Row: rows[2], Kernels: "avx512vnni", Peer: "avx512vnni", Ours: []figures{{Decode1: 12, Decode8: 60, Prefill: 150}},
			Theirs: []figures{{Decode1: 8, Decode8: 40, Prefill: 100}}, Bandwidth: []float64{40e9}, WeightBytes: 2.5e9, Threads: 2},
		{Row: rows[0], Kernels: "avx512vnni", Ours: []figures{{Decode1: 20}, {Decode1: 24}, {Decode1: 25}}, Bandwidth: []float64{40e9}, WeightBytes: 1.25e9, Threads: 2},
	}
	for _, want := range []string{"| bf16, BF16 | avx512vnni, avx512vnni | 12.0, 8.0: **1.50×** |", "30.0 of 40.0 GB/s, 75 %", "| 24.0 |", "2 threads, medians of 3 rounds"} {
		if !strings.Contains(page(all), want) {
			t.Errorf("no %q in\n%s", want, page(all))
		}
	}
}

// Passes go around all of the memory that each thread has.
func TestReaderReadsAll(t *testing.T) {
	const words = 1 << 12
	r := newReader(2, words)
	for range passes + 1 {
		r.pass()
	}
	for i, sum := range r.sums {
		if want := uint64((passes + 1) * words); sum != want || r.at != 1 {
			t.Errorf("thread %d read %d of %d words, %d passes into its memory", i, sum, want, r.at)
		}
	}
}
