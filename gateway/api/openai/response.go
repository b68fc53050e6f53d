package openai

import (
	"strconv"
	"unicode/utf8"
)

// Model is an entry of /v1/models.
type Model struct {
	ID          string
	Created     int64  // seconds since 1970
	MaxModelLen int    // tokens of prompt and answer together
	Parent      string // of an adapter: its model; empty: not an adapter
}

// Append appends the model object.
func (m Model) Append(dst []byte) []byte {
	dst = AppendString(append(dst, `{"id":`...), m.ID)
	dst = strconv.AppendInt(append(dst, `,"object":"model","created":`...), m.Created, 10)
	dst = AppendString(append(dst, `,"owned_by":"tandem","root":`...), m.ID)
	dst = appendOptional(append(dst, `,"parent":`...), m.Parent)
	dst = appendInt(dst, `,"max_model_len":`, m.MaxModelLen)
	return append(dst, '}')
}

func appendInt(dst []byte, before string, n int) []byte {
	return strconv.AppendInt(append(dst, before...), int64(n), 10)
}

// appendList appends a list, of which one appends each element.
func appendList[T any](dst []byte, list []T, one func([]byte, *T) []byte) []byte {
	dst = append(dst, '[')
	for i := range list {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = one(dst, &list[i])
	}
	return append(dst, ']')
}

func appendNumber[T byte | int32](dst []byte, n *T) []byte {
	return strconv.AppendInt(dst, int64(*n), 10)
}

const hex = "0123456789abcdef"

// plain has the bytes that need no escape in a JSON string.
var plain = func() (t [256]bool) {
	for c := ' '; c < utf8.RuneSelf; c++ {
		t[c] = c != '"' && c != '\\' && c != 0x7f
	}
	return t
}()

// AppendString appends s as a JSON string. Bytes that are not UTF-8 become U+FFFD.
func AppendString[T string | []byte](dst []byte, s T) []byte {
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if plain[c] {
			i++
			continue
		}
		if c >= utf8.RuneSelf {
			// At most four bytes, so that the conversion does not allocate.
			r, size := utf8.DecodeRuneInString(string(s[i:min(i+utf8.UTFMax, len(s))]))
			if r != utf8.RuneError || size != 1 {
				i += size
				continue
			}
		}
		dst = append(dst, s[start:i]...)
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c == '\n':
			dst = append(dst, '\\', 'n')
		case c == '\r':
			dst = append(dst, '\\', 'r')
		case c == '\t':
			dst = append(dst, '\\', 't')
		case c < utf8.RuneSelf:
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		default:
			dst = append(dst, "\uFFFD"...)
		}
		i++
		start = i
	}
	return append(append(dst, s[start:]...), '"')
}

// appendOptional appends s as a JSON string, or null if it is empty.
func appendOptional(dst []byte, s string) []byte {
	if s == "" {
		return append(dst, "null"...)
	}
	return AppendString(dst, s)
}

// AppendTokenized appends the answer of /tokenize. strs has the tokens' texts; nil: not requested.
func AppendTokenized(dst []byte, tokens []int32, strs []string, maxModelLen int) []byte {
	dst = appendInt(dst, `{"count":`, len(tokens))
	dst = appendInt(dst, `,"max_model_len":`, maxModelLen)
	dst = append(appendList(append(dst, `,"tokens":`...), tokens, appendNumber), `,"token_strs":`...)
	if strs == nil {
		return append(dst, "null}"...)
	}
	return append(appendList(dst, strs, func(dst []byte, s *string) []byte { return AppendString(dst, *s) }), '}')
}

// AppendDetokenized appends the answer of /detokenize.
func AppendDetokenized(dst []byte, text string) []byte {
	return append(AppendString(append(dst, `{"prompt":`...), text), '}')
}
