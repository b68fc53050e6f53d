package openai

import (
	"github.com/valyala/fastjson"
)

// Tokens in, tokens out, as vLLM's /inference/v1/generate has it: the prompt is
// token_ids, and how to sample stands in sampling_params, whose members are those of
// a completion. Such a request is turned into a completion's, so that one table says
// what is served.

// CompletionOfTokens is the body of a completion that a body of tokens asks for.
func CompletionOfTokens(body []byte) ([]byte, *Error) {
	var p fastjson.Parser
	v, err := p.ParseBytes(body)
	if err != nil {
		return nil, BadRequest("", "the body is not valid JSON: %v", err)
	}
	o, err := v.Object()
	if err != nil {
		return nil, BadRequest("", "the body must be a JSON object")
	}
	ids := o.Get("token_ids")
	if ids == nil || len(ids.GetArray()) == 0 || ids.GetArray()[0].Type() != fastjson.TypeNumber {
		return nil, BadRequest("token_ids", "token_ids: must be a list of token ids with at least one")
	}
	var fault *Error
	out := new(fastjson.Arena).NewObject()
	o.Visit(func(key []byte, v *fastjson.Value) {
		switch name := string(key); {
		case v.Type() == fastjson.TypeNull, name == "token_ids", name == "sampling_params":
		case name == "features", name == "kv_transfer_params":
			fault = BadRequest(name, "%s: is not served here: send token_ids alone", name)
		case samples(name): // where vLLM does not look, either
			fault = BadRequest(name, "%s: belongs into sampling_params", name)
		default:
			out.Set(name, v)
		}
	})
	if params := o.Get("sampling_params"); params != nil && params.Type() != fastjson.TypeNull {
		members, err := params.Object()
		if err != nil {
			return nil, BadRequest("sampling_params", "sampling_params: must be an object")
		}
		members.Visit(func(key []byte, v *fastjson.Value) {
			switch name := string(key); name {
			case "prompt", "model", "stream", "stream_options", "echo", "suffix", "return_prompt_text", "return_token_ids":
				fault = BadRequest("sampling_params", "sampling_params: %s is none of them", name)
			case "detokenize", "output_kind", "skip_clone", "_all_stop_token_ids": // of vLLM's own insides
			default:
				out.Set(name, v)
			}
		})
	}
	if fault != nil {
		return nil, fault
	}
	var a fastjson.Arena
	out.Set("prompt", ids)
	out.Set("return_token_ids", a.NewTrue())
	return appendValue(nil, out), nil
}

// samples says whether a member of a completion says how to sample.
func samples(name string) bool {
	switch name {
	case "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "logprobs", "prompt_logprobs",
		"presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "ignore_eos", "allowed_token_ids":
		return true
	}
	return false
}

// NewTokensAnswer is NewAnswer of a request of tokens.
func NewTokensAnswer(id string) *Answer {
	head := string(append(AppendString([]byte(`{"request_id":`), id), `,"choices":[`...))
	return &Answer{tokens: true, head: head, event: "data: " + head}
}

// appendTokenChoice appends a choice, or what is new of it, without its text.
func appendTokenChoice(dst []byte, index int, probs []TokenProb, f Finish, ids []int32) []byte {
	dst = append(appendInt(dst, `{"index":`, index), `,"logprobs":`...)
	if len(probs) > 0 {
		dst = appendChatProbs(dst, probs)
	} else {
		dst = append(dst, "null"...)
	}
	if ids == nil {
		ids = []int32{}
	}
	dst = f.append(append(dst, ','))
	return append(appendIDs(dst, `,"token_ids":`, ids), '}')
}

// appendTokens is AppendResponse of a request of tokens.
func (a *Answer) appendTokens(dst []byte, choices []Choice, u Usage) []byte {
	dst = append(dst, a.head...)
	for i := range choices {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendTokenChoice(dst, i, choices[i].Probs, choices[i].Finish, choices[i].Tokens)
	}
	dst = append(dst, `],"prompt_logprobs":`...)
	if p := choices[0].Prompt; p != nil && p.Probs != nil {
		dst = p.Probs.append(dst, p.Best, p.Decode)
	} else {
		dst = append(dst, "null"...)
	}
	return append(u.Append(append(dst, `,"usage":`...)), '}')
}
