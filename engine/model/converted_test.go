package model

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/gguf"
	"github.com/tandem-serving/tandem/engine/safetensors"
	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// convertedFiles returns the names of the files of testdata/converted.
func convertedFiles(t testing.TB) (names []string) {
	t.Helper()
	files, err := filepath.Glob("testdata/converted/*.gguf")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(f), ".gguf"))
	}
	return names
}

func openConverted(t testing.TB, name string) *Source {
	t.Helper()
	src, err := OpenDir(filepath.Join("testdata", "converted", name+".gguf"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = src.Close() })
	return src
}

// Files of llama.cpp's converter give the logits that transformers computes with the folders that
// they were made from, on one rank and on two, and the ids of transformers' tokenizers.
func TestConverted(t *testing.T) {
	for _, name := range convertedFiles(t) {
		t.Run(name, func(t *testing.T) {
			src, g := openConverted(t, name), readGoldensOf(t, "converted/"+name)
			if src.KeepsIntegers(AsStored) {
				src.ExpandIntegers() // see TestGrids
			}
			if worst := worstOf(t, loadFamily(t, src, cpu.Auto, Options{}, nil), g, familyLimits.Tokens); worst > tolerance {
				t.Errorf("a logit is off by %g, at most %g is allowed", worst, tolerance)
			}
			familyShards(t, src, g)
			familyBytes(t, src)
			checkTexts(t, src, "converted/"+name)
		})
	}
}

// checkTexts holds the ids of texts to those of transformers.
func checkTexts(t *testing.T, src *Source, name string) {
	t.Helper()
	b, err := src.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	if b.BosToken == "" || b.EosToken == "" || len(b.EOSTokenIDs) == 0 {
		t.Errorf("bos %q, eos %q, ends %v", b.BosToken, b.EosToken, b.EOSTokenIDs)
	}
	tok, err := tokenizer.Load(b.TokenizerJSON)
	if err != nil {
		t.Fatal(err)
	}
	texts := readGoldensOf(t, name).Texts
	if len(texts) == 0 {
		t.Fatal("no texts")
	}
	for _, c := range texts {
		if ids := tok.Encode(c.Text, false); !slices.Equal(ids, c.IDs) {
			t.Errorf("%q: %v, transformers %v", c.Text, ids, c.IDs)
		}
	}
}

// Texts of Kimi K2 are cut as tiktoken does, and a turn's end is the text's.
func TestGGUFKimi(t *testing.T) {
	values := map[string]any{
		"general.architecture": "deepseek2", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "kimi-k2", "tokenizer.ggml.eos_token_id": 0,
		"tokenizer.ggml.tokens": []string{"[EOS]", "a", "b", "<|im_end|>"}, "tokenizer.ggml.token_type": []int32{3, 1, 1, 3}, "tokenizer.ggml.merges": []string{},
	}
	for key, v := range map[string]any{
		"embedding_length": 8, "block_count": 1, "attention.head_count": 2, "feed_forward_length": 8, "context_length": 64, "attention.layer_norm_rms_epsilon": 1e-5,
		"attention.kv_lora_rank": 8, "attention.key_length": 8, "attention.value_length": 4, "rope.dimension_count": 4,
		"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8, "expert_shared_count": 1, "expert_gating_func": 2,
	} {
		values["deepseek2."+key] = v
	}
	src, err := OpenDir(ggufFileOf(t, values))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	b, err := src.Bundle()
	if err != nil || !slices.Equal(b.EOSTokenIDs, []int32{0, 3}) || !bytes.Contains(b.TokenizerJSON, []byte(`[\\p{Han}]+|`)) || !bytes.Contains(b.TokenizerJSON, []byte(`"ignore_merges":true`)) {
		t.Errorf("%v, %s, %v", b.EOSTokenIDs, b.TokenizerJSON, err)
	}
}

// What a family's file needs beyond its folder's architecture is refused by its key and value, and
// keys that contradict each other are refused, too.
func TestConvertedRefuses(t *testing.T) {
	latent := func(changes map[string]any) map[string]any {
		all := map[string]any{
			"attention.kv_lora_rank": 8, "attention.key_length": 8, "attention.value_length": 4, "rope.dimension_count": 4,
			"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8, "expert_shared_count": 1,
		}
		maps.Copy(all, changes)
		return all
	}
	for says, c := range map[string]struct {
		arch    string
		changes map[string]any
	}{
		`glm4.rope.dimension_sections is [8 12 12 0]; supported: none`:              {"glm4", map[string]any{"rope.dimension_sections": []int32{8, 12, 12, 0}}},
		`glm4.nextn_predict_layers is 1; supported: 0`:                              {"glm4", map[string]any{"nextn_predict_layers": 1}},
		`glm4moe.expert_count is missing`:                                           {"glm4moe", map[string]any{"expert_used_count": 1, "expert_feed_forward_length": 8, "expert_shared_count": 1}},
		`glm4moe.expert_gating_func is 1; supported: 2`:                             {"glm4moe", map[string]any{"expert_gating_func": 1}},
		`num_hidden_layers is -6`:                                                   {"glm4moe", map[string]any{"nextn_predict_layers": 7, "expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 8, "expert_shared_count": 1}},
		`granite.rope.scaling.finetuned is false`:                                   {"granite", map[string]any{"rope.scaling.finetuned": false}},
		`logits_scaling is 0`:                                                       {"granite", map[string]any{"logit_scale": 0.0}},
		`granitemoe.expert_used_count is missing`:                                   {"granitemoe", map[string]any{"expert_count": 2}},
		`olmo2.attention.sliding_window is 4096; supported: none`:                   {"olmo2", map[string]any{"attention.sliding_window": 4096}},
		`gemma2.attention.sliding_window_pattern has 3 values for 1 layers`:         {"gemma2", map[string]any{"attention.sliding_window_pattern": []int32{1, 0, 1}}},
		`gemma3.attention.sliding_window_pattern is -1`:                             {"gemma3", map[string]any{"attention.sliding_window": 8, "attention.sliding_window_pattern": -1}},
		`sliding_window is -8`:                                                      {"gemma3", map[string]any{"attention.sliding_window": -8}},
		`rope_factors_short.weight of type  []; supported: a vector of F32`:         {"phi3", map[string]any{"rope.scaling.type": "longrope"}},
		`partial_rotary_factor 0.125 of head_dim 4 are 0 columns`:                   {"phi3", map[string]any{"rope.dimension_count": 0}},
		`gemma.rope.dimension_count is 2, in heads of 4; supported: equal sizes`:    {"gemma", map[string]any{"rope.dimension_count": 2}},
		`phi3.rope.dimension_count is 8, in heads of 4; supported: equal sizes`:     {"phi3", map[string]any{"rope.dimension_count": 8}},
		`gemma3.attention.sliding_window_pattern is not an integer, or an array`:    {"gemma3", map[string]any{"attention.sliding_window": 8, "attention.sliding_window_pattern": "6"}},
		`granite.embedding_scale is not a number`:                                   {"granite", map[string]any{"embedding_scale": "12"}},
		`gemma2.block_count is 1000000, not between 1 and`:                          {"gemma2", map[string]any{"block_count": 1000000}},
		`gpt-oss.attention.sliding_window is missing, or not one integer`:           {"gpt-oss", map[string]any{"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32}},
		`gpt-oss.expert_gating_func is 1; supported: 3`:                             {"gpt-oss", map[string]any{"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32, "attention.sliding_window": 8, "expert_gating_func": 1}},
		`gpt-oss.rope.freq_base_swa is 500, rope.freq_base 10000; supported: equal`: {"gpt-oss", map[string]any{"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32, "attention.sliding_window": 8, "rope.freq_base": 10000.0, "rope.freq_base_swa": 500.0}},
		`deepseek2.attention.temperature_scale is 0.1; supported: 0`:                {"deepseek2", latent(map[string]any{"attention.temperature_scale": 0.1})},
		`deepseek2.expert_gating_func is 4; supported: 1, the softmax, and 2`:       {"deepseek2", latent(map[string]any{"expert_gating_func": 4})},
		`deepseek2.expert_weights_norm is true with the softmax; supported: false`:  {"deepseek2", latent(map[string]any{"expert_weights_norm": true})},
		`deepseek2.attention.kv_lora_rank is missing, or not one integer`:           {"deepseek2", latent(map[string]any{"attention.kv_lora_rank": "8"})},
		`qk_nope_head_dim is -8, not between 1 and`:                                 {"deepseek2", latent(map[string]any{"rope.dimension_count": 16})},
		`qk_rope_head_dim 3 is odd and cannot be rotated`:                           {"deepseek2", latent(map[string]any{"rope.dimension_count": 3})},
		`kv_lora_rank is 2000000000, not between 1 and`:                             {"deepseek2", latent(map[string]any{"attention.kv_lora_rank": 2000000000})},
		`q_lora_rank is -1`: {"deepseek2", latent(map[string]any{"attention.q_lora_rank": -1})},
		`num_experts_per_tok 2 out of the best topk_group 9 of n_group 2`:              {"deepseek2", latent(map[string]any{"expert_gating_func": 2, "expert_group_count": 2, "expert_group_used_count": 9})},
		`deepseek2.rope.scaling.yarn_log_multiplier is 0.1; supported: positive numb`:  {"deepseek2", latent(map[string]any{"rope.scaling.yarn_log_multiplier": 0.1})},
		`n_shared_experts 0 of moe_intermediate_size 8`:                                {"deepseek2", latent(map[string]any{"expert_shared_count": 0})},
		`mistral3.expert_count is 8; supported: 0`:                                     {"mistral3", map[string]any{"expert_count": 8}},
		`mistral3.attention.temperature_scale is 0.1; supported: positive numbers, wi`: {"mistral3", map[string]any{"attention.temperature_scale": 0.1}},
		`mistral3.rope.scaling.yarn_log_multiplier is -1; supported: positive number`:  {"mistral3", map[string]any{"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": -1.0}},
		`num_experts_per_tok is 3, num_experts 2`:                                      {"gpt-oss", map[string]any{"expert_count": 2, "expert_used_count": 3, "expert_feed_forward_length": 32, "attention.sliding_window": 8}},
		`num_experts_per_tok is 9, num_experts 2`:                                      {"granitemoe", map[string]any{"expert_count": 2, "expert_used_count": 9}},
		`qwen3moe.expert_feed_forward_length is missing, or not one integer`:           {"qwen3moe", map[string]any{"expert_count": 2, "expert_used_count": 1}},
		`yarn with factor 4, beta_fast 1, beta_slow 32, original_max_position_embedd`:  {"qwen2", map[string]any{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 8, "rope.scaling.yarn_beta_fast": 1.0, "rope.scaling.yarn_beta_slow": 32.0}},
	} {
		values := map[string]any{}
		for key, v := range ggufValues(nil) {
			values[strings.Replace(key, "llama.", c.arch+".", 1)] = v
		}
		values["general.architecture"] = c.arch
		for key, v := range c.changes {
			values[c.arch+"."+key] = v
		}
		src, err := OpenDir(ggufFileOf(t, values))
		if err == nil {
			_ = src.Close()
		}
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: err = %v, want %q", c.arch, err, says)
		}
	}
}

// convertedKeys are the keys of a file below general.architecture, and what happens without each:
// the start of an error, "moves" for other logits, or "same" where a default is equal.
var convertedKeys = map[string]map[string]string{
	"deepseek2": {
		"attention.head_count": "missing", "attention.head_count_kv": "same", "attention.key_length": "same", "attention.value_length": "same",
		"attention.key_length_mla": "missing", "attention.value_length_mla": "missing", "attention.kv_lora_rank": "missing", "attention.q_lora_rank": "q_proj.weight is missing",
		"attention.layer_norm_rms_epsilon": "rms_norm_eps is 0",
		"block_count":                      "missing", "context_length": "missing", "embedding_length": "missing", "feed_forward_length": "missing", "vocab_size": "same",
		"expert_count": "missing", "expert_feed_forward_length": "missing", "expert_gating_func": "same", "expert_group_count": "topk_group", "expert_group_used_count": "out of the best topk_group 1",
		"expert_shared_count": "missing", "expert_used_count": "missing", "expert_weights_norm": "moves", "expert_weights_scale": "moves", "leading_dense_block_count": "is missing",
		"rope.dimension_count": "missing", "rope.freq_base": "moves", "rope.scaling.type": "supported: positive numbers, with rope.scaling.type yarn",
		"rope.scaling.factor": "moves", "rope.scaling.original_context_length": "moves",
		"rope.scaling.yarn_beta_fast": "moves", "rope.scaling.yarn_beta_slow": "moves", "rope.scaling.yarn_log_multiplier": "moves",
	},
	"deepseek2-v2": {
		"attention.head_count": "missing", "attention.head_count_kv": "same", "attention.key_length": "same", "attention.value_length": "same",
		"attention.key_length_mla": "missing", "attention.value_length_mla": "missing", "attention.kv_lora_rank": "missing", "attention.q_lora_rank": "q_proj.weight is missing",
		"attention.layer_norm_rms_epsilon": "rms_norm_eps is 0",
		"block_count":                      "missing", "context_length": "missing", "embedding_length": "missing", "feed_forward_length": "missing", "vocab_size": "same",
		"expert_count": "missing", "expert_feed_forward_length": "missing", "expert_group_count": "moves", "expert_group_used_count": "out of the best topk_group 1",
		"expert_shared_count": "missing", "expert_used_count": "missing", "expert_weights_scale": "moves", "leading_dense_block_count": "is missing",
		"rope.dimension_count": "missing", "rope.freq_base": "moves", "rope.scaling.type": "supported: positive numbers, with rope.scaling.type yarn",
		"rope.scaling.factor": "moves", "rope.scaling.original_context_length": "moves",
		"rope.scaling.yarn_beta_fast": "moves", "rope.scaling.yarn_beta_slow": "moves", "rope.scaling.yarn_log_multiplier": "moves",
	},
	"deepseek2-lite": {
		"attention.head_count": "missing", "attention.head_count_kv": "same", "attention.key_length": "missing", "attention.value_length": "missing", "attention.kv_lora_rank": "missing",
		"attention.layer_norm_rms_epsilon": "rms_norm_eps is 0",
		"block_count":                      "missing", "context_length": "missing", "embedding_length": "missing", "feed_forward_length": "missing", "vocab_size": "same",
		"expert_count": "missing", "expert_feed_forward_length": "missing", "expert_group_count": "same", "expert_group_used_count": "same",
		"expert_shared_count": "missing", "expert_used_count": "missing", "expert_weights_scale": "moves", "leading_dense_block_count": "is missing",
		"rope.dimension_count": "missing", "rope.freq_base": "same",
	},
	"ministral3": {
		"attention.head_count": "missing", "attention.head_count_kv": "want shape", "attention.key_length": "value_length is 14, in heads of 8", "attention.value_length": "same",
		"attention.layer_norm_rms_epsilon": "rms_norm_eps is 0", "attention.temperature_scale": "moves",
		"block_count": "missing", "context_length": "missing", "embedding_length": "missing", "feed_forward_length": "missing", "vocab_size": "same",
		"rope.dimension_count": "same", "rope.freq_base": "moves", "rope.scaling.type": "supported: positive numbers, with rope.scaling.type yarn",
		"rope.scaling.factor": "moves", "rope.scaling.original_context_length": "moves",
		"rope.scaling.yarn_beta_fast": "moves", "rope.scaling.yarn_beta_slow": "moves", "rope.scaling.yarn_log_multiplier": "moves",
	},
	"mistral3": {
		"attention.head_count": "missing", "attention.head_count_kv": "want shape", "attention.key_length": "value_length is 12, in heads of 8", "attention.value_length": "same",
		"attention.layer_norm_rms_epsilon": "rms_norm_eps is 0",
		"block_count":                      "missing", "context_length": "missing", "embedding_length": "missing", "feed_forward_length": "missing", "vocab_size": "same",
		"rope.dimension_count": "same", "rope.freq_base": "moves",
	},
	"gpt-oss": {
		"attention.head_count": "missing", "attention.head_count_kv": "want shape", "attention.key_length": "value_length is 24, in heads of 16", "attention.value_length": "same",
		"attention.layer_norm_rms_epsilon": "rms_norm_eps is 0", "attention.sliding_window": "missing",
		"block_count": "missing", "context_length": "missing", "embedding_length": "missing", "feed_forward_length": "missing",
		"expert_count": "missing", "expert_feed_forward_length": "missing", "expert_used_count": "missing",
		"rope.freq_base": "moves", "rope.scaling.type": "moves", "rope.scaling.factor": "moves", "rope.scaling.original_context_length": "moves",
		"rope.scaling.yarn_beta_fast": "moves", "rope.scaling.yarn_beta_slow": "moves",
	},
}

// Without any of its keys a file is refused or gives other logits, so that each is read.
func TestConvertedKeys(t *testing.T) {
	for name, keys := range convertedKeys {
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join("testdata", "converted", name+".gguf"))
			if err != nil {
				t.Fatal(err)
			}
			g := readGoldensOf(t, "converted/"+name)
			arch := openedArchitecture(t, data)
			for _, found := range regexp.MustCompile(regexp.QuoteMeta(arch)+`\.([a-z_.]+)`).FindAllStringSubmatch(string(data[:8192]), -1) {
				if key := found[1]; keys[key] == "" {
					t.Errorf("%s.%s is not tested", arch, key)
				}
			}
			for key, want := range keys {
				full := arch + "." + key
				field := append(binary.LittleEndian.AppendUint64(nil, uint64(len(full))), full...)
				if bytes.Count(data, field) != 1 {
					t.Errorf("%s occurs %d times", full, bytes.Count(data, field))
					continue
				}
				field[8] = 'X'
				if got := loadedWith(t, bytes.Replace(data, append(binary.LittleEndian.AppendUint64(nil, uint64(len(full))), full...), field, 1), g); !strings.Contains(got, want) {
					t.Errorf("without %s: %s, want %s", full, got, want)
				}
			}
		})
	}
}

// openedArchitecture returns the value of general.architecture, the first key of a file.
func openedArchitecture(t *testing.T, data []byte) string {
	t.Helper()
	f, err := gguf.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	arch, _ := f.String("general.architecture")
	return arch
}

// loadedWith returns whether a file's logits are those of goldens ("same") or not ("moves"), or why
// it is not loaded.
func loadedWith(t *testing.T, data []byte, g goldens) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "changed.gguf")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	src, err := OpenDir(path)
	if err != nil {
		return err.Error()
	}
	defer src.Close()
	src.ExpandIntegers()
	dev, err := cpu.New(cpu.Options{Threads: 1, Limits: familyLimits})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	m, err := Load(src, dev, familyLimits, Options{})
	if err != nil {
		return err.Error()
	}
	if err := dev.AllocKV(kvWithin(&m.config, familyLimits)); err != nil {
		t.Fatal(err)
	}
	for _, most := range []int{20, familyLimits.Tokens} { // most changes show in short prompts
		if worst := worstOf(t, m, g, most); worst > 10*tolerance {
			return "moves"
		} else if worst > tolerance {
			return fmt.Sprintf("logits are off by %g", worst)
		}
	}
	return "same"
}

// Tensors of more or fewer rows than their matrices have are reported by name.
func TestCutRows(t *testing.T) {
	whole := safetensors.Tensor{Name: "w", Shape: []int{6, 2}, Data: []byte("aabbccddeeff")}
	name := func(module string) string { return "x." + module }
	parts := cutRows(whole, name, rowsOf{"q", 3}, rowsOf{"k", 2}, rowsOf{"v", 1})
	if len(parts) != 3 || string(parts[0].Data) != "aabbcc" || string(parts[2].Data) != "ff" || parts[1].Name != "x.k" || !slices.Equal(parts[1].Shape, []int{2, 2}) {
		t.Errorf("%+v", parts)
	}
	if halves := cutRows(whole, name, rowsOf{"gate", 0}, rowsOf{"up", 0}); len(halves) != 2 || string(halves[1].Data) != "ddeeff" {
		t.Errorf("%+v", halves)
	}
	blocks := safetensors.Tensor{Name: "b", Shape: []int{64}, Data: make([]byte, 68)} // of Q8_0
	if got := cutRows(blocks, name, rowsOf{"q", 32}, rowsOf{"k", 32}); len(got) != 1 || got[0].Name != "b" {
		t.Errorf("%+v", got)
	}
	for _, rows := range [][]rowsOf{{{"q", 7}}, {{"q", 2}, {"k", 2}}, {{"a", 0}, {"b", 0}, {"c", 0}, {"d", 0}}} {
		if got := cutRows(whole, name, rows...); len(got) != 1 || got[0].Name != "w" {
			t.Errorf("%v: %+v", rows, got)
		}
	}
}
