package tokenizer

import (
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

var tiktokenGoldens = flag.String("tiktoken", "testdata/tiktoken.gz", "goldens of testdata/tiktoken_ranks.py")

type tiktokenGolden struct {
	Ranks   string
	Classes []json.RawMessage
}

func loadTiktoken(t testing.TB) *tiktokenGolden {
	t.Helper()
	f, err := os.Open(*tiktokenGoldens)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	g := &tiktokenGolden{}
	if err := json.NewDecoder(z).Decode(g); err != nil || len(g.Classes) < 4 {
		t.Fatalf("%d classes, %v", len(g.Classes), err)
	}
	return g
}

// A file of ranks gives the ids of OpenAI's tiktoken with the pattern and the special tokens of
// each class.
func TestTiktoken(t *testing.T) {
	g := loadTiktoken(t)
	if !IsTiktoken([]byte(g.Ranks)) || IsTiktoken(loadSPM(t, "").Model) || IsTiktoken(nil) || IsTiktoken([]byte("AA== 1\n")) {
		t.Error("a file of ranks is taken for another, or another for it")
	}
	for _, raw := range g.Classes {
		var config json.RawMessage
		var cases [][2]json.RawMessage
		if err := json.Unmarshal(raw, &[]any{&config, &cases}); err != nil {
			t.Fatal(err)
		}
		made, err := FromTiktoken([]byte(g.Ranks), config)
		if err != nil {
			t.Fatal(err)
		}
		tok, err := Load(made)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range cases {
			var text string
			var ids []int32
			if err := errors.Join(json.Unmarshal(c[0], &text), json.Unmarshal(c[1], &ids)); err != nil {
				t.Fatal(err)
			}
			if got := tok.Encode(text, false); !slices.Equal(got, ids) {
				t.Errorf("%.60s: Encode(%q)\n got %v\nwant %v", config, text, got, ids)
			}
			if got := tok.Decode(ids, false); got != text {
				t.Errorf("%.60s: Decode(%v)\n got %q\nwant %q", config, ids, got, text)
			}
		}
	}
}

// Llama 3 is known by the number of its tokens.
func TestTiktokenOfLlama3(t *testing.T) {
	var b strings.Builder
	for i := range llama3Ranks {
		token := []byte{byte(i)}
		if i > 255 {
			token = fmt.Appendf(nil, "%d", i)
		}
		fmt.Fprintf(&b, "%s %d\n", base64.StdEncoding.EncodeToString(token), i)
	}
	made, err := FromTiktoken([]byte(b.String()), nil)
	if err != nil {
		t.Fatal(err)
	}
	tok, err := Load(made)
	if err != nil {
		t.Fatal(err)
	}
	for text, id := range map[string]int32{
		"<|begin_of_text|>": 128000, "<|reserved_special_token_0|>": 128002, "<|reserved_special_token_3|>": 128005, "<|start_header_id|>": 128006,
		"<|end_header_id|>": 128007, "<|reserved_special_token_4|>": 128008, "<|eot_id|>": 128009, "<|reserved_special_token_250|>": 128255,
	} {
		if got, ok := tok.Added(text); !ok || got != id {
			t.Errorf("%s is %d", text, got)
		}
	}
	if got := tok.Encode("a", true); !slices.Equal(got, []int32{128000, 'a'}) {
		t.Errorf("%v", got)
	}
}

// Files of ranks that are incomplete or contradict themselves, and classes that are not known, are
// refused.
func TestTiktokenRefuses(t *testing.T) {
	ranks := loadTiktoken(t).Ranks
	lines := strings.Split(ranks, "\n")
	var runs strings.Builder
	for i := range 800 {
		token := strings.Repeat("\x00", i+200) // longer than those of ranks
		fmt.Fprintf(&runs, "%s %d\n", base64.StdEncoding.EncodeToString([]byte(token)), len(lines)-1+i)
	}
	const fast = `{"tokenizer_class": "PreTrainedTokenizerFast"}`
	for _, c := range []struct {
		ranks, config string
		want          error
		says          string
	}{
		{ranks, `{"tokenizer_class": "MartianTokenizer"}`, ErrUnsupported, "read are ChatGLM4Tokenizer"},
		{ranks, "{}", ErrUnsupported, "absent from tokenizer_config.json"},
		{ranks, `{"added_tokens_decoder": {"1000": {"content": "[EOS]"}}}`, ErrUnsupported, "tokenizer_class with a file of ranks"},
		{ranks, `{"tokenizer_class": 7}`, ErrInvalid, "tokenizer_config.json"},
		{ranks, `{"added_tokens_decoder": {"7": {"content": "x"}}}`, ErrInvalid, `"x" as token "7"`},
		{ranks, `{"added_tokens_decoder": {"9999999999": {"content": "x"}}}`, ErrInvalid, "9999999999"},
		{ranks, `{"added_tokens_decoder": {"5000": {"content": ""}}}`, ErrInvalid, "5000"},
		{ranks, `{"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"5000": {"content": "a"}}}`, ErrInvalid, `"a" is in the vocabulary, too`},
		{"", "{}", ErrInvalid, "0 of the 256 bytes"},
		{strings.Join(lines[:200], "\n"), "{}", ErrInvalid, "200 of the 256 bytes"},
		{strings.Join(lines[1:], "\n"), "{}", ErrInvalid, "line 1 of the file of ranks"},
		{ranks + lines[65], "{}", ErrInvalid, "want a token in base64 and the rank"},
		{ranks + fmt.Sprintf("QQ== %d\n", len(lines)-1), fast, ErrInvalid, `"A" is in the vocabulary twice`},
		{"*** 0\n", "{}", ErrInvalid, "line 1"},
		{" 0\n", "{}", ErrInvalid, "line 1"},
		{base64.StdEncoding.EncodeToString(make([]byte, 2000)) + " 0\n", "{}", ErrInvalid, "2000 bytes, at most 1024"},
		{ranks + runs.String(), fast, ErrInvalid, "merges of the vocabulary take more than"},
		{strings.Repeat("\n", maxTokenID), "{}", ErrInvalid, "more than 4194304 lines"},
	} {
		if _, err := FromTiktoken([]byte(c.ranks), []byte(c.config)); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%.40q, %s: %v", c.ranks, c.config, err)
		}
	}
}
