package openai

import (
	"slices"
	"strconv"
)

// TokenLogprob is a token of an answer with its log-probability in the model's distribution, before
// temperature, penalties and masks.
type TokenLogprob struct {
	Text    string // of this token alone; a part of a character is U+FFFD
	Bytes   []byte
	Logprob float32
	First   bool           // it is the first token and has no log-probability
	Top     []TokenLogprob // the most probable tokens, best first, or the requested ones; their Top is empty
	Offset  int            // of the token's text in the answer, in bytes; for completions
}

// lowestLogprob replaces minus infinity, which JSON does not have, as in vLLM.
const lowestLogprob = -9999

func appendLogprob(dst []byte, lp float32) []byte {
	if !(lp >= lowestLogprob) { // also NaN
		lp = lowestLogprob
	}
	return strconv.AppendFloat(dst, float64(lp), 'g', -1, 32)
}

// appendLogprobs appends the member logprobs in the form of an endpoint, or null if there are none.
func appendLogprobs(dst []byte, logprobs []TokenLogprob, form func([]byte, []TokenLogprob) []byte) []byte {
	dst = append(dst, `,"logprobs":`...)
	if len(logprobs) == 0 {
		return append(dst, "null"...)
	}
	return form(dst, logprobs)
}

func appendChatLogprobs(dst []byte, logprobs []TokenLogprob) []byte {
	return append(appendList(append(dst, `{"content":`...), logprobs, func(dst []byte, p *TokenLogprob) []byte { return p.Append(dst) }), '}')
}

// Append appends the token as an object, in the form of chats.
func (p *TokenLogprob) Append(dst []byte) []byte {
	dst = append(appendTokenLogprob(dst, p), `,"top_logprobs":`...)
	dst = appendList(dst, p.Top, func(dst []byte, t *TokenLogprob) []byte { return append(appendTokenLogprob(dst, t), '}') })
	return append(dst, '}')
}

// appendTokenLogprob appends an object without its end.
func appendTokenLogprob(dst []byte, p *TokenLogprob) []byte {
	dst = AppendString(append(dst, `{"token":`...), p.Text)
	dst = appendLogprob(append(dst, `,"logprob":`...), p.Logprob)
	return appendList(append(dst, `,"bytes":`...), p.Bytes, appendNumber)
}

// appendCompletionLogprobs appends the older form: parallel lists, and for each token an object
// with the most probable tokens and the token itself.
func appendCompletionLogprobs(dst []byte, logprobs []TokenLogprob) []byte {
	dst = append(dst, `{"text_offset":`...)
	dst = appendList(dst, logprobs, func(dst []byte, p *TokenLogprob) []byte { return appendInt(dst, "", p.Offset) })
	dst = append(dst, `,"token_logprobs":`...)
	dst = appendList(dst, logprobs, func(dst []byte, p *TokenLogprob) []byte {
		if p.First {
			return append(dst, "null"...)
		}
		return appendLogprob(dst, p.Logprob)
	})
	dst = append(dst, `,"tokens":`...)
	dst = appendList(dst, logprobs, func(dst []byte, p *TokenLogprob) []byte { return AppendString(dst, p.Text) })
	dst = append(dst, `,"top_logprobs":`...)
	dst = appendList(dst, logprobs, func(dst []byte, p *TokenLogprob) []byte {
		if p.First {
			return append(dst, "null"...)
		}
		dst = appendLogprob(append(AppendString(append(dst, '{'), p.Text), ':'), p.Logprob)
		for j := range p.Top {
			if t := &p.Top[j]; t.Text != p.Text && !seen(p.Top[:j], t.Text) {
				dst = appendLogprob(append(AppendString(append(dst, ','), t.Text), ':'), t.Logprob)
			}
		}
		return append(dst, '}')
	})
	return append(dst, '}')
}

// seen reports whether an object already has the key, because tokens may have the same text.
func seen(before []TokenLogprob, text string) bool {
	return slices.ContainsFunc(before, func(p TokenLogprob) bool { return p.Text == text })
}

// PromptLogprobs has the log-probabilities of the n tokens of a prompt after the first.
type PromptLogprobs struct {
	Tokens      []int32   // [n+1] the prompt
	Logprobs    []float32 // [n]
	Ranks       []uint32  // [n] 1 is the most probable
	TopTokens   []int32   // [n, top] most probable first
	TopLogprobs []float32 // [n, top]
}

// Best returns the most probable tokens at place i, at most most, with their log-probabilities.
func (p *PromptLogprobs) Best(i, most int) ([]int32, []float32) {
	top := len(p.TopTokens) / len(p.Logprobs)
	end := i*top + min(top, most)
	return p.TopTokens[i*top : end], p.TopLogprobs[i*top : end]
}

// append appends a list with an entry for each token: null for the first, and then objects by token
// id, with the prompt's token before the most probable ones, at most most.
func (p *PromptLogprobs) append(dst []byte, most int, text func(int32) string) []byte {
	entry := func(id int32, lp float32, rank int) {
		dst = strconv.AppendInt(append(dst, '"'), int64(id), 10)
		dst = appendLogprob(append(dst, `":{"logprob":`...), lp)
		dst = appendInt(dst, `,"rank":`, rank)
		dst = append(AppendString(append(dst, `,"decoded_token":`...), text(id)), '}')
	}
	dst = append(dst, "[null"...)
	for i, lp := range p.Logprobs {
		own := p.Tokens[i+1]
		dst = append(dst, ",{"...)
		entry(own, lp, int(p.Ranks[i]))
		ids, logprobs := p.Best(i, most)
		for k, id := range ids {
			if id != own {
				dst = append(dst, ',')
				entry(id, logprobs[k], k+1)
			}
		}
		dst = append(dst, '}')
	}
	return append(dst, ']')
}
