// Package sock reads and writes sockets by system calls that the scheduler of Go
// is not told of.
//
// The net package announces every read and write as a call that may block, though
// on its sockets none does. The announcement costs little by itself, but whenever
// the process was idle before, it wakes the runtime's monitor, which then looks
// every 20 µs for a millisecond whether the call takes long: with streams whose
// tokens come one by one that is a fifth of a gateway's CPU time. Waiting is
// still the runtime's (syscall.RawConn), with its deadlines and its Close.
//
// Streams whose tokens come one by one wait in a Crowd: one goroutine is woken for all that
// have something, reads it and hands it on.
//
// Invariant: no call here blocks in the kernel; the sockets are non-blocking.
//
// The package opens and closes no connection, and knows plain TCP only: Of is nil for
// anything else, and on systems other than Linux.
package sock

import "net"

// Under is a connection for what is spoken over it, such as TLS: its reads and writes are
// this package's where there is a plain socket, and otherwise its own.
func Under(nc net.Conn) net.Conn {
	raw := Of(nc)
	if raw == nil {
		return nc
	}
	return &under{nc, raw}
}

type under struct {
	net.Conn
	raw *Conn
}

// Read implements net.Conn.
func (u *under) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	return u.raw.Read(p)
}

// Write implements net.Conn; it waits only for what the socket does not take at once.
func (u *under) Write(p []byte) (int, error) {
	n, err := u.raw.WriteNow(p)
	if err != nil || n == len(p) {
		return n, err
	}
	rest, err := u.Conn.Write(p[n:])
	return n + rest, err
}
