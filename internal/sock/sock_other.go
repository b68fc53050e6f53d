//go:build !linux

package sock

import "net"

// Conn does not exist on this system.
type Conn struct{ net.Conn }

// NewConn returns nil: callers use the net package.
func NewConn(net.Conn) *Conn { return nil }

// BufferSource provides buffers for reads.
type BufferSource interface {
	Buffer() []byte
	Release()
}

// ReadInto is never called on this system.
func (*Conn) ReadInto(BufferSource) (int, error) { panic("sock: not supported on this system") }

// WriteNow is never called on this system.
func (*Conn) WriteNow([]byte) (int, error) { panic("sock: not supported on this system") }

// WriteThenRead is never called on this system.
func (*Conn) WriteThenRead(p, q, into []byte) (int, error, int, error) {
	panic("sock: not supported on this system")
}
