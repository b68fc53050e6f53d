package e2e

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// A folder named like Qwen3-Reranker scores a pair by the logits of yes and no behind the prompt of
// its model card.
func TestBinaryReranker(t *testing.T) {
	t.Parallel()
	path := binary(t)
	c := newCluster(t)
	dir := filepath.Join(c.state, "models--Qwen--Qwen3-Reranker-0.6B", "snapshots", "0123")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	const yes, no = 0xf8, 0xf9 // bytes that are in no text
	vocab := map[string]int{}
	for b, r := range byteLevelRunes() {
		if b < yes {
			vocab[string(r)] = b
		}
	}
	vocab["yes"], vocab["no"], vocab["ye"] = yes, no, 0xfa
	tokenizer, err := json.Marshal(map[string]any{
		"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "use_regex": true}, "decoder": map[string]any{"type": "ByteLevel"},
		"model": map[string]any{"type": "BPE", "vocab": vocab, "merges": []string{"y e", "ye s", "n o"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	config := map[string]any{}
	for _, name := range []string{"config.json", "model.safetensors"} {
		data, err := os.ReadFile(filepath.Join(checkpoints, "qwen3", name))
		if err != nil {
			t.Fatal(err)
		}
		if name == "config.json" {
			if err := json.Unmarshal(data, &config); err != nil {
				t.Fatal(err)
			}
			config["max_position_embeddings"] = 1024
			if data, err = json.Marshal(config); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{"tokenizer.json": string(tokenizer), "chat_template.jinja": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(c.state, "serve.yaml")
	if err := os.WriteFile(file, []byte("port: "+strconv.Itoa(c.port)+"\nmodel: "+dir+"\nserved-model-name: r\nkv-cache-memory-bytes: 16MiB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.start(path, "serve", "--config", file)
	c.wait(startBound, "serve is ready", func() bool { return c.body("/readyz") != "" })
	ask := func(path string, body map[string]any, to any) {
		t.Helper()
		resp, err := c.post(path, body)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if err := json.NewDecoder(resp.Body).Decode(to); err != nil || resp.StatusCode != 200 {
			t.Fatalf("%s: %d, %v", path, resp.StatusCode, err)
		}
	}
	query, document := "What is a \"lease\"?", "A lease\nis a right to write."
	var scored struct{ Data []struct{ Score float64 } }
	ask("/score", map[string]any{"text_1": query, "text_2": document}, &scored)
	prompt := "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. " +
		"Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n" +
		"<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: " + query + "\n<Document>: " + document +
		"<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
	var completed struct {
		Choices []struct {
			Logprobs struct {
				Top []map[string]float64 `json:"top_logprobs"`
			}
		}
	}
	ask("/v1/completions", map[string]any{"prompt": prompt, "max_tokens": 1, "logprobs": 1, "logprob_token_ids": []int{yes, no}}, &completed)
	top := completed.Choices[0].Logprobs.Top[0]
	if want := 1 / (1 + math.Exp(top["no"]-top["yes"])); len(scored.Data) != 1 || top["yes"] == 0 || top["no"] == 0 || math.Abs(scored.Data[0].Score-want) > 1e-5 {
		t.Errorf("%+v, want %g of %v", scored, want, top)
	}
	var chat struct {
		Usage struct {
			Prompt int `json:"prompt_tokens"`
		}
	}
	ask("/v1/chat/completions", map[string]any{"messages": []map[string]string{{"role": "user", "content": "hi"}}, "max_tokens": 1}, &chat)
	if chat.Usage.Prompt != len("user: hi\n") {
		t.Errorf("a chat has %d tokens: its template is not the folder's", chat.Usage.Prompt)
	}
}

// byteLevelRunes returns how byte-level vocabularies write each byte.
func byteLevelRunes() (all [256]rune) {
	next := rune(256)
	for b := range rune(256) {
		if all[b] = b; !(b >= '!' && b <= '~' || b >= 0xA1 && b <= 0xAC || b >= 0xAE) {
			all[b], next = next, next+1
		}
	}
	return all
}
