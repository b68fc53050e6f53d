//go:build linux

package netlab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Place is a network namespace. A socket or process that is created within it stays there.
type Place struct {
	do  chan func() // runs on a thread in the namespace
	tun *os.File
}

// run is the place's thread, which ends with the place. No other code runs on it.
func (p *Place) run(at netip.Addr, mtu int, ready chan<- error) {
	runtime.LockOSThread() // and never unlocked
	err := unix.Unshare(unix.CLONE_NEWNET)
	if err == nil {
		p.tun, err = openTUN(at, mtu)
	}
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOENT) {
		err = fmt.Errorf("%w: %w", ErrDenied, err)
	}
	ready <- err
	if err != nil {
		return
	}
	for f := range p.do {
		f()
	}
}

// openTUN creates this thread's network: loopback, and an interface whose packets are read from
// and written to the file.
func openTUN(at netip.Addr, mtu int) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	defer unix.Close(s)
	set := func(fd int, name string, req uint, fill func(*unix.Ifreq) error) {
		if err != nil {
			return
		}
		var r *unix.Ifreq
		if r, err = unix.NewIfreq(name); err == nil {
			err = fill(r)
		}
		if err == nil {
			if err = unix.IoctlIfreq(fd, req, r); err != nil {
				err = fmt.Errorf("ioctl %#x of %s: %w", req, name, err)
			}
		}
	}
	flags := func(n uint16) func(*unix.Ifreq) error {
		return func(r *unix.Ifreq) error { r.SetUint16(n); return nil }
	}
	number := func(n int) func(*unix.Ifreq) error {
		return func(r *unix.Ifreq) error { r.SetUint32(uint32(n)); return nil }
	}
	ip := func(a []byte) func(*unix.Ifreq) error { return func(r *unix.Ifreq) error { return r.SetInet4Addr(a) } }
	set(s, "lo", unix.SIOCSIFFLAGS, flags(unix.IFF_UP))
	set(fd, "wire", unix.TUNSETIFF, flags(unix.IFF_TUN|unix.IFF_NO_PI))
	set(s, "wire", unix.SIOCSIFADDR, ip(at.AsSlice()))
	set(s, "wire", unix.SIOCSIFNETMASK, ip([]byte{255, 255, 255, 0}))
	set(s, "wire", unix.SIOCSIFMTU, number(mtu))
	set(s, "wire", unix.SIOCSIFTXQLEN, number(txQueue))
	set(s, "wire", unix.SIOCSIFFLAGS, flags(unix.IFF_UP|unix.IFF_RUNNING))
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "tun"), nil // not earlier, because polling fails for good without an interface
}

// txQueue is how many packets may wait for the lab, so that only its draws lose packets.
const txQueue = 10_000

// Within runs f in the place; a nil place is the caller's namespace.
func (p *Place) Within(f func() error) error {
	if p == nil {
		return f()
	}
	err := make(chan error)
	p.do <- func() { err <- f() }
	return <-err
}

// DialContext connects from within the place to a numeric address; names would be resolved outside
// the place.
func (p *Place) DialContext(ctx context.Context, network, addr string) (c net.Conn, err error) {
	err = p.Within(func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, addr)
		return err
	})
	return c, err
}

// Listen listens within the place.
func (p *Place) Listen(network, addr string) (l net.Listener, err error) {
	err = p.Within(func() (err error) {
		l, err = net.Listen(network, addr)
		return err
	})
	return l, err
}
