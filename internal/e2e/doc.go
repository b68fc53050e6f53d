// Package e2e holds the tests that need several roles at once. It has no code
// of its own: what it needs it takes from the packages it tests.
package e2e
