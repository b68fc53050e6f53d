package openai

// The form of /v1/completions.

func appendCompletionDelta(dst []byte, d *Delta) []byte {
	dst = AppendString(append(appendInt(dst, `{"index":`, d.Index), `,"text":`...), d.Text)
	dst = appendProbs(dst, d.Probs, appendCompletionProbs)
	dst = d.Finish.append(append(dst, ','))
	return append(d.Prompt.append(appendIDs(dst, `,"token_ids":`, d.Tokens)), '}')
}

func appendCompletionChoice(dst []byte, index int, c *Choice) []byte {
	dst = AppendString(append(appendInt(dst, `{"index":`, index), `,"text":`...), c.Text)
	dst = appendProbs(dst, c.Probs, appendCompletionProbs)
	dst = c.Finish.append(append(dst, ','))
	return append(c.Prompt.append(appendIDs(dst, `,"token_ids":`, c.Tokens)), '}')
}
