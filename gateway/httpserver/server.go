// Package httpserver serves HTTP/1.1 over fasthttp to untrusted clients.
//
// It bounds the resources of clients: the number of connections, in all and of one address; the
// time in which a request's head and each byte of its body arrive; the memory of large bodies,
// which is reserved before it is allocated; and the time of one write. While a request is being
// answered, its connection can be watched for its end.
//
// Invariant: bytes behind a request whose end is ambiguous are never read as another request.
// Memory that was reserved for a request is freed when the request ends.
//
// The package knows neither routes nor the form of errors: Options.Fail and Options.ErrorBody do.
package httpserver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// Fixed bounds.
const (
	// HeadBytes bounds a request's head.
	HeadBytes = 16 << 10
	// idleTimeout is the longest time between requests, above the 60 s of usual load balancers.
	idleTimeout = 75 * time.Second
	// operatorTimeout bounds reading an operator's request, and writing its answer.
	operatorTimeout = 30 * time.Second
	// answerBytes is the size of the write buffer. Most answers fit with their head, and are sent by
	// one write. A stream holds the buffer until it ends, although its events bypass it.
	answerBytes = 2 << 10
	// reuseTime is how long a connection stays open after an answer that did not announce its end,
	// and closeInterval how often Shutdown looks for connections that are idle for longer.
	reuseTime     = time.Second
	closeInterval = 20 * time.Millisecond
	// retryAfter is the Retry-After of refused connections, in seconds.
	retryAfter = 1
)

// Options of a Server.
type Options struct {
	Handler fasthttp.RequestHandler
	// Fail answers a request that could not be read. err is fasthttp's or this package's. The
	// connection is closed afterwards.
	Fail func(ctx *fasthttp.RequestCtx, err error)
	// ErrorBody returns the JSON of the answer to a refused connection.
	ErrorBody func(status int, message string) []byte
	Limits    limits.Limits // those of connections and bodies; SetLimits changes them
	TLS       *tls.Config   // nil: plain HTTP
	MaxConns  int           // 0: any number
	Counters  Counters
	Log       *slog.Logger
}

// Counters count connections that are refused, or closed in favor of others.
type Counters struct {
	AddressFull *metrics.Value // refused: its address has too many
	Full        *metrics.Value // refused: all have requests
	Evicted     *metrics.Value // closed in favor of a new one
}

// Server serves clients. Make it with New.
type Server struct {
	*listener
	o       Options
	http    *fasthttp.Server
	closing atomic.Bool // each answer is the last of its connection
}

// New makes a server of the connections that l accepts. Its answers carry no Date header. A handler
// must not reset the whole response, as RequestCtx.Error does, because that adds one.
func New(l net.Listener, o Options) *Server {
	if o.TLS != nil {
		l = tls.NewListener(l, o.TLS)
	}
	fasthttp.SetBodySizePoolLimit(pooledBody, pooledBody) // it is a setting of the process
	s := &Server{listener: newListener(l, o.MaxConns, o.Counters, o.ErrorBody), o: o}
	s.SetLimits(o.Limits)
	s.http = &fasthttp.Server{
		Handler:                      s.serve,
		ErrorHandler:                 s.fail,
		Name:                         "tandem",
		ReadBufferSize:               HeadBytes,
		WriteBufferSize:              answerBytes,
		ReduceMemoryUsage:            true, // a request that is being answered holds no buffer of HeadBytes
		ReadTimeout:                  longestArrival,
		IdleTimeout:                  idleTimeout,
		HeaderReceived:               s.headReceived,
		ExpectHandler:                s.expect,
		MaxRequestBodySize:           o.Limits.MaxBodyBytes,
		Concurrency:                  2*o.MaxConns + 1024, // the listener bounds connections, and goroutines of closed ones end a little later
		DisablePreParseMultipartForm: true,
		CloseOnShutdown:              true,
		NoDefaultDate:                true,
		TCPKeepalive:                 true,
		Logger:                       serverLog{o.Log},
	}
	return s
}

// Operators returns a server for few, trusted clients. It checks heads as New's does.
func (s *Server) Operators(handler fasthttp.RequestHandler, conns int) *fasthttp.Server {
	return &fasthttp.Server{
		Handler: handler, Name: "tandem", ReadTimeout: operatorTimeout, WriteTimeout: operatorTimeout, IdleTimeout: idleTimeout, MaxRequestBodySize: HeadBytes,
		Concurrency: conns, CloseOnShutdown: true, NoDefaultDate: true, Logger: serverLog{s.o.Log}, ExpectHandler: s.expect,
		HeaderReceived: func(h *fasthttp.RequestHeader) (defaults fasthttp.RequestConfig) {
			if err := checkHead(h); err != nil {
				refuseHead(h, err)
			}
			return defaults
		},
	}
}

// serverLog is fasthttp's logger.
type serverLog struct{ log *slog.Logger }

// Printf implements fasthttp.Logger.
func (l serverLog) Printf(format string, args ...any) {
	l.log.Debug("http server: " + fmt.Sprintf(format, args...))
}

// Run accepts connections and serves them until Shutdown or Close.
func (s *Server) Run() error { return s.http.Serve(s.listener) }

// Retire makes each answer whose head is not sent yet the last of its connection, so that clients
// send their next request elsewhere.
func (s *Server) Retire() { s.closing.Store(true) }

// Shutdown stops accepting and waits for the requests that run, until ctx ends.
//
// A client whose answer began before Retire may send its next request on the same connection. The
// connection stays open for reuseTime after that answer, because a request would be lost that
// crosses the end of the connection. From half of ctx's time on, connections end with their
// answers, because a request that begins then may not have the time to finish.
func (s *Server) Shutdown(ctx context.Context) error {
	s.Retire()
	err := s.Close()
	until := time.Now().Add(time.Hour)
	if end, ok := ctx.Deadline(); ok {
		until = time.Now().Add(time.Until(end) / 2)
	}
	for s.closeIdle(time.Now().Add(-reuseTime)) > 0 && time.Now().Before(until) && ctx.Err() == nil {
		time.Sleep(closeInterval)
	}
	return errors.Join(err, s.http.ShutdownWithContext(ctx))
}

// Open returns the number of open connections.
func (s *Server) Open() int { return int(s.http.GetOpenConnectionsCount()) }

// End stops the server's background work. It is called once, after Run.
func (s *Server) End() { close(s.ended) }

// serve calls the handler, and sends an answer without chunks if the client knows none.
func (s *Server) serve(ctx *fasthttp.RequestCtx) {
	serving(ctx)
	s.o.Handler(ctx)
	if s.closing.Load() {
		ctx.SetConnectionClose()
	}
	if ctx.Response.IsBodyStream() && ctx.Response.Header.ContentLength() < 0 && !ctx.Request.Header.IsHTTP11() {
		sendUnchunked(ctx)
	}
}

// fail answers a request that could not be read.
func (s *Server) fail(ctx *fasthttp.RequestCtx, err error) {
	s.o.Fail(ctx, err)
	ctx.SetConnectionClose()
	if c := bodyConn(ctx); c != nil {
		c.refused.Store(true)
	}
}
