//go:build linux

package kvtransfer

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestBuffersThatTheKernelRefuses: a buffer that the kernel grants stays; where it grants less it goes on sizing the buffer by itself.
func TestBuffersThatTheKernelRefuses(t *testing.T) {
	for _, option := range []int{receiveBuffer, sendBuffer} {
		for bytes, locked := range map[int]bool{64 << 10: true, 1 << 30: false} {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			err = setBufferOf(fd, option, bytes)
			got, lErr := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK)
			if err := errors.Join(err, lErr, unix.Close(fd)); err != nil {
				t.Fatal(err)
			}
			if (got != 0) != locked {
				t.Errorf("option %d, %d bytes: the lock is %d", option, bytes, got)
			}
		}
	}
}

// TestCongestionControl: the kernel's reno, which every one has, is taken, and another name is refused with those that there are.
func TestCongestionControl(t *testing.T) {
	for _, tr := range transports(t) {
		p := newPair(t, tr, small, 8, func(_ *ReaderOptions, w *WriterOptions) { w.CongestionControl = "reno" })
		p.wantWorks(t, 1, 2)
	}
	_, err := NewWriter(WriterOptions{Layout: small, Memory: newMemory(small, 1), CongestionControl: "tortoise"})
	if !errors.Is(err, ErrArguments) || !strings.Contains(err.Error(), "tortoise") || !strings.Contains(err.Error(), "reno") {
		t.Errorf("a congestion control that nobody has: %v", err)
	}
}
