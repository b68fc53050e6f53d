//go:build !linux

package sock

import "net"

// Conn is not there on this system.
type Conn struct{}

// Of is nil: the net package's own reads and writes are used.
func Of(net.Conn) *Conn { return nil }

// Read is not called.
func (*Conn) Read([]byte) (int, error) { panic("sock: no sockets here") }

// Lender has buffers for what comes.
type Lender interface {
	Lend() []byte
	Idle()
}

// ReadInto is not called.
func (*Conn) ReadInto(Lender) (int, error) { panic("sock: no sockets here") }

// WriteNow is not called.
func (*Conn) WriteNow([]byte) (int, error) { panic("sock: no sockets here") }

// Ask is not called.
func (*Conn) Ask(p, q, into []byte) (int, error, int, error) { panic("sock: no sockets here") }
