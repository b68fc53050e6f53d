package cluster

import (
	"errors"
	"testing"
)

// The errors of memberlist become one line.
func TestJoinError(t *testing.T) {
	for text, want := range map[string]string{
		"1 error occurred:\n\t* failed to resolve a: no such host\n\n": "failed to resolve a: no such host",
		"2 errors occurred:\n\t* failed to join a\n\t* b\n\n":          "failed to join a; b",
		"dial tcp 127.0.0.1:7946: connect: connection refused":         "dial tcp 127.0.0.1:7946: connect: connection refused",
	} {
		if got := joinError(errors.New(text)).Error(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
