package tokenizer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strings"
)

// maxTokenBytes bounds a token of a Vocabulary and a piece of a tokenizer.model. Published ones
// have at most some hundred bytes.
const maxTokenBytes = 4096

// Vocabulary is a GGUF file's tokenizer. Token ids are indexes of Tokens.
type Vocabulary struct {
	Model  string // tokenizer.ggml.model
	Pre    string // tokenizer.ggml.pre
	Tokens []string
	Scores []float32
	Kinds  []int64 // as SentencePiece numbers them
	Merges []string

	BOS, EOS, Unknown int32 // -1: none
	AddBOS, AddEOS    bool
	NoSpace           bool // no space is put before a text
}

// ggmlPre is how a tokenizer.ggml.pre cuts texts. Without an expression, digits are cut singly, and
// the rest as GPT-2 does.
type ggmlPre struct {
	pattern      string    // the name of an entry of patterns
	several      []pattern // instead, one behind the other
	ignoreMerges bool
	nfc          bool
	digits       bool // are cut singly, last
}

// ggmlPres are the values of tokenizer.ggml.pre that are read.
var ggmlPres = map[string]ggmlPre{
	"chatglm-bpe":      {pattern: "llama3"},
	"codeshell":        {digits: true},
	"command-r":        {digits: true, nfc: true},
	"dbrx":             {pattern: "llama3"},
	"deepseek-r1-qwen": {pattern: "qwen2", nfc: true},
	"deepseek-llm":     {several: deepseekLLM, digits: true},
	"deepseek-v3":      {several: deepseekV3},
	"exaone":           {digits: true},
	"glm4":             {pattern: "llama3", ignoreMerges: true},
	"gpt-2":            {pattern: "gpt2"},
	"gpt-4o":           {pattern: "o200k"},
	"kimi-k2":          {pattern: "kimi", ignoreMerges: true},
	"llama-bpe":        {pattern: "llama3", ignoreMerges: true},
	"llama3":           {pattern: "llama3", ignoreMerges: true},
	"llama4":           {pattern: "o200k"},
	"llama-v3":         {pattern: "llama3", ignoreMerges: true},
	"minerva-7b":       {digits: true},
	"mpt":              {pattern: "gpt2", nfc: true},
	"olmo":             {pattern: "gpt2", nfc: true},
	"phi-2":            {pattern: "gpt2"},
	"qwen2":            {pattern: "qwen2", nfc: true},
	"refact":           {digits: true},
	"smaug-bpe":        {pattern: "llama3"},
	"smollm":           {digits: true},
	"starcoder":        {digits: true},
	"tekken":           {pattern: "tekken", ignoreMerges: true},
}

// JSON returns the tokenizer.json that is equal to the vocabulary. Models and ways to cut a text
// that are not known give an error that wraps ErrUnsupported.
func (v *Vocabulary) JSON() ([]byte, error) {
	if n := len(v.Tokens); n == 0 || n > maxTokenID || v.Kinds != nil && len(v.Kinds) != n || v.Scores != nil && len(v.Scores) != n {
		return nil, invalid("tokenizer.ggml has %d tokens, %d token_type and %d scores", n, len(v.Kinds), len(v.Scores))
	}
	for _, id := range []int32{v.BOS, v.EOS, v.Unknown} {
		if id < -1 || int(id) >= len(v.Tokens) {
			return nil, invalid("tokenizer.ggml: token %d of %d", id, len(v.Tokens))
		}
	}
	m := &spm{unk: v.Unknown, bos: v.BOS, eos: v.EOS}
	for id, text := range v.Tokens {
		if len(text) > maxTokenBytes { // merges take the square of it
			return nil, invalid("tokenizer.ggml.tokens: token %d has %d bytes, at most %d", id, len(text), maxTokenBytes)
		}
		p := spmPiece{text: text, kind: 1}
		if v.Kinds != nil {
			p.kind = uint64(v.Kinds[id])
		}
		m.pieces = append(m.pieces, p)
	}
	switch v.Model {
	case "llama":
		order := slices.Clone(m.pieces)
		if v.Scores != nil {
			ids := make([]int, len(order))
			for i := range ids {
				ids[i] = i
			}
			slices.SortStableFunc(ids, func(a, b int) int { return -cmp.Compare(v.Scores[a], v.Scores[b]) })
			for i, id := range ids {
				order[i] = m.pieces[id]
			}
		}
		space := !v.NoSpace
		return m.json(order, &Llama{Class: "LlamaTokenizer", PrefixSpace: &space}, v.AddBOS, v.AddEOS)
	case "gpt2":
		return v.bytes(m)
	}
	return nil, &UnsupportedError{"tokenizer.ggml.model", v.Model}
}

// bytes returns the tokenizer.json of a vocabulary over bytes.
func (v *Vocabulary) bytes(m *spm) ([]byte, error) {
	pre, ok := ggmlPres[v.Pre]
	if !ok {
		return nil, &UnsupportedError{"tokenizer.ggml.pre (read are " + strings.Join(slices.Sorted(maps.Keys(ggmlPres)), ", ") + ")", v.Pre}
	}
	type object = map[string]any
	vocab, err := m.vocab()
	if err != nil {
		return nil, err
	}
	if v.Merges == nil {
		return nil, invalid("tokenizer.ggml.merges is missing")
	}
	merges := make([][2]string, len(v.Merges))
	for i, text := range v.Merges {
		left, right, ok := strings.Cut(text, " ")
		if !ok {
			return nil, invalid("tokenizer.ggml.merges: %q is no pair", text)
		}
		merges[i] = [2]string{left, right}
	}
	var cuts []object
	split := func(p pattern) {
		cuts = append(cuts, object{"type": "Split", "pattern": object{"Regex": p.expr}, "behavior": "Isolated", "invert": false})
	}
	for _, p := range pre.several {
		split(p)
	}
	if pre.pattern != "" {
		split(patterns[slices.IndexFunc(patterns, func(p pattern) bool { return p.name == pre.pattern })])
	}
	if pre.digits {
		cuts = append(cuts, object{"type": "Digits", "individual_digits": true})
	}
	cuts = append(cuts, object{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": pre.digits && pre.several == nil})
	file := object{
		"version": "1.0", "added_tokens": m.added(), "normalizer": nil, "post_processor": m.template(v.AddBOS, v.AddEOS),
		"pre_tokenizer": object{"type": "Sequence", "pretokenizers": cuts},
		"decoder":       object{"type": "ByteLevel"},
		"model":         object{"type": "BPE", "ignore_merges": pre.ignoreMerges, "vocab": vocab, "merges": merges},
	}
	if pre.nfc {
		file["normalizer"] = object{"type": "NFC"}
	}
	return encode(file)
}

// vocab returns the ids of pieces, of which no two are equal.
func (m *spm) vocab() (map[string]int32, error) {
	vocab := make(map[string]int32, len(m.pieces))
	for id, p := range m.pieces {
		if _, twice := vocab[p.text]; twice {
			return nil, invalid("the vocabulary has the piece %q twice", p.text)
		}
		vocab[p.text] = int32(id)
	}
	return vocab, nil
}

// json returns the tokenizer.json of a SentencePiece vocabulary with merges. order is the pieces,
// those that are merged first to the front.
func (m *spm) json(order []spmPiece, l *Llama, bos, eos bool) ([]byte, error) {
	vocab, err := m.vocab()
	if err != nil {
		return nil, err
	}
	type object = map[string]any
	merges, err := pieceMerges(order, vocab)
	if err != nil {
		return nil, err
	}
	text, err := encode(object{
		"version": "1.0", "added_tokens": m.added(),
		"post_processor": m.template(bos, eos),
		"model": object{
			"type": "BPE", "dropout": nil, "unk_token": nil, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
			"vocab": vocab, "merges": merges,
		},
	})
	if err != nil {
		return nil, err
	}
	return l.Apply(text)
}

// encode returns JSON without escapes for HTML.
func encode(file any) ([]byte, error) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(file); err != nil {
		return nil, invalid("%v", err)
	}
	return text.Bytes(), nil
}
