package bench

import (
	"context"
	"fmt"
	"net/http"
)

// template renders the prompts of a custom dataset with the model's chat template, as
// one user message, if they go to /v1/completions. Other tools that read such files do
// the same, so that a chat model gets input of the form that it was trained on. The
// server renders, by its /tokenize, so that no template is needed here; the prompts are
// then sent as token ids. If the server cannot do that, the run fails, because other
// prompts would be measured.
func (r *run) template(ctx context.Context) error {
	if r.Data.Name != "custom" || r.chat() || r.SkipChatTemplate {
		return nil
	}
	const instead = "give --skip-chat-template to send them as they are"
	if r.native() {
		return fmt.Errorf("%w: --dataset-name custom puts prompts into a chat template, which nodes do not know: %s", ErrOption, instead)
	}
	header, err := r.header()
	if err != nil {
		return err
	}
	s := newServer(r.BaseURL, header, r.Insecure)
	defer s.close()
	known := map[string][]int32{} // samples repeat if there are too few
	for i := range r.requests {
		q := &r.requests[i]
		ids, ok := known[q.Text]
		if !ok {
			var answer struct {
				Tokens []int32 `json:"tokens"`
			}
			err := s.ask(ctx, http.MethodPost, "/tokenize", map[string]any{"model": r.model, "add_generation_prompt": true,
				"messages": []map[string]string{{"role": "user", "content": q.Text}}}, &answer)
			if err == nil && len(answer.Tokens) == 0 {
				err = fmt.Errorf("its /tokenize returned no tokens")
			}
			if err != nil {
				return fmt.Errorf("%w: --dataset-name custom puts prompts into the model's chat template, and the server did not for number %d: %s, or --backend openai-chat to send them as chats: %w",
					ErrOption, i+1, instead, err)
			}
			ids = answer.Tokens
			known[q.Text] = ids
		}
		q.Text, q.Pieces, q.PromptTokens = "", [][]int32{ids}, len(ids)
	}
	return nil
}
