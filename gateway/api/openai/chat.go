package openai

// The answers of /v1/chat/completions.

// appendChatRole appends the first event of an answer to a chat.
func appendChatRole(dst []byte, d *Delta) []byte {
	dst = appendInt(dst, `{"index":`, d.Index)
	dst = append(dst, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
	return d.Prompt.append(dst)
}

func appendChatDelta(dst []byte, d *Delta) []byte {
	dst = append(appendInt(dst, `{"index":`, d.Index), `,"delta":{`...)
	if len(d.Text) > 0 {
		dst = AppendString(append(dst, `"content":`...), d.Text)
	}
	dst = appendLogprobs(append(dst, '}'), d.Logprobs, appendChatLogprobs)
	dst = d.Finish.append(append(dst, ','))
	return append(appendIDs(dst, `,"token_ids":`, d.Tokens), '}')
}

func appendChatChoice(dst []byte, c *Delta) []byte {
	dst = append(appendInt(dst, `{"index":`, c.Index), `,"message":{"role":"assistant","content":`...)
	dst = appendLogprobs(append(AppendString(dst, c.Text), '}'), c.Logprobs, appendChatLogprobs)
	dst = c.Finish.append(append(dst, ','))
	return append(appendIDs(dst, `,"token_ids":`, c.Tokens), '}')
}
