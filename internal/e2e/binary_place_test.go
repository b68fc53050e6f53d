//go:build linux

package e2e

import (
	"context"
	"net"
)

// place is a network of its own in which processes run.
type place struct {
	do chan func()
}

// within runs f in the place.
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
