package kvtransfer

import (
	"fmt"
	"strings"
)

// Transport says how pages may travel. A session has one: its data connections carry the pages behind their headers, or, between
// processes of one host, the headers alone, and the reader copies the pages out of the writer's memory, which it maps read-only. Leases,
// fences, checksums and the control connection are the same, and so is where a page may land: the reader alone writes to its memory.
type Transport string

const (
	Auto       Transport = "auto" // the fastest that both ends have
	OverTCP    Transport = "tcp"
	OverShared Transport = "shm"
)

// Transports are all of them.
var Transports = []Transport{Auto, OverTCP, OverShared}

// ParseTransport reads a transport's name; empty is Auto.
func ParseTransport(s string) (Transport, error) {
	if s == "" {
		return Auto, nil
	}
	var names []string
	for _, t := range Transports {
		if string(t) == s {
			return t, nil
		}
		names = append(names, string(t))
	}
	return "", fmt.Errorf("%w: transport %q, want one of %s", ErrArguments, s, strings.Join(names, ", "))
}
