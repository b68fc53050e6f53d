package model

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// yesNo is a tokenizer with the tokens yes, 4, and no, 6.
const yesNo = `{"added_tokens":[],"normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true},"post_processor":null,"decoder":{"type":"ByteLevel"},` +
	`"model":{"type":"BPE","vocab":{"n":0,"o":1,"y":2,"e":3,"yes":4,"ye":5,"no":6,"s":7},"merges":[["y","e"],["ye","s"],["n","o"]]}}`

// The folder of Qwen3-Reranker, by its own name or that in a Hugging Face cache, scores pairs by yes
// and no with the prompt of its model card. Other folders do not.
func TestReranker(t *testing.T) {
	folder := func(path, tokenizer string, more map[string]string) *Bundle {
		t.Helper()
		dir := filepath.Join(t.TempDir(), path)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		config, err := os.ReadFile("testdata/qwen3/config.json")
		if err != nil {
			t.Fatal(err)
		}
		files := map[string]string{"config.json": string(config), "tokenizer.json": tokenizer, "chat_template.jinja": "{{ messages[0].content }}{% if x %}{% endif %}"}
		for name, text := range more {
			files[name] = text
		}
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		src, err := OpenDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		b, err := src.Bundle()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, path := range []string{"Qwen3-Reranker-0.6B", "models--Qwen--Qwen3-Reranker-4B/snapshots/0123", "my-qwen3-reranker"} {
		b := folder(path, yesNo, nil)
		if v := b.Vectors; !slices.Equal(v.ScoreTokens, []int32{4, 6}) || !strings.Contains(v.Refused, "pairs of texts") || v.Only {
			t.Errorf("%s: %+v", path, v)
		}
	}
	for what, b := range map[string]*Bundle{
		"another name": folder("Qwen3-0.6B", yesNo, nil),
		"no tokens":    folder("Qwen3-Reranker", strings.ReplaceAll(yesNo, `"no"`, `"on"`), nil),
		"modules":      folder("Qwen3-Reranker", yesNo, map[string]string{"modules.json": "[]"}),
	} {
		if b.Vectors.ScoreTokens != nil || strings.Contains(b.ChatTemplate, "<Document>") {
			t.Errorf("%s: %+v", what, b)
		}
	}
}
