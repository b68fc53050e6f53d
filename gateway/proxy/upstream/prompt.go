package upstream

import (
	"bytes"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// BytesPerToken is the number of bytes that count as a token when a bound of tokens is checked
// without a tokenizer. It is above the mean of any language (4 to 5 in English), so that no prompt
// within the bound is refused, and below twice that, so that none far beyond it passes.
const BytesPerToken = 8

// PromptTokens returns the number of tokens of the largest prompt in a value of prompt, messages or
// input. It is exact for token ids, and a lower bound for text. Anything that is not text, such as
// pictures in a chat, is not counted.
func PromptTokens(prompt []byte) (n int, exact bool) { return promptTokens(prompt, maxLists) }

// maxLists bounds the lists in each other that are read: of prompts, and of a prompt's tokens.
const maxLists = 2

func promptTokens(prompt []byte, lists int) (n int, exact bool) {
	b := bytes.TrimLeft(prompt, " \t\r\n")
	if len(b) == 0 || b[0] != '[' {
		return textBytes(b) / BytesPerToken, false
	}
	switch first := bytes.TrimLeft(b[1:], " \t\r\n"); {
	case len(first) == 0, lists == 0:
		return 0, false
	case first[0] == '-' || first[0] >= '0' && first[0] <= '9':
		return 1 + bytes.Count(b, []byte{','}), true
	case first[0] == '{': // messages, or parts of a message: one prompt
		return textBytes(b) / BytesPerToken, false
	}
	for s := jsonscan.List(b); s.Next(); { // a list of prompts
		if m, sure := promptTokens(s.Unchecked(), lists-1); m > n {
			n, exact = m, sure
		}
	}
	return n, exact
}

// textBytes returns the number of bytes of text in the strings of a JSON value, without the names
// of members, and without data or references to it.
func textBytes(b []byte) (n int) {
	kind := ofText // of the current member
	for i := 0; i < len(b); {
		if b[i] != '"' {
			i++
			continue
		}
		end := jsonscan.PastString(b, i)
		if end < 0 {
			return n
		}
		text := b[i+1 : end-1]
		i = end
		if i = jsonscan.Space(b, i); i < len(b) && b[i] == ':' {
			kind = kindOf(text)
			i++
			continue
		}
		if kind == ofText || kind == ofAny && !bytes.HasPrefix(text, []byte("data:")) {
			n += len(text) - escapes(text)
		}
	}
	return n
}

// Kinds of members of a message.
const (
	ofText = iota // text only, even if it begins like a data URL
	ofAny         // text or a data URL
	ofData
)

func kindOf(name []byte) int {
	switch string(name) {
	case "url", "image_url", "audio_url", "video_url", "data", "file_data", "b64_json", "image", "role", "type":
		return ofData
	case "content", "text", "arguments", "reasoning", "reasoning_content":
		return ofText
	}
	return ofAny
}

// MaxPromptTokens returns the largest PromptTokens of the members of a body that may be the prompt.
// It is for bodies with several: which of them counts depends on the server and the path.
func MaxPromptTokens(body []byte) (n int, exact bool) {
	s := jsonscan.Object(body)
	for s.Next() {
		v := s.Unchecked()
		switch string(s.Key()) {
		case "prompt", "messages", "input", "query", "token_ids":
			if m, sure := PromptTokens(v); m > n {
				n, exact = m, sure
			}
		}
	}
	return n, exact
}

// escapes returns a lower bound of the bytes by which a JSON string is longer than its text.
func escapes(s []byte) (n int) {
	for {
		i := bytes.IndexByte(s, '\\')
		if i < 0 || i+1 >= len(s) {
			return n
		}
		if s[i+1] == 'u' { // six bytes for two to four of UTF-8
			n += 3
		}
		n++
		s = s[i+2:]
	}
}
