package tokenizer

import (
	"errors"
	"fmt"
)

var (
	// ErrUnsupported is wrapped by every *UnsupportedError.
	ErrUnsupported = errors.New("tokenizer: unsupported")
	// ErrInvalid wraps the errors of a tokenizer.json that contradicts itself or is incomplete.
	ErrInvalid = errors.New("tokenizer: invalid tokenizer.json")
)

// UnsupportedError names the part of a tokenizer.json that this package does
// not implement, and the value it found there.
type UnsupportedError struct {
	Part  string // where in the file, e.g. "pre_tokenizer.pattern"
	Value string // the value in the file, such as the regular expression
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("tokenizer: unsupported %s %q", e.Part, e.Value)
}

// Unwrap makes errors.Is(err, ErrUnsupported) hold.
func (e *UnsupportedError) Unwrap() error { return ErrUnsupported }

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}
