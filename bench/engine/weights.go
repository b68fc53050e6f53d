package main

import (
	"io"
	"path/filepath"

	"github.com/tandem-serving/tandem/bench/checkpoint"
)

// shape of Llama-3.2-1B.
var shape = checkpoint.Shape{Vocab: 128256, Hidden: 2048, FFN: 8192, Layers: 16, Heads: 32, KVHeads: 8, HeadDim: 64, Positions: 131072, RopeTheta: 500000}

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

// gguf writes llama.cpp's format: matrices of one type, and the embedding, which is also
// the output projection, of another.
func gguf(w io.Writer, t, embedding uint32) error {
	f := &ggufFile{}
	f.text("general.architecture", "llama")
	f.text("tokenizer.ggml.model", "no_vocab")
	f.float("llama.attention.layer_norm_rms_epsilon", 1e-5)
	f.float("llama.rope.freq_base", shape.RopeTheta)
	for _, n := range []struct {
		name  string
		value int
	}{
		{"llama.block_count", shape.Layers}, {"llama.context_length", shape.Positions}, {"llama.embedding_length", shape.Hidden},
		{"llama.feed_forward_length", shape.FFN}, {"llama.attention.head_count", shape.Heads}, {"llama.attention.head_count_kv", shape.KVHeads},
		{"llama.rope.dimension_count", shape.HeadDim}, {"llama.vocab_size", shape.Vocab}, {"general.alignment", ggufAlign},
	} {
		f.number(n.name, n.value)
	}
	for _, m := range shape.Matrices() {
		kind := t
		if m.GGUF == "token_embd" {
			kind = embedding
		}
		f.add(m.GGUF+".weight", m.Out, m.In, kind)
	}
	return f.write(w)
}
