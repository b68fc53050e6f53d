package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/model"
)

// What it writes is a model that the engine opens.
func TestWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "m")
	var out bytes.Buffer
	if err := run(strings.Fields("-vocab 300 -hidden 32 -ffn 64 -layers 2 -heads 4 -kv-heads 2 -head-dim 8 "+dir), &out); err != nil {
		t.Fatal(err)
	}
	if want := dir + ": 0.0 million parameters\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
	src, err := model.OpenDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	ranks := filepath.Join(t.TempDir(), "ranks.json")
	if err := os.WriteFile(ranks, []byte(`["IQ==","","ISE="]`), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := run(strings.Fields("-vocab 300 -hidden 32 -ffn 64 -layers 2 -heads 4 -kv-heads 2 -head-dim 8 -ranks "+ranks+" "+dir), &out); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "tokenizer.json"))
	if err != nil || !bytes.Contains(text, []byte(`"!":0,"!!":2,`)) || !bytes.Contains(text, []byte(`"w1":1,`)) {
		t.Errorf("the tokens of -ranks: %v: %.200s", err, text)
	}
	for _, args := range []string{"", "-vocab 255 x", "-heads 3 -kv-heads 2 x", "-layers 0 x", "x y"} {
		if err := run(strings.Fields(args), &out); !errors.Is(err, errUsage) {
			t.Errorf("%q: %v", args, err)
		}
	}
}
