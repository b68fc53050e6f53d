package tokenizer

import (
	"encoding/json"
	"strings"
	"unicode/utf8"
)

// metaspace is SentencePiece's treatment of spaces: each becomes a visible character, which may
// also be put before the text.
type metaspace struct {
	mark   string
	always bool // every piece between added tokens begins with the mark
	first  bool // the piece with which the prompt begins does
}

// apply returns a piece with its spaces as marks. begins is whether the prompt begins with it.
func (m *metaspace) apply(s string, begins bool) string {
	s = strings.ReplaceAll(s, " ", m.mark)
	if (m.always || m.first && begins) && !strings.HasPrefix(s, m.mark) {
		s = m.mark + s
	}
	return s
}

// loadMetaspace reads the pre-tokenizer Metaspace. prepend_scheme takes the place of
// add_prefix_space, which older files have.
func (t *Tokenizer) loadMetaspace(c *component) error {
	if len(t.stages) > 0 {
		return &UnsupportedError{"pre_tokenizer (Metaspace must come first)", c.Type}
	}
	if r, width := utf8.DecodeRuneInString(c.Replacement); width != len(c.Replacement) || r == utf8.RuneError {
		return invalid("pre_tokenizer Metaspace: replacement %q is not one character", c.Replacement)
	}
	m := &metaspace{mark: c.Replacement}
	switch scheme := c.PrependScheme; {
	case scheme == "always", scheme == "" && (c.AddPrefixSpace == nil || *c.AddPrefixSpace):
		m.always = true
	case scheme == "first":
		m.first, t.firstOnly = true, true
	case scheme == "never", scheme == "":
	default:
		return &UnsupportedError{"pre_tokenizer Metaspace prepend_scheme", scheme}
	}
	s := stage{meta: m}
	if c.Split == nil || *c.Split {
		s.scan = scanBefore(m.mark)
	}
	t.stages = append(t.stages, s)
	return nil
}

// scanBefore cuts before every occurrence of text.
func scanBefore(text string) scanner {
	return func(_ *charTable, s string, i int) int {
		from := i
		if strings.HasPrefix(s[i:], text) {
			from += len(text)
		}
		if k := strings.Index(s[from:], text); k >= 0 {
			return from + k
		}
		return len(s)
	}
}

// Llama is what a tokenizer_config.json says of a tokenizer of class LlamaTokenizer.
type Llama struct {
	Class       string `json:"tokenizer_class"`
	Legacy      bool   `json:"legacy"`
	PrefixSpace *bool  `json:"add_prefix_space"`
}

// Apply returns tokenizer.json as transformers 5 reads it for the class LlamaTokenizer: it takes
// the vocabulary, the merges and the post-processor from the file, and treats spaces by the
// class's own rules. Files of other classes and of byte-level vocabularies are returned as they are.
func (l *Llama) Apply(tokenizerJSON []byte) ([]byte, error) {
	if name := strings.TrimSuffix(l.Class, "Fast"); name != "LlamaTokenizer" {
		return tokenizerJSON, nil
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(tokenizerJSON, &all); err != nil {
		return nil, invalid("%v", err)
	}
	var m struct {
		Type         string `json:"type"`
		ByteFallback bool   `json:"byte_fallback"`
	}
	if err := decodePart(all["model"], "model", &m); err != nil {
		return nil, err
	}
	if m.Type != "BPE" || !m.ByteFallback {
		return tokenizerJSON, nil
	}
	scheme, strip := "first", `,{"type":"Strip","content":" ","start":1,"stop":0}`
	switch {
	case l.PrefixSpace != nil && !*l.PrefixSpace:
		scheme, strip = "never", ""
	case l.Legacy:
		scheme = "always"
	}
	all["normalizer"] = json.RawMessage("null")
	all["pre_tokenizer"] = json.RawMessage(`{"type":"Metaspace","replacement":"▁","prepend_scheme":"` + scheme + `","split":false}`)
	all["decoder"] = json.RawMessage(`{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"}` + strip + `]}`)
	return json.Marshal(all)
}
