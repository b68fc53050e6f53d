//go:build !linux

package sock

import (
	"net"
	"time"
)

// Crowd is not there on this system.
type Crowd struct{}

// Close does nothing.
func (*Crowd) Close() {}

// Member is not there on this system.
type Member struct{}

// ErrLeft is not returned.
var ErrLeft = net.ErrClosed

// NewMember is not called.
func NewMember(_, _ *Conn, _ Lender, _ func(int) bool) *Member { panic("sock: no sockets here") }

// End is not called.
func (*Member) End(error) { panic("sock: no sockets here") }

// Stay is not called.
func (*Member) Stay(*Crowd, time.Time) (error, bool) { panic("sock: no sockets here") }

// Len is 0.
func (*Crowd) Len() int { return 0 }
