//go:build linux

package e2e

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/tandem-serving/tandem/internal/netlab"
)

// wire joins the network namespaces of members.
type wire struct {
	t   *testing.T
	lab *netlab.Lab
}

// maxPacket is the interfaces' MTU: fewer packets to carry.
const maxPacket = 32 << 10

func newWire(t *testing.T) *wire {
	t.Helper()
	w := &wire{t: t, lab: netlab.New(maxPacket, 1)}
	t.Cleanup(w.lab.Close)
	return w
}

// place makes the namespace of an address, or finds it. It needs root, or the right to make network namespaces, and a kernel with interfaces that
// programs serve.
func (w *wire) place(address string) *place {
	w.t.Helper()
	p, err := w.lab.Place(netip.MustParseAddr(address))
	if errors.Is(err, netlab.ErrDenied) {
		w.t.Skip(netlab.ErrDenied)
	} else if err != nil {
		w.t.Fatal(err)
	}
	return (*place)(p)
}

// sever cuts the way from one member to another, not the way back.
func (w *wire) sever(from, to *member) {
	w.lab.Shape(netip.MustParseAddr(from.host), netip.MustParseAddr(to.host), netlab.Shape{Cut: true})
}

// place is a network namespace; nil is where the test runs.
type place netlab.Place

func (p *place) within(f func() error) error { return (*netlab.Place)(p).Within(f) }

// dialer connects from within the place; nil: as usual.
func (p *place) dialer() func(ctx context.Context, network, addr string) (net.Conn, error) {
	if p == nil {
		return nil
	}
	return (*netlab.Place)(p).DialContext
}
