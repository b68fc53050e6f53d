// Package sock reads and writes TCP sockets by system calls that Go's scheduler does not track.
//
// The net package marks every read and write as a system call that may block, although calls on
// non-blocking sockets never do. The mark itself is cheap. But if the process was idle before, it
// wakes the runtime's monitor thread, which then checks every 20 µs for a millisecond whether the
// call takes long. With streams whose tokens come one by one, that is a fifth of a gateway's CPU
// time. Waiting is still the runtime's (syscall.RawConn), with its deadlines and its Close.
//
// A Poller reads many streams in one goroutine, which wakes once for all sockets that are readable.
//
// Invariant: no call of this package blocks in the kernel, because the sockets are non-blocking.
//
// The package opens and closes no connection. It supports plain TCP on Linux only: NewConn returns
// nil for anything else.
package sock

import (
	"net"
	"syscall"
)

// Wrap returns a connection for a protocol above nc, such as TLS. Its reads and writes are this
// package's if nc is a plain socket; otherwise Wrap returns nc.
func Wrap(nc net.Conn) net.Conn {
	if c := NewConn(nc); c != nil {
		return c
	}
	return nc
}

// Unread reports whether the socket of nc, which may be that of a TLS connection, has bytes that
// were not read. It is false for anything else, and for closed sockets. Any goroutine may call it.
func Unread(nc net.Conn) (unread bool) {
	if over, ok := nc.(interface{ NetConn() net.Conn }); ok {
		nc = over.NetConn()
	}
	if over, ok := nc.(*Conn); ok {
		nc = over.Conn
	}
	socket, ok := nc.(syscall.Conn)
	if !ok {
		return false
	}
	rc, err := socket.SyscallConn()
	return err == nil && rc.Control(func(fd uintptr) { unread = peek(fd) > 0 }) == nil && unread
}
