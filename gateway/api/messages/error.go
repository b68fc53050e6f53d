package messages

import (
	"strings"

	"github.com/tandem-serving/tandem/gateway/api/openai"
)

// Serves reports whether errors at a path have the form of this API.
func Serves(path string) bool {
	rest, ok := strings.CutPrefix(path, Path)
	return ok && (rest == "" || rest[0] == '/')
}

// errorType returns the type of an error with a status.
func errorType(status int) string {
	switch status {
	case 401:
		return "authentication_error"
	case 403:
		return "permission_error"
	case 404:
		return "not_found_error"
	case 413:
		return "request_too_large"
	case 429:
		return "rate_limit_error"
	case 503, 529:
		return "overloaded_error"
	case 504:
		return "timeout_error"
	}
	if status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

// AppendError appends an error object.
func AppendError[T string | []byte](dst []byte, e *openai.Error, requestID T) []byte {
	dst = append(dst, `{"type":"error","error":{"type":"`...)
	dst = append(append(dst, errorType(e.Status)...), `","message":`...)
	dst = append(openai.AppendString(dst, e.Message), `},"request_id":`...)
	return append(openai.AppendString(dst, requestID), '}')
}

// AppendErrorEvent appends an error as the last event of a stream that fails.
func AppendErrorEvent[T string | []byte](dst []byte, e *openai.Error, requestID T) []byte {
	return append(AppendError(append(dst, "event: error\ndata: "...), e, requestID), "\n\n"...)
}
