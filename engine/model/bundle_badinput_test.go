package model

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// The files beside the weights are the user's, and each may be torn.
func FuzzBundle(f *testing.F) {
	f.Add([]byte(`{"bos_token":"<s>","eos_token":{"content":"</s>"},"chat_template":"{{ x }}"}`), []byte(`{}`), []byte(`{"temperature":0.5,"top_k":3}`))
	f.Add([]byte(`{"chat_template":[{"name":"default","template":"a"}]}`), []byte(`{"eos_token":null}`), []byte(`{"top_p":2}`))
	f.Add([]byte(`{"chat_template":[{"name":"tool_use","template":"a"}]}`), []byte(`[]`), []byte(`null`))
	f.Add([]byte(`{"bos_token":`), []byte(`{"bos_token":7}`), []byte(`{"top_k":-1}`))
	f.Fuzz(func(t *testing.T, config, special, generation []byte) {
		s := &Source{Name: "m", files: fstest.MapFS{
			"tokenizer_config.json":   {Data: config},
			"special_tokens_map.json": {Data: special},
			"generation_config.json":  {Data: generation},
		}}
		b, err := s.Bundle()
		if err != nil {
			if !errors.Is(err, ErrConfig) && !errors.Is(err, ErrUnsupported) {
				t.Fatalf("err = %v, which is of no kind", err)
			}
			return
		}
		if err := b.Defaults.check(); err != nil {
			t.Fatalf("accepted defaults %+v: %v", b.Defaults, err)
		}
	})
}

// A folder with tokenizer.model alone is served as text where its class is known.
func TestBundleOfSentencePiece(t *testing.T) {
	f, err := os.Open("../tokenizer/testdata/sentencepiece.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var g struct {
		Model []byte `json:"model"`
	}
	if err := json.NewDecoder(z).Decode(&g); err != nil {
		t.Fatal(err)
	}
	folder := fstest.MapFS{"tokenizer.model": {Data: g.Model}, "tokenizer_config.json": {Data: []byte(`{"tokenizer_class":"LlamaTokenizer","bos_token":"<s>"}`)}}
	b, err := ReadTokenizer(folder)
	if err != nil || b.BosToken != "<s>" {
		t.Fatalf("%+v, %v", b, err)
	}
	if _, err := tokenizer.Load(b.TokenizerJSON); err != nil {
		t.Error(err)
	}
	folder["tokenizer_config.json"].Data = []byte(`{"tokenizer_class":"XGLMTokenizer"}`)
	if _, err := ReadTokenizer(folder); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "XGLMTokenizer") {
		t.Errorf("err = %v", err)
	}
	for name, want := range map[string]string{"tiktoken.model": "tiktoken.model: tokenizer: invalid tokenizer.json: line 1 of the file of ranks", "qwen.tiktoken": "qwen.tiktoken: tokenizer: invalid tokenizer.json: line 1", "tekken.json": "tekken.json: default_vocab_size 0"} {
		if _, err := ReadTokenizer(fstest.MapFS{name: {Data: []byte("{}")}}); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: err = %v", name, err)
		}
	}
}
