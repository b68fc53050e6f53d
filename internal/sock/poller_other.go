//go:build !linux

package sock

import (
	"net"
	"time"
)

// Poller does not exist on this system.
type Poller struct{}

// Close does nothing.
func (*Poller) Close() {}

// Registration does not exist on this system.
type Registration struct{}

// ErrPeerClosed is not returned on this system.
var ErrPeerClosed = net.ErrClosed

// NewRegistration is never called on this system.
func NewRegistration(_, _ *Conn, _ BufferSource, _ func(int) bool) *Registration {
	panic("sock: not supported on this system")
}

// Cancel is never called on this system.
func (*Registration) Cancel(error) { panic("sock: not supported on this system") }

// Wait is never called on this system.
func (*Registration) Wait(*Poller, time.Time) (error, bool) {
	panic("sock: not supported on this system")
}

// Len returns 0.
func (*Poller) Len() int { return 0 }
