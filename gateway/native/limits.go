package native

import (
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render"
)

// checkLimits refuses a request that asks for more than this gateway allows.
func (fl *Fleet) checkLimits(r *openai.Request) *openai.Error {
	l := fl.limits()
	if fault := r.CheckLogprobs(l.MaxLogprobs); fault != nil {
		return fault
	}
	if r.N > l.MaxN {
		return openai.BadRequest("n", "n is %d: this gateway gives at most %d choices (--max-n)", r.N, l.MaxN)
	}
	return nil
}

// checkPrompts is checkLimits of what the prompts turned out to be.
func (fl *Fleet) checkPrompts(r *openai.Request, ps []render.Prompt) *openai.Error {
	most := fl.limits().MaxPromptTokens
	if most <= 0 {
		return nil
	}
	param := "prompt"
	if r.Endpoint == openai.Chat {
		param = "messages"
	}
	for i := range ps {
		if n := len(ps[i].Tokens); n > most {
			return openai.BadRequest(param, "the prompt has %d tokens: this gateway takes at most %d (--max-prompt-tokens)", n, most)
		}
	}
	return nil
}
