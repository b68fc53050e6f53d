package model

import (
	"path/filepath"
	"strings"

	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// rerankerName is in the names of the models that rerankerTemplate is for, in lower case.
const rerankerName = "qwen3-reranker"

// rerankerTemplate is the prompt of a query and a document in the model card of Qwen3-Reranker,
// with the card's default instruction. The chat template of the folder follows, for other chats.
const rerankerTemplate = `{%- if messages[0].role == "query" and messages[1].role == "document" -%}
{{- '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n' -}}
{{- '<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n' -}}
{{- '<Query>: ' + messages[0].content + '\n<Document>: ' + messages[1].content + '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n' -}}
{%- else -%}
`

// rerankerEnd follows the template of chats.
const rerankerEnd = `
{%- endif -%}`

// reranker makes a model score pairs of texts by the logits of yes and no, if its name and
// architecture are those of Qwen3-Reranker. A folder with modules.json states its own scores.
func (s *Source) reranker(b *Bundle) error {
	if s.Config.Architecture != "Qwen3ForCausalLM" || !strings.Contains(strings.ToLower(s.repository), rerankerName) || b.TokenizerJSON == nil {
		return nil
	}
	if modules, err := s.optional("modules.json"); err != nil || modules != nil {
		return err
	}
	t, err := tokenizer.Load(b.TokenizerJSON)
	if err != nil {
		return nil // the gateway, which tokenizes, reports what is wrong with it
	}
	yes, known := t.ID("yes")
	no, both := t.ID("no")
	if !known || !both {
		return nil
	}
	b.Vectors.ScoreTokens = []int32{yes, no}
	b.Vectors.Raw, b.Vectors.Refused = true, "it scores pairs of texts by the tokens yes and no"
	b.ChatTemplate = rerankerTemplate + b.ChatTemplate + rerankerEnd
	return nil
}

// repositoryOf returns the name of a model's folder; of a snapshot in a Hugging Face cache that of
// the folder with all of its snapshots.
func repositoryOf(dir string) string {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return filepath.Base(dir)
	}
	if up := filepath.Dir(abs); filepath.Base(up) == "snapshots" {
		return filepath.Base(filepath.Dir(up))
	}
	return filepath.Base(abs)
}
