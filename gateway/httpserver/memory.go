package httpserver

import (
	"net"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"

	"github.com/valyala/fasthttp"
)

// MaxBodyMemory bounds the large bodies, the memory of their parse and that of answers (Charge).
// While more than limitFrom is reserved, the garbage collector runs more often, and Go's memory
// limit keeps reserved memory, garbage and fragmentation together within the bound and limitSlack.
// Bodies hold no pointers, so that this costs little. Afterwards the memory is returned to the
// system.
const (
	limitFrom  = 4 << 20
	limitPause = 100 * time.Millisecond
	limitRest  = 2 * time.Second // between the last large body and the return of the memory
	limitGC    = 25              // GOGC meanwhile
	limitSlack = 0.375           // of MaxBodyMemory
	minSlack   = 16 << 20        // bytes, at least: with less the collector would run all the time
)

// pooledBody is the largest buffer of a body that fasthttp keeps for another request, in bytes.
const pooledBody = 1 << 20

// bodyConn returns the Conn of a request, also below TLS, or nil if the connection is of another
// kind.
func bodyConn(ctx *fasthttp.RequestCtx) *Conn {
	if ctx == nil {
		return nil
	}
	nc := ctx.Conn()
	if t, ok := nc.(interface{ NetConn() net.Conn }); ok {
		nc = t.NetConn()
	}
	c, _ := nc.(*Conn)
	return c
}

// Charge reserves n bytes for the request within MaxBodyMemory, until its body is dropped or else
// its answer is sent. It returns false if they do not fit. Up to HeadBytes are not counted.
func Charge(ctx *fasthttp.RequestCtx, n int) bool {
	c := bodyConn(ctx)
	return c == nil || n <= HeadBytes || c.reserve(n)
}

// Refund frees n bytes that Charge reserved.
func Refund(ctx *fasthttp.RequestCtx, n int) {
	if c := bodyConn(ctx); c != nil {
		c.unreserve(n)
	}
}

// Held returns the bytes that are reserved for large bodies and for answers.
func (l *listener) Held() int64 { return l.held.Load() }

// maxHeld returns the bound of large bodies in bytes; 0: any number.
func (l *listener) maxHeld() int64 { return int64(max(0, l.limits.Load().MaxBodyMemory)) }

// reserve reserves n bytes for the connection's request. It returns false if they do not fit.
func (c *Conn) reserve(n int) bool {
	l := c.l
	held := l.held.Add(int64(n))
	most := l.maxHeld()
	if held > most && most > 0 {
		l.held.Add(-int64(n))
		return false
	}
	c.held.Add(int64(n))
	if c.isClosed() { // nothing else frees it
		c.release()
	}
	if held > limitFrom && l.limiting.CompareAndSwap(false, true) {
		collector.tighten(most)
		go l.limitGarbage(most)
	}
	return true
}

// isClosed reports whether the connection is closed.
func (c *Conn) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// unreserve frees n bytes that reserve reserved, unless release has freed them.
func (c *Conn) unreserve(n int) {
	for {
		held := c.held.Load()
		freed := min(held, int64(n))
		if freed <= 0 {
			return
		}
		if c.held.CompareAndSwap(held, held-freed) {
			c.l.held.Add(-freed)
			return
		}
	}
}

// limitGarbage runs after tighten(most), while large bodies are held, and returns their memory to
// the system.
func (l *listener) limitGarbage(most int64) {
	for open := true; ; collector.tighten(most) {
		for open {
			for open && l.held.Load() > limitFrom {
				open = l.pause(limitPause)
				collector.adjust()
			}
			if open = open && l.pause(limitRest); l.held.Load() <= limitFrom {
				break
			}
		}
		if open {
			debug.FreeOSMemory()
		}
		collector.restore(most)
		if !open {
			return
		}
		most = l.maxHeld()
		l.limiting.Store(false)
		if l.held.Load() <= limitFrom || !l.limiting.CompareAndSwap(false, true) {
			return
		}
	}
}

// pause waits for d. It returns false if the server has ended.
func (l *listener) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-l.ended:
		return false
	}
}

// collector limits the garbage of the process while any server in it holds large bodies.
var collector gcSettings

type gcSettings struct {
	mu      sync.Mutex
	servers int   // that hold large bodies
	most    int64 // sum of their MaxBodyMemory
	unbound int   // those without MaxBodyMemory
	percent int   // GOGC before
	limit   int64 // Go's memory limit before, in bytes
	base    int64 // memory of everything else, in bytes
}

// tighten limits garbage for a server with MaxBodyMemory most; 0: any number.
func (p *gcSettings) tighten(most int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.servers++; p.servers == 1 {
		if p.percent = debug.SetGCPercent(limitGC); p.percent >= 0 && p.percent < limitGC {
			debug.SetGCPercent(p.percent)
		}
		p.limit = debug.SetMemoryLimit(-1)
		p.base = goMemory()
	}
	if p.most += most; most == 0 {
		p.unbound++
	}
	p.setLimit()
}

// adjust follows the growth of everything else.
func (p *gcSettings) adjust() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.servers > 0 {
		p.setLimit()
	}
}

// restore ends what tighten(most) began.
func (p *gcSettings) restore(most int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.most -= most; most == 0 {
		p.unbound--
	}
	if p.servers--; p.servers == 0 {
		debug.SetGCPercent(p.percent)
		debug.SetMemoryLimit(p.limit)
		return
	}
	p.setLimit()
}

// setLimit sets Go's memory limit to the bound of large bodies and the memory of everything else.
// Memory in use beyond the bound of large bodies belongs to everything else, and is never
// collected.
func (p *gcSettings) setLimit() {
	limit := p.limit
	if p.unbound == 0 {
		used := goMemory()
		p.base = max(p.base, used-p.most)
		limit = min(limit, p.base+p.most+max(minSlack, int64(limitSlack*float64(p.most))))
	}
	debug.SetMemoryLimit(limit)
}

// goMemory returns the memory that Go holds for objects that were in use at the end of the last
// collection, with its overheads, in bytes.
func goMemory() (used int64) {
	s := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
		{Name: "/memory/classes/heap/unused:bytes"}, {Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/live:bytes"},
	}
	metrics.Read(s)
	n := func(i int) int64 { return int64(s[i].Value.Uint64()) }
	return n(0) - n(1) - n(2) - n(3) - n(4) + n(5)
}
