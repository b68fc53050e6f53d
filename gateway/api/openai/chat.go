package openai

// The answers of /v1/chat/completions.

// appendChatRole appends the first event of an answer to a chat.
func appendChatRole(dst []byte, d *Delta) []byte {
	dst = appendInt(dst, `[{"index":`, d.Index)
	dst = append(dst, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
	return d.Prompt.append(dst)
}

// appendChat appends a whole answer to a chat, or what is new of it.
func appendChat(dst []byte, d *Delta, whole bool) []byte {
	dst = appendInt(dst, `{"index":`, d.Index)
	switch {
	case whole:
		dst = AppendString(append(dst, `,"message":{"role":"assistant","content":`...), d.Text)
	case len(d.Text) > 0:
		dst = AppendString(append(dst, `,"delta":{"content":`...), d.Text)
	default:
		dst = append(dst, `,"delta":{`...)
	}
	dst = appendLogprobs(append(dst, '}'), d.Logprobs, appendChatLogprobs)
	return append(d.appendEnd(dst), '}')
}
