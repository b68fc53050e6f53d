// Package render converts requests to prompts and generated tokens to text. It renders chats by
// their template (package jinja), tokenizes, checks prompts against the model, and ends text at
// stop strings.
//
// Invariant: the text does not depend on token boundaries. Text that may be the beginning of a
// stop string is held until it is known not to be.
package render
