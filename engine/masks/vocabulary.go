package masks

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// ErrVocabulary means that the model's outputs cannot be constrained.
var ErrVocabulary = errors.New("masks: the model has no vocabulary for grammars")

// Check returns an error, which wraps ErrVocabulary, for a model whose outputs cannot be
// constrained: it has no tokenizer, or no token that ends an output.
func Check(tokenizerJSON []byte, eos []int32) error {
	switch {
	case len(tokenizerJSON) == 0:
		return fmt.Errorf("%w: it has no tokenizer", ErrVocabulary)
	case len(eos) == 0:
		return fmt.Errorf("%w: it has no end-of-sequence token", ErrVocabulary)
	}
	return nil
}

// ReadVocabulary returns the vocabulary of a tokenizer.json. eos are the ids that end an output.
func ReadVocabulary(tokenizerJSON []byte, eos []int32) (Vocabulary, error) {
	if err := Check(tokenizerJSON, eos); err != nil {
		return Vocabulary{}, err
	}
	t, err := tokenizer.Load(tokenizerJSON)
	if err != nil {
		return Vocabulary{}, fmt.Errorf("%w: %w", ErrVocabulary, err)
	}
	tokens, special := make([][]byte, t.VocabSize()), map[string]int32{}
	for id := range tokens {
		b := t.TokenBytes(int32(id))
		if t.IsSpecial(int32(id)) {
			special[string(b)] = int32(id)
			continue
		}
		tokens[id] = b
		if added, ok := t.Added(string(b)); ok && added == int32(id) && len(bytes.TrimSpace(b)) > 0 {
			special[string(b)] = int32(id) // a marker that is shown as text
		}
	}
	return Vocabulary{grammar.NewVocabulary(tokens, special, eos), t.LeadingSpaces()}, nil
}
