package rpc

import (
	"context"
	"crypto/tls"
	"fmt"
	"sync"
	"time"
)

// Pool holds this node's outgoing connections: one for each address, shared by all
// callers, dialled by the first Get and again after it was lost.
type Pool struct {
	o      Options
	h      Handler
	err    error           // of o; nil: none
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	conns  sync.WaitGroup

	mu    sync.Mutex
	peers map[string]*peer // by address
}

// peer is the state of one address; guarded by Pool.mu.
type peer struct {
	conn    *Conn         // the last one; may have ended
	dialing chan struct{} // closed when the running dial has ended; nil: none
	err     error         // of the last dial
	retry   time.Time     // no dial before
	backoff time.Duration // after the next failure
}

// NewPool returns an empty pool. Get returns the errors of o.
func NewPool(o Options, h Handler) *Pool {
	o, err := o.withDefaults()
	ctx, cancel := context.WithCancel(context.Background())
	return &Pool{o: o, h: h, err: err, ctx: ctx, cancel: cancel, peers: map[string]*peer{}}
}

// Get returns the open connection to addr, or dials one. It waits for the dial until ctx
// ends; the dial itself continues for other callers. After a failed dial Get repeats its
// error (as ErrBackoff) until the back-off has passed.
func (p *Pool) Get(ctx context.Context, addr string) (*Conn, error) {
	if p.err != nil {
		return nil, p.err
	}
	for waited := false; ; waited = true {
		c, dialing, err := p.look(addr, waited)
		if c != nil || err != nil {
			return c, err
		}
		select {
		case <-dialing:
		case <-ctx.Done():
			return nil, fmt.Errorf("rpc: waiting for a connection to %s: %w", addr, ctx.Err())
		}
	}
}

// look returns a connection, or an error, or a channel to wait for. A caller that has
// waited gets the result of the dial, even a connection that has ended meanwhile, so that
// one Get never dials twice.
func (p *Pool) look(addr string, waited bool) (*Conn, <-chan struct{}, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		return nil, nil, fmt.Errorf("%w: the pool is closed", ErrClosed)
	}
	e := p.peers[addr]
	if e == nil {
		if !p.room() {
			return nil, nil, fmt.Errorf("%w: %d, dialling %s", ErrTooManyConns, len(p.peers), addr)
		}
		e = &peer{backoff: p.o.BackoffMin}
		p.peers[addr] = e
	}
	switch {
	case e.conn != nil && (waited || e.conn.Open()):
		return e.conn, nil, nil
	case e.dialing != nil:
		return nil, e.dialing, nil
	case e.err != nil && waited:
		return nil, nil, e.err
	case time.Now().Before(e.retry):
		return nil, nil, fmt.Errorf("%w: %w", ErrBackoff, e.err)
	}
	e.dialing = make(chan struct{})
	e.conn, e.err = nil, nil
	p.conns.Go(func() { p.dial(addr, e) })
	return nil, e.dialing, nil
}

// room makes room for one more address by removing those without a connection, and
// reports whether there is room; the caller holds mu.
func (p *Pool) room() bool {
	if len(p.peers) < p.o.MaxConns {
		return true
	}
	now := time.Now()
	for addr, e := range p.peers {
		if e.dialing == nil && (e.conn == nil || !e.conn.Open()) && !now.Before(e.retry) {
			delete(p.peers, addr)
		}
	}
	return len(p.peers) < p.o.MaxConns
}

// dial opens a connection, reports it, and then runs its reader.
func (p *Pool) dial(addr string, e *peer) {
	c, err := p.open(addr)
	if err != nil {
		p.report(e, nil, fmt.Errorf("rpc: dialling %s: %w", addr, err))
		return
	}
	stop := context.AfterFunc(p.ctx, func() { c.Close(nil) })
	defer stop()
	ended := make(chan struct{})
	p.conns.Go(func() {
		select {
		case <-c.ready:
			p.report(e, c, nil)
		case <-ended:
			p.report(e, nil, fmt.Errorf("rpc: dialling %s: %w", addr, c.Err()))
		}
	})
	c.run()
	close(ended)
}

// open dials and secures the transport.
func (p *Pool) open(addr string) (*Conn, error) {
	ctx, cancel := context.WithTimeout(p.ctx, p.o.HandshakeTimeout)
	defer cancel()
	raw, err := p.o.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	nc, err := secure(p.ctx, raw, p.o, tls.Client)
	if err != nil {
		return nil, err
	}
	return newConn(raw, nc, p.o, p.h), nil
}

// report ends the dial for all callers that wait for it.
func (p *Pool) report(e *peer, c *Conn, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e.conn, e.err = c, err
	close(e.dialing)
	e.dialing = nil
	if err == nil {
		e.backoff, e.retry = p.o.BackoffMin, time.Time{}
		return
	}
	p.o.Counters.DialErrors.Add(1)
	e.retry = time.Now().Add(e.backoff)
	e.backoff = min(2*e.backoff, p.o.BackoffMax)
}

// Close closes every connection and returns when each one's Closed has returned.
// It must not be called from a Handler.
func (p *Pool) Close() {
	p.mu.Lock()
	p.cancel()
	p.mu.Unlock()
	p.conns.Wait()
}
