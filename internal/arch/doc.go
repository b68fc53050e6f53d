// Package arch has the tests of the tree's structure: the imports of each package, the purity of
// the deciders, the words of comments, the currency of generated code. The Makefile has the steps
// of `make test`, and verdict judges their results.
//
// Invariant: each rule is one literal table here, and each check has a test that it finds
// violations in small sources.
//
// The package has no code of its own and nothing imports it.
package arch
