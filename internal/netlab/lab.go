//go:build linux

package netlab

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

// ErrDenied reports that this process may not make namespaces or interfaces.
var ErrDenied = errors.New("needs /dev/net/tun and the right to make network namespaces")

// Shape is the properties of a way. The zero value forwards packets at once.
type Shape struct {
	Cut   bool          // nothing arrives, packets in flight included
	Loss  float64       // share of the packets that are lost, each drawn independently
	Delay time.Duration // from sending to arrival
	Rate  float64       // bytes a second; 0: no limit
	Queue int           // bytes that may wait at Rate; 0: what Rate sends in 100 ms
}

// Count has the packet counters of a way.
type Count struct {
	Packets, Bytes uint64 // arrived
	Lost           uint64 // packets drawn to be lost
	Dropped        uint64 // packets dropped at a full queue, a cut way, or an unknown place
}

// Lab is the network.
type Lab struct {
	mtu  int
	seed uint64
	pool sync.Pool // *[]byte of mtu
	done chan struct{}
	runs sync.WaitGroup

	mu     sync.RWMutex
	tap    func(packet []byte)
	places map[netip.Addr]*Place
	ways   map[[2]netip.Addr]*way // from, to
}

// New returns a network without places, with packets of at most mtu bytes. The seed determines
// which packets are lost.
func New(mtu int, seed uint64) *Lab {
	l := &Lab{mtu: mtu, seed: seed, done: make(chan struct{}), places: make(map[netip.Addr]*Place), ways: make(map[[2]netip.Addr]*way)}
	l.pool.New = func() any { b := make([]byte, mtu); return &b }
	return l
}

// Shape changes one way from now on, but not the way back.
func (l *Lab) Shape(from, to netip.Addr, s Shape) {
	if s.Queue == 0 {
		s.Queue = int(s.Rate / 10)
	}
	w := l.way(from, to)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shape = s
}

// Both changes a way and the way back.
func (l *Lab) Both(a, b netip.Addr, s Shape) {
	l.Shape(a, b, s)
	l.Shape(b, a, s)
}

// Mend makes every way forward packets at once.
func (l *Lab) Mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.ways {
		w.mu.Lock()
		w.shape = Shape{}
		w.mu.Unlock()
	}
}

// Tap calls f with every packet that leaves a place from now on. Several goroutines may call f,
// which must not keep the packet.
func (l *Lab) Tap(f func(packet []byte)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tap = f
}

// Count returns the counters of one way.
func (l *Lab) Count(from, to netip.Addr) Count {
	w := l.way(from, to)
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count
}

// Close removes the network. Processes in a place lose its interface.
func (l *Lab) Close() {
	l.mu.Lock()
	for _, p := range l.places {
		close(p.do)
		p.tun.Close()
	}
	l.mu.Unlock()
	close(l.done)
	l.runs.Wait()
}

// maxInFlight bounds the packets of a way that were sent and have not arrived.
const maxInFlight = 1 << 16

// packet is a packet in flight.
type packet struct {
	buf *[]byte
	n   int
	due time.Time
}

// way is one direction between two places.
type way struct {
	l        *Lab
	to       netip.Addr
	inFlight chan packet

	mu    sync.Mutex
	shape Shape
	count Count
	rng   *rand.Rand
	free  time.Time // when the last accepted packet will have been sent
}

func (l *Lab) way(from, to netip.Addr) *way {
	l.mu.RLock()
	w := l.ways[[2]netip.Addr{from, to}]
	l.mu.RUnlock()
	if w != nil {
		return w
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if w = l.ways[[2]netip.Addr{from, to}]; w == nil {
		a, b := from.As4(), to.As4()
		w = &way{l: l, to: to, inFlight: make(chan packet, maxInFlight)}
		w.rng = rand.New(rand.NewPCG(l.seed, uint64(a[3])<<8|uint64(b[3])))
		l.ways[[2]netip.Addr{from, to}] = w
		l.runs.Go(w.deliver)
	}
	return w
}

// send accepts a packet at the beginning of the way, and owns buf from then on.
func (w *way) send(buf *[]byte, n int) {
	now := time.Now()
	w.mu.Lock()
	s := w.shape
	switch wait := w.free.Sub(now).Seconds() * s.Rate; {
	case s.Cut || s.Rate > 0 && wait > float64(s.Queue):
		w.count.Dropped++
	case s.Loss > 0 && w.rng.Float64() < s.Loss:
		w.count.Lost++
	default:
		due := now
		if s.Rate > 0 {
			if w.free.After(now) {
				due = w.free
			}
			due = due.Add(time.Duration(float64(n) / s.Rate * float64(time.Second)))
			w.free = due
		}
		select {
		case w.inFlight <- packet{buf, n, due.Add(s.Delay)}:
			w.mu.Unlock()
			return
		default:
			w.count.Dropped++
		}
	}
	w.mu.Unlock()
	w.l.pool.Put(buf)
}

// deliver writes packets to their place when they are due.
func (w *way) deliver() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		var p packet
		select {
		case p = <-w.inFlight:
		case <-w.l.done:
			return
		}
		if d := time.Until(p.due); d > 0 {
			timer.Reset(d)
			select {
			case <-timer.C:
			case <-w.l.done:
				return
			}
		}
		w.l.mu.RLock()
		to := w.l.places[w.to]
		w.l.mu.RUnlock()
		w.mu.Lock()
		cut := w.shape.Cut
		w.mu.Unlock()
		arrived := false
		if to != nil && !cut {
			_, err := to.tun.Write((*p.buf)[:p.n]) // a packet without room in the interface is lost
			arrived = err == nil
		}
		w.l.pool.Put(p.buf)
		w.mu.Lock()
		if arrived {
			w.count.Packets++
			w.count.Bytes += uint64(p.n)
		} else {
			w.count.Dropped++
		}
		w.mu.Unlock()
	}
}

// forward reads a place's packets until its interface is closed.
func (l *Lab) forward(p *Place) {
	for {
		buf := l.pool.Get().(*[]byte)
		b := *buf
		n, err := p.tun.Read(b)
		if err != nil {
			return
		}
		if n < 20 || b[0]>>4 != 4 {
			l.pool.Put(buf)
			continue // not IPv4
		}
		l.mu.RLock()
		tap := l.tap
		l.mu.RUnlock()
		if tap != nil {
			tap(b[:n])
		}
		src, dst := netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		l.way(src, dst).send(buf, n)
	}
}

// Place returns the namespace of an IPv4 address, and creates it at the first call. All places
// are in one network of 24 bits.
func (l *Lab) Place(at netip.Addr) (*Place, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.places[at]; p != nil {
		return p, nil
	}
	p := &Place{do: make(chan func())}
	ready := make(chan error)
	go p.run(at, l.mtu, ready)
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("netlab: a network namespace for %s: %w", at, err)
	}
	l.places[at] = p
	l.runs.Go(func() { l.forward(p) })
	return p, nil
}
