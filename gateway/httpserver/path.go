package httpserver

import (
	"bytes"
	"strconv"
	"strings"
)

// DotSegments reports whether a path, as it was received, has a segment . or .., encoded or not.
func DotSegments(path string) bool {
	for segment := range strings.SplitSeq(path, "/") {
		if s := Unescape([]byte(segment)); s == "." || s == ".." {
			return true
		}
	}
	return false
}

// Unescape decodes %XX. Anything that is no escape stays as it is.
func Unescape(b []byte) string {
	if bytes.IndexByte(b, '%') < 0 {
		return string(b)
	}
	var out []byte
	for i := 0; i < len(b); i++ {
		if b[i] == '%' && i+2 < len(b) {
			if n, err := strconv.ParseUint(string(b[i+1:i+3]), 16, 8); err == nil {
				out, i = append(out, byte(n)), i+2
				continue
			}
		}
		out = append(out, b[i])
	}
	return string(out)
}

// FieldName reports whether a header's name has only letters, digits, -, _ and ., which all parsers
// read alike.
func FieldName(name []byte) bool {
	for _, c := range name {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.') {
			return false
		}
	}
	return len(name) > 0
}
