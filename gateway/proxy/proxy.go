// Package proxy answers requests by servers that speak the OpenAI API.
//
// A request's body passes through as it came, but for the model's name and what pairs of
// prefill and decode servers add; so does the answer. Of a body only what routing needs is
// read. A server that fails before its answer has begun is replaced by another one, and a
// stream that breaks off ends with an error event and an aborted connection.
//
// Which servers there are, their connections, probes and models are package upstream's.
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
	ForwardAuthorization bool // clients' credentials go on to upstreams
	// Tokenizers are those of models, by the models' names; "" is that of all others. Prompts
	// for models without one are routed by their bytes.
	Tokenizers map[string]*Tokenizer
	Pollers    int                    // goroutines that wait for streams
	Routed     func(path string) bool // whether a path is one of the gateway's routes
}

// Proxy relays requests. Make it with New.
type Proxy struct {
	*exchange.Service
	Pool *upstream.Pool

	o       Options
	pollers []sock.Poller // in which streams wait
	nextIn  atomic.Uint32 // of pollers
}

// New makes a proxy of the servers.
func New(s *exchange.Service, o Options) (*Proxy, error) {
	pool, err := upstream.New(o.Upstreams)
	if err != nil {
		return nil, err
	}
	return &Proxy{Service: s, Pool: pool, o: o, pollers: make([]sock.Poller, o.Pollers)}, nil
}

// Close ends what is under way, after the last request.
func (p *Proxy) Close() {
	p.Pool.Close()
	for i := range p.pollers {
		p.pollers[i].Close()
	}
}

// crowd is where the next stream waits.
func (p *Proxy) poller() *sock.Poller {
	return &p.pollers[p.nextIn.Add(1)%uint32(len(p.pollers))]
}

// Polled is the number of streams that wait for their next event without a goroutine.
func (p *Proxy) Polled() (n int) {
	for i := range p.pollers {
		n += p.pollers[i].Len()
	}
	return n
}

// Serve answers a request by an upstream server. envelope is what the body's outermost members say;
// nil: they have not been read.
func (p *Proxy) Serve(ctx *fasthttp.RequestCtx, path string, envelope *upstream.Envelope) {
	on := openai.Completions
	if path == "/v1/chat/completions" {
		on = openai.Chat
	}
	r := relays.Get().(*relay)
	r.p, r.envelope = p, envelope
	p.Answer(ctx, path, on, r)
}
