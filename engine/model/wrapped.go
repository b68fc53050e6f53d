package model

import (
	"encoding/json"
	"fmt"
	"strings"
)

// wrappers are the models that see or hear, by the text model that they wrap.
// That alone is served: what they see with is neither loaded nor counted.
var wrappers = map[string]string{
	"Gemma4ForConditionalGeneration": gemma4Name,
}

// unwrap is the config.json of the text model, where one wraps it: text_config,
// with what only the wrapper's says of tokens and types.
func unwrap(text []byte) (inner []byte, wrapped bool, err error) {
	var outer map[string]json.RawMessage
	var names []string
	if json.Unmarshal(text, &outer) != nil || json.Unmarshal(outer["architectures"], &names) != nil || len(names) != 1 || wrappers[names[0]] == "" {
		return text, false, nil // parsing says what is wrong with it
	}
	var config map[string]json.RawMessage
	if err := json.Unmarshal(outer["text_config"], &config); err != nil || config == nil {
		return nil, false, fmt.Errorf("%w: config.json: %s without a text_config", ErrConfig, names[0])
	}
	for _, key := range []string{"bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config"} {
		if value, ok := outer[key]; ok && string(config[key]) == "" {
			config[key] = value
		}
	}
	config["architectures"], _ = json.Marshal([]string{wrappers[names[0]]}) // strings always marshal
	inner, err = json.Marshal(config)
	return inner, true, err
}

// weightName is what a tensor of the files is called here; false: it is of no use.
func (c *Config) weightName(file string) (string, bool) {
	if !c.Wrapped {
		return file, true
	}
	if name, ok := strings.CutPrefix(file, "model.language_model."); ok {
		return "model." + name, true
	}
	return file, file == "lm_head.weight"
}
