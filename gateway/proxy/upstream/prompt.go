package upstream

import (
	"bytes"

	"github.com/tandem-serving/tandem/internal/jsonscan"
)

// BytesPerToken is how many bytes of text a token is taken for where a bound of
// tokens has to be held without a tokenizer: more than any language needs (English
// has 4 to 5), so that no prompt within the bound is refused, and less than twice
// of it lets through.
const BytesPerToken = 8

// Tokens is how many tokens the largest prompt in a value of prompt, messages or
// input has: exactly where it comes as tokens, and at least where it is text. What is
// no text, such as pictures in a chat, is not counted.
func Tokens(prompt []byte) (n int, exact bool) {
	b := bytes.TrimLeft(prompt, " \t\r\n")
	if len(b) == 0 || b[0] != '[' {
		return textBytes(b) / BytesPerToken, false
	}
	switch first := bytes.TrimLeft(b[1:], " \t\r\n"); {
	case len(first) == 0:
		return 0, false
	case first[0] == '-' || first[0] >= '0' && first[0] <= '9':
		return elements(b), true
	case first[0] == '{': // messages, or parts of them: one prompt
		return textBytes(b) / BytesPerToken, false
	}
	for i := 1; i < len(b); { // prompts of their own
		switch b[i] {
		case '"', '[':
			end := jsonscan.Past(b, i)
			if end < 0 {
				return n, exact
			}
			if m, sure := Tokens(b[i:end]); m > n {
				n, exact = m, sure
			}
			i = end
		case ']':
			return n, exact
		default:
			i++
		}
	}
	return n, exact
}

// elements is how many numbers a JSON list of them has.
func elements(b []byte) (n int) {
	in := false
	for _, c := range b {
		if digit := c >= '0' && c <= '9'; digit != in && !(in && (c == '.' || c == 'e' || c == 'E' || c == '+' || c == '-')) {
			if in = digit; digit {
				n++
			}
		}
		if c == ']' {
			break
		}
	}
	return n
}

// textBytes is how many bytes of text the strings of a JSON value have, the names of
// members and what refers to or holds data left out.
func textBytes(b []byte) (n int) {
	kind := ofText // of the member at hand
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

// What a member of a message holds.
const (
	ofText = iota // and nothing else: a text may begin like a URL of data
	ofAny
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

// MostTokens is Tokens of the member with the most, of a body of which several might
// be the prompt: which of them counts depends on the server and the path.
func MostTokens(body []byte) (n int, exact bool) {
	s := jsonscan.Object(body)
	for s.Next() {
		v := s.Unchecked()
		switch string(s.Key()) {
		case "prompt", "messages", "input", "query", "token_ids":
			if m, sure := Tokens(v); m > n {
				n, exact = m, sure
			}
		}
	}
	return n, exact
}

// escapes is by how many bytes a JSON string is longer than its text, at least.
func escapes(s []byte) (n int) {
	for {
		i := bytes.IndexByte(s, '\\')
		if i < 0 || i+1 >= len(s) {
			return n
		}
		if s[i+1] == 'u' { // two to four bytes in UTF-8, of six
			n += 3
		}
		n++
		s = s[i+2:]
	}
}
