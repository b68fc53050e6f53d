//go:build unix

package foreign

import (
	"errors"
	"net"
	"syscall"
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
	open, b := false, make([]byte, 1)
	look := func(fd uintptr) bool {
		_, _, err := syscall.Recvfrom(int(fd), b, syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		open = errors.Is(err, syscall.EAGAIN)
		return true
	}
	return func() bool {
		open = false
		return raw.Read(look) == nil && open
	}
}
