package openai

// The form of /v1/completions.

func appendCompletionDelta(dst []byte, d *Delta) []byte {
	dst = AppendString(append(appendInt(dst, `{"index":`, d.Index), `,"text":`...), d.Text)
	dst = appendProbs(dst, d.Probs, appendCompletionProbs)
	dst = d.Finish.append(append(dst, ','))
	return append(d.Prompt.append(appendIDs(dst, `,"token_ids":`, d.Tokens)), '}')
}
