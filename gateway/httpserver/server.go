// Package httpserver serves HTTP/1.1 over fasthttp to clients that nobody vouches for.
//
// It bounds what a client can hold: connections in number, in all and of one address; the
// time that a request's head and each byte of its body may take; the memory of large
// bodies, counted before it is allocated; the time that one write may block. While a
// request is being answered its connection can be watched for the client's end.
//
// Invariant: bytes behind a request whose end is ambiguous are never read as another
// request, and memory that was counted for a request is given back at its end, however it
// ends.
//
// The package knows neither routes nor the form of errors: Options.Fail and
// Options.ErrorBody do.
package httpserver

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// Fixed bounds.
const (
	// HeadBytes bounds a request's head.
	HeadBytes = 16 << 10
	// idleTimeout is the time between requests; above usual balancers' 60 s.
	idleTimeout = 75 * time.Second
	// operatorTimeout is for an operator's request and its answer.
	operatorTimeout = 30 * time.Second
	// answerBytes is what the server gathers of an answer. Most answers fit, head included,
	// and leave by one write; a stream holds it all its life, and its events go past it.
	answerBytes = 2 << 10
	// retryAfter is what refused connections are told, in seconds.
	retryAfter = 1
)

// Limits of clients; they may change while the server runs.
type Limits struct {
	HeaderTimeout      time.Duration // for a request's head
	SlowClientTimeout  time.Duration // for one write
	MinBodyRate        int           // bytes of a request per second; 0: any
	MaxBodyBytes       int           // of one request
	MaxBodyMemory      int           // bytes of all large bodies together; 0: any number
	MaxConnsPerAddress int           // 0: any number
}

// Options of a Server.
type Options struct {
	Handler fasthttp.RequestHandler
	// Fail answers what could not be read as a request: err is of fasthttp or one of this
	// package's. The connection is closed after it.
	Fail func(ctx *fasthttp.RequestCtx, err error)
	// ErrorBody is the JSON that a connection gets which is refused.
	ErrorBody func(status int, message string) []byte
	Limits    Limits
	TLS       *tls.Config // nil: plain HTTP
	MaxConns  int         // 0: any number
	Counters  Counters
	Log       *slog.Logger
}

// Counters count connections that are refused or closed for others.
type Counters struct {
	Crowded *metrics.Value // refused: an address has too many
	Full    *metrics.Value // refused: all are busy
	Evicted *metrics.Value // closed for a new one
}

// Server serves clients. Make it with New.
type Server struct {
	*listener
	o    Options
	http *fasthttp.Server
}

// New makes a server of the connections that l accepts. Its answers carry no Date; a handler
// keeps it so by never resetting the whole response, as RequestCtx.Error does.
func New(l net.Listener, o Options) *Server {
	if o.TLS != nil {
		l = tls.NewListener(l, o.TLS)
	}
	fasthttp.SetBodySizePoolLimit(pooledBody, pooledBody) // of the process
	s := &Server{listener: newListener(l, o.MaxConns, o.Counters, o.ErrorBody), o: o}
	s.SetLimits(o.Limits)
	s.http = &fasthttp.Server{
		Handler:                      s.serve,
		ErrorHandler:                 s.fail,
		Name:                         "tandem",
		ReadBufferSize:               HeadBytes,
		WriteBufferSize:              answerBytes,
		ReduceMemoryUsage:            true, // a request that is being answered holds no buffer of its head's, of HeadBytes
		ReadTimeout:                  longestArrival,
		IdleTimeout:                  idleTimeout,
		HeaderReceived:               s.headCame,
		ExpectHandler:                s.expect,
		MaxRequestBodySize:           o.Limits.MaxBodyBytes,
		Concurrency:                  2*o.MaxConns + 1024, // the listener bounds connections; goroutines of closed ones take a moment to end
		DisablePreParseMultipartForm: true,
		CloseOnShutdown:              true,
		NoDefaultDate:                true,
		TCPKeepalive:                 true,
		Logger:                       serverLog{o.Log},
	}
	return s
}

// Operators is a server for few and trusted clients, with the same checks of heads.
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

// serverLog takes what fasthttp has to say about connections.
type serverLog struct{ log *slog.Logger }

// Printf implements fasthttp.Logger.
func (l serverLog) Printf(format string, args ...any) {
	l.log.Debug("http server: " + fmt.Sprintf(format, args...))
}

// Run accepts connections and serves them until Shutdown or Close.
func (s *Server) Run() error { return s.http.Serve(s.listener) }

// Shutdown stops accepting and waits for the requests that run, until ctx ends.
func (s *Server) Shutdown(ctx context.Context) error { return s.http.ShutdownWithContext(ctx) }

// Open is the number of open connections.
func (s *Server) Open() int { return int(s.http.GetOpenConnectionsCount()) }

// End stops what the server does in the background. It is called once, after Run.
func (s *Server) End() { close(s.ended) }

// serve has the handler answer, and sends what fasthttp would send in chunks to a client
// that knows none.
func (s *Server) serve(ctx *fasthttp.RequestCtx) {
	serving(ctx)
	s.o.Handler(ctx)
	if ctx.Response.IsBodyStream() && ctx.Response.Header.ContentLength() < 0 && !ctx.Request.Header.IsHTTP11() {
		sendUnchunked(ctx)
	}
}

// fail answers what could not be read as a request.
func (s *Server) fail(ctx *fasthttp.RequestCtx, err error) {
	s.o.Fail(ctx, err)
	ctx.SetConnectionClose()
	if c := bodyConn(ctx); c != nil {
		c.refused.Store(true)
	}
}
