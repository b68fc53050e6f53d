package jinja

import (
	"errors"
	"fmt"
)

// The kinds of template errors, for errors.Is.
var (
	// ErrSyntax: the template is no valid Jinja.
	ErrSyntax = errors.New("syntax error")
	// ErrUnsupported: valid Jinja or Python, but not implemented here.
	ErrUnsupported = errors.New("unsupported")
	// ErrRender: the template failed on this input, as it would in Python.
	ErrRender = errors.New("render error")
	// ErrRaised: the template refused this input with raise_exception.
	ErrRaised = errors.New("raised")
	// ErrLimit: a bound of the sandbox was reached.
	ErrLimit = errors.New("limit")
	// ErrInput: the messages, tools or options are not what a template takes.
	ErrInput = errors.New("invalid input")
)

// Error is what Parse and Render return.
type Error struct {
	Kind error  // one of the kinds above
	Line int    // of the template, from 1; 0 when no line is to blame
	Msg  string // for ErrRaised exactly what the template said
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("chat template: %v: %s", e.Kind, e.Msg)
	}
	return fmt.Sprintf("chat template line %d: %v: %s", e.Line, e.Kind, e.Msg)
}

// Unwrap makes errors.Is work with the kinds.
func (e *Error) Unwrap() error { return e.Kind }
