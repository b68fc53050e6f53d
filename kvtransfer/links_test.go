//go:build linux

package kvtransfer

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/internal/netlab"
)

// far is a pair in two network namespaces.
type far struct {
	*pair
	lab      *netlab.Lab
	from, to netip.Addr
}

// placed is the network of a place.
type placed struct{ p *netlab.Place }

func (n placed) Listen(addr string) (net.Listener, error) { return n.p.Listen("tcp", addr) }
func (n placed) Dial(ctx context.Context, addr string) (net.Conn, error) {
	return n.p.DialContext(ctx, "tcp", addr)
}

// medium has pages as large as models'.
var medium = Layout{Regions: 4, PageBytes: 16 << 10, Hash: 3}

// The named bounds under test: short, so that the tests are.
const (
	farLease = 3 * time.Second
	farPeer  = 2 * PingInterval
	// farSlack is what a busy machine may add to a bound. The bounds themselves are held in virtual time (TestHalfOpenPeer).
	farSlack = time.Minute
)

func newFar(t *testing.T, s netlab.Shape) *far { return newFarTLS(t, s, nil, nil) }

func newFarTLS(t *testing.T, s netlab.Shape, server, client *tls.Config) *far {
	t.Helper()
	f := &far{lab: netlab.New(1500, 1), from: netip.MustParseAddr("10.79.0.1"), to: netip.MustParseAddr("10.79.0.2")}
	t.Cleanup(f.lab.Close)
	var places [2]*netlab.Place
	for i, at := range []netip.Addr{f.from, f.to} {
		var err error
		if places[i], err = f.lab.Place(at); errors.Is(err, netlab.ErrDenied) {
			t.Skip(netlab.ErrDenied)
		} else if err != nil {
			t.Fatal(err)
		}
	}
	f.lab.Both(f.from, f.to, s)
	tr := transport{name: "tcp", network: placed{places[1]}, listen: f.to.String() + ":7000", server: server, client: client}
	f.pair = newPair(t, tr, medium, 64, func(r *ReaderOptions, w *WriterOptions) {
		w.Network, r.PeerTimeout, w.PeerTimeout = placed{places[0]}, farPeer, farPeer
	})
	f.src.randomize(mrand.New(mrand.NewPCG(5, 5)))
	return f
}

// wantPushed pushes n pages of all regions and compares them.
func (f *far) wantPushed(t *testing.T, n int) {
	t.Helper()
	if err := f.pushed(t, n); err != nil {
		t.Fatal(err)
	}
}

// pushed pushes n pages of all regions and compares them if they have arrived.
func (f *far) pushed(t *testing.T, n int) error {
	t.Helper()
	var pages []int32
	for i := range int32(n) {
		pages = append(pages, i)
	}
	g := f.grant(t, farSlack, pages...)
	push := f.open(t, g)
	f.sendAll(t, push, pages...)
	ctx, cancel := context.WithTimeout(t.Context(), 2*farSlack)
	defer cancel()
	if err := push.Wait(ctx); err != nil {
		return err
	}
	for region := range medium.Regions {
		for _, p := range pages {
			if !bytes.Equal(f.src.page(medium, region, p), f.dst.page(medium, region, p)) {
				t.Fatalf("region %d, page %d differs", region, p)
			}
		}
	}
	return nil
}

// TestLossyLink: over a link that loses one packet of a hundred and delays the rest by 50 ms each way, transfers finish, with the right bytes.
func TestLossyLink(t *testing.T) {
	t.Parallel()
	f := newFar(t, netlab.Shape{Delay: 50 * time.Millisecond, Loss: 0.01})
	f.wantPushed(t, 8)
	f.wantPushed(t, 8)
	if c := f.lab.Count(f.from, f.to); c.Lost == 0 {
		t.Errorf("nothing was lost: %+v", c)
	}
}

// TestNothingInTheClearOnTheLine captures every packet between two namespaces: with TLS no piece of a page is in any of them, without it there are,
// so that the search is known to find them.
func TestNothingInTheClearOnTheLine(t *testing.T) {
	t.Parallel()
	server, client := testTLS(t)
	client.ServerName = "127.0.0.1" // which the certificate names
	for name, encrypted := range map[string]bool{"plain": false, "TLS": true} {
		t.Run(name, func(t *testing.T) {
			s, c := server, client
			if !encrypted {
				s, c = nil, nil
			}
			f := newFarTLS(t, netlab.Shape{}, s, c)
			word := []byte("a word of KV")
			for region := range medium.Regions {
				for page := range int32(8) {
					copy(f.src.page(medium, region, page), bytes.Repeat(word, medium.PageBytes/len(word)))
				}
			}
			var packets, found atomic.Int64
			f.lab.Tap(func(packet []byte) {
				packets.Add(1)
				if bytes.Contains(packet, word) {
					found.Add(1)
				}
			})
			f.wantPushed(t, 8)
			if (found.Load() == 0) != encrypted || packets.Load() == 0 {
				t.Errorf("%d of %d packets have pieces of pages in the clear", found.Load(), packets.Load())
			}
		})
	}
}

// TestCutLink cuts the link in the middle of a transfer, both ways or one, or has the reader's end go without a word. Both sides fail within their
// bounds, the reader has its pages back, and when the link is whole again the next transfer finishes, or the one after it where that loses the old connection.
func TestCutLink(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ there, back, close bool }{
		"both ways":      {there: true, back: true},
		"to the reader":  {there: true},
		"to the writer":  {back: true},
		"the reader too": {there: true, back: true, close: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			slow := netlab.Shape{Rate: 5e5, Delay: time.Millisecond} // eight seconds for what follows, so that the cut comes in its middle on a busy machine, too
			f := newFar(t, slow)
			var pages []int32
			for i := range int32(64) {
				pages = append(pages, i)
			}
			g := f.grant(t, farLease, pages...)
			push := f.open(t, g)
			f.sendAll(t, push, pages...)
			for f.reader.Stats().Pieces == 0 {
				time.Sleep(time.Millisecond)
			}
			cut := slow
			cut.Cut = true
			if c.there {
				f.lab.Shape(f.from, f.to, cut)
			}
			if c.back {
				f.lab.Shape(f.to, f.from, cut)
			}
			began := time.Now()
			if c.close {
				if err := f.reader.Close(); err != nil {
					t.Error(err)
				}
			}
			e := f.log.over(g.Lease)
			within(t, "the reader's end", began, farLease+time.Second) // and QuarantineTimeout
			if e.Kind == Arrived {
				t.Fatal("it arrived over a link that was cut")
			}
			ctx, cancel := context.WithTimeout(t.Context(), farPeer+farSlack)
			defer cancel()
			if err := push.Wait(ctx); err == nil || ctx.Err() != nil {
				t.Errorf("the writer's end: %v", err)
			}
			within(t, "the writer's end", began, farPeer)
			if c.close {
				return
			}
			f.lab.Both(f.from, f.to, netlab.Shape{})
			// The reader may close the connection on which it heard nothing only now,
			// under the first transfer.
			if err := f.pushed(t, 8); errors.Is(err, ErrConnection) {
				f.wantPushed(t, 8)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

func within(t *testing.T, what string, began time.Time, bound time.Duration) {
	t.Helper()
	if d := time.Since(began); d > bound+farSlack {
		t.Errorf("%s came after %v, want at most %v and what the machine adds", what, d, bound)
	}
}

// pacedNetwork lets so many bytes a second through from writers to readers, over all connections together.
type pacedNetwork struct {
	Network
	rate float64
	link chan struct{} // whoever holds it writes
}

type pacedConn struct {
	net.Conn
	n *pacedNetwork
}

func (n *pacedNetwork) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := n.Network.Dial(ctx, addr)
	return pacedConn{c, n}, err
}

func (c pacedConn) Write(b []byte) (int, error) {
	c.n.link <- struct{}{}
	defer func() { <-c.n.link }()
	time.Sleep(time.Duration(float64(len(b)) / c.n.rate * float64(time.Second)))
	return c.Conn.Write(b)
}

// TestExposed: over a link up to twice as fast as layers are computed, what a transfer still takes behind the last layer is at most 2/L of the whole.
func TestExposed(t *testing.T) {
	for _, layers := range []int{16, 32, 64} {
		for _, ratio := range []float64{1.02, 1.3, 1.7, 2} { // a layer's computing over its way through the link
			t.Run(fmt.Sprintf("layers=%d/link=%.2f", layers, ratio), func(t *testing.T) {
				l := Layout{Regions: layers, PageBytes: 1 << 10, Hash: 1}
				const nPages = 100
				const rate = 1e6
				whole := time.Duration(float64(layers*nPages*l.PageBytes) / rate * float64(time.Second))
				exposedOf(t, l, nPages, rate, time.Duration(ratio*float64(whole)/float64(layers)), whole)
			})
		}
	}
}

func exposedOf(t *testing.T, l Layout, nPages int, rate float64, compute, whole time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		tr := transport{name: "mem", network: NewMem(), listen: "reader"}
		p := newPair(t, tr, l, nPages, func(_ *ReaderOptions, w *WriterOptions) {
			w.Network = &pacedNetwork{w.Network, rate, make(chan struct{}, 1)}
		})
		var pages []int32
		for i := range int32(nPages) {
			pages = append(pages, i)
		}
		push := p.open(t, p.grant(t, time.Hour, pages...))
		for region := range l.Regions {
			time.Sleep(compute)
			if err := push.Send(region, pages, 0); err != nil {
				t.Fatal(err)
			}
		}
		last := time.Now()
		if err := push.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		exposed := time.Since(last)
		t.Logf("exposed %v of %v: %.4f, at most %.4f", exposed, whole, exposed.Seconds()/whole.Seconds(), 2/float64(l.Regions))
		if exposed > 2*whole/time.Duration(l.Regions) {
			t.Errorf("%v are exposed of a transfer of %v in %d layers", exposed, whole, l.Regions)
		}
	})
}
