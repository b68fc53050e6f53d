// Package proxy answers requests by servers that speak the OpenAI API.
//
// The bodies of requests and answers pass unchanged, except for the model's name and the members
// that pairs of prefill and decode servers need. Only the members that routing needs are read. A
// server that fails before its answer has begun is replaced by another one. A stream that breaks
// off ends with an error event and an aborted connection.
//
// Package upstream has the servers, with their connections, probes and models.
package proxy

import (
	"sync/atomic"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/sock"
)

// Options of a Proxy.
type Options struct {
	Upstreams            upstream.Options
	ForwardAuthorization bool // clients' credentials are sent to upstreams
	// Tokenizers has the tokenizers of models by name; "" is that of all other models. Prompts for
	// models without a tokenizer are routed by their bytes.
	Tokenizers map[string]*Tokenizer
	Pollers    int                    // goroutines that read streams
	Routed     func(path string) bool // whether a path is one of the gateway's routes
}

// Proxy relays requests to upstreams. Make it with New.
type Proxy struct {
	*exchange.Service
	Pool *upstream.Pool

	o       Options
	stored  stored
	pollers []sock.Poller // read streams
	next    atomic.Uint32 // counts the uses of pollers
}

// New makes a proxy, and starts to probe its servers.
func New(s *exchange.Service, o Options) (*Proxy, error) {
	pool, err := upstream.New(o.Upstreams)
	if err != nil {
		return nil, err
	}
	return &Proxy{Service: s, Pool: pool, o: o, pollers: make([]sock.Poller, o.Pollers)}, nil
}

// Close closes all connections. It is called after the last request.
func (p *Proxy) Close() {
	p.Pool.Close()
	for i := range p.pollers {
		p.pollers[i].Close()
	}
}

// poller returns the poller of the next stream.
func (p *Proxy) poller() *sock.Poller {
	return &p.pollers[p.next.Add(1)%uint32(len(p.pollers))]
}

// Polled returns the number of streams that a poller reads.
func (p *Proxy) Polled() (n int) {
	for i := range p.pollers {
		n += p.pollers[i].Len()
	}
	return n
}

// Serve answers a request by an upstream server, which gets it at the path sent. envelope is the
// body's envelope if it was parsed before; otherwise nil.
func (p *Proxy) Serve(ctx *fasthttp.RequestCtx, path, sent string, envelope *upstream.Envelope) {
	on := openai.Completions
	if sent == "/v1/chat/completions" {
		on = openai.Chat
	}
	r := relays.Get().(*relay)
	r.p, r.sent, r.parsed = p, sent, envelope
	p.Answer(ctx, path, on, r)
}
