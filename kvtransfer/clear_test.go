package kvtransfer

import (
	"bytes"
	"context"
	"net"
	"sync"
	"testing"
)

// tapped is a network that keeps what crosses its connections, both ways, as a capture on the line would.
type tapped struct {
	Network
	mu   sync.Mutex
	seen []byte
}

type tappedConn struct {
	net.Conn
	tap *tapped
}

func (n *tapped) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := n.Network.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	return tappedConn{c, n}, nil
}

func (n *tapped) keep(b []byte) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.seen = append(n.seen, b...)
}

func (c tappedConn) Write(b []byte) (int, error) {
	c.tap.keep(b)
	return c.Conn.Write(b)
}

func (c tappedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.tap.keep(b[:n])
	return n, err
}

// TestNothingInTheClear looks for pieces of pages, and for the grant's epoch, in all that crossed the connections: with TLS there are none.
// Without it they are there, so that the search is known to find them; out of shared memory no page crosses any connection.
func TestNothingInTheClear(t *testing.T) {
	for _, tr := range transports(t) {
		t.Run(tr.name, func(t *testing.T) {
			tap := &tapped{}
			p := newPair(t, tr, small, 32, func(_ *ReaderOptions, w *WriterOptions) {
				tap.Network = w.Network
				w.Network = tap
			})
			for region := range small.Regions {
				for page := range int32(32) {
					copy(p.src.page(small, region, page), bytes.Repeat([]byte("a word of KV"), small.PageBytes/12))
				}
			}
			p.wantWorks(t, 3, 1, 2)
			epoch := le.AppendUint64(nil, p.reader.epoch)
			tap.mu.Lock()
			defer tap.mu.Unlock()
			pages, epochs := bytes.Count(tap.seen, []byte("a word of KV")), bytes.Count(tap.seen, epoch)
			if clear := tr.client == nil; clear != (epochs > 0) || (clear && !tr.shared) != (pages > 0) {
				t.Errorf("%d bytes crossed: %d pieces of pages and %d epochs in the clear", len(tap.seen), pages, epochs)
			}
		})
	}
}
