// Package arch holds the tests of how the tree is built: which package may
// import which, that the deciders are pure, that generated code is current. The Makefile has the steps of
// `make test`, and verdict judges their results.
//
// Invariant: each rule is one literal table here, and each check is itself shown
// to see violations, on small sources that break it.
//
// The package has no code of its own and nothing imports it.
package arch
