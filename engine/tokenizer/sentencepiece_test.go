package tokenizer

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var spmGoldens = flag.String("sentencepiece", "testdata", "folder of the goldens of testdata/sentencepiece.py")

type spmGolden struct {
	Model   []byte            `json:"model"`
	Configs []json.RawMessage `json:"configs"`
}

// loadSPM reads a golden file; name is empty for the vocabulary with merges.
func loadSPM(t testing.TB, name string) *spmGolden {
	t.Helper()
	f, err := os.Open(filepath.Join(*spmGoldens, "sentencepiece"+name+".gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	g := &spmGolden{}
	if err := json.NewDecoder(z).Decode(g); err != nil {
		t.Fatal(err)
	}
	return g
}

// A tokenizer.model alone gives the ids and the text of transformers' LlamaTokenizer, or of the
// class without code, which encodes as SentencePiece does.
func TestSentencePiece(t *testing.T) {
	for _, name := range []string{"", "-unigram", "-plain", "-bare"} {
		t.Run(name, func(t *testing.T) { testSentencePiece(t, loadSPM(t, name)) })
	}
}

func testSentencePiece(t *testing.T, g *spmGolden) {
	t.Helper()
	if len(g.Configs) == 0 {
		t.Fatal("no configs")
	}
	for _, raw := range g.Configs {
		var config json.RawMessage
		var cases [][]json.RawMessage
		if err := json.Unmarshal(raw, &[]any{&config, &cases}); err != nil {
			t.Fatal(err)
		}
		text, err := FromSentencePiece(g.Model, config)
		if err != nil {
			t.Fatal(err)
		}
		tok, err := Load(text)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range cases {
			var text, decoded string
			var ids, plain []int32
			for i, to := range []any{&text, &ids, &plain, &decoded} {
				if err := json.Unmarshal(c[i], to); err != nil {
					t.Fatal(err)
				}
			}
			if got := tok.Encode(text, true); !slices.Equal(got, ids) {
				t.Errorf("%s: Encode(%q, true)\n got %v\nwant %v", config, text, got, ids)
			}
			if got := tok.Encode(text, false); !slices.Equal(got, plain) {
				t.Errorf("%s: Encode(%q, false)\n got %v\nwant %v", config, text, got, plain)
			}
			if got := tok.Decode(ids, false); got != decoded {
				t.Errorf("%s: Decode(%v)\n got %q\nwant %q", config, ids, got, decoded)
			}
		}
	}
}

// Files that are cut or changed give an error, and none a panic.
func TestSentencePieceRefuses(t *testing.T) {
	g := loadSPM(t, "")
	llama := []byte(`{"tokenizer_class":"LlamaTokenizer"}`)
	for i := range len(g.Model) {
		if i > 120 && i%101 != 0 {
			continue
		}
		_, _ = FromSentencePiece(g.Model[:i], llama)
		changed := slices.Clone(g.Model)
		changed[i] ^= 0x55
		if text, err := FromSentencePiece(changed, llama); err == nil {
			_, _ = Load(text)
		}
	}
	for config, want := range map[string]string{
		`{"tokenizer_class":"T5Tokenizer"}`: `"T5Tokenizer"`, `{}`: "tokenizer_class with a tokenizer.model with merges alone",
	} {
		if _, err := FromSentencePiece(g.Model, []byte(config)); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", config, err)
		}
	}
	scored := loadSPM(t, "-unigram").Model
	for i := range len(scored) {
		if i > 120 && i%101 != 0 {
			continue
		}
		changed := slices.Clone(scored)
		changed[i] ^= 0x55
		for _, model := range [][]byte{scored[:i], changed} {
			if text, err := FromSentencePiece(model, nil); err == nil {
				_, _ = Load(text)
			}
		}
	}
	if _, err := FromSentencePiece(scored, []byte(`{"legacy": false}`)); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "legacy") {
		t.Errorf("err = %v", err)
	}
	var many []byte
	for i := range maxWhole {
		many = append(many, 0x0a, 7, 0x0a, 3, '(', byte('A'+i), ')', 0x18, 4)
	}
	for says, change := range map[string][]byte{
		"treat_whitespace_as_suffix": {0x12, 3, 0xc0, 1, 1},
		"one is in another":          {0x0a, 6, 0x0a, 2, 'o', 'o', 0x18, 4},
		"one ends as another begins": {0x0a, 7, 0x0a, 3, 'l', '>', 'x', 0x18, 4},
		`"zz" has the score NaN`:     {0x0a, 9, 0x0a, 2, 'z', 'z', 0x15, 0, 0, 0xc0, 0x7f},
		`"zz" has the score -Inf`:    {0x0a, 9, 0x0a, 2, 'z', 'z', 0x15, 0, 0, 0x80, 0xff},
		"has 5000 bytes, at most":    append([]byte{0x0a, 0x8b, 0x27, 0x0a, 0x88, 0x27}, make([]byte, 5000)...),
		"more than 63":               many,
		`unk_id -1`:                  {0x12, 12, 0xc0, 2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1},
	} {
		if _, err := FromSentencePiece(append(slices.Clone(scored), change...), nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: err = %v", says, err)
		}
	}
	unigram := append(slices.Clone(g.Model), 0x12, 2, 0x18, 1) // trainer_spec.model_type 1
	if _, err := FromSentencePiece(unigram, llama); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "model_type") {
		t.Errorf("unigram: %v", err)
	}
}

// No format makes the converters panic, and what they accept encodes a text or is refused.
func FuzzOtherFormats(f *testing.F) {
	f.Add([]byte("\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\x12\x05\x18\x02\x98\x02\x01"), uint8(0))
	f.Add(loadSPM(f, "-unigram").Model, uint8(0))
	f.Add([]byte(`{"config":{"pattern":"x","default_vocab_size":259,"default_num_special_tokens":3},"vocab":[{"rank":0,"token_bytes":"AA=="}],"special_tokens":[{"rank":1,"token_str":"<s>"}]}`), uint8(1))
	f.Add([]byte(strings.Join(strings.SplitAfter(loadTiktoken(f).Ranks, "\n")[:300], "")), uint8(2))
	f.Fuzz(func(t *testing.T, data []byte, kind uint8) {
		var text []byte
		var err error
		switch kind % 3 {
		case 0:
			text, err = FromSentencePiece(data, []byte(`{"tokenizer_class":"LlamaTokenizer","add_bos_token":true,"add_eos_token":true}`))
			if errors.Is(err, ErrUnsupported) {
				text, err = FromSentencePiece(data, nil)
			}
		case 1:
			text, err = FromTekken(data)
		case 2:
			text, err = FromTiktoken(data, []byte(`{"tokenizer_class":"TikTokenTokenizer","added_tokens_decoder":{"301":{"content":"<|x|>"}}}`))
		}
		var tok *Tokenizer
		if err == nil {
			tok, err = Load(text)
		}
		if err == nil {
			tok.Decode(tok.Encode("a  <s>\xff 漢e\u0301ﬁ\n", true), false)
		}
		if err != nil && !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrUnsupported) {
			t.Fatalf("err = %v", err)
		}
	})
}
