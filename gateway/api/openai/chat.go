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
	if whole {
		dst = d.appendMessage(dst)
	} else {
		dst = append(dst, `,"delta":{`...)
		if d.Role {
			dst = append(dst, `"role":"assistant"`...)
		}
		if len(d.Text) > 0 {
			dst = AppendString(appendName(dst, `"content":`), d.Text)
		}
		dst = d.appendParsed(dst)
	}
	dst = appendLogprobs(append(dst, '}'), d.Logprobs, appendChatLogprobs)
	return append(d.appendEnd(dst, whole), '}')
}

// appendMessage appends a whole message without its end. Its content is null if there are only
// reasoning and calls.
func (d *Delta) appendMessage(dst []byte) []byte {
	dst = append(dst, `,"message":{"role":"assistant","content":`...)
	if len(d.Text) == 0 && len(d.Reasoning)+len(d.Calls) > 0 {
		dst = append(dst, "null"...)
	} else {
		dst = AppendString(dst, d.Text)
	}
	dst = append(dst, `,"refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":`...)
	dst = append(d.appendCalls(dst, true), `,"reasoning":`...)
	if len(d.Reasoning) == 0 {
		return append(dst, "null"...)
	}
	return AppendString(append(AppendString(dst, d.Reasoning), `,"reasoning_content":`...), d.Reasoning)
}
