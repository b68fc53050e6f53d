package main

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

// shape of Llama-3.2-1B.
const (
	vocab, hidden, ffn      = 128256, 2048, 8192
	layers, heads, kvHeads  = 16, 32, 8
	headDim                 = 64
	deviation               = 0.02 // of a weight
	ggufAlign, ggufVersion  = 32, 3
	typeF32, typeQ4, typeQ8 = 0, 2, 8
	typeQ6K, typeBF16       = 14, 30
)

// matrix is a weight's two names and its shape; in is 0 for a norm.
type matrix struct {
	hf, gguf string
	out, in  int
}

func matrices() []matrix {
	all := []matrix{{"model.embed_tokens", "token_embd", vocab, hidden}, {"model.norm", "output_norm", hidden, 0}}
	for i := range layers {
		hf, gguf := fmt.Sprintf("model.layers.%d.", i), fmt.Sprintf("blk.%d.", i)
		for _, m := range []matrix{
			{"input_layernorm", "attn_norm", hidden, 0}, {"post_attention_layernorm", "ffn_norm", hidden, 0},
			{"self_attn.q_proj", "attn_q", heads * headDim, hidden}, {"self_attn.k_proj", "attn_k", kvHeads * headDim, hidden},
			{"self_attn.v_proj", "attn_v", kvHeads * headDim, hidden}, {"self_attn.o_proj", "attn_output", hidden, heads * headDim},
			{"mlp.gate_proj", "ffn_gate", ffn, hidden}, {"mlp.up_proj", "ffn_up", ffn, hidden}, {"mlp.down_proj", "ffn_down", hidden, ffn},
		} {
			all = append(all, matrix{hf + m.hf, gguf + m.gguf, m.out, m.in})
		}
	}
	return all
}

// models writes what is not there yet: a Hugging Face folder in bf16 and a GGUF of
// each type. Their random weights differ, but not in how fast they compute.
func models(dir string) error {
	if err := os.MkdirAll(filepath.Join(dir, "bf16"), 0o755); err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architectures": []string{"LlamaForCausalLM"}, "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn,
		"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kvHeads, "head_dim": headDim,
		"rms_norm_eps": 1e-5, "tie_word_embeddings": true, "max_position_embeddings": 131072, "rope_theta": 500000.0, "dtype": "bfloat16",
	})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "bf16", "config.json"), config, 0o644); err != nil {
		return err
	}
	if err := once(filepath.Join(dir, "bf16", "model.safetensors"), safetensors); err != nil {
		return err
	}
	for name, types := range map[string][2]uint32{"Q8_0": {typeQ8, typeQ8}, "Q4_0": {typeQ4, typeQ6K}, "BF16": {typeBF16, typeBF16}} {
		err := once(filepath.Join(dir, name+".gguf"), func(w io.Writer) error { return gguf(w, types[0], types[1]) })
		if err != nil {
			return err
		}
	}
	return nil
}

// once writes a file that is not there, and leaves none that is not whole.
func once(path string, write func(io.Writer) error) error {
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

// noise is a stream of random numbers: xorshift.
type noise uint64

func (n *noise) next() uint64 {
	*n ^= *n << 13
	*n ^= *n >> 7
	*n ^= *n << 17
	return uint64(*n)
}

// bf16 is a number within two deviations.
func (n *noise) bf16() uint16 {
	v := float32(int32(n.next()>>32)) / (1 << 31) * 2 * deviation
	return uint16(math.Float32bits(v) >> 16)
}

func safetensors(w io.Writer) error {
	header, at := map[string]any{}, 0
	for _, m := range matrices() {
		shape := []int{m.out}
		if m.in > 0 {
			shape = append(shape, m.in)
		}
		n := m.out * max(m.in, 1) * 2
		header[m.hf+".weight"] = map[string]any{"dtype": "BF16", "shape": shape, "data_offsets": []int{at, at + n}}
		at += n
	}
	text, err := json.Marshal(header)
	if err != nil {
		return err
	}
	if _, err := w.Write(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)); err != nil {
		return err
	}
	random := noise(1)
	for _, m := range matrices() {
		if err := m.data(w, typeBF16, &random); err != nil {
			return err
		}
	}
	return nil
}

// bytes is the size of a tensor of a type.
func (m *matrix) bytes(t uint32) int {
	n := m.out * max(m.in, 1)
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

// data writes random weights of a type; a norm is all ones.
func (m *matrix) data(w io.Writer, t uint32, random *noise) error {
	total := m.bytes(t)
	buf := make([]byte, 0, total)
	half := func(f float32) { // fp16 of a normal number
		u := math.Float32bits(f)
		buf = binary.LittleEndian.AppendUint16(buf, uint16((u>>23-112)<<10|u>>13&0x3ff))
	}
	fill := func(n int) {
		for range n {
			buf = append(buf, byte(random.next()>>40))
		}
	}
	for len(buf) < total {
		switch {
		case m.in == 0 && t == typeF32:
			buf = binary.LittleEndian.AppendUint32(buf, math.Float32bits(1))
		case m.in == 0:
			buf = binary.LittleEndian.AppendUint16(buf, 0x3f80)
		case t == typeBF16:
			buf = binary.LittleEndian.AppendUint16(buf, random.bf16())
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

// gguf writes llama.cpp's format: matrices of one type, the embedding, which is
// the output projection too, of another.
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
	of := func(m *matrix) uint32 {
		switch {
		case m.in == 0:
			return typeF32
		case m.gguf == "token_embd":
			return embedding
		}
		return t
	}
	all := matrices()
	numbers := []struct {
		name  string
		value uint32
	}{
		{"llama.block_count", layers}, {"llama.context_length", 131072}, {"llama.embedding_length", hidden},
		{"llama.feed_forward_length", ffn}, {"llama.attention.head_count", heads}, {"llama.attention.head_count_kv", kvHeads},
		{"llama.rope.dimension_count", headDim}, {"llama.vocab_size", vocab}, {"general.alignment", ggufAlign},
	}
	b = append(b, "GGUF"...)
	b = binary.LittleEndian.AppendUint32(b, ggufVersion)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(all)))
	b = binary.LittleEndian.AppendUint64(b, uint64(len(numbers)+4))
	for k, v := range map[string]string{"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"} {
		key(k, 8)
		str(v)
	}
	for k, v := range map[string]float32{"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 500000} {
		key(k, 6)
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	for _, n := range numbers {
		key(n.name, 4)
		b = binary.LittleEndian.AppendUint32(b, n.value)
	}
	at := 0
	for i := range all {
		m := &all[i]
		str(m.gguf + ".weight")
		dims := []int{m.in, m.out}
		if m.in == 0 {
			dims = dims[1:]
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(len(dims)))
		for _, d := range dims {
			b = binary.LittleEndian.AppendUint64(b, uint64(d))
		}
		b = binary.LittleEndian.AppendUint32(b, of(m))
		b = binary.LittleEndian.AppendUint64(b, uint64(at))
		at += (m.bytes(of(m)) + ggufAlign - 1) / ggufAlign * ggufAlign
	}
	pad := func() { b = append(b, make([]byte, (ggufAlign-len(b)%ggufAlign)%ggufAlign)...) }
	pad()
	if _, err := w.Write(b); err != nil {
		return err
	}
	random := noise(2)
	for i := range all {
		m := &all[i]
		if err := m.data(w, of(m), &random); err != nil {
			return err
		}
		b = make([]byte, m.bytes(of(m)))
		n := len(b)
		pad()
		if _, err := w.Write(b[n:]); err != nil {
			return err
		}
	}
	return nil
}
