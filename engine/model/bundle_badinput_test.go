package model

import (
	"errors"
	"testing"
	"testing/fstest"
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
