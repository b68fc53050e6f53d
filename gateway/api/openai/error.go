package openai

import (
	"fmt"
	"strings"
)

// Error is an error answer: an HTTP status and the OpenAI error object
// {"error":{"message","type","param","code"}}, where code is the status unless Code is set.
type Error struct {
	Status     int
	Type       string
	Param      string // the field at fault; empty: null
	Message    string // the fault, the value, and the remedy
	Code       string // empty: the status
	RetryAfter int    // seconds; 0: no such header
}

// Error types, named as vLLM names them.
const (
	TypeBadRequest   = "BadRequestError"
	TypeInvalidInput = "InvalidUserInput" // of adapters' routes
	TypeNotFound     = "NotFoundError"
	TypeUnauthorized = "Unauthorized"
	TypeForbidden    = "Forbidden"
	TypeMethod       = "Method Not Allowed"
	TypeConflict     = "Conflict"
	TypeTooLarge     = "Request Entity Too Large"
	TypeMedia        = "Unsupported Media Type"
	TypeRateLimit    = "RateLimitError"
	TypeUnavailable  = "ServiceUnavailableError"
	TypeTimeout      = "Gateway Timeout"
	TypeInternal     = "InternalServerError"
)

// Error implements error.
func (e *Error) Error() string {
	if e.Param != "" {
		return fmt.Sprintf("openai: %d %s (%s): %s", e.Status, e.Type, e.Param, e.Message)
	}
	return fmt.Sprintf("openai: %d %s: %s", e.Status, e.Type, e.Message)
}

// BadRequest returns a 400 about a field; param may be empty.
func BadRequest(param, format string, args ...any) *Error {
	return &Error{Status: 400, Type: TypeBadRequest, Param: param, Message: fmt.Sprintf(format, args...)}
}

// ContextTooLong returns a 400 about a request that does not fit the model's context of most
// tokens. Clients recognize the error by its first sentence or by its code, some of them in the
// message, and shorten the chat.
func ContextTooLong(param string, most int, format string, args ...any) *Error {
	const code = "context_length_exceeded"
	e := BadRequest(param, "This model's maximum context length is %d tokens. %s (%s)", most, fmt.Sprintf(format, args...), code)
	e.Code = code
	return e
}

// Unavailable returns a 503 with Retry-After, in seconds.
func Unavailable(retryAfter int, format string, args ...any) *Error {
	return &Error{Status: 503, Type: TypeUnavailable, Message: fmt.Sprintf(format, args...), RetryAfter: retryAfter}
}

// Append appends the error object.
func (e *Error) Append(dst []byte) []byte {
	dst = AppendString(append(dst, `{"error":{"message":`...), e.Message)
	dst = AppendString(append(dst, `,"type":`...), e.Type)
	dst = appendOptional(append(dst, `,"param":`...), e.Param)
	if dst = append(dst, `,"code":`...); e.Code != "" {
		dst = AppendString(dst, e.Code)
	} else {
		dst = appendInt(dst, "", e.Status)
	}
	return append(dst, "}}"...)
}

// AppendEvent appends the error as a server-sent event.
func (e *Error) AppendEvent(dst []byte) []byte {
	return append(e.Append(append(dst, "data: "...)), "\n\n"...)
}

// Clip truncates text that a client sent to n bytes, for an error's message.
func Clip(s string, n int) string {
	if len(s) > n {
		return strings.ToValidUTF8(s[:n], "") + "…"
	}
	return s
}

// TooMany returns a 429 about a limit, with Retry-After, in seconds.
func TooMany(retryAfter int, format string, args ...any) *Error {
	return &Error{Status: 429, Type: TypeRateLimit, Message: fmt.Sprintf(format, args...), RetryAfter: retryAfter}
}

// BadGateway returns a 502 about an upstream's answer.
func BadGateway(format string, args ...any) *Error {
	return &Error{Status: 502, Type: "Bad Gateway", Message: fmt.Sprintf(format, args...)}
}

// NoModel returns a 404 about a model that is not served.
func NoModel(name string) *Error {
	return &Error{Status: 404, Type: TypeNotFound, Param: "model", Message: fmt.Sprintf("the model %q does not exist; /v1/models lists those that do", Clip(name, 200))}
}
