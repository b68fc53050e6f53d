// Package render turns generated tokens back into text and ends it at stop strings. Its
// folder jinja has the template language of chat templates.
//
// Invariant: the text does not depend on where tokens begin and end. Text that may be the
// beginning of a stop string is held back until it is known not to be.
package render
