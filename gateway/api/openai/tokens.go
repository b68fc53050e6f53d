package openai

import (
	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// vLLM's /inference/v1/generate takes and returns token ids: the prompt is token_ids, and
// sampling_params has the sampling fields of a completion. Such a request is converted into a
// completion's, so that one table has all fields.

// Paths that are served in more than one place.
const (
	TokensPath        = "/inference/v1/generate"
	LoadAdapterPath   = "/v1/load_lora_adapter"
	UnloadAdapterPath = "/v1/unload_lora_adapter"
	BatchPath         = "/v1/chat/completions/batch"
	InvocationsPath   = "/invocations"
	AbortPath         = "/abort_requests"
	TokenizerInfoPath = "/tokenizer_info"
)

// CompletionOfTokens returns the body of the completion for a body of TokensPath.
func CompletionOfTokens(body []byte) ([]byte, *Error) {
	var ids, params []byte
	out := append(make([]byte, 0, len(body)+64), '{') // of equal names the last one counts, which is the prompt
	add := func(name, v []byte) { out = append(append(append(append(out, name...), ':'), v...), ',') }
	fault := Scan(body, func(s *jsonscan.Scanner) *Error {
		quoted := s.Name()
		v, _ := s.Value(jsonscan.Bounds{})
		switch name := shortName(quoted); {
		case v == nil: // invalid: Scan reports it
		case name == "token_ids":
			ids = v
		case name == "sampling_params":
			params = v
		case v[0] == 'n':
		case name == "features", name == "kv_transfer_params":
			return BadRequest(name, "%s: is not served here: send token_ids alone", name)
		case samples(name): // vLLM does not read them here either
			return BadRequest(name, "%s: must be in sampling_params", name)
		default:
			add(quoted, v)
		}
		return nil
	})
	switch {
	case fault != nil:
		return nil, fault
	case ids == nil || ids[0] != '[' || !isDigit(ids[jsonscan.Space(ids, 1)]):
		return nil, BadRequest("token_ids", "token_ids: must be a list of token ids with at least one")
	}
	if params != nil && params[0] != 'n' {
		if params[0] != '{' {
			return nil, BadRequest("sampling_params", "sampling_params: must be an object")
		}
		for s := jsonscan.Object(params); s.Next(); {
			quoted := s.Name()
			v, _ := s.Value(jsonscan.Bounds{})
			switch name := shortName(quoted); name {
			case "prompt", "model", "stream", "stream_options", "echo", "suffix", "return_prompt_text", "return_token_ids":
				return nil, BadRequest("sampling_params", "sampling_params: %s is not a sampling parameter", name)
			case "detokenize", "output_kind", "skip_clone", "_all_stop_token_ids": // internal to vLLM
			default:
				add(quoted, v)
			}
		}
	}
	add([]byte(`"prompt"`), ids)
	return append(out, `"return_token_ids":true}`...), nil
}

// samples reports whether a member of a completion is a sampling field.
func samples(name string) bool {
	switch name {
	case "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "logprobs", "prompt_logprobs",
		"presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "ignore_eos", "allowed_token_ids", "structured_outputs":
		return true
	}
	return false
}

// appendTokensDelta appends a choice, or what is new of it, without its text.
func appendTokensDelta(dst []byte, d *Delta) []byte {
	dst = appendLogprobs(appendInt(dst, `{"index":`, d.Index), d.Logprobs, appendChatLogprobs)
	dst = append(d.Finish.append(append(dst, ',')), `,"token_ids":`...)
	return append(appendList(dst, d.Tokens, appendNumber), '}')
}

// appendPromptLogprobs appends the prompt's log-probabilities, or null if there are none.
func appendPromptLogprobs(dst []byte, choices []Delta) []byte {
	dst = append(dst, `,"prompt_logprobs":`...)
	if p := choices[0].Prompt; p != nil && p.Logprobs != nil {
		return p.Logprobs.append(dst, p.Best, p.Decode)
	}
	return append(dst, "null"...)
}
