package main

import (
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strconv"

	"github.com/tandem-serving/tandem/bench/checkpoint"
)

// published is the shape of a published model whose embedding is also its output projection.
type published struct {
	Name, Arch         string // Arch as general.architecture has it
	Vocab, Hidden, FFN int
	Layers, Heads      int
	KVHeads, HeadDim   int
	Window             int // positions that most layers attend to; 0: all

	bias bool // of queries, keys and values
	norm bool // of queries and keys, and behind attention and feed-forward
}

// Shapes of -models.
var publishedShapes = []published{
	{Name: "Qwen2.5-0.5B", Arch: "qwen2", Vocab: 151936, Hidden: 896, FFN: 4864, Layers: 24, Heads: 14, KVHeads: 2, HeadDim: 64, bias: true},
	{Name: "Gemma-3-1B", Arch: "gemma3", Vocab: 262144, Hidden: 1152, FFN: 6912, Layers: 26, Heads: 4, KVHeads: 1, HeadDim: 256, Window: 512, norm: true},
}

// fileTypes are the types of files that -models compares.
var fileTypes = []string{"Q4_K_M", "Q8_0", "BF16"}

// file returns a GGUF file of a type, and writes it if it is missing.
func (s *published) file(dir, fileType string) (string, error) {
	path := filepath.Join(dir, s.Name+"-"+fileType+".gguf")
	return path, checkpoint.Once(path, func(w io.Writer) error {
		f := &ggufFile{}
		s.metadata(f)
		s.vocabulary(f)
		s.weights(f, fileType)
		return f.write(w)
	})
}

func (s *published) metadata(f *ggufFile) {
	f.text("general.architecture", s.Arch)
	f.text("general.name", s.Name)
	for _, n := range []struct {
		name  string
		value int
	}{
		{"block_count", s.Layers}, {"context_length", 32768}, {"embedding_length", s.Hidden}, {"feed_forward_length", s.FFN},
		{"attention.head_count", s.Heads}, {"attention.head_count_kv", s.KVHeads}, {"attention.key_length", s.HeadDim}, {"attention.value_length", s.HeadDim},
	} {
		f.number(s.Arch+"."+n.name, n.value)
	}
	f.float(s.Arch+".attention.layer_norm_rms_epsilon", 1e-6)
	f.float(s.Arch+".rope.freq_base", 1e6)
	if s.Window > 0 {
		f.number(s.Arch+".attention.sliding_window", s.Window)
	}
}

// vocabulary has the size of the model's: a token for each byte, and tokens that no text has.
func (s *published) vocabulary(f *ggufFile) {
	tokens, kinds, scores := make([]string, s.Vocab), make([]uint32, s.Vocab), make([]uint32, s.Vocab)
	const normal, control, byteKind = 1, 3, 6
	for i := range tokens {
		tokens[i], kinds[i], scores[i] = "w"+strconv.Itoa(i), normal, math.Float32bits(float32(-i))
	}
	sentencePiece := s.Arch == "gemma3"
	for b := range 256 {
		if tokens[b] = checkpoint.ByteName(b); sentencePiece {
			tokens[b], kinds[b] = fmt.Sprintf("<0x%02X>", b), byteKind
		}
	}
	for i, name := range []string{"<pad>", "<eos>", "<bos>"} {
		tokens[256+i], kinds[256+i] = name, control
	}
	tokens[259] = "ab" // of the only merge
	f.number("tokenizer.ggml.padding_token_id", 256)
	f.number("tokenizer.ggml.eos_token_id", 257)
	f.number("tokenizer.ggml.bos_token_id", 258)
	f.boolean("tokenizer.ggml.add_bos_token", false)
	f.texts("tokenizer.ggml.tokens", tokens)
	f.words("tokenizer.ggml.token_type", valueI32, kinds)
	if sentencePiece {
		f.text("tokenizer.ggml.model", "llama")
		f.text("tokenizer.ggml.pre", "default")
		f.boolean("tokenizer.ggml.add_space_prefix", false)
		f.words("tokenizer.ggml.scores", valueF32, scores)
		return
	}
	f.text("tokenizer.ggml.model", "gpt2")
	f.text("tokenizer.ggml.pre", "qwen2")
	f.texts("tokenizer.ggml.merges", []string{"a b"})
}

// weights adds the tensors, with the types that llama.cpp's quantizer chooses for a file of this
// type.
func (s *published) weights(f *ggufFile, fileType string) {
	kindOf := func(in int, more bool) uint32 {
		switch {
		case fileType == "BF16":
			return typeBF16
		case fileType == "Q8_0" || more && in%256 != 0:
			return typeQ8
		case more:
			return typeQ6K
		case in%256 != 0:
			return typeQ50
		}
		return typeQ4K
	}
	f.add("token_embd.weight", s.Vocab, s.Hidden, kindOf(s.Hidden, true))
	f.add("output_norm.weight", s.Hidden, 0, typeF32)
	for i := range s.Layers {
		more := i < s.Layers/8 || i >= 7*s.Layers/8 || (i-s.Layers/8)%3 == 2 // Q4_K_M's layers of higher precision
		q, kv := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
		for _, m := range []struct {
			name    string
			out, in int
			more    bool
		}{
			{"attn_norm", s.Hidden, 0, false}, {"ffn_norm", s.Hidden, 0, false},
			{"attn_q", q, s.Hidden, false}, {"attn_k", kv, s.Hidden, false}, {"attn_v", kv, s.Hidden, more}, {"attn_output", s.Hidden, q, false},
			{"ffn_gate", s.FFN, s.Hidden, false}, {"ffn_up", s.FFN, s.Hidden, false}, {"ffn_down", s.Hidden, s.FFN, more},
		} {
			name := fmt.Sprintf("blk.%d.%s", i, m.name)
			f.add(name+".weight", m.out, m.in, kindOf(m.in, m.more))
			if s.bias && (m.name == "attn_q" || m.name == "attn_k" || m.name == "attn_v") {
				f.add(name+".bias", m.out, 0, typeF32)
			}
		}
		if s.norm {
			for _, m := range []struct {
				name string
				out  int
			}{{"attn_q_norm", s.HeadDim}, {"attn_k_norm", s.HeadDim}, {"post_attention_norm", s.Hidden}, {"post_ffw_norm", s.Hidden}} {
				f.add(fmt.Sprintf("blk.%d.%s.weight", i, m.name), m.out, 0, typeF32)
			}
		}
	}
}
