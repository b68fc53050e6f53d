// Package args converts arguments of tool calls to JSON.
//
// A Scanner finds the end of a JSON value that comes in pieces, and checks it. AppendValue converts
// the text of a parameter by the types that the tool's schema allows (Tools). AppendLiteral
// converts the notations of Python and of Gemma, and PythonString a string of Python that comes in
// pieces.
//
// Invariant: what is valid JSON of an allowed type stays as it is, byte for byte. What is not
// becomes a string.
//
// The package knows no formats of calls, and validates nothing against schemas.
package args
