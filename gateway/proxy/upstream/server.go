package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/internal/breaker"
	"github.com/tandem-serving/tandem/internal/sock"
)

// Bounds of a server's connections and of its breaker.
const (
	// DialTimeout bounds the wait for a new connection.
	DialTimeout = 2 * time.Second
	// maxIdle bounds kept connections of one server: as many as requests usually
	// run at once on one.
	maxIdle = 1024
	// keepIdle is how long one is kept. Servers close theirs after 5 s (uvicorn)
	// or later, which is noticed when it is taken.
	keepIdle = 60 * time.Second
	// breakerFailures in a row open a server's breaker for breakerPause; then one
	// request at a time tries it.
	breakerFailures = 5
	breakerPause    = time.Second
)

// Role is what a server does of a request.
type Role uint8

// Roles.
const (
	Whole   Role = iota // all of it
	Prefill             // its prompt
	Decode              // its answer, from a prompt computed elsewhere
)

var roles = [...]string{"serve", "prefill", "decode"}

func (r Role) String() string { return roles[r] }

// Target is a server as configuration or discovery tells of it.
type Target struct {
	URL  string // http or https, host and port; a path before /v1 is kept
	Role Role
	// Bootstrap is the port of an SGLang prefill server's bootstrap server; 0: it
	// is asked for it.
	Bootstrap  int
	ServerName string // that its certificate is for; empty: the URL's host
}

// Server is one OpenAI-compatible server.
type Server struct {
	Name     string // its URL: the name on the routing ring
	Role     Role
	InFlight atomic.Int64 // requests of this gateway that it has in hand

	p      *Pool
	listed bool   // no source told of it; guarded by p.mu
	host   string // of the Host header
	dial   string // host:port
	base   string // path before /v1
	secure *tls.Config
	stop   context.CancelFunc // ends its keeper
	kick   chan struct{}      // asks the keeper to look now

	made      time.Time // with the monotonic clock: the wall clock may jump
	breaker   atomic.Pointer[breaker.Breaker]
	up        atomic.Bool            // its last probes were good
	openUntil atomic.Int64           // nanoseconds since made: the breaker lets nothing pass before
	bootstrap atomic.Int32           // port; 0: not known
	draining  atomic.Bool            // an operator wants it to get nothing new
	era       atomic.Int64           // grows when its probes begin to be late
	cutOff    atomic.Bool            // the last verdict was about a connection, not an answer
	models    atomic.Pointer[[]Card] // nil: not known yet; empty: it does not tell
	why       atomic.Pointer[string] // it is not up; nil: not known yet

	mu     sync.Mutex
	idle   []*conn // the last is the one used last
	active []*conn
	closed bool
}

// newServer checks a target's URL.
func newServer(p *Pool, t Target) (*Server, error) {
	u, err := url.Parse(t.URL)
	switch {
	case err != nil:
		return nil, fmt.Errorf("foreign: upstream %q: %w", t.URL, err)
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "", u.Hostname() == "":
		return nil, fmt.Errorf("foreign: upstream %q: want http://HOST:PORT or https://HOST:PORT", t.URL)
	case u.User != nil, u.RawQuery != "", u.Fragment != "":
		return nil, fmt.Errorf("foreign: upstream %s: want no user, query or fragment", u.Redacted())
	}
	s := &Server{Role: t.Role, p: p, host: u.Host, kick: make(chan struct{}, 1), made: time.Now()}
	s.bootstrap.Store(int32(t.Bootstrap))
	port := u.Port()
	if u.Scheme == "https" {
		s.secure = &tls.Config{MinVersion: tls.VersionTLS12}
		if p.o.TLS != nil {
			s.secure = p.o.TLS.Clone()
		}
		if s.secure.ServerName = t.ServerName; t.ServerName == "" {
			s.secure.ServerName = u.Hostname()
		}
		s.secure.NextProtos = []string{"http/1.1"}
	}
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	s.dial = net.JoinHostPort(u.Hostname(), port)
	s.base = strings.TrimSuffix(strings.TrimSuffix(u.EscapedPath(), "/"), "/v1")
	s.Name = u.Scheme + "://" + u.Host + s.base
	s.renew()
	return s, nil
}

// renew gives the server a closed breaker: one of a process that is gone says
// nothing of the next.
func (s *Server) renew() {
	s.openUntil.Store(0)
	s.breaker.Store(breaker.New(breaker.Options{Failures: breakerFailures, Pause: breakerPause,
		Ignore: func(err error) bool { return errors.Is(err, errNoVerdict) },
		Changed: func(from, to string) {
			if to == breaker.Open {
				s.openUntil.Store(int64(time.Since(s.made) + breakerPause))
			}
			s.p.o.Log.Info("upstream's breaker", "upstream", s.Name, "from", from, "to", to)
		},
	}))
}

// errNoVerdict ends a request that tells the breaker nothing: its client left.
var errNoVerdict = errors.New("foreign: nothing learnt")

// Up says whether the server's probes are good.
func (s *Server) Up() bool { return s.up.Load() }

// Drain has the server get no new requests, or again; what it has goes on.
func (s *Server) Drain(on bool) { s.draining.Store(on) }

// Draining says whether an operator drains it.
func (s *Server) Draining() bool { return s.draining.Load() }

// Called says whether that is what somebody calls the server: its URL, also where
// its slashes were taken for one, or its host.
func (s *Server) Called(name string) bool {
	return name == s.Name || name == strings.Replace(s.Name, "://", ":/", 1) || name == s.host+s.base
}

// Why says why it is not up; empty: it is, or nobody has looked yet.
func (s *Server) Why() string {
	if why := s.why.Load(); why != nil && !s.Up() {
		return *why
	}
	return ""
}

// Breaker is the state of the server's breaker: closed, half-open or open.
func (s *Server) Breaker() string { return s.breaker.Load().State() }

// Bootstrap is the address of an SGLang prefill server's bootstrap server.
func (s *Server) Bootstrap() (host string, port int) {
	host, _, err := net.SplitHostPort(s.dial)
	if err != nil {
		panic(err) // made by JoinHostPort
	}
	if port = int(s.bootstrap.Load()); port == 0 {
		port = defaultBootstrap
	}
	return host, port
}

// defaultBootstrap is SGLang's own default.
const defaultBootstrap = 8998

// AppendHead appends the beginning of a request's head: the request line and the
// headers that only the server's own address and key decide. path and query are
// as they go over the wire.
func (s *Server) AppendHead(dst []byte, method string, path, query []byte) []byte {
	dst = append(append(dst, method...), ' ')
	dst = append(append(dst, s.base...), path...)
	if len(query) > 0 {
		dst = append(append(dst, '?'), query...)
	}
	dst = append(append(dst, " HTTP/1.1\r\nHost: "...), s.host...)
	return s.p.authorize(append(dst, "\r\n"...))
}

// take returns an open connection to the server, whose reads wait until patience: a kept one or,
// if there is none or fresh is set, a new one.
func (s *Server) take(ctx context.Context, patience time.Time, fresh bool) (*conn, error) {
	for !fresh {
		s.mu.Lock()
		n := len(s.idle)
		if n == 0 {
			s.mu.Unlock()
			break
		}
		c := s.idle[n-1]
		s.idle[n-1] = nil
		s.idle = s.idle[:n-1]
		s.activate(c)
		s.mu.Unlock()
		if time.Since(c.kept) < keepIdle && c.patience(patience) == nil && c.quiet() {
			return c, nil
		}
		s.give(c, false)
	}
	nc, err := s.connect(ctx)
	if err != nil {
		return nil, err
	}
	c := &conn{nc: nc, raw: sock.Of(nc), server: s, quiet: peeker(below(nc))}
	s.mu.Lock()
	s.activate(c)
	s.mu.Unlock()
	if err := c.patience(patience); err != nil {
		s.give(c, false)
		return nil, fmt.Errorf("%w: %s: %w", ErrServer, s.Name, err)
	}
	return c, nil
}

// below is the connection under TLS.
func below(nc net.Conn) net.Conn {
	if t, ok := nc.(*tls.Conn); ok {
		return t.NetConn()
	}
	return nc
}

// connect dials, TLS included, within DialTimeout.
func (s *Server) connect(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, DialTimeout)
	defer cancel()
	nc, err := s.p.o.Dial(ctx, "tcp", s.dial)
	if err != nil {
		return nil, fmt.Errorf("%w: %s cannot be reached: %w", ErrServer, s.Name, err)
	}
	if s.secure == nil {
		return nc, nil
	}
	t := tls.Client(nc, s.secure)
	if err := t.HandshakeContext(ctx); err != nil {
		nc.Close()
		return nil, fmt.Errorf("%w: %s: TLS: %w", ErrServer, s.Name, err)
	}
	return t, nil
}

// activate books a connection as in use; the caller holds mu.
func (s *Server) activate(c *conn) {
	c.heard.Store(s.era.Load())
	c.bed = len(s.active)
	s.active = append(s.active, c)
}

// give takes a connection back, to keep it where it is fit for another request.
func (s *Server) give(c *conn, fit bool) {
	c.drop()
	s.mu.Lock()
	last := s.active[len(s.active)-1]
	s.active[c.bed], last.bed = last, c.bed
	s.active[len(s.active)-1] = nil
	s.active = s.active[:len(s.active)-1]
	var old *conn
	switch {
	case !fit || s.closed:
		old = c
	case len(s.idle) == maxIdle:
		old = s.idle[0] // unused for longest
		copy(s.idle, s.idle[1:])
		s.idle[maxIdle-1] = c
	default:
		s.idle = append(s.idle, c)
	}
	c.kept = time.Now()
	s.mu.Unlock()
	if old != nil {
		old.abort()
	}
}

// sweep closes connections that have been idle for long; all of them on demand.
func (s *Server) sweep(all bool) {
	s.mu.Lock()
	n := 0
	for n < len(s.idle) && (all || time.Since(s.idle[n].kept) > keepIdle) {
		n++
	}
	old := append([]*conn(nil), s.idle[:n]...)
	s.idle = append(s.idle[:0], s.idle[n:]...)
	s.mu.Unlock()
	for _, c := range old {
		c.abort()
	}
}

// shut closes what is idle now and what comes back later.
func (s *Server) shut() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.sweep(true)
}

// abortAll ends every request that the server has in hand.
func (s *Server) abortAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.active {
		c.abort()
	}
}

// abortSilent ends the requests that nothing was heard of since the era began.
func (s *Server) abortSilent() (n int) {
	era := s.era.Load()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.active {
		if c.heard.Load() < era {
			c.abort()
			n++
		}
	}
	return n
}

// Kick asks for a probe now.
func (s *Server) Kick() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// Call is one request at one server.
type Call struct {
	Reply
	Late bool // what failed last ran out of the patience given

	s    *Server
	c    *conn
	done func(error) // the breaker's; nil: it was passed by
	told bool
}

// Open gets a connection for a request. Errors wrap ErrServer. force passes the
// breaker by.
func (s *Server) Open(ctx context.Context, patience time.Time, force bool) (*Call, error) {
	k := &Call{s: s}
	if !force {
		done, err := s.breaker.Load().Allow()
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrServer, s.Name, err)
		}
		k.done = done
	}
	c, err := s.take(ctx, patience, false)
	if err != nil {
		s.Kick()
		k.verdict(err)
		return nil, err
	}
	k.c = c
	c.hold()
	s.InFlight.Add(1)
	return k, nil
}

// verdict tells the breaker, once, what came of the request.
func (k *Call) verdict(err error) {
	if k.told {
		return
	}
	k.told = true
	if errors.Is(err, ErrServer) {
		k.s.cutOff.Store(true)
	} else if err == nil {
		k.s.cutOff.Store(false)
	}
	if k.done != nil {
		k.done(err)
	}
}

// Abort ends the request from any goroutine, while it is the caller's.
func (k *Call) Abort() { k.c.abort() }

// Patience is how long reads wait from now on.
func (k *Call) Patience(t time.Time) error { return k.c.patience(t) }

// Send writes the request. Errors wrap ErrServer.
func (k *Call) Send(head, body []byte, deadline time.Time) error {
	if err := k.c.send(head, body, deadline); err != nil {
		return k.failure(err, true)
	}
	return nil
}

// Ask is Send for a request whose answer is then waited for: it may have the first of
// it, and takes as long as Patience says where the server does.
func (k *Call) Ask(head, body []byte, deadline time.Time) error {
	if err := k.c.ask(head, body, deadline); err != nil {
		return k.failure(err, true)
	}
	return nil
}

// Head waits for the answer's head. When Late is set it may be called again.
func (k *Call) Head() error {
	rep, fresh, err := k.c.head()
	if err != nil {
		if k.Late = errors.Is(err, os.ErrDeadlineExceeded); k.Late {
			return err
		}
		return k.failure(err, fresh)
	}
	k.Reply = rep
	if rep.Status >= 500 {
		k.verdict(fmt.Errorf("foreign: %s: status %d", k.s.Name, rep.Status))
	} else {
		k.verdict(nil) // now: an answer may take minutes to its end
	}
	return nil
}

// failure is what a broken connection means.
func (k *Call) failure(err error, fresh bool) error {
	if fresh && !k.c.kept.IsZero() {
		k.verdict(errNoVerdict)
		return fmt.Errorf("%w: %s: %w", ErrStale, k.s.Name, err)
	}
	if errors.Is(err, ErrServer) {
		return err
	}
	return fmt.Errorf("%w: %s: %w", ErrServer, k.s.Name, err)
}

// Next is the next piece of the body, valid until the next call; io.EOF behind
// the last, ErrBroken where it broke off. Without wait it may give nothing.
func (k *Call) Next(wait bool) ([]byte, error) {
	b, err := k.c.next(wait)
	k.Late = err != nil && errors.Is(err, os.ErrDeadlineExceeded)
	return b, err
}

// More waits for more of the body, which is taken by Next without wait. The errors are those of Next,
// but for io.EOF behind the last piece.
func (k *Call) More() error {
	err := k.c.more()
	k.Late = err != nil && errors.Is(err, os.ErrDeadlineExceeded)
	return err
}

// Stays reports whether Stay works for the answer.
func (k *Call) Stays() bool { return k.c.stays() }

// Stay has a crowd read the body, and calls took whenever more of it has come, until took returns
// false; the bytes are taken by Next without wait. The errors are those of Next, but for io.EOF
// behind the last piece, and sock.ErrLeft at the end of to, the connection that is written to. It
// returns false if the crowd could not take the connection. took must not block, because Abort
// waits for it.
func (k *Call) Stay(w *sock.Crowd, to *sock.Conn, took func() bool) (err error, ok bool) {
	err, ok = k.c.stay(w, to, took)
	k.Late = err != nil && errors.Is(err, os.ErrDeadlineExceeded)
	return err, ok
}

// Close ends the request: err is what it says of the server, nil: all is well.
// The connection is kept where the answer was read to its end.
func (k *Call) Close(err error) {
	if k.c == nil {
		return
	}
	k.verdict(err)
	k.s.InFlight.Add(-1)
	k.s.give(k.c, err == nil && k.c.reusable())
	k.c = nil
	if err != nil && errors.Is(err, ErrServer) {
		k.s.Kick()
	}
}

// NoVerdict is Close for a request whose end says nothing of the server.
func (k *Call) NoVerdict() { k.Close(errNoVerdict) }
