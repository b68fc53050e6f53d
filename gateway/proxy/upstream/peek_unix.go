//go:build unix

package upstream

import (
	"net"
	"syscall"

	"github.com/tandem-serving/tandem/internal/sock"
)

// peeker returns a function that reports whether a connection is open and has nothing to read. Any
// bytes or EOF on an idle connection mean that the server is closing it.
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
	peek := func(fd uintptr) bool {
		open = sock.Quiet(fd)
		return true
	}
	return func() bool {
		open = false
		return raw.Read(peek) == nil && open
	}
}
