package openai

// The answers of /v1/completions.

func appendCompletionDelta(dst []byte, d *Delta) []byte {
	dst = AppendString(append(appendInt(dst, `{"index":`, d.Index), `,"text":`...), d.Text)
	dst = appendLogprobs(dst, d.Logprobs, appendCompletionLogprobs)
	return append(d.Prompt.append(d.appendEnd(dst)), '}')
}
