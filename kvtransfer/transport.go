package kvtransfer

import (
	"fmt"
	"strings"
)

// Transport says how pages may travel. A session has one: its data connections carry the pages behind their headers, or, between
// processes of one host, the headers alone, and the reader copies the pages out of the writer's memory, which it maps read-only; then the reader alone
// writes to its memory. Or, by RDMA, the headers alone, and the writer writes to the reader's memory by itself, while it is permitted to. Leases,
// checksums and the control connection are the same.
type Transport string

const (
	Auto       Transport = "auto" // the fastest that both ends have
	OverTCP    Transport = "tcp"
	OverShared Transport = "shm"
	OverRDMA   Transport = "rdma" // into the reader's memory, by libfabric; over TCP to a peer that has none of the same kind
)

// Transports are all of them.
var Transports = []Transport{Auto, OverTCP, OverShared, OverRDMA}

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
