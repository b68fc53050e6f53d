package openai

import "strconv"

// Delta is one event of a choice's answer: its begin, text, log-probabilities, its end, or several
// of these. A whole answer is one Delta for each choice. Backends make Deltas and own their memory,
// and encoders write them.
type Delta struct {
	Index int
	Begin bool // no Delta of the choice came before
	Role  bool // a chat's event has the role of the message
	Text  []byte
	// Reasoning and Calls are what a parser split off Text, for chats.
	Reasoning []byte
	Calls     []ToolCall
	Logprobs  []TokenLogprob // nil: not requested
	Tokens    []int32        // of Text; nil: not requested
	Prompt    *PromptInfo    // with Begin; nil: nothing is requested
	Finish    Finish
	Usage     *Usage // of the request so far; nil: not requested
}

// appendEnd appends the reason of the choice's end and the token ids, each after a comma. Token ids
// of a whole answer that were not requested are null.
func (d *Delta) appendEnd(dst []byte, whole bool) []byte {
	dst = d.Finish.append(append(dst, ','))
	if whole && d.Tokens == nil {
		return append(dst, `,"token_ids":null`...)
	}
	return appendIDs(dst, `,"token_ids":`, d.Tokens)
}

// Splice is a part of encoded events that is not in their buffer. It precedes the buffer's byte At.
// The encoder owns its memory, and does not change it.
type Splice struct {
	At    int
	Parts [][]byte // none is empty
}

// Usage counts a request's tokens.
type Usage struct {
	Prompt     int
	Completion int
	Cached     int // of Prompt, found in a prefix cache
	Reasoning  int // of Completion, in reasoning

	Reasons bool // reasoning is split off, and Reasoning is shown
}

// Append appends the usage object.
func (u Usage) Append(dst []byte) []byte {
	dst = appendInt(dst, `{"prompt_tokens":`, u.Prompt)
	dst = appendInt(dst, `,"total_tokens":`, u.Prompt+u.Completion)
	dst = appendInt(dst, `,"completion_tokens":`, u.Completion)
	dst = appendInt(dst, `,"prompt_tokens_details":{"cached_tokens":`, u.Cached)
	dst = append(dst, '}')
	if u.Reasons {
		dst = append(appendInt(dst, `,"completion_tokens_details":{"reasoning_tokens":`, u.Reasoning), '}')
	}
	return append(dst, '}')
}

// ofPrompt returns the usage before the first token of an answer; nil: not requested.
func (u *Usage) ofPrompt() *Usage {
	if u == nil {
		return nil
	}
	return &Usage{Prompt: u.Prompt, Cached: u.Cached}
}

// Finish is why a choice ended.
type Finish struct {
	Reason string // "stop", "length", ReasonToolCalls; empty: not yet
	// Stop and Token are the stop string, or the stop token if that is at least 0, that ended the
	// choice. Neither is set after the end-of-sequence token.
	Stop  string
	Token int32
}

// NotFinished is the Finish of a choice that has not ended.
var NotFinished = Finish{Token: -1}

func (f Finish) append(dst []byte) []byte {
	if f.Reason == "" {
		return append(dst, `"finish_reason":null`...)
	}
	dst = append(dst, `"finish_reason":"`...)
	dst = append(append(dst, f.Reason...), `","stop_reason":`...)
	switch {
	case f.Stop != "":
		return AppendString(dst, f.Stop)
	case f.Token >= 0:
		return strconv.AppendInt(dst, int64(f.Token), 10)
	}
	return append(dst, "null"...)
}

// PromptInfo is what a client requested about its prompt.
type PromptInfo struct {
	Tokens   []int32 // its ids; nil: not requested
	Text     *string // as the template rendered it; nil: not requested
	Logprobs *PromptLogprobs
	Best     int                // number of most probable tokens at each place
	Decode   func(int32) string // returns a token's text, for Logprobs
}

// append appends the fields, each after a comma.
func (p *PromptInfo) append(dst []byte) []byte {
	if p == nil {
		return dst
	}
	dst = appendIDs(dst, `,"prompt_token_ids":`, p.Tokens)
	if p.Text != nil {
		dst = AppendString(append(dst, `,"prompt_text":`...), *p.Text)
	}
	if p.Logprobs != nil {
		dst = p.Logprobs.append(append(dst, `,"prompt_logprobs":`...), p.Best, p.Decode)
	}
	return dst
}

// appendWhole appends the fields of a whole answer, each after a comma. Those that were not
// requested are null, as in vLLM.
func (p *PromptInfo) appendWhole(dst []byte) []byte {
	dst = p.append(dst)
	if p == nil || p.Tokens == nil {
		dst = append(dst, `,"prompt_token_ids":null`...)
	}
	if p == nil || p.Text == nil {
		dst = append(dst, `,"prompt_text":null`...)
	}
	if p == nil || p.Logprobs == nil {
		dst = append(dst, `,"prompt_logprobs":null`...)
	}
	return dst
}

// appendIDs appends a field with token ids, unless they are nil.
func appendIDs(dst []byte, name string, ids []int32) []byte {
	if ids == nil {
		return dst
	}
	return appendList(append(dst, name...), ids, appendNumber)
}
