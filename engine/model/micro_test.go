package model

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
)

// MXFP4 in GGUF has the values of the package gguf, stays as it is also where other matrices are
// quantized or expanded, and is cut between ranks by rows and by groups of columns.
func TestGGUFMXFP4(t *testing.T) {
	src := openConverted(t, "gpt-oss")
	checkExpanded(t, "converted/gpt-oss", src)
	if !strings.Contains(src.Integers(), "GGUF") || src.KeepsIntegers(AsStored) {
		t.Errorf("%q", src.Integers())
	}
	wide := openConverted(t, "gpt-oss")
	wide.ExpandIntegers()
	experts := src.Config.Layers * src.Config.MoE.Experts * 3
	for name, c := range map[string]struct {
		src *Source
		o   Options
	}{
		"as stored": {src, Options{}}, "expanded": {wide, Options{}}, "int8": {src, Options{Quantization: INT8}}, "int4": {src, Options{Quantization: INT4}},
		"two ranks": {src, Options{Shard: Shard{1, 2}}},
	} {
		held := &packed{src: c.src, t: t}
		dev, err := cpu.New(cpu.Options{Threads: 1, Limits: testLimits})
		if err != nil {
			t.Fatal(err)
		}
		held.Backend = dev
		if _, err := Load(c.src, held, testLimits, c.o); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if held.matrices != experts || held.columns != (c.o.Shard.Ranks > 1) {
			t.Errorf("%s: %d matrices in MXFP4, want %d; some with a part of the columns: %t", name, held.matrices, experts, held.columns)
		}
		_ = dev.Close()
	}
	ends := []int32{272, 277, 278}
	if b, err := src.Bundle(); err != nil || !slices.Equal(b.EOSTokenIDs, ends) {
		t.Errorf("texts end with %v, want %v; %v", b.EOSTokenIDs, ends, err)
	}
}

// packed compares matrices that are loaded in MXFP4 with their expanded values.
type packed struct {
	backend.Backend
	src      *Source
	t        *testing.T
	matrices int
	columns  bool // one has a part of a matrix's columns
}

func (p *packed) Load(m backend.Tensor) (backend.Weight, error) {
	if m.DType != backend.MXFP4 {
		return p.Backend.Load(m)
	}
	p.matrices++
	c, err := p.src.weights()
	if err != nil {
		p.t.Fatal(err)
	}
	s, fault := find(c, m.Name, &p.src.Config)
	if fault != "" {
		p.t.Fatal(fault)
	}
	whole := floatsOf(s.whole())
	out, in, of := m.Shape[0], m.Shape[1], s.Shape[1]
	row, column := s.Shape[0]-out, of-in // of the last rank
	p.columns = p.columns || in < of
	for i := range out * in {
		code := m.Data[i/2] >> (4 * (i % 2)) & 15
		v := float32(math.Ldexp(float64(backend.E2M1[code]), int(m.Data[out*in/2+i/32])-127))
		if want := whole[(row+i/in)*of+column+i%in]; v != want {
			p.t.Fatalf("%s: element %d is %g, want %g", m.Name, i, v, want)
		}
	}
	return p.Backend.Load(m)
}

// Where columns are cut within a group, and in embeddings, MXFP4 is expanded.
func TestGGUFMXFP4Expanded(t *testing.T) {
	src := openConverted(t, "gpt-oss")
	c, err := src.weights()
	if err != nil {
		t.Fatal(err)
	}
	s, _ := find(c, "model.layers.0.mlp.experts.0.down_proj.weight", &src.Config)
	whole := floatsOf(s.whole())
	cut := binding{name: s.Name, shape: s.Shape, out: "hidden", parts: []part{{64, 0, 64}, {96, 16, 32}}}
	embedding := binding{name: "model.embed_tokens.weight", shape: s.Shape, out: "vocab", parts: []part{{64, 0, 64}, {96, 0, 96}}}
	for _, b := range []binding{cut, embedding} {
		for _, q := range []Quantization{AsStored, INT8} {
			got := s.part(&b, q.converted(&src.Config, &s, &b))
			if got.DType != backend.BF16 || got.As != q.of(&b) {
				t.Fatalf("%s: %s as %s", b.name, got.DType, got.As)
			}
			from, n := b.parts[1].from, b.parts[1].n
			for i, v := range floatsOf(got) {
				if want := whole[i/n*96+from+i%n]; v != want {
					t.Fatalf("element %d is %g, want %g", i, v, want)
				}
			}
		}
	}
}

// An exponent that is not a number is refused, in GGUF and in a folder.
func TestMXFP4NotANumber(t *testing.T) {
	data, err := os.ReadFile("testdata/converted/gpt-oss.gguf")
	if err != nil {
		t.Fatal(err)
	}
	src := openConverted(t, "gpt-oss")
	c, err := src.weights()
	if err != nil {
		t.Fatal(err)
	}
	one, _ := c.Tensor("model.layers.1.mlp.experts.2.up_proj.weight") // [96, 64]
	at := bytes.Index(data, one.Data)
	data[at+17*(5*2+1)] = 255
	path := filepath.Join(t.TempDir(), "damaged.gguf")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	loadRefuses(t, path, "model.layers.1.mlp.experts.2.up_proj.weight: the exponent of inputs 32 and following in row 5 is 255, which is not a number")
	s := &stored{micro: &microscaled{data: make([]byte, 4*17), in: 64}}
	s.micro.data[3*17] = 255
	for _, m := range []backend.Tensor{{Name: "w", DType: backend.MXFP4, Shape: []int{1, 32}, Data: append(make([]byte, 16), 255)}, {Name: "expanded", DType: backend.BF16}} {
		if err := s.checkExponents(&m); !errors.Is(err, ErrWeights) {
			t.Errorf("%s: %v", m.Name, err)
		}
	}
}
