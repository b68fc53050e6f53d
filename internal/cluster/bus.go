package cluster

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// Bounds of the NATS client.
const (
	busConnectTimeout = 2 * time.Second
	busPing           = 5 * time.Second // a server that misses two is lost
	busWriteTimeout   = 2 * time.Second // a server that reads nothing for so long is lost
	busRetryMin       = 100 * time.Millisecond
	busRetryMax       = 5 * time.Second
	// DefaultStale: caches change by the second, but a server that is back soon
	// delivers what was missed. After this time, old events are worse than none.
	DefaultStale = 15 * time.Second
)

// BusOptions configure a Bus.
type BusOptions struct {
	Name      string      // of this node, for the server's logs
	InProcess *Server     // a gateway's own server; nil: the servers of SetServers
	TLS       *tls.Config // mutual; nil: plain, or TLS for a tls:// address
	// Stale is how long subscribers keep the events of nodes without a server.
	Stale time.Duration // 0: DefaultStale
	Log   *slog.Logger
}

// Bus is this node's connection to NATS: to one of the known servers, and to another
// when that one is lost. Events published while there is no connection are lost.
type Bus struct {
	o      BusOptions
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	loops  sync.WaitGroup
	wake   chan struct{} // capacity 1: servers has changed

	conn atomic.Pointer[nats.Conn] // nil: not connected

	mu      sync.Mutex
	servers []string
	subs    map[*Subscription]struct{}
}

// NewBus returns a Bus that connects in the background.
func NewBus(o BusOptions) *Bus {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Stale = cmp.Or(o.Stale, DefaultStale)
	b := &Bus{o: o, wake: make(chan struct{}, 1), subs: map[*Subscription]struct{}{}}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	b.loops.Go(b.run)
	return b
}

// SetServers sets the addresses of servers: those of the member list, or the URL of
// --nats-url (with user and password, if any). An open connection is kept.
func (b *Bus) SetServers(addrs []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	addrs = slices.Sorted(slices.Values(addrs))
	if !slices.Equal(addrs, b.servers) {
		b.servers = addrs
		signal(b.wake)
	}
}

// Connected reports whether a server is connected now.
func (b *Bus) Connected() bool { return b.conn.Load() != nil }

// Close ends the connection, the publishers and the subscriptions, and returns
// when they have ended. It must not be called from a subscriber.
func (b *Bus) Close() {
	b.cancel()
	b.loops.Wait()
	for _, s := range b.subscriptions() {
		s.Close()
	}
}

func (b *Bus) subscriptions() []*Subscription {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Keys(b.subs))
}

// lostGrace is how long a connection is lost before it is logged: a node loses its gateway's
// server shortly before it is stopped itself when a whole cluster stops.
const lostGrace = 3 * time.Second

// run keeps one connection.
func (b *Bus) run() {
	retry := busRetryMin
	var gone time.Time // when the connection was lost; zero: subscribers have dropped all events
	var lostErr error  // why, until it is logged
	for b.ctx.Err() == nil {
		conn, lost, err := b.connect()
		if err != nil {
			b.o.Log.Debug("no NATS server", "error", err)
			if lostErr != nil && time.Since(gone) >= lostGrace {
				b.o.Log.Warn("block events: connection to NATS lost; routing falls back to consistent hashing", "error", lostErr)
				lostErr = nil
			}
			if !gone.IsZero() && time.Since(gone) >= b.o.Stale {
				gone = time.Time{}
				for _, s := range b.subscriptions() {
					s.forget(fmt.Sprintf("NATS has been gone for %v", b.o.Stale))
				}
			}
			sleep(b.ctx, retry, b.wake)
			retry = min(2*retry, busRetryMax)
			continue
		}
		retry, lostErr = busRetryMin, nil
		b.o.Log.Info("connected to NATS", "server", conn.ConnectedUrlRedacted())
		b.attach(conn)
		select {
		case <-lost:
			gone, lostErr = time.Now(), cmp.Or(conn.LastError(), io.EOF)
		case <-b.ctx.Done():
		}
		b.conn.Store(nil)
		conn.Close()
		<-lost
	}
}

// connect tries the servers in random order, so that nodes spread over them.
func (b *Bus) connect() (conn *nats.Conn, lost <-chan struct{}, err error) {
	if b.o.InProcess != nil {
		return b.connectTo("in-process", nats.InProcessServer(b.o.InProcess.srv))
	}
	b.mu.Lock()
	servers := slices.Clone(b.servers)
	b.mu.Unlock()
	rand.Shuffle(len(servers), func(i, j int) { servers[i], servers[j] = servers[j], servers[i] })
	err = fmt.Errorf("%w: none is known", ErrNATS)
	for _, addr := range servers {
		if b.ctx.Err() != nil {
			break
		}
		if b.o.TLS != nil {
			conn, lost, err = b.connectTo(addr, nats.Secure(b.o.TLS))
		} else {
			conn, lost, err = b.connectTo(addr)
		}
		if err == nil {
			return conn, lost, nil
		}
	}
	return nil, nil, err
}

// connectTo also returns a channel that is closed when the connection has ended.
func (b *Bus) connectTo(addr string, opts ...nats.Option) (*nats.Conn, <-chan struct{}, error) {
	lost := make(chan struct{})
	ended := sync.OnceFunc(func() { close(lost) })
	conn, err := nats.Connect(addr, append(opts,
		nats.Name(b.o.Name), nats.NoReconnect(), nats.Timeout(busConnectTimeout),
		nats.PingInterval(busPing), nats.MaxPingsOutstanding(2), nats.FlusherTimeout(busWriteTimeout),
		nats.ClosedHandler(func(*nats.Conn) { ended() }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			b.o.Log.Warn("NATS", "error", err) // a slow subscriber, which then sees a gap
		}))...)
	if err != nil {
		return nil, nil, fmt.Errorf("cluster: connecting to NATS at %s: %w", addr, err)
	}
	return conn, lost, nil
}

// attach makes conn the connection and moves the subscriptions to it.
func (b *Bus) attach(conn *nats.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.conn.Store(conn)
	for s := range b.subs {
		s.subscribe(conn)
	}
}
