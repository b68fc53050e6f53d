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
	for _, kind := range []uint32{typeF32, typeQ4, typeQ50, typeQ8, typeQ4K, typeQ6K, typeBF16} {
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

// The files of -models load, and steps of several sequences and of a prompt give tokens.
func TestModelFiles(t *testing.T) {
	for _, s := range publishedShapes {
		s.Vocab, s.Hidden, s.FFN, s.Layers, s.Heads, s.KVHeads, s.HeadDim = 300, 64, 256, 2, 2, 1, 32
		for _, fileType := range fileTypes {
			path, err := s.file(t.TempDir(), fileType)
			if err != nil {
				t.Fatal(err)
			}
			ours, err := newOurs(path, "none", "auto", 1, 4)
			if err != nil {
				t.Fatal(err)
			}
			if ours.weights < 300*64 {
				t.Errorf("%s %s: %d bytes of weights", s.Name, fileType, ours.weights)
			}
			for _, n := range []int{1, 4} {
				if rate, err := ours.rate(20, ours.seqs[:n], 2, nothing); err != nil || !(rate > 0) {
					t.Errorf("%s %s: %v tokens per second, %v", s.Name, fileType, rate, err)
				}
			}
			ours.close()
		}
	}
}

func TestModelsPage(t *testing.T) {
	o := &options{rounds: 3, threads: 2, kernels: "avx512vnni"}
	m := measured{model: "Gemma-3-1B", fileType: "Q8_0", bytes: 1e9, read: []float64{40e9, 30e9, 50e9},
		ours: []rates{{30, 100, 200, 400}, {36, 90, 210, 410}, {32, 110, 190, 420}}, theirs: []rates{{16, 50, 100, 205}, {15, 51, 101, 200}, {20, 49, 99, 210}}}
	for _, want := range []string{
		"| Gemma-3-1B | Q8_0, 1.00 GB | 32.0, 16.0: **2.00×** | 100.0, 50.0: **2.00×** | 200.0, 100.0: **2.00×** | 410.0, 205.0: **2.00×** | 32.0 of 40.0 GB/s, 80 % |",
		"| Gemma-3-1B, Q8_0, 2 | 30.0 | 36.0, 90.0, 210.0, 410 | 15.0, 51.0, 101.0, 200 |",
		"2 threads", "medians of 3 rounds",
	} {
		if page := modelsPage(o, []measured{m}, 0); !strings.Contains(page, want) {
			t.Errorf("no %q in\n%s", want, page)
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
