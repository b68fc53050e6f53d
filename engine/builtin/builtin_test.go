package builtin

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

type config struct {
	Architectures []string `json:"architectures"`
	Vocab         int      `json:"vocab_size"`
	Hidden        int      `json:"hidden_size"`
	FFN           int      `json:"intermediate_size"`
	Layers        int      `json:"num_hidden_layers"`
	Heads         int      `json:"num_attention_heads"`
	KVHeads       int      `json:"num_key_value_heads"`
	HeadDim       int      `json:"head_dim"`
	Context       int      `json:"max_position_embeddings"`
	Tied          bool     `json:"tie_word_embeddings"`
	EOS           int      `json:"eos_token_id"`
}

type tensor struct {
	DType   string   `json:"dtype"`
	Shape   []int    `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	b, err := fs.ReadFile(FS(), name)
	if err != nil {
		t.Fatalf("built-in model has no %s: %v", name, err)
	}
	return b
}

func decode[T any](t *testing.T, name string) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(read(t, name), &v); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return v
}

// shapes gives every tensor of a Llama with tied embeddings, by its Hugging Face name.
func shapes(c config) map[string][]int {
	q, kv := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	all := map[string][]int{"model.embed_tokens.weight": {c.Vocab, c.Hidden}, "model.norm.weight": {c.Hidden}}
	for i := range c.Layers {
		for name, shape := range map[string][]int{
			"self_attn.q_proj":         {q, c.Hidden},
			"self_attn.k_proj":         {kv, c.Hidden},
			"self_attn.v_proj":         {kv, c.Hidden},
			"self_attn.o_proj":         {c.Hidden, q},
			"mlp.gate_proj":            {c.FFN, c.Hidden},
			"mlp.up_proj":              {c.FFN, c.Hidden},
			"mlp.down_proj":            {c.Hidden, c.FFN},
			"input_layernorm":          {c.Hidden},
			"post_attention_layernorm": {c.Hidden},
		} {
			all[fmt.Sprintf("model.layers.%d.%s.weight", i, name)] = shape
		}
	}
	return all
}

// checkWeights returns why a safetensors file is not exactly the wanted tensors in bf16, back to back.
func checkWeights(file []byte, want map[string][]int) error {
	if len(file) < 8 || binary.LittleEndian.Uint64(file) > uint64(len(file)-8) {
		return errors.New("no safetensors header")
	}
	n := binary.LittleEndian.Uint64(file)
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(file[8:8+n], &raw); err != nil {
		return fmt.Errorf("safetensors header: %w", err)
	}
	delete(raw, "__metadata__")
	var covered int64
	for name, shape := range want {
		var got tensor
		if err := json.Unmarshal(raw[name], &got); err != nil {
			return fmt.Errorf("tensor %s: %w", name, err)
		}
		bytes := int64(2)
		for _, dim := range shape {
			bytes *= int64(dim)
		}
		if got.DType != "BF16" || !slices.Equal(got.Shape, shape) || got.Offsets[1]-got.Offsets[0] != bytes {
			return fmt.Errorf("tensor %s is %s %v at %v, want BF16 %v", name, got.DType, got.Shape, got.Offsets, shape)
		}
		covered += bytes
	}
	if len(raw) != len(want) {
		return fmt.Errorf("%d tensors, want %d", len(raw), len(want))
	}
	if data := int64(len(file)) - 8 - int64(n); data != covered {
		return fmt.Errorf("%d bytes of data, want %d", data, covered)
	}
	return nil
}

func TestWeightsAreWhatTheConfigAsksFor(t *testing.T) {
	c := decode[config](t, "config.json")
	if !slices.Equal(c.Architectures, []string{"LlamaForCausalLM"}) || !c.Tied {
		t.Fatalf("config.json: architectures %v, tied %v", c.Architectures, c.Tied)
	}
	if c.HeadDim%16 != 0 || c.Heads%c.KVHeads != 0 || c.Context < 2048 {
		t.Fatalf("config.json: head_dim %d, heads %d/%d, context %d", c.HeadDim, c.Heads, c.KVHeads, c.Context)
	}
	file := read(t, "model.safetensors")
	if err := checkWeights(file, shapes(c)); err != nil {
		t.Fatal(err)
	}

	c.Layers++
	if checkWeights(file, shapes(c)) == nil {
		t.Error("a missing layer went unnoticed")
	}
	c.Layers -= 2
	if checkWeights(file, shapes(c)) == nil {
		t.Error("a surplus layer went unnoticed")
	}
	if checkWeights(file[:len(file)-2], shapes(decode[config](t, "config.json"))) == nil {
		t.Error("a cut file went unnoticed")
	}
}

func TestTokenizerMatchesConfig(t *testing.T) {
	c := decode[config](t, "config.json")
	tok := decode[struct {
		Model struct {
			Type   string         `json:"type"`
			Vocab  map[string]int `json:"vocab"`
			Merges []any          `json:"merges"`
		} `json:"model"`
		Added []struct {
			ID      int    `json:"id"`
			Content string `json:"content"`
			Special bool   `json:"special"`
		} `json:"added_tokens"`
	}](t, "tokenizer.json")
	special := map[string]int{}
	for _, a := range tok.Added {
		if a.Special {
			special[a.Content] = a.ID
		}
	}
	if tok.Model.Type != "BPE" || len(tok.Model.Vocab) != c.Vocab {
		t.Errorf("tokenizer is %s with %d tokens, config.json says %d", tok.Model.Type, len(tok.Model.Vocab), c.Vocab)
	}
	if len(tok.Model.Merges)+256+len(special) != c.Vocab {
		t.Errorf("%d merges + 256 bytes + %d special tokens do not make %d", len(tok.Model.Merges), len(special), c.Vocab)
	}
	eos, ok := special["<|im_end|>"]
	if !ok || eos != c.EOS {
		t.Errorf("<|im_end|> is token %d, config.json ends at %d", eos, c.EOS)
	}
	tc := decode[struct {
		Template string `json:"chat_template"`
		EOS      string `json:"eos_token"`
	}](t, "tokenizer_config.json")
	if tc.EOS != "<|im_end|>" || !strings.Contains(tc.Template, "<|im_start|>") {
		t.Errorf("tokenizer_config.json: eos %q, template %q", tc.EOS, tc.Template)
	}
	gen := decode[struct {
		EOS []int `json:"eos_token_id"`
	}](t, "generation_config.json")
	if !slices.Contains(gen.EOS, eos) || !slices.Contains(gen.EOS, special["<|endoftext|>"]) {
		t.Errorf("generation_config.json ends at %v, want %v", gen.EOS, special)
	}
}

func TestFolderIsSmall(t *testing.T) {
	var total int64
	err := fs.WalkDir(FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		total += info.Size()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if total > MaxBytes {
		t.Errorf("the embedded folder has %d bytes, at most %d are allowed", total, int64(MaxBytes))
	}
}

// TestEvalList holds the form of eval.jsonl, which the engine's own test asks greedily: every line is complete, none is asked twice,
// and the list is as wide as it claims.
func TestEvalList(t *testing.T) {
	f, err := os.Open("eval.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	kinds, seen, n := map[string]int{}, map[string]bool{}, 0
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		n++
		var row struct {
			Kind    string   `json:"kind"`
			System  string   `json:"system"`
			History []string `json:"history"` // user, assistant, user, …: ends with an answer
			Prompt  string   `json:"prompt"`
			Answer  string   `json:"answer"` // exact
			// A story's first choices are ties by design, so it is held by what it contains and by its length instead.
			Contains  []string `json:"contains"`
			MinTokens int      `json:"min_tokens"`
		}
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			t.Fatalf("line %d: %v", n, err)
		}
		exact := row.Answer != "" && utf8.ValidString(row.Answer)
		story := row.Answer == "" && len(row.Contains) > 0 && row.MinTokens > 0
		if row.Kind == "" || row.Prompt == "" || exact == story || story != (row.Kind == "story") || len(row.History)%2 != 0 {
			t.Errorf("line %d is incomplete: %s", n, lines.Bytes())
		}
		key := fmt.Sprint(row.System, row.History, row.Prompt)
		if seen[key] {
			t.Errorf("line %d asks again: %q", n, row.Prompt)
		}
		seen[key] = true
		kinds[row.Kind]++
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"trained", "heldout", "story", "refusal", "multi-turn", "system"} {
		if kinds[kind] == 0 {
			t.Errorf("eval.jsonl has no line of kind %q", kind)
		}
	}
	if n < 20 {
		t.Errorf("eval.jsonl has %d lines, at least 20 are wanted", n)
	}
}

// TestTrainingRefusesHeldOutText runs the recipe's own tests: no question of heldout*.jsonl, after normalizing, is in what the model is trained on.
func TestTrainingRefusesHeldOutText(t *testing.T) {
	python := os.Getenv("TANDEM_PYTHON")
	if python == "" {
		t.Skip("needs TANDEM_PYTHON, any Python 3.11: run make test")
	}
	cmd := exec.CommandContext(t.Context(), python, "-W", "ignore", "-m", "unittest", "test_corpus")
	cmd.Dir = "train"
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "Ran 7 tests") {
		t.Errorf("the recipe's tests: %v\n%s", err, out)
	}
}
