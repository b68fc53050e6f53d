package httpserver

import (
	"bytes"
	"container/list"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/internal/sock"
)

// idleState is the state of a connection between requests. A connection has a request from the end
// of the request's head until the server waits for the next head. Connections without a request may
// be closed in favor of new ones.
type idleState struct {
	place *list.Element // in the listener's list; nil: closed; guarded by the listener's mutex
	since time.Time     // when its last request ended; guarded by the listener's mutex
	first atomic.Int64  // when the first bytes of the current head were read, in ns since the listener was made

	// Used by the reading goroutine only.
	busy bool // it has a request
	line bool // the current line of the head is not empty
	head bool // a line of the head has ended
}

// unlink removes c from the listener's accounts. l.mu must be held.
func (l *listener) unlink(c *Conn) {
	if c.idle.place == nil {
		return
	}
	l.conns.Remove(c.idle.place)
	c.idle.place = nil
	if c.from.IsValid() {
		if l.from[c.from]--; l.from[c.from] == 0 {
			delete(l.from, c.from)
		}
	}
}

// longestIdle returns the connection that is longest without a request, or nil if all have
// requests. l.mu must be held.
func (l *listener) longestIdle() *Conn {
	c, _ := l.conns.Front().Value.(*Conn) // the value of firstBusy is nil
	return c
}

// minIdle is the time that a connection has for sending a request before it may be closed in favor
// of another one. Without it, a burst of new connections could close one whose request has arrived
// and was not read yet. It delays the burst, not connections with requests.
const minIdle = 100 * time.Millisecond

// maxPassed bounds how many connections are passed over because a request is arriving on them.
const maxPassed = 64

// waitIdle waits until the connection that is longest without a request has been idle for minIdle,
// and at most minIdle. l.mu must be held; it is released meanwhile.
func (l *listener) waitIdle() {
	for until := time.Now().Add(minIdle); l.longestIdle() != nil; {
		wait := min(minIdle-time.Since(l.longestIdle().idle.since), time.Until(until))
		if wait <= 0 {
			return
		}
		l.mu.Unlock()
		time.Sleep(wait)
		l.mu.Lock()
	}
}

// unlinkIdle unlinks the connection that is longest without a request and returns it for the caller
// to close. It passes over up to maxPassed connections on which a request is arriving, unless there
// are no others. It returns nil if all have requests. l.mu must be held.
func (l *listener) unlinkIdle() *Conn {
	victim, now := l.longestIdle(), time.Now()
	for e, passed := l.conns.Front(), 0; e != l.firstBusy && passed < maxPassed; e, passed = e.Next(), passed+1 {
		if c := e.Value.(*Conn); !c.arriving(now) {
			victim = c
			break
		}
	}
	if victim != nil {
		l.unlink(victim)
	}
	return victim
}

// arriving reports whether a request is arriving: the socket has bytes that were not read, as
// happens on a busy machine, or the first were read within minIdle.
func (c *Conn) arriving(now time.Time) bool {
	first := c.l.made.Add(time.Duration(c.idle.first.Load()))
	return now.Sub(first) < minIdle || sock.Unread(c.Conn)
}

// closeIdle closes the connections whose last request ended before a time, and returns the number
// of open connections that are left.
func (l *listener) closeIdle(before time.Time) (left int) {
	l.mu.Lock()
	var old []*Conn
	for c := l.longestIdle(); c != nil && c.idle.since.Before(before); c = l.longestIdle() {
		l.unlink(c)
		old = append(old, c)
	}
	left = l.open()
	l.mu.Unlock()
	for _, c := range old {
		_ = c.end() // its owner may have closed it before
	}
	return left
}

// setBusy marks that c has a request, so that it is not closed in favor of another connection. It
// reports whether c is still open.
func (c *Conn) setBusy() bool {
	c.idle.busy = true
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	if c.idle.place == nil {
		return false
	}
	c.l.conns.MoveToBack(c.idle.place)
	return true
}

// setIdle marks that c waits for its next request.
func (c *Conn) setIdle() {
	c.idle.line, c.idle.head = false, false
	if !c.idle.busy {
		return
	}
	c.idle.busy = false
	c.l.mu.Lock()
	if c.idle.since = time.Now(); c.idle.place != nil {
		c.l.conns.MoveBefore(c.idle.place, c.l.firstBusy)
	}
	c.l.mu.Unlock()
}

// begins reports whether the next bytes that are received are the first of a head.
func (s *idleState) begins() bool { return !s.busy && !s.line && !s.head }

// headEnds reports whether the head of a request ends in p, the next bytes that were received:
// whether an empty line follows one that is not empty.
func (s *idleState) headEnds(p []byte) bool {
	for len(p) > 0 {
		end := bytes.IndexByte(p, '\n')
		line := p
		if end >= 0 {
			line = p[:end]
		}
		if len(line) > 1 || len(line) == 1 && line[0] != '\r' {
			s.line = true
		}
		switch {
		case end < 0:
			return false
		case s.line:
			s.line, s.head = false, true
		case s.head:
			return true
		}
		p = p[end+1:]
	}
	return false
}

// serving marks the connection of a request as busy. Read has done so before, unless a pipelined
// request's head was received in parts.
func serving(ctx *fasthttp.RequestCtx) {
	if c, ok := ctx.Conn().(*Conn); ok && !c.idle.busy {
		c.setBusy()
	}
}
