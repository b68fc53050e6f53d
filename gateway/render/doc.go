// Package render stands at the edge between text and tokens: it renders a chat
// into a prompt by the model's chat template, and turns generated tokens back
// into text with stop strings.
//
// A template is Jinja as Hugging Face transformers configures it (immutable
// sandbox, trim_blocks, lstrip_blocks, its own tojson): a lexer, a parser and a
// tree-walking evaluator over Python's values, whose dictionaries keep their
// order and whose str, repr and json.dumps are Python's to the byte.
//
// Invariant: a template renders exactly what transformers renders, or fails with
// an *Error that names the construct and its line. A render ends within a fixed
// number of steps, bytes and nested calls, whatever the template does.
//
// It does not load templates from files or other templates, reach the network,
// read a clock (the time is an input), or parse tool calls out of generated text.
package render
