package httpserver

import (
	"errors"
	"net"
	"net/netip"
	"time"
)

// ErrNoMemory ends the reading of a large body that there is no memory for.
var ErrNoMemory = errors.New("gateway: too many bytes of request bodies are held")

// arrival is how a connection's present request comes in. Its head has
// HeaderTimeout, and with each byte it may take as long as MinBodyRate gives it;
// the memory of a large body, which is taken at once for all of it, is within
// MaxBodyMemory.
type arrival struct {
	begun    bool
	start    time.Time
	bytes    int64 // that have come
	expect   int   // of the part of a large body that is under way
	counted  int64 // of bytes, within MaxBodyMemory
	sized    bool  // expect has counted the body
	answered bool  // something was written, if only that it may go on
}

// deadline is the end of patience with what has come so far.
func (a *arrival) deadline(l *listener) time.Time {
	patience := time.Duration(l.headerTimeout.Load())
	if perSecond := l.minRate.Load(); perSecond > 0 {
		patience += time.Duration(float64(a.bytes) / float64(perSecond) * float64(time.Second))
	}
	return a.start.Add(min(patience, longestArrival))
}

// longestArrival is the time that any request has to arrive.
const longestArrival = 10 * time.Minute

// room takes memory for a large body of which so many bytes are to be read: twice as
// many, because the server's buffer for it is rounded up to a power of two.
func (c *Conn) room(nBytes int) error {
	switch {
	case c.sized, c.expect > 0: // more of the same
		return nil
	case nBytes > HeadBytes:
		if !c.take(2 * nBytes) {
			return ErrNoMemory
		}
		c.expect = nBytes
	case c.bytes > c.counted+2*HeadBytes: // a body in small chunks, whose length is not known
		// The server's buffer for it doubles.
		if !c.take(int(c.bytes)) {
			return ErrNoMemory
		}
		c.counted = 2 * c.bytes
	}
	return nil
}

// came counts bytes that have arrived.
func (a *arrival) came(n int) {
	if n <= 0 {
		return
	}
	if !a.begun {
		a.begun, a.start = true, time.Now()
	}
	a.bytes += int64(n)
	if a.expect > 0 {
		a.counted += int64(min(n, a.expect))
	}
	a.expect = max(0, a.expect-n)
}

// over ends the request, which has been answered.
func (c *Conn) over() {
	c.arrival = arrival{}
	c.release()
	c.setIdle()
}

// release gives back the memory of a large body.
func (c *Conn) release() {
	if n := c.held.Swap(0); n > 0 {
		c.l.held.Add(-n)
	}
}

// address is whom a connection counts for: an IPv4 address, or the 64 bits of an
// IPv6 address that one host can choose from.
func address(c net.Conn) (netip.Addr, bool) {
	tcp, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}, false
	}
	a, ok := netip.AddrFromSlice(tcp.IP)
	if a = a.Unmap(); ok && a.Is6() {
		if p, err := a.Prefix(64); err == nil {
			a = p.Addr()
		}
	}
	return a, ok
}

// refusedAnswer is what a connection beyond --max-connections or
// --max-connections-per-address gets.
const refusedAnswer = "HTTP/1.1 %d %s\r\nConnection: close\r\nRetry-After: %d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
