//go:build !linux

package kvtransfer

import (
	"fmt"
	"net"
)

const (
	receiveBuffer = iota
	sendBuffer
)

func setBuffer(t *net.TCPConn, option, bytes int) error {
	if option == sendBuffer {
		return t.SetWriteBuffer(bytes)
	}
	return t.SetReadBuffer(bytes)
}

func setCongestion(net.Conn, string) error { return nil }

// CheckCongestionControl returns an error: only Linux lets a process choose a congestion control.
func CheckCongestionControl(name string) error {
	if name != "" {
		return fmt.Errorf("%w: TCP congestion control %q: it can be chosen on Linux only", ErrArguments, name)
	}
	return nil
}
