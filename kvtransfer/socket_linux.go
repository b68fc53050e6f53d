package kvtransfer

import (
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// setBuffer sets the size of a socket's buffer, which the kernel then no longer changes. If the
// kernel would grant less (net.core.rmem_max, wmem_max), the socket keeps the kernel's own sizing,
// which grows further.
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
	if err != nil || got >= 2*bytes { // the kernel adds its own overhead
		return err
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK, 0)
}

// setCongestion sets the congestion control of a TCP connection; it ignores other connections.
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

// CheckCongestionControl returns an error if this process may not use a congestion control.
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
	has, _ := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control") // empty if it cannot be read
	return fmt.Errorf("%w: TCP congestion control %q: %w; this kernel has %s", ErrArguments, name, err, strings.TrimSpace(string(has)))
}
