package httpserver

import (
	"errors"
	"net"
	"net/netip"
	"time"
)

// ErrNoMemory reports that a large body does not fit MaxBodyMemory.
var ErrNoMemory = errors.New("gateway: too many bytes of request bodies are held")

// arrival is the state of a request that is being received. The head has HeaderTimeout; each byte
// extends that by the time that MinBodyRate gives it. The memory of a large body is reserved at
// once, within MaxBodyMemory.
type arrival struct {
	begun    bool
	start    time.Time
	bytes    int64 // received
	expect   int   // bytes of a large read that have not arrived
	counted  int64 // bytes that are reserved within MaxBodyMemory
	sized    bool  // Server.expect has reserved the body
	answered bool  // an answer was written
}

// arrivalDeadline returns when the next byte has to arrive.
func (a *arrival) arrivalDeadline(l *listener) time.Time {
	current := l.limits.Load()
	timeout := current.HeaderTimeout
	if perSecond := current.MinBodyRate; perSecond > 0 {
		timeout += time.Duration(float64(a.bytes) / float64(perSecond) * float64(time.Second))
	}
	return a.start.Add(min(timeout, longestArrival))
}

// longestArrival bounds the time in which a request arrives.
const longestArrival = 10 * time.Minute

// reserveBody reserves memory for a large body of which nBytes are to be read. It reserves twice as
// many, because the server rounds its buffer up to a power of two.
func (c *Conn) reserveBody(nBytes int) error {
	switch {
	case c.sized, c.expect > 0: // already reserved
		return nil
	case nBytes > HeadBytes:
		if !c.reserve(2 * nBytes) {
			return ErrNoMemory
		}
		c.expect = nBytes
	case c.bytes > c.counted+2*HeadBytes: // a body in small chunks, for which the server doubles its buffer
		if !c.reserve(int(c.bytes)) {
			return ErrNoMemory
		}
		c.counted = 2 * c.bytes
	}
	return nil
}

// received counts bytes that have arrived.
func (a *arrival) received(n int) {
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

// finishRequest resets the state after a request was answered.
func (c *Conn) finishRequest() {
	c.arrival = arrival{}
	c.release()
	c.setIdle()
}

// release frees the reserved memory of a large body.
func (c *Conn) release() {
	if n := c.held.Swap(0); n > 0 {
		c.l.held.Add(-n)
	}
}

// address returns the address that a connection is counted for: an IPv4 address, or the /64 prefix
// of an IPv6 address, within which one host can choose.
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

// refusedAnswer is the answer to a connection beyond --max-connections or
// --max-connections-per-address.
const refusedAnswer = "HTTP/1.1 %d %s\r\nConnection: close\r\nRetry-After: %d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
