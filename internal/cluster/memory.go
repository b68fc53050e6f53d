package cluster

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/tandem-serving/tandem/internal/rpc"
)

// memPackets is how many packets may wait for a member of an in-memory network. A full
// queue drops packets, as a socket does.
const memPackets = 1024

// Network is an in-memory network for gossip, on which whole clusters run in virtual
// time. It loses packets by a seeded draw, and addresses can be disconnected.
type Network struct {
	streams *rpc.Network
	mu      sync.Mutex
	draw    *rand.Rand
	loss    float64 // share of packets that are lost
	members map[string]*memTransport
	cut     map[string]bool
}

// NewNetwork returns a network that loses the given share of packets.
func NewNetwork(seed uint64, loss float64) *Network {
	return &Network{
		streams: rpc.NewNetwork(),
		draw:    rand.New(rand.NewPCG(seed, 0)),
		loss:    loss,
		members: map[string]*memTransport{},
		cut:     map[string]bool{},
	}
}

// Cut disconnects addr from all others, or connects it again.
func (n *Network) Cut(addr string, on bool) {
	n.mu.Lock()
	n.cut[addr] = on
	n.mu.Unlock()
	n.streams.Silence(addr, on)
}

// Transport joins the network at addr, an ip:port, for Options.Transport.
func (n *Network) Transport(addr string) (memberlist.Transport, error) {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBind, err)
	}
	l, err := n.streams.Listen(addr)
	if err != nil {
		return nil, err
	}
	t := &memTransport{
		n: n, addr: addr, at: at, listener: l,
		packets: make(chan *memberlist.Packet, memPackets),
		streams: make(chan net.Conn),
		closed:  make(chan struct{}),
	}
	n.mu.Lock()
	n.members[addr] = t
	n.mu.Unlock()
	t.ended.Go(t.accept)
	return t, nil
}

// memTransport is one member's end of a Network.
type memTransport struct {
	n        *Network
	addr     string
	at       netip.AddrPort
	listener net.Listener
	packets  chan *memberlist.Packet
	streams  chan net.Conn
	closed   chan struct{}
	once     sync.Once
	ended    sync.WaitGroup
}

func (t *memTransport) accept() {
	for {
		c, err := t.listener.Accept()
		if err != nil {
			return
		}
		select {
		case t.streams <- c:
		case <-t.closed:
			c.Close()
			return
		}
	}
}

func (t *memTransport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return t.at.Addr().AsSlice(), int(t.at.Port()), nil
}

// WriteTo sends a packet. As with UDP, a lost packet is no error.
func (t *memTransport) WriteTo(b []byte, addr string) (time.Time, error) {
	now := time.Now()
	t.n.mu.Lock()
	defer t.n.mu.Unlock()
	to := t.n.members[addr]
	if to == nil || t.n.cut[addr] || t.n.cut[t.addr] || t.n.draw.Float64() < t.n.loss {
		return now, nil
	}
	p := &memberlist.Packet{Buf: append([]byte(nil), b...), From: net.UDPAddrFromAddrPort(t.at), Timestamp: now}
	select {
	case to.packets <- p:
	default:
	}
	return now, nil
}

func (t *memTransport) PacketCh() <-chan *memberlist.Packet { return t.packets }
func (t *memTransport) StreamCh() <-chan net.Conn           { return t.streams }

func (t *memTransport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	t.n.mu.Lock()
	cut := t.n.cut[t.addr]
	t.n.mu.Unlock()
	if cut {
		<-ctx.Done()
		return nil, fmt.Errorf("cluster: dialling %s: %w", addr, ctx.Err())
	}
	return t.n.streams.Dial(ctx, addr)
}

func (t *memTransport) Shutdown() error {
	t.once.Do(func() {
		t.n.mu.Lock()
		delete(t.n.members, t.addr)
		t.n.mu.Unlock()
		close(t.closed)
		t.listener.Close()
		t.ended.Wait()
	})
	return nil
}
