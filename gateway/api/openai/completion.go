package openai

// The answers of /v1/completions.

func appendCompletionDelta(dst []byte, d *Delta, whole bool) []byte {
	dst = AppendString(append(appendInt(dst, `{"index":`, d.Index), `,"text":`...), d.Text)
	dst = appendLogprobs(dst, d.Logprobs, appendCompletionLogprobs)
	dst = d.appendEnd(dst, whole)
	if whole {
		return append(d.Prompt.appendWhole(dst), '}')
	}
	return append(d.Prompt.append(dst), '}')
}
