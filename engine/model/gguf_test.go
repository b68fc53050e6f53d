package model

import (
	"compress/gzip"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/tokenizer"
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
			b, err := openGGUFCheckpoint(t, name).Bundle()
			if err != nil {
				t.Fatal(err)
			}
			if b.ChatTemplate == "" || b.BosToken == "" || b.EosToken == "" || len(b.EOSTokenIDs) != 1 {
				t.Errorf("template %q, bos %q, eos %q, ends %v", b.ChatTemplate, b.BosToken, b.EosToken, b.EOSTokenIDs)
			}
			tok, err := tokenizer.Load(b.TokenizerJSON)
			if err != nil {
				t.Fatal(err)
			}
			f, err := os.Open(filepath.Join("testdata", "gguf", name, "goldens.json.gz"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			z, err := gzip.NewReader(f)
			if err != nil {
				t.Fatal(err)
			}
			var g struct {
				Texts []struct {
					Text string
					IDs  []int32
				}
			}
			if err := json.NewDecoder(z).Decode(&g); err != nil || len(g.Texts) == 0 {
				t.Fatalf("%d texts, %v", len(g.Texts), err)
			}
			for _, c := range g.Texts {
				if ids := tok.Encode(c.Text, false); !slices.Equal(ids, c.IDs) {
					t.Errorf("%q: %v, transformers %v", c.Text, ids, c.IDs)
				}
			}
		})
	}
}
