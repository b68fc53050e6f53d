package model

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// wrappers are multimodal models, with the text model of each. Only the text model is served:
// towers for images and sound are neither loaded nor counted.
var wrappers = map[string]wrapper{
	"Gemma3ForConditionalGeneration":     {text: "Gemma3ForCausalLM"},
	"Gemma4ForConditionalGeneration":     {text: gemma4Name},
	"Mistral3ForConditionalGeneration":   {text: "MistralForCausalLM"},
	"Qwen2_5_VLForConditionalGeneration": {text: "Qwen2ForCausalLM", flat: true},
	"Qwen3_5ForConditionalGeneration":    {text: "Qwen3_5ForCausalLM"},
	"Qwen3_5MoeForConditionalGeneration": {text: "Qwen3_5MoeForCausalLM"},
	"Qwen3VLForConditionalGeneration":    {text: "Qwen3ForCausalLM"},
}

type wrapper struct {
	text string // the architecture where text_config has no model_type that is known
	flat bool   // older files have the text model's keys next to the wrapper's
}

// unwrap returns the config.json of the text model, where one wraps it: text_config, with the
// tokens and types that only the wrapper has.
func unwrap(text []byte) (inner []byte, wrapped bool, err error) {
	var outer map[string]json.RawMessage
	var names []string
	if json.Unmarshal(text, &outer) != nil || json.Unmarshal(outer["architectures"], &names) != nil || len(names) != 1 {
		return text, false, nil // parsing reports what is wrong with it
	}
	w, ok := wrappers[names[0]]
	if !ok {
		return text, false, nil
	}
	var config map[string]json.RawMessage
	if err := json.Unmarshal(outer["text_config"], &config); err != nil || config == nil {
		if outer["text_config"] != nil || !w.flat {
			return nil, false, fmt.Errorf("%w: config.json: %s without a text_config", ErrConfig, names[0])
		}
		config = outer
	}
	for _, key := range []string{"bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings"} {
		if value, ok := outer[key]; ok && string(config[key]) == "" {
			config[key] = value
		}
	}
	var kind string
	_ = json.Unmarshal(config["model_type"], &kind) // absent or of another type: the wrapper's own
	for name, a := range architectures {
		if slices.Contains(a.types, kind) {
			w.text = name
		}
	}
	config["architectures"], _ = json.Marshal([]string{w.text}) // strings always marshal
	inner, err = json.Marshal(config)
	return inner, true, err
}

// textPrefixes are what the names of a wrapped text model's tensors begin with in the files, and
// without the wrapper.
var textPrefixes = [][2]string{
	{"model.language_model.", "model."}, {"language_model.model.", "model."}, {"language_model.lm_head.", "lm_head."},
	{"lm_head.", "lm_head."}, {"model.layers.", "model.layers."}, {"model.embed_tokens.", "model.embed_tokens."}, {"model.norm.", "model.norm."},
}

// renamed returns the function that names the tensors of a file here; false: the tensor is not the
// text model's. Where the names begin with embed_tokens and layers, as those of a model that was
// saved without its output projection, they get the prefix that the others have.
func (c *Config) renamed(names []string) func(file string) (string, bool) {
	const embedding = "embed_tokens.weight"
	if c.Wrapped || !slices.Contains(names, embedding) || slices.Contains(names, "model."+embedding) {
		return c.weightName
	}
	return func(file string) (string, bool) {
		if strings.HasPrefix(file, "lm_head.") || file == classifierName {
			return file, true
		}
		return "model." + file, true
	}
}

// weightName returns the name of a file's tensor here; false: it is not the text model's.
func (c *Config) weightName(file string) (string, bool) {
	if !c.Wrapped {
		return file, true
	}
	for _, p := range textPrefixes {
		if name, ok := strings.CutPrefix(file, p[0]); ok {
			return p[1] + name, true
		}
	}
	return file, false
}
