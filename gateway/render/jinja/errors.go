package jinja

import (
	"errors"
	"fmt"
)

// The kinds of template errors, for errors.Is.
var (
	// ErrSyntax: the template is not valid Jinja.
	ErrSyntax = errors.New("syntax error")
	// ErrUnsupported: valid Jinja or Python that this package does not implement.
	ErrUnsupported = errors.New("unsupported")
	// ErrRender: the template failed on this input, as it would in Python.
	ErrRender = errors.New("render error")
	// ErrRaised: the template rejected this input with raise_exception.
	ErrRaised = errors.New("raised")
	// ErrLimit: the template exceeded a bound of the sandbox.
	ErrLimit = errors.New("limit")
	// ErrInput: the messages, tools or options are not valid input of a template.
	ErrInput = errors.New("invalid input")
)

// Error is the error type of Parse and Render.
type Error struct {
	Kind error  // one of the kinds above
	Line int    // line of the template, from 1; 0 if the error has no line
	Msg  string // for ErrRaised exactly the template's message
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("chat template: %v: %s", e.Kind, e.Msg)
	}
	return fmt.Sprintf("chat template line %d: %v: %s", e.Line, e.Kind, e.Msg)
}

// Unwrap returns the kind, for errors.Is.
func (e *Error) Unwrap() error { return e.Kind }

// fail ends a parse or render with an error. It panics with an *Error, which catch recovers at the
// entry of the package, so that expressions and statements need not return errors.
func fail(kind error, line int, format string, args ...any) {
	panic(&Error{Kind: kind, Line: line, Msg: fmt.Sprintf(format, args...)})
}

// catch stores the error of a failed parse or render. Other panics pass through.
func catch(err *error) {
	switch e := recover().(type) {
	case nil:
	case *Error:
		*err = e
	default:
		panic(e)
	}
}
