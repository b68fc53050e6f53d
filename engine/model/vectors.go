package model

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
)

// Vectors describes how the model turns a text into a vector: by modules.json, as
// sentence-transformers saves it, or else by the normalised row of the last token.
type Vectors struct {
	Size       int   // numbers of a vector
	Mean       bool  // the vector is the mean of all tokens' rows; else it is the last token's
	Raw        bool  // it is not divided by its length
	Only       bool  // the model gives vectors and no tokens
	Whole      bool  // its first numbers alone are no vector
	Dimensions []int // of the first numbers that are one; nil: any

	// Labels is the number of outputs of the model's classifier. The logits of ScoreTokens score a
	// pair of texts: the first token is for it, the second, if there is one, against it. A model with
	// one of them gives scores and no vectors.
	Labels      int
	ScoreTokens []int32

	Refused string // why there are no vectors; empty: there are

	Prompts map[string]string // prefixes of texts by the names of their kinds, such as query
}

// prompts reads the prefixes of texts: task_instructions of config.json, or else the prompts of
// config_sentence_transformers.json.
func (s *Source) prompts() (map[string]string, error) {
	const name = "config_sentence_transformers.json"
	var c struct {
		Prompts map[string]string `json:"prompts"`
	}
	text, err := s.optional(name)
	if err == nil && text != nil {
		if err = json.Unmarshal(text, &c); err != nil {
			err = fmt.Errorf("%w: %s: %w", ErrConfig, name, err)
		}
	}
	if s.Config.instructions != nil {
		c.Prompts = s.Config.instructions
	}
	if len(c.Prompts) > maxPrompts {
		return nil, fmt.Errorf("%w: %s: %d prompts, at most %d", ErrConfig, name, len(c.Prompts), maxPrompts)
	}
	for key, prefix := range c.Prompts {
		if len(key)+len(prefix) > maxPrompt {
			return nil, fmt.Errorf("%w: %s: the prompt %.100q has %d bytes, at most %d", ErrConfig, name, key, len(prefix), maxPrompt)
		}
	}
	return c.Prompts, err
}

// Bounds of the prefixes of texts: their number, and the bytes of one.
const maxPrompts, maxPrompt = 256, 4096

// maxModules bounds modules.json, and maxDimensions matryoshka_dimensions.
const maxModules, maxDimensions = 16, 256

// vectors reads modules.json and the configs of its modules. An absent file means the default.
func (s *Source) vectors() (Vectors, error) {
	v := Vectors{Size: s.Config.Hidden, Only: s.Config.Headless, Whole: s.Config.whole, Dimensions: s.Config.dimensions, Labels: s.Config.labels}
	if v.Labels > 0 {
		v.Refused = "it has a classifier, which scores pairs of texts"
		return v, nil
	}
	var err error
	if v.Prompts, err = s.prompts(); err != nil {
		return v, err
	}
	text, err := s.optional("modules.json")
	if err != nil || text == nil {
		return v, err
	}
	var modules []struct {
		Path string `json:"path"`
		Type string `json:"type"`
	}
	if err := json.Unmarshal(text, &modules); err != nil {
		return v, fmt.Errorf("%w: modules.json: %w", ErrConfig, err)
	}
	if len(modules) > maxModules {
		return v, fmt.Errorf("%w: modules.json has %d modules, at most %d", ErrConfig, len(modules), maxModules)
	}
	v.Raw = true
	for _, m := range modules {
		switch kind := m.Type[strings.LastIndexByte(m.Type, '.')+1:]; kind {
		case "Transformer":
		case "Normalize":
			v.Raw = false
		case "Pooling":
			if err := s.pooling(&v, m.Path); err != nil {
				return v, err
			}
		case "LogitScore":
			if err := s.logitScore(&v, m.Path); err != nil {
				return v, err
			}
		default:
			v.Refused = fmt.Sprintf("modules.json has the module %.100q, and only Transformer, Pooling and Normalize are computed", m.Type)
		}
	}
	return v, nil
}

// pooling reads the config of the module Pooling in a folder.
func (s *Source) pooling(v *Vectors, folder string) error {
	name := path.Join(folder, "config.json")
	text, err := s.ReadFile(name)
	if err != nil {
		return err
	}
	var c map[string]json.RawMessage
	if err := json.Unmarshal(text, &c); err != nil {
		return fmt.Errorf("%w: %.100s: %w", ErrConfig, name, err)
	}
	var modes []string
	for key, value := range c {
		if mode, ok := strings.CutPrefix(key, "pooling_mode_"); ok && string(value) == "true" {
			modes = append(modes, mode)
		}
	}
	if value := c["pooling_mode"]; value != nil {
		modes = append(modes, strings.Trim(string(value), `"`))
	}
	slices.Sort(modes)
	switch strings.Join(modes, ", ") {
	case "lasttoken":
	case "mean_tokens", "mean":
		v.Mean = true
	default:
		v.Refused = fmt.Sprintf("%.100s has the pooling modes %.200q, and one of lasttoken and mean_tokens is computed", name, modes)
	}
	if string(c["include_prompt"]) == "false" && v.Mean {
		v.Refused = fmt.Sprintf("%.100s has include_prompt false, and only true is computed", name)
	}
	return nil
}

// logitScore reads the config of the module LogitScore in a folder.
func (s *Source) logitScore(v *Vectors, folder string) error {
	name := path.Join(folder, "config.json")
	text, err := s.ReadFile(name)
	if err != nil {
		return err
	}
	var c struct {
		For     *int32 `json:"true_token_id"`
		Against *int32 `json:"false_token_id"`
	}
	if err := json.Unmarshal(text, &c); err != nil {
		return fmt.Errorf("%w: %.100s: %w", ErrConfig, name, err)
	}
	for _, id := range []*int32{c.For, c.Against} {
		if id == nil {
			continue
		}
		if *id < 0 || int(*id) >= s.Config.Vocab {
			return fmt.Errorf("%w: %.100s: token id %d is outside the vocabulary of %d", ErrConfig, name, *id, s.Config.Vocab)
		}
		v.ScoreTokens = append(v.ScoreTokens, *id)
	}
	if c.For == nil {
		return fmt.Errorf("%w: %.100s has no true_token_id", ErrConfig, name)
	}
	v.Refused = "its module LogitScore scores pairs of texts"
	return nil
}

// classifierName is the name of a classifier's matrix, [labels, hidden]. maxLabels bounds labels.
const classifierName, maxLabels = "score.weight", 1 << 12

// Classifier returns the matrix of the model's classifier, [labels, hidden]; nil: there is none.
func (s *Source) Classifier() ([]float32, error) {
	n := s.Config.labels
	if n == 0 {
		return nil, nil
	}
	c, err := s.weights()
	if err != nil {
		return nil, err
	}
	t, ok := c.Tensor(classifierName)
	if !ok || !slices.Equal(t.Shape, []int{n, s.Config.Hidden}) {
		return nil, fmt.Errorf("%w: %s: want shape %v, got %v", ErrWeights, classifierName, []int{n, s.Config.Hidden}, t.Shape)
	}
	return floats(&t)
}

// classifier reads the number of labels as transformers does.
func (r *rawConfig) classifier(c *Config) error {
	if !r.Classifies {
		return nil
	}
	c.labels = 2
	switch {
	case r.NumLabels != nil:
		c.labels = *r.NumLabels
	case r.LabelNames != nil:
		c.labels = len(r.LabelNames)
	}
	if c.labels < 1 || c.labels > maxLabels {
		return fmt.Errorf("%w: config.json: num_labels is %d, not between 1 and %d", ErrConfig, c.labels, maxLabels)
	}
	return nil
}

// matryoshka reads which first numbers of a vector are a vector as well. Without the keys the
// request decides.
func (r *rawConfig) matryoshka(c *Config) error {
	c.whole = !or(r.Matryoshka, true)
	c.dimensions, c.instructions = r.Dimensions, r.Instructions
	if len(c.dimensions) > maxDimensions {
		return fmt.Errorf("%w: config.json: matryoshka_dimensions has %d numbers, at most %d", ErrConfig, len(c.dimensions), maxDimensions)
	}
	for _, n := range c.dimensions {
		if n < 1 || n > c.Hidden {
			return fmt.Errorf("%w: config.json: matryoshka_dimensions has %d, not between 1 and hidden_size %d", ErrConfig, n, c.Hidden)
		}
	}
	return nil
}
