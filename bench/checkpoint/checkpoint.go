// Package checkpoint writes models of any shape with random weights, for benchmarks. The
// output of such a model is noise, but the cost of a step depends only on its shape. A
// file has the same bytes wherever it is written.
package checkpoint

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
)

// deviation is the standard deviation of a weight, drawn evenly within two of them.
const deviation = 0.02

// Shape is the shape of a Llama whose embedding is also its output projection.
type Shape struct {
	Vocab, Hidden, FFN, Layers, Heads, KVHeads, HeadDim int
	Positions                                           int // longest context
	RopeTheta                                           float64
	Tokens                                              [][]byte // of the tokenizer, by id; nil: see Tokenizer
}

// Matrix is a weight with its names in Hugging Face's and llama.cpp's files, and its
// shape; In is 0 for a norm.
type Matrix struct {
	HF, GGUF string
	Out, In  int
}

// Matrices returns the weights in the order of the files.
func (s Shape) Matrices() []Matrix {
	all := []Matrix{{"model.embed_tokens", "token_embd", s.Vocab, s.Hidden}, {"model.norm", "output_norm", s.Hidden, 0}}
	for i := range s.Layers {
		hf, gguf := fmt.Sprintf("model.layers.%d.", i), fmt.Sprintf("blk.%d.", i)
		for _, m := range []Matrix{
			{"input_layernorm", "attn_norm", s.Hidden, 0}, {"post_attention_layernorm", "ffn_norm", s.Hidden, 0},
			{"self_attn.q_proj", "attn_q", s.Heads * s.HeadDim, s.Hidden}, {"self_attn.k_proj", "attn_k", s.KVHeads * s.HeadDim, s.Hidden},
			{"self_attn.v_proj", "attn_v", s.KVHeads * s.HeadDim, s.Hidden}, {"self_attn.o_proj", "attn_output", s.Hidden, s.Heads * s.HeadDim},
			{"mlp.gate_proj", "ffn_gate", s.FFN, s.Hidden}, {"mlp.up_proj", "ffn_up", s.FFN, s.Hidden}, {"mlp.down_proj", "ffn_down", s.Hidden, s.FFN},
		} {
			all = append(all, Matrix{hf + m.HF, gguf + m.GGUF, m.Out, m.In})
		}
	}
	return all
}

// Elements returns the number of weights in it.
func (m *Matrix) Elements() int { return m.Out * max(m.In, 1) }

// HuggingFace writes a folder with config.json and the weights in bf16. It keeps weights
// that are already there.
func (s Shape) HuggingFace(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architectures": []string{"LlamaForCausalLM"}, "vocab_size": s.Vocab, "hidden_size": s.Hidden, "intermediate_size": s.FFN,
		"num_hidden_layers": s.Layers, "num_attention_heads": s.Heads, "num_key_value_heads": s.KVHeads, "head_dim": s.HeadDim,
		"rms_norm_eps": 1e-5, "tie_word_embeddings": true, "max_position_embeddings": s.Positions, "rope_theta": s.RopeTheta, "dtype": "bfloat16",
	})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), config, 0o644); err != nil {
		return err
	}
	return Once(filepath.Join(dir, "model.safetensors"), s.safetensors)
}

// Tokenizer writes a folder's tokenizer.json: the Tokens, or one for each byte, and further tokens.
// Those of several bytes occur in no prompt but may occur in an answer.
func (s Shape) Tokenizer(dir string) error {
	tokens := s.Tokens
	if tokens == nil {
		for b := range 256 {
			tokens = append(tokens, []byte{byte(b)})
		}
	}
	vocab := make(map[string]int, s.Vocab)
	for id := range s.Vocab {
		name := ""
		if id < len(tokens) {
			for _, b := range tokens[id] {
				name += ByteName(int(b))
			}
		}
		if name == "" {
			name = fmt.Sprintf("w%d", id)
		}
		vocab[name] = id
	}
	text, err := json.Marshal(map[string]any{
		"version": "1.0", "added_tokens": []any{}, "normalizer": nil, "post_processor": nil,
		"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
		"decoder":       map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
		"model":         map[string]any{"type": "BPE", "vocab": vocab, "merges": []any{}},
	})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "tokenizer.json"), text, 0o644)
}

// ByteName returns the character of a byte in byte-level vocabularies: the byte itself if
// it is printable, else the next one from U+0100 on (GPT-2).
func ByteName(b int) string {
	printed := func(c int) bool { return c >= '!' && c <= '~' || c >= 0xa1 && c <= 0xac || c >= 0xae && c <= 0xff }
	if printed(b) {
		return string(rune(b))
	}
	n := 0
	for c := range b {
		if !printed(c) {
			n++
		}
	}
	return string(rune(0x100 + n))
}

// Once writes a file unless it exists. It leaves no incomplete file.
func Once(path string, write func(io.Writer) error) error {
	if _, err := os.Stat(path); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.Create(path + ".part")
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 1<<20)
	if err := errors.Join(write(w), w.Flush(), f.Close()); err != nil {
		return err
	}
	return os.Rename(path+".part", path)
}

// Noise is a stream of random numbers: xorshift. It must not start at 0.
type Noise uint64

func (n *Noise) Next() uint64 {
	*n ^= *n << 13
	*n ^= *n >> 7
	*n ^= *n << 17
	return uint64(*n)
}

// bf16 returns a number within two deviations.
func (n *Noise) bf16() uint16 {
	v := float32(int32(n.Next()>>32)) / (1 << 31) * 2 * deviation
	return uint16(math.Float32bits(v) >> 16)
}

func (s Shape) safetensors(w io.Writer) error {
	header, at := map[string]any{}, 0
	for _, m := range s.Matrices() {
		shape := []int{m.Out}
		if m.In > 0 {
			shape = append(shape, m.In)
		}
		n := m.Elements() * 2
		header[m.HF+".weight"] = map[string]any{"dtype": "BF16", "shape": shape, "data_offsets": []int{at, at + n}}
		at += n
	}
	text, err := json.Marshal(header)
	if err != nil {
		return err
	}
	if _, err := w.Write(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)); err != nil {
		return err
	}
	random := Noise(1)
	for _, m := range s.Matrices() {
		if _, err := w.Write(m.BF16(&random)); err != nil {
			return err
		}
	}
	return nil
}

// BF16 returns the bytes of random weights; a norm is all ones.
func (m *Matrix) BF16(random *Noise) []byte {
	buf := make([]byte, 0, 2*m.Elements())
	for len(buf) < cap(buf) {
		v := uint16(0x3f80)
		if m.In > 0 {
			v = random.bf16()
		}
		buf = binary.LittleEndian.AppendUint16(buf, v)
	}
	return buf
}
