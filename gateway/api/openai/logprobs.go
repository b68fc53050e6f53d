package openai

import "strconv"

// TokenProb is a token of an answer with its log-probability under the model's
// own distribution, before temperature, penalties and masks.
type TokenProb struct {
	Text    string // of this token alone; part of a character reads U+FFFD
	Bytes   []byte
	LogProb float32
	First   bool        // nothing stands before it, so that it has no log-probability
	Top     []TokenProb // the most probable tokens, best first, or those asked for; without Top
	Offset  int         // of the token's text in the answer, in bytes; completions tell it
}

// lowestLogProb stands for minus infinity, which JSON has not, as vLLM does.
const lowestLogProb = -9999

func appendLogProb(dst []byte, lp float32) []byte {
	if !(lp >= lowestLogProb) { // also NaN
		lp = lowestLogProb
	}
	return strconv.AppendFloat(dst, float64(lp), 'g', -1, 32)
}

// appendProbs appends the field logprobs in one endpoint's form: null without any.
func appendProbs(dst []byte, probs []TokenProb, form func([]byte, []TokenProb) []byte) []byte {
	dst = append(dst, `,"logprobs":`...)
	if len(probs) == 0 {
		return append(dst, "null"...)
	}
	return form(dst, probs)
}

func appendChatProbs(dst []byte, probs []TokenProb) []byte {
	dst = append(dst, `{"content":[`...)
	for i := range probs {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(appendTokenProb(append(dst, '{'), &probs[i]), `,"top_logprobs":[`...)
		for j := range probs[i].Top {
			if j > 0 {
				dst = append(dst, ',')
			}
			dst = append(appendTokenProb(append(dst, '{'), &probs[i].Top[j]), '}')
		}
		dst = append(dst, "]}"...)
	}
	return append(dst, "]}"...)
}

func appendTokenProb(dst []byte, p *TokenProb) []byte {
	dst = AppendString(append(dst, `"token":`...), p.Text)
	dst = appendLogProb(append(dst, `,"logprob":`...), p.LogProb)
	dst = append(dst, `,"bytes":[`...)
	for i, b := range p.Bytes {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(b), 10)
	}
	return append(dst, ']')
}

// appendCompletionProbs appends the older form: parallel lists, and for each
// token an object of the best ones, the token itself among them.
func appendCompletionProbs(dst []byte, probs []TokenProb) []byte {
	list := func(name string, one func(p *TokenProb)) {
		dst = append(append(append(dst, '"'), name...), `":[`...)
		for i := range probs {
			if i > 0 {
				dst = append(dst, ',')
			}
			one(&probs[i])
		}
		dst = append(dst, ']')
	}
	dst = append(dst, '{')
	list("text_offset", func(p *TokenProb) { dst = strconv.AppendInt(dst, int64(p.Offset), 10) })
	dst = append(dst, ',')
	list("token_logprobs", func(p *TokenProb) {
		if p.First {
			dst = append(dst, "null"...)
			return
		}
		dst = appendLogProb(dst, p.LogProb)
	})
	dst = append(dst, ',')
	list("tokens", func(p *TokenProb) { dst = AppendString(dst, p.Text) })
	dst = append(dst, ',')
	list("top_logprobs", func(p *TokenProb) {
		if p.First {
			dst = append(dst, "null"...)
			return
		}
		dst = appendLogProb(append(AppendString(append(dst, '{'), p.Text), ':'), p.LogProb)
		for j := range p.Top {
			if t := &p.Top[j]; t.Text != p.Text && !seen(p.Top[:j], t.Text) {
				dst = appendLogProb(append(AppendString(append(dst, ','), t.Text), ':'), t.LogProb)
			}
		}
		dst = append(dst, '}')
	})
	return append(dst, '}')
}

// seen says whether an object has the key already: tokens may share a text.
func seen(before []TokenProb, text string) bool {
	for i := range before {
		if before[i].Text == text {
			return true
		}
	}
	return false
}

// PromptProbs are the log-probabilities of a prompt's tokens but the first, n of
// them.
type PromptProbs struct {
	Tokens      []int32   // [n+1] the prompt
	LogProbs    []float32 // [n]
	Ranks       []uint32  // [n] 1 is the most probable
	TopTokens   []int32   // [n, top] most probable first
	TopLogProbs []float32 // [n, top]
}

// Best are the best tokens at place i, at most most.
func (p *PromptProbs) Best(i, most int) ([]int32, []float32) {
	top := len(p.TopTokens) / len(p.LogProbs)
	end := i*top + min(top, most)
	return p.TopTokens[i*top : end], p.TopLogProbs[i*top : end]
}

// append appends a list with an entry for each token: null for the first, then
// objects by token id, the prompt's own token before the most best ones.
func (p *PromptProbs) append(dst []byte, most int, text func(int32) string) []byte {
	entry := func(id int32, lp float32, rank int) {
		dst = strconv.AppendInt(append(dst, '"'), int64(id), 10)
		dst = appendLogProb(append(dst, `":{"logprob":`...), lp)
		dst = appendInt(dst, `,"rank":`, rank)
		dst = append(AppendString(append(dst, `,"decoded_token":`...), text(id)), '}')
	}
	dst = append(dst, "[null"...)
	for i, lp := range p.LogProbs {
		own := p.Tokens[i+1]
		dst = append(dst, ",{"...)
		entry(own, lp, int(p.Ranks[i]))
		ids, probs := p.Best(i, most)
		for k, id := range ids {
			if id != own {
				dst = append(dst, ',')
				entry(id, probs[k], k+1)
			}
		}
		dst = append(dst, '}')
	}
	return append(dst, ']')
}
