package grammar

import (
	"errors"
	"fmt"
)

// Limits bounds the work and the memory of compiling a grammar and of running it. All of them are
// counts, so that a grammar that is refused on one machine is refused on every machine.
type Limits struct {
	SourceBytes   int // length of a schema or a grammar text
	RegexBytes    int // length of one regular expression
	Choices       int // values of a choice
	Depth         int // nesting of a schema, of a group in a regular expression or of a rule's body
	Rules         int // rules of a grammar
	Positions     int // positions of the program that a grammar compiles to
	CompileSteps  int // nodes visited, merged or expanded while compiling
	DFAStates     int // states of one determinized pattern
	StackDepth    int // calls and counters that are open at once in an output
	StateItems    int // configurations of one state
	CacheBytes    int // memory of the states and masks of one Automaton
	MaskSteps     int // counted steps of one mask or of one accepted token; see Automaton.Steps
	Whitespace    int // between JSON tokens: a newline with its indentation, or a space; 0 allows none
	RegexRepeat   int // largest count of a repeat in a pattern
	AlternateSets int // alternatives of one schema after anyOf, oneOf and if are distributed

	steps *int // compile steps so far; nil: they are not counted
}

// DefaultLimits returns the bounds that servers use unless an operator changes them.
func DefaultLimits() Limits {
	return Limits{
		SourceBytes:   1 << 20,
		RegexBytes:    4 << 10,
		Choices:       10_000,
		Depth:         64,
		Rules:         100_000,
		Positions:     400_000,
		CompileSteps:  5_000_000,
		DFAStates:     4_000,
		StackDepth:    512,
		StateItems:    10_000,
		CacheBytes:    64 << 20,
		MaskSteps:     5_000_000, // the largest vocabularies have half a million nodes; below a second
		Whitespace:    20,
		RegexRepeat:   100_000_000,
		AlternateSets: 512,
	}
}

// spend counts n compile steps. A step is about 100 ns of work, so that the steps of CompileSteps
// take less than a second.
func (l *Limits) spend(n int) error {
	if l.steps == nil {
		return nil
	}
	if *l.steps += n; *l.steps > l.CompileSteps {
		return limitError("grammar", "", "compile steps", l.CompileSteps)
	}
	return nil
}

// ErrBudget means that a grammar needs more work or memory than a limit allows.
var ErrBudget = errors.New("grammar: limit exceeded")

// ErrDeadEnd means that no token of the vocabulary continues an unfinished output.
var ErrDeadEnd = errors.New("grammar: no token of the vocabulary continues the output")

// ErrRefused means that a token is not allowed after the tokens accepted so far.
var ErrRefused = errors.New("grammar: the token is not allowed here")

// ErrEmpty means that a grammar accepts no text.
var ErrEmpty = errors.New("grammar: accepts no text")

// An Error reports why a grammar does not compile.
type Error struct {
	Keyword string // JSON Schema keyword, or the kind of grammar
	Pointer string // JSON pointer into the schema, or the offset in a grammar text
	Reason  string
	Err     error // ErrBudget where a limit was exceeded, ErrEmpty of a grammar without a text; otherwise nil

	sizes []int32 // positions of the rules so far, where all of them together exceed a limit
}

func (e *Error) Error() string {
	at := ""
	if e.Pointer != "" {
		at = " at " + e.Pointer
	}
	return fmt.Sprintf("%s%s: %s", e.Keyword, at, e.Reason)
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// limitError reports the limit that a grammar exceeds.
func limitError(keyword, pointer, limit string, n int) *Error {
	return &Error{Keyword: keyword, Pointer: pointer, Reason: fmt.Sprintf("more than %d %s", n, limit), Err: ErrBudget}
}
