//go:build unix && !linux

package sock

import (
	"errors"
	"syscall"
)

// Quiet reports whether the socket is open and has nothing to read.
func Quiet(fd uintptr) bool {
	_, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	return errors.Is(err, syscall.EAGAIN)
}
