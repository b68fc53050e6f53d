package tokenizer

import (
	"encoding/json"
	"slices"
	"testing"
)

// oldLlama is a tokenizer.json as transformers 4 saved Llama's: the normalizer treats spaces.
func oldLlama(t *testing.T) []byte {
	t.Helper()
	_, g := loadGolden(t, "testdata/metaspace-first.json.gz")
	var all map[string]json.RawMessage
	if err := json.Unmarshal(g.Tokenizer, &all); err != nil {
		t.Fatal(err)
	}
	all["pre_tokenizer"] = json.RawMessage("null")
	all["normalizer"] = json.RawMessage(`{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},
		{"type":"Replace","pattern":{"String":" "},"content":"▁"}]}`)
	return marshal(t, all)
}

// A file of the class LlamaTokenizer is read as transformers 5 reads it, whatever it says of
// spaces itself.
func TestLlamaClass(t *testing.T) {
	_, g := loadGolden(t, "testdata/metaspace-first.json.gz")
	no := false
	same := func(l Llama, golden string) {
		t.Helper()
		text, err := l.Apply(oldLlama(t))
		if err != nil {
			t.Fatal(err)
		}
		tok, err := Load(text)
		if err != nil {
			t.Fatal(err)
		}
		var all map[string]json.RawMessage
		if err := json.Unmarshal(g.Tokenizer, &all); err != nil {
			t.Fatal(err)
		}
		all["pre_tokenizer"] = json.RawMessage(golden)
		want, err := Load(marshal(t, all))
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range g.Encode {
			if got, ids := tok.Encode(c.text, true), want.Encode(c.text, true); !slices.Equal(got, ids) {
				t.Fatalf("%+v: Encode(%q)\n got %v\nwant %v", l, c.text, got, ids)
			}
		}
		// The text behind [INST] begins with its own space alone.
		id, _ := tok.ID("[INST]")
		first, behind := tok.Encode("hi", false), tok.Encode("[INST]hi", false)
		if behind[0] != id || (l.Legacy || l.PrefixSpace != nil) != slices.Equal(behind[1:], first) {
			t.Errorf("%+v: %v, behind [INST] %v", l, first, behind)
		}
	}
	same(Llama{Class: "LlamaTokenizer"}, `{"type":"Metaspace","replacement":"▁","prepend_scheme":"first","split":false}`)
	same(Llama{Class: "LlamaTokenizerFast", Legacy: true}, `{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":false}`)
	same(Llama{Class: "LlamaTokenizer", Legacy: true, PrefixSpace: &no}, `{"type":"Metaspace","replacement":"▁","add_prefix_space":false,"split":false}`)
	for _, l := range []Llama{{Class: "PreTrainedTokenizerFast"}, {}} {
		if text, err := l.Apply(oldLlama(t)); err != nil || string(text) != string(oldLlama(t)) {
			t.Errorf("%+v changes the file: %v", l, err)
		}
	}
	qwen, byteLevel := loadGolden(t, "testdata/qwen2.json.gz")
	if text, err := (&Llama{Class: "LlamaTokenizer"}).Apply(byteLevel.Tokenizer); err != nil || string(text) != string(byteLevel.Tokenizer) || qwen == nil {
		t.Errorf("a byte-level file changes: %v", err)
	}
	for _, text := range []string{"{", `{"model":null}`, `{"model":{"type":"BPE","byte_fallback":3}}`} {
		if _, err := (&Llama{Class: "LlamaTokenizer"}).Apply([]byte(text)); err == nil {
			t.Errorf("%s is read", text)
		}
	}
}
