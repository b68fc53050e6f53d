// Package clients holds the tests of official clients against Tandem. It has no code of its own.
//
// Each script below python and node is a client. It runs a loop of two tools with every format of
// the parser's table, whole and streamed. A gateway in the test's process serves each format, and a
// node of nodestest plays the format's sample. Scripts for structured output use the program with
// models that compute: the built-in one and one of random weights.
//
// make test runs the official OpenAI clients over some formats. make clients installs all clients
// of requirements.txt and package-lock.json, runs them over all formats and writes docs/clients.md.
//
// Invariant: the page names as served only what the client accepted and its script compared with
// the answer. What the server refuses by name is "refused" on the page, and fails the test.
package clients
