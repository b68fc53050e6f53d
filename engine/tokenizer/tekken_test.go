package tokenizer

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"slices"
	"strings"
	"testing"
)

var (
	tekkenGoldens = flag.String("tekken", "testdata/tekken.gz", "goldens of testdata/tekken.py")
	tekkenReal    = flag.String("tekken-file", "", "a published tekken.json to load as well")
)

// A tekken.json gives the ids of Mistral's own library, and <s> and special tokens in the text theirs.
func TestTekken(t *testing.T) {
	f, err := os.Open(*tekkenGoldens)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var g struct {
		Tekken json.RawMessage      `json:"tekken"`
		Cases  [][2]json.RawMessage `json:"cases"`
	}
	if err := json.NewDecoder(z).Decode(&g); err != nil {
		t.Fatal(err)
	}
	text, err := FromTekken(g.Tekken)
	if err != nil {
		t.Fatal(err)
	}
	tok, err := Load(text)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range g.Cases {
		var text string
		var ids []int32
		if err := errors.Join(json.Unmarshal(c[0], &text), json.Unmarshal(c[1], &ids)); err != nil {
			t.Fatal(err)
		}
		if got := tok.Encode(text, false); !slices.Equal(got, ids) {
			t.Errorf("Encode(%q)\n got %v\nwant %v", text, got, ids)
		}
		if got := tok.Decode(ids, false); got != text {
			t.Errorf("Decode(%v)\n got %q\nwant %q", ids, got, text)
		}
	}
	if got := tok.Encode("[INST]a", true); got[0] != 1 || got[1] != 3 || !tok.IsSpecial(29) || string(tok.TokenBytes(29)) != "<SPECIAL_29>" {
		t.Errorf("[INST]a is %v", got)
	}
	for _, change := range [][2]string{
		{`"default_vocab_size":`, `"default_vocab_size":9`}, {`"rank":7,`, `"rank":8,`}, {`"default_num_special_tokens":30`, `"default_num_special_tokens":-1`},
	} {
		if _, err := FromTekken([]byte(strings.Replace(string(g.Tekken), change[0], change[1], 1))); !errors.Is(err, ErrInvalid) {
			t.Errorf("%v: %v", change, err)
		}
	}
	long := strings.Replace(string(g.Tekken), `"token_bytes":"`, `"token_bytes":"`+strings.Repeat("QUFB", 400), 1)
	if _, err := FromTekken([]byte(long)); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "rank 0 has 1201 bytes, at most 1024") {
		t.Errorf("a long token: %v", err)
	}
	if other, err := FromTekken([]byte(strings.Replace(string(g.Tekken), `"pattern":"`, `"pattern":"x|`, 1))); err == nil {
		if _, err := Load(other); !errors.Is(err, ErrUnsupported) {
			t.Errorf("another pattern: %v", err)
		}
	}
	if *tekkenReal == "" {
		return
	}
	data, err := os.ReadFile(*tekkenReal)
	if err != nil {
		t.Fatal(err)
	}
	if text, err = FromTekken(data); err != nil {
		t.Fatal(err)
	}
	if tok, err = Load(text); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %d tokens, %d bytes of tokenizer.json: %v", *tekkenReal, tok.VocabSize(), len(text), tok.Encode("Hello, world! Ça va? 12345", true))
}
