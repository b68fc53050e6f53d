//go:build unix

package upstream

import (
	"net"
	"syscall"

	"github.com/tandem-serving/tandem/internal/sock"
)

// peeker makes a function that says whether a connection is open with nothing to
// be read. What a server sends on an idle connection is its goodbye.
func peeker(nc net.Conn) func() bool {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return func() bool { return true }
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return func() bool { return true }
	}
	open := false
	look := func(fd uintptr) bool {
		open = sock.Quiet(fd)
		return true
	}
	return func() bool {
		open = false
		return raw.Read(look) == nil && open
	}
}
