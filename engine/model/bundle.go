package model

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"math"

	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// Bundle is what a gateway needs to serve a model whose files it does not have.
type Bundle struct {
	ModelName     string
	TokenizerJSON []byte // nil: the folder has none, only token ids can be served
	ChatTemplate  string // empty: there is none
	BosToken      string
	EosToken      string
	EOSTokenIDs   []int32
	MaxModelLen   int // tokens, prompt and output
	VocabSize     int
	Defaults      Defaults
	Vectors       Vectors
}

// Defaults are the sampling values of generation_config.json for requests that
// give none. Nil: the file has none either.
type Defaults struct {
	Temperature *float32 `json:"temperature"`
	TopP        *float32 `json:"top_p"`
	TopK        *int32   `json:"top_k"`
}

// Bundle reads the folder's tokenizer, chat template and generation defaults.
// Each of the files may be absent.
func (s *Source) Bundle() (*Bundle, error) {
	b := &Bundle{
		ModelName: s.Name, EOSTokenIDs: s.Config.EOS,
		MaxModelLen: s.Config.MaxPositions, VocabSize: s.Config.Vocab,
	}
	if err := s.text(b); err != nil {
		return nil, err
	}
	generation, err := s.optional("generation_config.json")
	if err != nil {
		return nil, err
	}
	if generation != nil {
		if err := json.Unmarshal(generation, &b.Defaults); err != nil {
			return nil, fmt.Errorf("%w: generation_config.json: %w", ErrConfig, err)
		}
	}
	if err := b.Defaults.check(); err != nil {
		return nil, err
	}
	if b.Vectors, err = s.vectors(); err != nil {
		return nil, err
	}
	return b, s.reranker(b)
}

// ReadTokenizer is a folder's tokenizer and chat template, read without the
// config.json and the weights that it may lack. Without a tokenizer.json it is an
// ErrSource.
func ReadTokenizer(folder fs.FS) (*Bundle, error) {
	s, b := &Source{files: folder}, new(Bundle)
	err := s.text(b)
	if err == nil && b.TokenizerJSON == nil {
		err = fmt.Errorf("%w: it has no tokenizer.json, tokenizer.model, tiktoken.model, qwen.tiktoken or tekken.json", ErrSource)
	}
	return b, err
}

// text reads the tokenizer, the chat template and the special tokens.
func (s *Source) text(b *Bundle) (err error) {
	if b.TokenizerJSON, err = s.optional("tokenizer.json"); err != nil {
		return err
	}
	if b.TokenizerJSON, err = s.asClass(b.TokenizerJSON); err != nil {
		return err
	}
	// What tokenizer_config.json leaves out, special_tokens_map.json may have.
	for _, file := range []string{"tokenizer_config.json", "special_tokens_map.json"} {
		if err := s.tokens(b, file); err != nil {
			return err
		}
	}
	template, err := s.optional("chat_template.jinja")
	if template != nil { // as in transformers, a file of its own wins
		b.ChatTemplate = string(template)
	}
	return err
}

// asClass returns tokenizer.json as transformers reads it for the class that
// tokenizer_config.json names. In a folder without it, it is made of tekken.json,
// tokenizer.model, tiktoken.model or qwen.tiktoken.
func (s *Source) asClass(tokenizerJSON []byte) ([]byte, error) {
	text, err := s.optional("tokenizer_config.json")
	if err != nil {
		return nil, err
	}
	if tokenizerJSON == nil {
		return s.otherTokenizer(text)
	}
	if text == nil {
		return tokenizerJSON, nil
	}
	var l tokenizer.Llama
	if json.Unmarshal(text, &l) != nil { // tokens reports what is wrong with the file
		return tokenizerJSON, nil
	}
	if changed, err := l.Apply(tokenizerJSON); err == nil { // loading it reports what is wrong with it
		return changed, nil
	}
	return tokenizerJSON, nil
}

// otherTokenizer returns the tokenizer.json that is equal to the folder's tokenizer in another
// format; nil: there is none. config is tokenizer_config.json, or nil.
func (s *Source) otherTokenizer(config []byte) ([]byte, error) {
	ranks := func(data []byte) ([]byte, error) { return tokenizer.FromTiktoken(data, config) }
	for _, f := range []struct {
		name string
		read func([]byte) ([]byte, error)
	}{
		{"tekken.json", tokenizer.FromTekken},
		{"tokenizer.model", func(data []byte) ([]byte, error) {
			if tokenizer.IsTiktoken(data) {
				return ranks(data)
			}
			return tokenizer.FromSentencePiece(data, config)
		}},
		{"tiktoken.model", ranks},
		{"qwen.tiktoken", ranks},
	} {
		data, err := s.optional(f.name)
		if err != nil {
			return nil, err
		}
		if data == nil {
			continue
		}
		made, err := f.read(data)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrUnsupported, f.name, err)
		}
		return made, nil
	}
	return nil, nil
}

func (s *Source) tokens(b *Bundle, file string) error {
	text, err := s.optional(file)
	if err != nil || text == nil {
		return err
	}
	var c struct {
		Template templates `json:"chat_template"`
		Bos      token     `json:"bos_token"`
		Eos      token     `json:"eos_token"`
	}
	if err := json.Unmarshal(text, &c); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrConfig, file, err)
	}
	for _, f := range []struct {
		to   *string
		from string
	}{{&b.ChatTemplate, string(c.Template)}, {&b.BosToken, string(c.Bos)}, {&b.EosToken, string(c.Eos)}} {
		if *f.to == "" {
			*f.to = f.from
		}
	}
	return nil
}

// token is written as a string, as an object with its content, or as null.
type token string

func (t *token) UnmarshalJSON(text []byte) error {
	if text[0] != '{' {
		return json.Unmarshal(text, (*string)(t))
	}
	var added struct {
		Content string `json:"content"`
	}
	err := json.Unmarshal(text, &added)
	*t = token(added.Content)
	return err
}

// templates is one chat template, or a list of named ones: then "default" is
// taken, and a list without it is refused rather than guessed from.
type templates string

func (t *templates) UnmarshalJSON(text []byte) error {
	if text[0] != '[' {
		return json.Unmarshal(text, (*string)(t))
	}
	var list []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return err
	}
	for _, entry := range list {
		if entry.Name == "default" {
			*t = templates(entry.Template)
			return nil
		}
	}
	return fmt.Errorf("chat_template is a list of %d without one called \"default\"", len(list))
}

func (d *Defaults) check() error {
	refuse := func(name string, value any, want string) error {
		return fmt.Errorf("%w: generation_config.json: %s is %v, %s", ErrConfig, name, value, want)
	}
	if v := d.Temperature; v != nil && !(*v >= 0 && float64(*v) <= math.MaxFloat32) {
		return refuse("temperature", *v, "not a number from 0")
	}
	if v := d.TopP; v != nil && !(*v > 0 && *v <= 1) {
		return refuse("top_p", *v, "not above 0 and at most 1")
	}
	if v := d.TopK; v != nil && *v < -1 {
		return refuse("top_k", *v, "not -1, 0 or a number of tokens")
	}
	return nil
}
