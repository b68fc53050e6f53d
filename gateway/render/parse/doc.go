// Package parse splits a model's answer into content, reasoning and tool calls as it streams.
//
// # Algorithm
//
// One table (rows) has the formats of tool calls, another (thoughts) those of reasoning. A row
// names the markers around a section of calls, a call, its name and its arguments, and which of
// seven kinds the arguments are. NewFormat compiles a row and a reasoning format to the sets of
// markers that each state looks for. A Parser is a state machine over the answer's text: in each
// state it finds the first marker of the state's set, passes on what precedes it, and holds back
// the longest end of the text that begins a marker. A marker that is a special token of the
// vocabulary matches by its id only, so that text which spells it is text.
//
// Arguments that the model writes as JSON are passed on byte by byte, up to the bracket that closes
// them. They are never parsed and written again: numbers, escapes and spaces are the model's. In
// formats with typed values, a string is passed on as it comes. Another value is held until it
// ends. Package args makes JSON of it: by the tool's schema, or else as it is if it is valid JSON,
// or else as a string.
//
// A call starts when its name is complete and its arguments have begun. What breaks the format
// before that is content, from the call's first marker on. After it, the call ends as it is, is
// marked as incomplete, and what follows is content.
//
// Choose finds a model's format: it takes the first row that reads the call in a chat that the
// model's template rendered, so that a template decides by what it writes.
//
// Grammar describes the calls of a request in a format, for requests that force them: a structural
// tag of engine/grammar, made from the format's row and the schemas of the tools. What matches it
// is parsed to exactly such calls.
//
// # Invariants
//
// The concatenated deltas do not depend on how the text is split, nor on the number of tokens in a
// frame. No delta has a part of a marker. Calls do not interleave: the deltas of each are a
// CallStart with its whole name, Arguments and a CallEnd. The arguments of a call that is not
// incomplete are a valid JSON object.
//
// No text is lost: each byte is in a delta, in a marker or in the rest of a call (members of its
// object other than name, id and arguments). White space between calls, and newlines next to the
// markers of reasoning, belong to the markers.
//
// What is held back is bounded: the beginning of a marker; a value that is not a string; a name
// (maxName); white space before a call (maxSpace); arguments that precede a name (maxHeld). Memory
// grows with what the model wrote and was not passed on. Text, strings and JSON arguments allocate
// nothing.
//
// The parser validates neither names nor arguments against the request's tools: a call of an
// unknown function is passed on. It does not read the ends of answers: the finish reason is the
// caller's.
//
// # Use by a surface
//
// A model has a Format, from Choose, when it is loaded. Each choice of a request has a Parser in
// the gateway, which a new attempt on another node does not change. The caller
//
//   - decodes tokens itself and pushes each with its id, special tokens included, whether or not
//     their text is left out: markers are found by their ids
//   - pushes the token that ends the answer, which may be a marker, then the rest of an unfinished
//     character with the id -1, and calls Finish
//   - searches Content for stop strings, behind the parser, so that arguments do not end at one
//   - writes the deltas of a frame before it pushes the next frame
//   - makes the id of a call whose Delta has none by Format.IDs
//   - reports tool_calls as the finish reason if Calls is not 0 and the answer ended by itself
package parse
