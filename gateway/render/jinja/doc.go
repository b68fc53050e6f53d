// Package jinja renders chat templates: Jinja as Hugging Face transformers configures it
// (immutable sandbox, trim_blocks, lstrip_blocks, its own tojson). It has a lexer and a parser,
// which returns a function for each expression and statement; to render is to call them. They work
// on Python's values, whose dictionaries keep their order and whose str, repr and json.dumps are
// Python's to the byte.
//
// Invariant: a template renders exactly what transformers renders, or fails with an *Error
// that names the construct and its line. A render ends within a fixed number of steps, bytes
// and nested calls, whatever the template does.
//
// It does not load templates from files or other templates, reach the network or read a
// clock: the time is an input. It imports nothing of this module.
//
// Errors inside the package are panics with an *Error, as in text/template; see fail.
package jinja
