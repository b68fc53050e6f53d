package kvtransfer

import (
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// setBuffer gives a connection's socket a buffer of so many bytes, which then stays as it is. A kernel that grants less (net.core.rmem_max and
// wmem_max) goes on sizing it by itself, which reaches further.
func setBuffer(t *net.TCPConn, option, bytes int) error {
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	if e := raw.Control(func(fd uintptr) { err = setBufferOf(int(fd), option, bytes) }); e != nil {
		return e
	}
	return err
}

const (
	receiveBuffer = unix.SO_RCVBUF
	sendBuffer    = unix.SO_SNDBUF
)

func setBufferOf(fd, option, bytes int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, bytes); err != nil {
		return err
	}
	got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, option)
	if err != nil || got >= 2*bytes { // the kernel counts its own costs too
		return err
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK, 0)
}

// setCongestion gives a TCP connection another congestion control than the kernel's default; it does nothing to other connections.
func setCongestion(c net.Conn, name string) error {
	t, ok := c.(*net.TCPConn)
	if !ok || name == "" {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	if e := raw.Control(func(fd uintptr) { err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name) }); e != nil {
		return e
	}
	if err != nil {
		return congestionError(name, err)
	}
	return nil
}

// CheckCongestionControl says whether this process may choose a congestion control.
func CheckCongestionControl(name string) error {
	if name == "" {
		return nil
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("kvtransfer: a socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name); err != nil {
		return congestionError(name, err)
	}
	return nil
}

func congestionError(name string, err error) error {
	has, _ := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control") // a kernel that does not tell has none to name
	return fmt.Errorf("%w: TCP congestion control %q: %w; this kernel has %s", ErrArguments, name, err, strings.TrimSpace(string(has)))
}
