package httpserver

import (
	"net"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"

	"github.com/valyala/fasthttp"
)

// MaxBodyMemory counts each large body and what its parse takes besides (Charge).
// While more than tendFrom is counted the garbage collector runs more often, and Go's
// memory limit keeps what is counted, garbage and fragments together within the bound
// and tendSlack: bodies hold no pointers, so that this costs little. Afterwards the
// memory goes back to the system.
const (
	tendFrom  = 4 << 20
	tendPause = 100 * time.Millisecond
	tendRest  = 2 * time.Second // between the last large body and the return of the memory
	tendGC    = 25              // GOGC meanwhile
	tendSlack = 0.375           // of MaxBodyMemory
	minSlack  = 16 << 20        // bytes, at least: with less the collector would run all the time
)

// pooledBody is the largest buffer of a body that is kept for the next request, in bytes.
const pooledBody = 1 << 20

// bodyConn returns the connection below a request, also below TLS; nil: it is another.
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

// Charge counts n bytes for the request within MaxBodyMemory until its body is dropped;
// false: there is no room. Less than HeadBytes is not counted.
func Charge(ctx *fasthttp.RequestCtx, n int) bool {
	c := bodyConn(ctx)
	return c == nil || n <= HeadBytes || c.take(n)
}

// Refund gives back n bytes that Charge has counted.
func Refund(ctx *fasthttp.RequestCtx, n int) {
	if c := bodyConn(ctx); c != nil {
		c.refund(n)
	}
}

// Held is the number of bytes of large bodies that arrive or are being answered.
func (l *listener) Held() int64 { return l.held.Load() }

// take counts n bytes for the connection's request; false: there is no room.
func (c *Conn) take(n int) bool {
	l := c.l
	held := l.held.Add(int64(n))
	if most := l.maxHeld.Load(); held > most && most > 0 {
		l.held.Add(-int64(n))
		return false
	}
	c.held.Add(int64(n))
	if held > tendFrom && l.tending.CompareAndSwap(false, true) {
		collector.hurry(l.maxHeld.Load())
		go l.tend(l.maxHeld.Load())
	}
	return true
}

// refund gives back n bytes that take has counted.
func (c *Conn) refund(n int) {
	c.held.Add(-int64(n))
	c.l.held.Add(-int64(n))
}

// tend runs from hurry(most) on, while large bodies are held, and returns their memory
// to the system.
func (l *listener) tend(most int64) {
	for open := true; ; collector.hurry(most) {
		for open {
			for open && l.held.Load() > tendFrom {
				open = l.pause(tendPause)
				collector.adjust()
			}
			if open = open && l.pause(tendRest); l.held.Load() <= tendFrom {
				break
			}
		}
		if open {
			debug.FreeOSMemory()
		}
		collector.relax(most)
		if !open {
			return
		}
		most = l.maxHeld.Load()
		l.tending.Store(false)
		if l.held.Load() <= tendFrom || !l.tending.CompareAndSwap(false, true) {
			return
		}
	}
}

// pause waits; false: the gateway has ended.
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

// collector holds the garbage of the process down while any gateway in it asks for it.
var collector gcSettings

type gcSettings struct {
	mu      sync.Mutex
	hurries int
	most    int64 // MaxBodyMemory of those that ask, together
	unbound int   // those of them that have no bound
	percent int   // GOGC before
	limit   int64 // Go's memory limit before, in bytes
	base    int64 // memory of all else, in bytes
}

// hurry begins a time of large bodies, of at most most bytes together; 0: any number.
func (p *gcSettings) hurry(most int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hurries++; p.hurries == 1 {
		if p.percent = debug.SetGCPercent(tendGC); p.percent >= 0 && p.percent < tendGC {
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

// adjust follows the growth of what else takes memory.
func (p *gcSettings) adjust() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hurries > 0 {
		p.setLimit()
	}
}

// relax ends a time that hurry(most) began.
func (p *gcSettings) relax(most int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.most -= most; most == 0 {
		p.unbound--
	}
	if p.hurries--; p.hurries == 0 {
		debug.SetGCPercent(p.percent)
		debug.SetMemoryLimit(p.limit)
		return
	}
	p.setLimit()
}

// setLimit sets Go's memory limit to what large bodies and all else may take. What is
// in use beyond the bound of large bodies is something else, and is never collected.
func (p *gcSettings) setLimit() {
	limit := p.limit
	if p.unbound == 0 {
		used := goMemory()
		p.base = max(p.base, used-p.most)
		limit = min(limit, p.base+p.most+max(minSlack, int64(tendSlack*float64(p.most))))
	}
	debug.SetMemoryLimit(limit)
}

// goMemory returns the bytes that Go has from the system for what was in use at the
// end of the last collection.
func goMemory() (used int64) {
	s := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
		{Name: "/memory/classes/heap/unused:bytes"}, {Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/live:bytes"},
	}
	metrics.Read(s)
	n := func(i int) int64 { return int64(s[i].Value.Uint64()) }
	return n(0) - n(1) - n(2) - n(3) - n(4) + n(5)
}
