package main

import (
	"encoding/binary"
	"io"
	"math"
	"path/filepath"

	"github.com/tandem-serving/tandem/bench/checkpoint"
)

// shape of Llama-3.2-1B.
var shape = checkpoint.Shape{Vocab: 128256, Hidden: 2048, FFN: 8192, Layers: 16, Heads: 32, KVHeads: 8, HeadDim: 64, Positions: 131072, RopeTheta: 500000}

// Constants of the GGUF format.
const (
	deviation               = 0.02 // of a weight
	ggufAlign, ggufVersion  = 32, 3
	typeF32, typeQ4, typeQ8 = 0, 2, 8
	typeQ6K, typeBF16       = 14, 30
)

// models writes the missing files: a Hugging Face folder in bf16 and a GGUF of each type.
// Their random weights differ, which does not change their speed.
func models(dir string) error {
	if err := shape.HuggingFace(filepath.Join(dir, "bf16")); err != nil {
		return err
	}
	for name, types := range map[string][2]uint32{"Q8_0": {typeQ8, typeQ8}, "Q4_0": {typeQ4, typeQ6K}, "BF16": {typeBF16, typeBF16}} {
		err := checkpoint.Once(filepath.Join(dir, name+".gguf"), func(w io.Writer) error { return gguf(w, types[0], types[1]) })
		if err != nil {
			return err
		}
	}
	return nil
}

// size returns the size of a tensor of a type in bytes.
func size(m *checkpoint.Matrix, t uint32) int {
	n := m.Elements()
	switch t {
	case typeF32:
		return n * 4
	case typeQ8:
		return n / 32 * 34
	case typeQ4:
		return n / 32 * 18
	case typeQ6K:
		return n / 256 * 210
	}
	return n * 2
}

// write writes random weights of a type; a norm is all ones.
func write(w io.Writer, m *checkpoint.Matrix, t uint32, random *checkpoint.Noise) error {
	total := size(m, t)
	buf := make([]byte, 0, total)
	half := func(f float32) { // fp16 of a normal number
		u := math.Float32bits(f)
		buf = binary.LittleEndian.AppendUint16(buf, uint16((u>>23-112)<<10|u>>13&0x3ff))
	}
	fill := func(n int) {
		for range n {
			buf = append(buf, byte(random.Next()>>40))
		}
	}
	for len(buf) < total {
		switch {
		case m.In == 0 && t == typeF32:
			buf = binary.LittleEndian.AppendUint32(buf, math.Float32bits(1))
		case t == typeBF16:
			buf = m.BF16(random)
		case t == typeQ8:
			half(deviation / 64)
			fill(32)
		case t == typeQ4:
			half(deviation / 4)
			fill(16)
		case t == typeQ6K:
			fill(208)
			half(deviation / 2000)
		}
	}
	_, err := w.Write(buf)
	return err
}

// gguf writes llama.cpp's format: matrices of one type, and the embedding, which is also
// the output projection, of another.
func gguf(w io.Writer, t, embedding uint32) error {
	var b []byte
	str := func(s string) {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(s)))
		b = append(b, s...)
	}
	key := func(name string, kind uint32) {
		str(name)
		b = binary.LittleEndian.AppendUint32(b, kind)
	}
	of := func(m *checkpoint.Matrix) uint32 {
		switch {
		case m.In == 0:
			return typeF32
		case m.GGUF == "token_embd":
			return embedding
		}
		return t
	}
	all := shape.Matrices()
	numbers := []struct {
		name  string
		value int
	}{
		{"llama.block_count", shape.Layers}, {"llama.context_length", shape.Positions}, {"llama.embedding_length", shape.Hidden},
		{"llama.feed_forward_length", shape.FFN}, {"llama.attention.head_count", shape.Heads}, {"llama.attention.head_count_kv", shape.KVHeads},
		{"llama.rope.dimension_count", shape.HeadDim}, {"llama.vocab_size", shape.Vocab}, {"general.alignment", ggufAlign},
	}
	b = append(b, "GGUF"...)
	b = binary.LittleEndian.AppendUint32(b, ggufVersion)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(all)))
	b = binary.LittleEndian.AppendUint64(b, uint64(len(numbers)+4))
	for k, v := range map[string]string{"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"} {
		key(k, 8)
		str(v)
	}
	for k, v := range map[string]float32{"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": float32(shape.RopeTheta)} {
		key(k, 6)
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	for _, n := range numbers {
		key(n.name, 4)
		b = binary.LittleEndian.AppendUint32(b, uint32(n.value))
	}
	at := 0
	for i := range all {
		m := &all[i]
		str(m.GGUF + ".weight")
		dims := []int{m.In, m.Out}
		if m.In == 0 {
			dims = dims[1:]
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(len(dims)))
		for _, d := range dims {
			b = binary.LittleEndian.AppendUint64(b, uint64(d))
		}
		b = binary.LittleEndian.AppendUint32(b, of(m))
		b = binary.LittleEndian.AppendUint64(b, uint64(at))
		at += (size(m, of(m)) + ggufAlign - 1) / ggufAlign * ggufAlign
	}
	pad := func() { b = append(b, make([]byte, (ggufAlign-len(b)%ggufAlign)%ggufAlign)...) }
	pad()
	if _, err := w.Write(b); err != nil {
		return err
	}
	random := checkpoint.Noise(2)
	for i := range all {
		m := &all[i]
		if err := write(w, m, of(m), &random); err != nil {
			return err
		}
		b = make([]byte, size(m, of(m)))
		n := len(b)
		pad()
		if _, err := w.Write(b[n:]); err != nil {
			return err
		}
	}
	return nil
}
