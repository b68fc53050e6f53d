//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// wire joins network namespaces: each has one interface, whose packets the test
// carries to the others, or drops, each direction for itself.
type wire struct {
	t      *testing.T
	places map[netip.Addr]*place
	mu     sync.RWMutex
	cut    map[[2]netip.Addr]bool // from, to
}

// place is a network namespace in which processes run.
type place struct {
	do  chan func() // runs on a thread that is there
	tun *os.File
}

// newWire needs root, or the right to make network namespaces, and a kernel with
// interfaces that programs serve.
func newWire(t *testing.T) *wire {
	t.Helper()
	if f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0); err != nil {
		t.Skip("needs /dev/net/tun and the right to make network namespaces")
	} else {
		f.Close()
	}
	return &wire{t: t, places: map[netip.Addr]*place{}, cut: map[[2]netip.Addr]bool{}}
}

// place makes the namespace of an address, or finds it.
func (w *wire) place(address string) *place {
	w.t.Helper()
	at := netip.MustParseAddr(address)
	if p := w.places[at]; p != nil {
		return p
	}
	p := &place{do: make(chan func())}
	ready := make(chan error)
	go p.live(at, ready)
	if err := <-ready; errors.Is(err, unix.EPERM) {
		w.t.Skip("needs /dev/net/tun and the right to make network namespaces")
	} else if err != nil {
		w.t.Fatalf("a network namespace for %s: %v", at, err)
	}
	w.mu.Lock()
	w.places[at] = p
	w.mu.Unlock()
	var carried sync.WaitGroup
	carried.Go(func() { w.carry(p.tun) })
	w.t.Cleanup(func() {
		close(p.do)
		p.tun.Close()
		carried.Wait()
	})
	return p
}

// live is the place's thread, which ends with it: no other code ever runs on it.
func (p *place) live(at netip.Addr, ready chan<- error) {
	runtime.LockOSThread() // and never unlocked
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		ready <- err
		return
	}
	var err error
	p.tun, err = openTUN(at)
	ready <- err
	if err != nil {
		return
	}
	for f := range p.do {
		f()
	}
}

// openTUN makes this thread's network: loopback, and an interface whose packets
// are the file's.
func openTUN(at netip.Addr) (*os.File, error) {
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
	ip := func(a []byte) func(*unix.Ifreq) error { return func(r *unix.Ifreq) error { return r.SetInet4Addr(a) } }
	set(s, "lo", unix.SIOCSIFFLAGS, flags(unix.IFF_UP))
	set(fd, "wire", unix.TUNSETIFF, flags(unix.IFF_TUN|unix.IFF_NO_PI))
	set(s, "wire", unix.SIOCSIFADDR, ip(at.AsSlice()))
	set(s, "wire", unix.SIOCSIFNETMASK, ip([]byte{255, 255, 255, 0}))
	set(s, "wire", unix.SIOCSIFMTU, func(r *unix.Ifreq) error { r.SetUint32(maxPacket); return nil })
	set(s, "wire", unix.SIOCSIFFLAGS, flags(unix.IFF_UP|unix.IFF_RUNNING))
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "tun"), nil // only now, that it is an interface: polling it before is an error for good
}

// maxPacket is the interfaces' MTU: fewer packets to carry.
const maxPacket = 32 << 10

// carry brings an interface's packets to where they go.
func (w *wire) carry(from *os.File) {
	packet := make([]byte, maxPacket)
	for {
		n, err := from.Read(packet)
		if err != nil {
			return // closed
		}
		if n < 20 || packet[0]>>4 != 4 {
			continue // not IPv4
		}
		src, dst := netip.AddrFrom4([4]byte(packet[12:16])), netip.AddrFrom4([4]byte(packet[16:20]))
		w.mu.RLock()
		to, cut := w.places[dst], w.cut[[2]netip.Addr{src, dst}]
		w.mu.RUnlock()
		if to != nil && !cut {
			_, _ = to.tun.Write(packet[:n]) // what finds no room is lost, as anywhere
		}
	}
}

// sever cuts or mends the way from one member to another, not the way back.
func (w *wire) sever(from, to *member, on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut[[2]netip.Addr{netip.MustParseAddr(from.host), netip.MustParseAddr(to.host)}] = on
}

// mend ends every cut.
func (w *wire) mend() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.cut)
}

// within runs f in the place; a nil place is where the test runs.
func (p *place) within(f func() error) error {
	if p == nil {
		return f()
	}
	err := make(chan error)
	p.do <- func() { err <- f() }
	return <-err
}

// dialer connects from within the place; nil: as usual.
func (p *place) dialer() func(ctx context.Context, network, addr string) (net.Conn, error) {
	if p == nil {
		return nil
	}
	return func(ctx context.Context, network, addr string) (c net.Conn, err error) {
		err = p.within(func() (err error) {
			c, err = new(net.Dialer).DialContext(ctx, network, addr)
			return err
		})
		return c, err
	}
}
