package model

import (
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend/cpu"
)

// ggufCheckpoints are the files of testdata/gguf.
var ggufCheckpoints = []string{"llama", "qwen2", "qwen3", "qwen3moe"}

func openGGUFCheckpoint(t testing.TB, name string) *Source {
	t.Helper()
	src, err := OpenDir(filepath.Join("testdata", "gguf", name+".gguf"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = src.Close() })
	return src
}

// GGUF files expand to the bits of the Python package gguf, and compute what transformers computes
// with them: on every kernel, on several ranks, and with weights that are quantized again.
func TestGGUF(t *testing.T) {
	for _, name := range ggufCheckpoints {
		t.Run(name, func(t *testing.T) {
			src, g := openGGUFCheckpoint(t, name), readGoldensOf(t, "gguf/"+name)
			if src.Name != name {
				t.Errorf("the model is called %q", src.Name)
			}
			src.ExpandIntegers() // see TestGrids
			m := loadFamily(t, src, cpu.Auto, Options{}, nil)
			checkExpanded(t, "gguf/"+name, src)
			if worst := worstOf(t, m, g, familyLimits.Tokens); worst > tolerance {
				t.Errorf("a logit is off by %g, at most %g is allowed", worst, tolerance)
			}
			familyShards(t, src, g)
			familyQuantized(t, src, g)
			familyBytes(t, src)
		})
	}
}

// A file's vocabulary gives the ids of transformers, and its template and special tokens are the
// bundle's.
func TestGGUFTokenizer(t *testing.T) {
	for _, name := range ggufCheckpoints {
		t.Run(name, func(t *testing.T) {
			src := openGGUFCheckpoint(t, name)
			if b, err := src.Bundle(); err != nil || b.ChatTemplate == "" || len(b.EOSTokenIDs) != 1 {
				t.Errorf("%+v, %v", b, err)
			}
			checkTexts(t, src, "gguf/"+name)
		})
	}
}

// ggufFileOf is a file with these values, and an embedding of F32 [vocab, 8].
func ggufFileOf(t testing.TB, values map[string]any, tensors ...string) string {
	t.Helper()
	var b bytes.Buffer
	var put func(v any)
	put = func(v any) {
		if s, ok := v.(string); ok {
			put(uint64(len(s)))
			b.WriteString(s)
			return
		}
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			t.Fatal(err)
		}
	}
	b.WriteString("GGUF")
	put(uint32(3))
	put(uint64(1 + len(tensors)))
	put(uint64(len(values)))
	for key, v := range values {
		put(key)
		switch v := v.(type) {
		case string:
			put(uint32(8))
			put(v)
		case int:
			put(uint32(5))
			put(int32(v))
		case float64:
			put(uint32(12))
			put(v)
		case bool:
			put(uint32(7))
			put(v)
		case []string:
			put(uint32(9))
			put(uint32(8))
			put(uint64(len(v)))
			for _, s := range v {
				put(s)
			}
		case []int32:
			put(uint32(9))
			put(uint32(5))
			put(uint64(len(v)))
			put(v)
		}
	}
	put("token_embd.weight")
	put(uint32(2))
	put([]uint64{8, 4})
	put(uint32(0))
	put(uint64(0))
	for i, name := range tensors {
		put(name)
		put(uint32(1))
		put(uint64(2))
		put(uint32(0))
		put(uint64(128 + 32*i))
	}
	b.Write(make([]byte, -b.Len()&31+128))
	for range tensors {
		put([]float32{2, 4})
		b.Write(make([]byte, 24))
	}
	path := filepath.Join(t.TempDir(), "made.gguf")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// ggufValues are the metadata of a llama with heads of 4, and changes to them; nil removes.
func ggufValues(changes map[string]any) map[string]any {
	all := map[string]any{
		"general.architecture": "llama", "llama.embedding_length": 8, "llama.block_count": 1, "llama.attention.head_count": 2,
		"llama.feed_forward_length": 8, "llama.context_length": 64, "llama.attention.layer_norm_rms_epsilon": 1e-5,
		"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": []string{"a", "b", "ab", "c"},
		"tokenizer.ggml.merges": []string{"a b"}, "tokenizer.ggml.eos_token_id": 3,
	}
	for key, v := range changes {
		if all[key] = v; v == nil {
			delete(all, key)
		}
	}
	return all
}

// Llama 3.1's factors of frequencies are used at every length.
func TestGGUFFrequencies(t *testing.T) {
	src, err := OpenDir(ggufFileOf(t, ggufValues(map[string]any{"llama.rope.freq_base": 10000.0}), "rope_freqs.weight"))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	for _, positions := range []int{16, 64} {
		src.SetContext(positions)
		if r := src.Config.Rope.table(4); r.InvFreq[0] != 0.5 || r.InvFreq[1] != float32(1)/(4*100) || r.Scale != 1 {
			t.Errorf("%d positions: %+v", positions, r)
		}
	}
}

// Two tensors that become one weight are both kept, so that Load refuses the file.
func TestGGUFWithAWeightTwice(t *testing.T) {
	src, err := OpenDir(ggufFileOf(t, ggufValues(nil), "blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	c, err := src.weights()
	if err != nil {
		t.Fatal(err)
	}
	if names := c.Names(); len(names) != 3 {
		t.Errorf("%q", names)
	}
}

// What a file needs beyond this package is refused by its key and value.
func TestGGUFRefuses(t *testing.T) {
	for says, changes := range map[string]map[string]any{
		`general.architecture is "mamba"; supported: deepseek2, gemma, gemma2, gemma3, glm4`: {"general.architecture": "mamba"},
		`general.architecture is ""`:                                                 {"general.architecture": 7},
		`split.count is 3; merge the parts first`:                                    {"split.count": 3},
		`llama.block_count is missing, or not one integer`:                           {"llama.block_count": nil},
		`llama.attention.head_count is missing, or not one integer`:                  {"llama.attention.head_count": []int32{2, 2}},
		`llama.attention.head_count_kv is not one integer`:                           {"llama.attention.head_count_kv": []int32{2, 2}},
		`num_attention_heads is 0`:                                                   {"llama.attention.head_count": 0},
		`num_hidden_layers is 1000000, at most`:                                      {"llama.block_count": 1000000},
		`hidden_size is -8`:                                                          {"llama.embedding_length": -8},
		`rms_norm_eps is 0`:                                                          {"llama.attention.layer_norm_rms_epsilon": nil},
		`unsupported value: NaN`:                                                     {"llama.attention.layer_norm_rms_epsilon": math.NaN()},
		`llama.rope.dimension_count is 2, in heads of 4`:                             {"llama.rope.dimension_count": 2},
		`llama.attention.value_length is 8, in heads of 4`:                           {"llama.attention.value_length": 8},
		`llama.rope.scaling.type is "luck"; supported: none, linear, longrope, yarn`: {"llama.rope.scaling.type": "luck"},
		`factor 0`:  {"llama.rope.scaling.type": "linear"},
		`"martian"`: {"tokenizer.ggml.pre": "martian"},
		`tokenizer.ggml.pre (read are chatglm-bpe, codeshell, command-r, dbrx, deepseek-llm, deepseek-r1-qwen`: {"tokenizer.ggml.pre": nil},
		`tokenizer.ggml.model "bert"`:                {"tokenizer.ggml.model": "bert"},
		`tokenizer.ggml has 0 tokens`:                {"tokenizer.ggml.tokens": nil},
		`tokenizer.ggml has 4 tokens, 2 token_type`:  {"tokenizer.ggml.token_type": []int32{1, 1}},
		`token 1 has 5000 bytes, at most 4096`:       {"tokenizer.ggml.tokens": []string{"a", strings.Repeat("b", 5000), "ab", "c"}},
		`tokenizer.ggml: token 9 of 4`:               {"tokenizer.ggml.eos_token_id": 9},
		`tokenizer.ggml.merges: "ab" is no pair`:     {"tokenizer.ggml.merges": []string{"ab"}},
		`tokenizer.ggml.merges is missing`:           {"tokenizer.ggml.merges": nil},
		`tokenizer.ggml.merges is not an array`:      {"tokenizer.ggml.merges": []int32{1}},
		`tokenizer.ggml.add_bos_token is not a bool`: {"tokenizer.ggml.add_bos_token": 1},
		`tokenizer.chat_template is not a string`:    {"tokenizer.chat_template": []string{"x"}},
		`llama.rope.freq_base is not a number`:       {"llama.rope.freq_base": "10000"},
		`the vocabulary has the piece "a" twice`:     {"tokenizer.ggml.tokens": []string{"a", "a", "b", "c"}},
	} {
		src, err := OpenDir(ggufFileOf(t, ggufValues(changes)))
		if err == nil {
			_ = src.Close()
		}
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("err = %v, want %q", err, says)
		}
	}
	if c, err := OpenConfig(ggufFileOf(t, ggufValues(nil))); err != nil || c.Hidden != 8 {
		t.Errorf("%+v, %v", c, err)
	}
	loadRefuses(t, ggufFileOf(t, ggufValues(nil), "blk.0.ssm_in.weight"), "model.layers.0.input_layernorm.weight is missing")
}

// loadRefuses checks that a file can be opened, and that Load refuses its weights with the text.
func loadRefuses(t *testing.T, path, text string) {
	t.Helper()
	src, err := OpenDir(path)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dev, err := cpu.New(cpu.Options{Threads: 1, Limits: familyLimits})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	if _, err := Load(src, dev, familyLimits, Options{}); err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("err = %v", err)
	}
}

// Blocks that are no matrix are refused: their tensor has no rows.
func TestGGUFVectorOfBlocks(t *testing.T) {
	data, err := os.ReadFile("testdata/gguf/llama.gguf")
	if err != nil {
		t.Fatal(err)
	}
	const name = "blk.0.attn_norm.weight"
	at := bytes.Index(data, []byte(name)) + len(name) + 4 + 8 // behind one dimension
	binary.LittleEndian.PutUint32(data[at:], 2)               // Q4_0, whose bytes are the first of F32's
	path := filepath.Join(t.TempDir(), "vector.gguf")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	loadRefuses(t, path, "input_layernorm.weight: dtype Q4_0; supported: F32")
}
