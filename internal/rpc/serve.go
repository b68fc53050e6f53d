package rpc

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/tandem-serving/tandem/internal/netio"
	"github.com/tandem-serving/tandem/internal/sock"
)

// Serve accepts peers on l until ctx ends. Then it closes all connections; their queued
// frames are still sent, within CloseLinger. It owns l. It returns when every
// connection's Closed has returned: nil after ctx, else why accepting failed.
func Serve(ctx context.Context, l net.Listener, o Options, h Handler) error {
	o, err := o.withDefaults()
	if err != nil {
		l.Close()
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var conns sync.WaitGroup
	defer conns.Wait()
	defer cancel()
	l = netio.NewListener(l, netio.Options{Log: o.Log}) // retries while descriptors or memory are short
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()

	warned := new(warnings)
	slots := make(chan struct{}, o.MaxConns)
	for {
		raw, err := l.Accept()
		if ctx.Err() != nil {
			if err == nil {
				raw.Close()
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("rpc: accepting on %v: %w", l.Addr(), err)
		}
		select {
		case slots <- struct{}{}:
		default:
			raw.Close()
			o.Counters.Refused.Add(1)
			o.Log.Warn("refused a node", "address", raw.RemoteAddr().String(),
				"error", fmt.Errorf("%w: %d are open", ErrTooManyConns, o.MaxConns))
			continue
		}
		conns.Go(func() {
			defer func() { <-slots }()
			serveConn(ctx, raw, o, h, warned)
		})
	}
}

func serveConn(ctx context.Context, raw net.Conn, o Options, h Handler, warned *warnings) {
	nc, err := secure(ctx, raw, o, tls.Server)
	var c *Conn
	if err == nil {
		c = newConn(raw, nc, o, h)
		if err = c.identify(warned); err != nil {
			raw.Close()
		}
	}
	if err == nil {
		stop := context.AfterFunc(ctx, func() { c.Close(nil) })
		defer stop()
		c.run()
		if c.opened {
			return
		}
		err = c.Err()
	}
	switch {
	case ctx.Err() != nil:
	case errors.Is(err, io.EOF): // nothing was asked for, as of a check that the port is open
		o.Log.Debug("a connection ended before its handshake", "address", raw.RemoteAddr().String(), "error", err)
	default:
		o.Counters.Refused.Add(1)
		o.Log.Warn("refused a node", "address", raw.RemoteAddr().String(), "error", err)
	}
}

// secure wraps a transport in TLS where the options ask for it. It closes the
// transport on an error.
func secure(ctx context.Context, raw net.Conn, o Options, wrap func(net.Conn, *tls.Config) *tls.Conn) (net.Conn, error) {
	if o.TLS == nil {
		return raw, nil
	}
	ctx, cancel := context.WithTimeout(ctx, o.HandshakeTimeout)
	defer cancel()
	t := wrap(sock.Wrap(raw), o.TLS)
	if err := t.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, fmt.Errorf("%w: TLS with %s: %w", ErrHandshake, raw.RemoteAddr(), err)
	}
	return t, nil
}
