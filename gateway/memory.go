package gateway

import (
	"net"
	"runtime/debug"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/internal/openai"
)

// MaxBodyMemory counts each large body and what its parse takes besides (charge).
// While more than tendFrom is counted the garbage collector runs more often, so that
// garbage adds a quarter and not as much again; bodies hold no pointers, so that this
// costs little. Afterwards the memory goes back to the system.
const (
	tendFrom  = 4 << 20
	tendPause = 100 * time.Millisecond
	tendRest  = 2 * time.Second // between the last large body and the return of the memory
	tendGC    = 25              // GOGC meanwhile
)

// pooledBody is the largest buffer of a body that is kept for the next request, in bytes.
const pooledBody = 1 << 20

// bodyConn returns the connection below a request, also below TLS; nil: it is another.
func bodyConn(ctx *fasthttp.RequestCtx) *clientConn {
	if ctx == nil {
		return nil
	}
	nc := ctx.Conn()
	if t, ok := nc.(interface{ NetConn() net.Conn }); ok {
		nc = t.NetConn()
	}
	c, _ := nc.(*clientConn)
	return c
}

// charge returns a function that counts bytes for the request within MaxBodyMemory
// until its body is released. Beyond it the function returns 429.
func (g *Gateway) charge(ctx *fasthttp.RequestCtx) func(bytes int) *openai.Error {
	return func(n int) *openai.Error {
		c := bodyConn(ctx)
		if c == nil || n <= headBytes || c.take(n) {
			return nil
		}
		g.refused("body_memory")
		return g.noMemory()
	}
}

// noMemory is the answer to a request that MaxBodyMemory has no room for.
func (g *Gateway) noMemory() *openai.Error {
	return tooMany(retryAfter, "large requests take as many bytes of memory as they may (--max-body-memory %d): send this one again later", g.lim().MaxBodyMemory)
}

// take counts n bytes for the connection's request; false: there is no room.
func (c *clientConn) take(n int) bool {
	l := c.l
	held := l.held.Add(int64(n))
	if most := l.maxHeld.Load(); held > most && most > 0 {
		l.held.Add(-int64(n))
		return false
	}
	c.held.Add(int64(n))
	if held > tendFrom && l.tending.CompareAndSwap(false, true) {
		go l.tend()
	}
	return true
}

// refund gives back n bytes that take has counted.
func (c *clientConn) refund(n int) {
	c.held.Add(-int64(n))
	c.l.held.Add(-int64(n))
}

// tend runs while large bodies are held and returns their memory to the system.
func (l *listener) tend() {
	for open := true; ; {
		collector.hurry()
		for open && l.held.Load() > tendFrom {
			open = l.pause(tendPause)
		}
		collector.relax()
		open = open && l.pause(tendRest)
		switch {
		case !open:
			return
		case l.held.Load() > tendFrom:
			continue
		}
		debug.FreeOSMemory()
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

// collector lowers GOGC of the process while any gateway in it asks for it.
var collector gcPercent

type gcPercent struct {
	mu      sync.Mutex
	hurries int
	before  int
}

func (p *gcPercent) hurry() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hurries++; p.hurries == 1 {
		if p.before = debug.SetGCPercent(tendGC); p.before >= 0 && p.before < tendGC {
			debug.SetGCPercent(p.before)
		}
	}
}

func (p *gcPercent) relax() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hurries--; p.hurries == 0 {
		debug.SetGCPercent(p.before)
	}
}
