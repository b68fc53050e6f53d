//go:build unix && !linux

package sock

import (
	"errors"
	"syscall"
)

// Quiet reports whether the socket is open and has nothing to read.
func Quiet(fd uintptr) bool { return peek(fd) < 0 }

// peek returns 1 if the socket has bytes to read, 0 if it has ended, and -1 otherwise.
func peek(fd uintptr) int {
	n, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	switch {
	case err == nil:
		return n
	case errors.Is(err, syscall.EAGAIN):
		return -1
	}
	return 0
}
