package kvtransfer

import (
	"fmt"
	"strings"
)

// Transport is the way that pages travel. A session has one. Over its data connections, pages
// follow their headers. Between processes of one host, only headers are sent, and the reader copies
// the pages from the writer's memory, which it maps read-only; only the reader writes to its
// memory. With RDMA, only headers are sent, and the writer writes to the reader's memory while it
// has a permit. Leases, checksums and the control connection are the same.
type Transport string

const (
	Auto       Transport = "auto" // the fastest that both ends support
	OverTCP    Transport = "tcp"
	OverShared Transport = "shm"
	OverRDMA   Transport = "rdma" // to the reader's memory, by libfabric; falls back to TCP if the peer lacks the same provider
)

// Transports lists all transports.
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
