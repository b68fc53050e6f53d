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

// ErrDenied says that this process may not make namespaces or interfaces.
var ErrDenied = errors.New("needs /dev/net/tun and the right to make network namespaces")

// Shape is what a way does to packets. The zero value carries them as they come.
type Shape struct {
	Cut   bool          // nothing arrives, nor what is under way
	Loss  float64       // share of the packets that are lost, each drawn for itself
	Delay time.Duration // from leaving to arriving
	Rate  float64       // bytes a second; 0: no limit
	Queue int           // bytes that may wait at Rate; 0: what Rate sends in 100 ms
}

// Count is what a way has done to packets.
type Count struct {
	Packets, Bytes uint64 // arrived
	Lost           uint64 // packets drawn to be lost
	Dropped        uint64 // packets that found a full queue, a cut way, or no place
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

// New returns a network without places, of packets of at most mtu bytes. The draws of which packets are lost follow from the seed.
func New(mtu int, seed uint64) *Lab {
	l := &Lab{mtu: mtu, seed: seed, done: make(chan struct{}), places: make(map[netip.Addr]*Place), ways: make(map[[2]netip.Addr]*way)}
	l.pool.New = func() any { b := make([]byte, mtu); return &b }
	return l
}

// Shape changes one way from now on; the way back is another.
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

// Mend makes every way carry packets as they come.
func (l *Lab) Mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.ways {
		w.mu.Lock()
		w.shape = Shape{}
		w.mu.Unlock()
	}
}

// Tap has f see every packet that leaves a place from now on, as a capture on the line would; f may be called from several goroutines, and keeps nothing of it.
func (l *Lab) Tap(f func(packet []byte)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tap = f
}

// Count returns what one way has done.
func (l *Lab) Count(from, to netip.Addr) Count {
	w := l.way(from, to)
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count
}

// Close takes the network down. What runs in a place loses its interface.
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

// maxUnderWay bounds the packets of a way that have left and not arrived.
const maxUnderWay = 1 << 16

// packet is one that is under way.
type packet struct {
	buf *[]byte
	n   int
	due time.Time
}

// way is one direction between two places.
type way struct {
	l        *Lab
	to       netip.Addr
	underWay chan packet

	mu    sync.Mutex
	shape Shape
	count Count
	rng   *rand.Rand
	free  time.Time // when the last packet that has been taken in has left
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
		w = &way{l: l, to: to, underWay: make(chan packet, maxUnderWay)}
		w.rng = rand.New(rand.NewPCG(l.seed, uint64(a[3])<<8|uint64(b[3])))
		l.ways[[2]netip.Addr{from, to}] = w
		l.runs.Go(w.deliver)
	}
	return w
}

// take takes a packet in at its beginning; buf is its own from here on.
func (w *way) take(buf *[]byte, n int) {
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
		case w.underWay <- packet{buf, n, due.Add(s.Delay)}:
			w.mu.Unlock()
			return
		default:
			w.count.Dropped++
		}
	}
	w.mu.Unlock()
	w.l.pool.Put(buf)
}

// deliver brings packets to their place when it is time.
func (w *way) deliver() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		var p packet
		select {
		case p = <-w.underWay:
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
			_, err := to.tun.Write((*p.buf)[:p.n]) // what finds no room is lost, as anywhere
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

// carry takes in a place's packets until its interface is closed.
func (l *Lab) carry(p *Place) {
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
		l.way(src, dst).take(buf, n)
	}
}

// Place makes the namespace of an IPv4 address, in a network of 24 bits that all places share, or finds it.
func (l *Lab) Place(at netip.Addr) (*Place, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.places[at]; p != nil {
		return p, nil
	}
	p := &Place{do: make(chan func())}
	ready := make(chan error)
	go p.live(at, l.mtu, ready)
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("netlab: a network namespace for %s: %w", at, err)
	}
	l.places[at] = p
	l.runs.Go(func() { l.carry(p) })
	return p, nil
}
