package gateway

import (
	"errors"
	"net"
	"net/netip"
	"time"

	"golang.org/x/time/rate"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// lim are the options with the limits that hold now.
func (g *Gateway) lim() *Options { return g.limits.Load() }

// SetLimits takes the limits of o from now on, and nothing else; any goroutine may
// call it while the gateway runs. What has been let in stays.
func (g *Gateway) SetLimits(o Options) error {
	if err := o.CheckLimits(); err != nil {
		return err
	}
	o.setDefaults()
	now := *g.lim()
	now.MaxBodyBytes, now.MaxBodyMemory, now.HeaderTimeout, now.MinBodyRate = o.MaxBodyBytes, o.MaxBodyMemory, o.HeaderTimeout, o.MinBodyRate
	now.MaxConnsPerAddress, now.SlowClientTimeout = o.MaxConnsPerAddress, o.SlowClientTimeout
	now.MaxInFlight, now.MaxN, now.MaxPromptTokens, now.MaxLogprobs = o.MaxInFlight, o.MaxN, o.MaxPromptTokens, o.MaxLogprobs
	now.MaxQueuedRequests, now.MaxQueuedTokens, now.QueueTimeout = o.MaxQueuedRequests, o.MaxQueuedTokens, o.QueueTimeout
	now.NodeBacklog, now.NodeBacklogTime = o.NodeBacklog, o.NodeBacklogTime
	now.UpstreamRequests = o.UpstreamRequests
	now.RequestTimeout, now.ResumeTimeout, now.MaxAttempts = o.RequestTimeout, o.ResumeTimeout, o.MaxAttempts
	now.RetriesPerSecond, now.ResumesPerSecond = o.RetriesPerSecond, o.ResumesPerSecond
	g.limits.Store(&now)
	g.l.setLimits(&now)
	g.eachAdmission(func(a *admission) {
		a.setLimits(admit.Limits{Requests: o.MaxQueuedRequests, Tokens: o.MaxQueuedTokens})
	})
	for l, perSecond := range map[*rate.Limiter]float64{g.budget: o.RetriesPerSecond, g.resumes: o.ResumesPerSecond} {
		l.SetLimit(rate.Limit(perSecond))
		l.SetBurst(burst(perSecond))
	}
	g.meterLimits()
	return nil
}

// SetUpstreams replaces the servers of other kinds and the sources of more; there
// must have been some.
func (g *Gateway) SetUpstreams(targets []upstream.Target, sources []upstream.Source) error {
	if g.foreign == nil {
		return errors.New("gateway: it was started without upstreams")
	}
	if err := g.foreign.SetTargets(targets); err != nil {
		return err
	}
	return g.foreign.SetSources(sources)
}

// checkLimits refuses a request that asks for more than this gateway allows.
func (g *Gateway) checkLimits(r *openai.Request) *openai.Error {
	l := g.lim()
	if fault := r.CheckLogprobs(l.MaxLogprobs); fault != nil {
		return fault
	}
	if r.N > l.MaxN {
		return openai.BadRequest("n", "n is %d: this gateway gives at most %d choices (--max-n)", r.N, l.MaxN)
	}
	return nil
}

// checkPrompts is checkLimits of what the prompts turned out to be.
func (g *Gateway) checkPrompts(r *openai.Request, ps []prompt) *openai.Error {
	most := g.lim().MaxPromptTokens
	if most <= 0 {
		return nil
	}
	param := "prompt"
	if r.Endpoint == openai.Chat {
		param = "messages"
	}
	for i := range ps {
		if n := len(ps[i].tokens); n > most {
			return openai.BadRequest(param, "the prompt has %d tokens: this gateway takes at most %d (--max-prompt-tokens)", n, most)
		}
	}
	return nil
}

// errNoMemory ends the reading of a large body that there is no memory for.
var errNoMemory = errors.New("gateway: too many bytes of request bodies are held")

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
func (c *clientConn) room(nBytes int) error {
	switch {
	case c.sized, c.expect > 0: // more of the same
		return nil
	case nBytes > headBytes:
		if !c.take(2 * nBytes) {
			return errNoMemory
		}
		c.expect = nBytes
	case c.bytes > c.counted+2*headBytes: // a body in small chunks, whose length is not known
		// The server's buffer for it doubles.
		if !c.take(int(c.bytes)) {
			return errNoMemory
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
func (c *clientConn) over() {
	c.arrival = arrival{}
	c.release()
	c.setIdle()
}

// release gives back the memory of a large body.
func (c *clientConn) release() {
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
const refusedAnswer = "HTTP/1.1 %s\r\nConnection: close\r\nRetry-After: 1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
