package upstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/internal/breaker"
	"github.com/tandem-serving/tandem/internal/sock"
)

// Bounds of a server's connections and of its breaker.
const (
	// DialTimeout bounds dialing, TLS included.
	DialTimeout = 2 * time.Second
	// maxIdle bounds the kept connections of a server: about as many as the requests that usually
	// run on it at once.
	maxIdle = 1024
	// keepIdle is how long an idle connection is kept. A server that closes it earlier, as uvicorn
	// does after 5 s, is noticed when the connection is taken.
	keepIdle = 60 * time.Second
	// breakerFailures in a row open a server's breaker for breakerPause. Then it lets one request
	// through at a time.
	breakerFailures = 5
	breakerPause    = time.Second
)

// Role is the part of a request that a server computes.
type Role uint8

// Roles.
const (
	Whole   Role = iota // prompt and answer
	Prefill             // the prompt
	Decode              // the answer, from a prompt computed elsewhere
)

var roles = [...]string{"serve", "prefill", "decode"}

func (r Role) String() string { return roles[r] }

// Target is a server as configured or discovered.
type Target struct {
	URL  string // http or https, host and port; a path before /v1 is kept
	Role Role
	// Bootstrap is the port of an SGLang prefill server's bootstrap server; 0: the server is asked
	// for it.
	Bootstrap  int
	ServerName string // in the server's certificate; empty: the URL's host
}

// Server is one OpenAI-compatible server.
type Server struct {
	Name     string // its URL, which is its name on the routing ring
	Role     Role
	InFlight atomic.Int64 // requests of this gateway that it has not answered

	p      *Pool
	static bool   // configured, not discovered; guarded by p.mu
	host   string // Host header
	dial   string // host:port
	base   string // path before /v1
	secure *tls.Config
	stop   context.CancelFunc // ends its probes
	kick   chan struct{}      // requests a probe now

	made      time.Time // with the monotonic clock, because the wall clock may jump
	breaker   atomic.Pointer[breaker.Breaker]
	up        atomic.Bool            // its last probes succeeded
	openUntil atomic.Int64           // nanoseconds since made: until then the breaker lets nothing pass
	bootstrap atomic.Int32           // port; 0: not known
	draining  atomic.Bool            // an operator stopped new requests to it
	era       atomic.Int64           // grows when its probes begin to be late
	connLost  atomic.Bool            // the last result was a failed connection, not an answer
	models    atomic.Pointer[[]Card] // nil: not known yet; empty: it has no list of models
	why       atomic.Pointer[string] // it is not up; nil: not known yet

	mu     sync.Mutex
	idle   []*conn // the last one was used last
	active []*conn
	closed bool
}

// newServer checks a target's URL.
func newServer(p *Pool, t Target) (*Server, error) {
	u, err := url.Parse(t.URL)
	switch {
	case err != nil:
		return nil, fmt.Errorf("upstream: upstream %q: %w", t.URL, err)
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "", u.Hostname() == "":
		return nil, fmt.Errorf("upstream: upstream %q: want http://HOST:PORT or https://HOST:PORT", t.URL)
	case u.User != nil, u.RawQuery != "", u.Fragment != "":
		return nil, fmt.Errorf("upstream: upstream %s: want no user, query or fragment", u.Redacted())
	}
	s := &Server{Role: t.Role, p: p, host: u.Host, kick: make(chan struct{}, 1), made: time.Now()}
	s.bootstrap.Store(int32(t.Bootstrap))
	if u.Scheme == "https" {
		s.secure = &tls.Config{MinVersion: tls.VersionTLS12}
		if p.o.TLS != nil {
			s.secure = p.o.TLS.Clone()
		}
		s.secure.ServerName = cmp.Or(t.ServerName, u.Hostname())
		s.secure.NextProtos = []string{"http/1.1"}
	}
	port := cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
	s.dial = net.JoinHostPort(u.Hostname(), port)
	s.base = strings.TrimSuffix(strings.TrimSuffix(u.EscapedPath(), "/"), "/v1")
	s.Name = u.Scheme + "://" + u.Host + s.base
	s.renew()
	return s, nil
}

// renew gives the server a closed breaker, because failures of an earlier process are no evidence
// about the present one.
func (s *Server) renew() {
	s.openUntil.Store(0)
	s.breaker.Store(breaker.New(breaker.Options{Failures: breakerFailures, Pause: breakerPause,
		Ignore: func(err error) bool { return errors.Is(err, ErrNoVerdict) },
		Changed: func(from, to string) {
			if to == breaker.Open {
				s.openUntil.Store(int64(time.Since(s.made) + breakerPause))
			}
			s.p.o.Log.Info("upstream's breaker", "upstream", s.Name, "from", from, "to", to)
		},
	}))
}

// ErrNoVerdict is the result of a request that is no evidence about the server, such as one whose
// client left.
var ErrNoVerdict = errors.New("upstream: nothing learnt")

// Up reports whether the server's last probes succeeded.
func (s *Server) Up() bool { return s.up.Load() }

// Models returns the server's own names of its models, as it lists them; none: not known yet, or it
// has no list.
func (s *Server) Models() (names []string) {
	if cards := s.models.Load(); cards != nil {
		for _, c := range *cards {
			names = append(names, c.ID)
		}
	}
	return names
}

// Drain stops new requests to the server, or allows them again. Running requests continue.
func (s *Server) Drain(on bool) { s.draining.Store(on) }

// Draining reports whether an operator drains the server.
func (s *Server) Draining() bool { return s.draining.Load() }

// HasName reports whether name is the server's URL, also with its two slashes merged into one, or
// its host.
func (s *Server) HasName(name string) bool {
	return name == s.Name || name == strings.Replace(s.Name, "://", ":/", 1) || name == s.host+s.base
}

// Why returns why the server is not up; empty if it is, or was not probed yet.
func (s *Server) Why() string {
	if why := s.why.Load(); why != nil && !s.Up() {
		return *why
	}
	return ""
}

// Breaker returns the state of the server's breaker.
func (s *Server) Breaker() string { return s.breaker.Load().State() }

// Bootstrap returns the address of an SGLang prefill server's bootstrap server.
func (s *Server) Bootstrap() (host string, port int) {
	host, _, err := net.SplitHostPort(s.dial)
	if err != nil {
		panic(err) // made by JoinHostPort
	}
	return host, int(cmp.Or(s.bootstrap.Load(), defaultBootstrap))
}

// defaultBootstrap is SGLang's default port.
const defaultBootstrap = 8998

// AppendHead appends the beginning of a request's head: the request line, Host and the server's
// key. path and query are sent as they are.
func (s *Server) AppendHead(dst []byte, method string, path, query []byte) []byte {
	dst = append(append(dst, method...), ' ')
	dst = append(append(dst, s.base...), path...)
	if len(query) > 0 {
		dst = append(append(dst, '?'), query...)
	}
	dst = append(append(dst, " HTTP/1.1\r\nHost: "...), s.host...)
	return s.p.authorize(append(dst, "\r\n"...))
}

// acquire returns an open connection to the server with that read deadline: a kept one or, if there
// is none or fresh is set, a new one.
func (s *Server) acquire(ctx context.Context, deadline time.Time, fresh bool) (*conn, error) {
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
		if time.Since(c.idleAt) < keepIdle && c.setDeadline(deadline) == nil && c.quiet() {
			return c, nil
		}
		s.release(c, false)
	}
	nc, err := s.connect(ctx)
	if err != nil {
		return nil, err
	}
	c := &conn{nc: nc, raw: sock.NewConn(nc), server: s, quiet: peeker(below(nc))}
	s.mu.Lock()
	s.activate(c)
	s.mu.Unlock()
	if err := c.setDeadline(deadline); err != nil {
		s.release(c, false)
		return nil, fmt.Errorf("%w: %s: %w", ErrServer, s.Name, err)
	}
	return c, nil
}

// below returns the connection below TLS, or nc.
func below(nc net.Conn) net.Conn {
	if t, ok := nc.(*tls.Conn); ok {
		return t.NetConn()
	}
	return nc
}

// connect opens a connection within DialTimeout.
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

// activate adds a connection to the active ones. s.mu must be held.
func (s *Server) activate(c *conn) {
	c.readEra.Store(s.era.Load())
	c.index = len(s.active)
	s.active = append(s.active, c)
}

// release takes a connection back, and keeps it if it is fit for another request.
func (s *Server) release(c *conn, fit bool) {
	c.drop()
	s.mu.Lock()
	last := s.active[len(s.active)-1]
	s.active[c.index], last.index = last, c.index
	s.active[len(s.active)-1] = nil
	s.active = s.active[:len(s.active)-1]
	var old *conn
	if !fit || s.closed {
		old = c
	} else if s.idle = append(s.idle, c); len(s.idle) > maxIdle {
		old = s.idle[0] // unused for longest
		s.idle = slices.Delete(s.idle, 0, 1)
	}
	c.idleAt = time.Now()
	s.mu.Unlock()
	if old != nil {
		old.abort()
	}
}

// closeIdle closes the connections that have been idle for keepIdle, or all idle ones.
func (s *Server) closeIdle(all bool) {
	s.mu.Lock()
	n := 0
	for n < len(s.idle) && (all || time.Since(s.idle[n].idleAt) > keepIdle) {
		n++
	}
	old := append([]*conn(nil), s.idle[:n]...)
	s.idle = append(s.idle[:0], s.idle[n:]...)
	s.mu.Unlock()
	for _, c := range old {
		c.abort()
	}
}

// close closes idle connections, and active ones when they are released.
func (s *Server) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.closeIdle(true)
}

// abortAll ends every request of the server.
func (s *Server) abortAll() { s.abortSilent(math.MaxInt64) }

// abortSilent ends the requests for which no byte arrived since an era began, and returns their
// number.
func (s *Server) abortSilent(era int64) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.active {
		if c.readEra.Load() < era {
			c.abort()
			n++
		}
	}
	return n
}

// Kick requests a probe now.
func (s *Server) Kick() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// Call is one request to one server.
type Call struct {
	Reply
	Late bool // the last error was the read deadline

	s        *Server
	c        *conn
	done     func(error) // of the breaker; nil: it was not asked
	reported bool
}

// Open gets a connection for a request, with that read deadline. Errors wrap ErrServer. force
// ignores the breaker.
func (s *Server) Open(ctx context.Context, deadline time.Time, force bool) (*Call, error) {
	k := &Call{s: s}
	if !force {
		done, err := s.breaker.Load().Allow()
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrServer, s.Name, err)
		}
		k.done = done
	}
	c, err := s.acquire(ctx, deadline, false)
	if err != nil {
		s.Kick()
		k.report(err)
		return nil, err
	}
	k.c = c
	c.hold()
	s.InFlight.Add(1)
	return k, nil
}

// report passes the result of the request to the breaker, the first time.
func (k *Call) report(err error) {
	if k.reported {
		return
	}
	k.reported = true
	if errors.Is(err, ErrServer) {
		k.s.connLost.Store(true)
	} else if err == nil {
		k.s.connLost.Store(false)
	}
	if k.done != nil {
		k.done(err)
	}
}

// Abort ends the request. Any goroutine may call it until Close.
func (k *Call) Abort() { k.c.abort() }

// SetDeadline sets the deadline of reads.
func (k *Call) SetDeadline(t time.Time) error { return k.c.setDeadline(t) }

// Send writes the request within the deadline. With read it may also wait for the first bytes of
// the answer, until the read deadline. Errors wrap ErrServer.
func (k *Call) Send(head, body []byte, deadline time.Time, read bool) error {
	send := k.c.send
	if read {
		send = k.c.sendAndRead
	}
	if err := send(head, body, deadline); err != nil {
		return k.failure(err, true)
	}
	return nil
}

// Head reads the answer's head. It may be called again if Late is set.
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
		k.report(fmt.Errorf("upstream: %s: status %d", k.s.Name, rep.Status))
	} else {
		k.report(nil) // already now, because an answer may take minutes
	}
	return nil
}

// failure returns the error of a failed connection. fresh reports that no byte of the answer had
// arrived.
func (k *Call) failure(err error, fresh bool) error {
	if fresh && !k.c.idleAt.IsZero() {
		k.report(ErrNoVerdict)
		return fmt.Errorf("%w: %s: %w", ErrStale, k.s.Name, err)
	}
	if errors.Is(err, ErrServer) {
		return err
	}
	return fmt.Errorf("%w: %s: %w", ErrServer, k.s.Name, err)
}

// Next returns the next piece of the body, which is valid until the next call. The error is io.EOF
// at the end, and ErrBroken if the connection ended before. Without wait it may return neither.
func (k *Call) Next(wait bool) ([]byte, error) {
	b, err := k.c.next(wait)
	k.Late = err != nil && errors.Is(err, os.ErrDeadlineExceeded)
	return b, err
}

// More waits for more of the body, which the caller reads by Next without wait. Its errors are
// those of Next, except io.EOF at the end.
func (k *Call) More() error {
	err := k.c.more()
	k.Late = err != nil && errors.Is(err, os.ErrDeadlineExceeded)
	return err
}

// CanPoll reports whether Poll works for the answer.
func (k *Call) CanPoll() bool { return k.c.canPoll() }

// Poll has a poller read the body, and calls onRead whenever more has arrived, until onRead returns
// false. onRead reads by Next without wait; it must not block, because Abort waits for it. The
// errors are those of More, and sock.ErrPeerClosed when to, the connection that the body is written
// to, has ended. ok is false if the poller could not take the connection.
func (k *Call) Poll(w *sock.Poller, to *sock.Conn, onRead func() bool) (err error, ok bool) {
	err, ok = k.c.poll(w, to, onRead)
	k.Late = err != nil && errors.Is(err, os.ErrDeadlineExceeded)
	return err, ok
}

// Close ends the request. err is the server's failure, ErrNoVerdict, or nil. The connection is kept
// if the answer was read to its end.
func (k *Call) Close(err error) {
	if k.c == nil {
		return
	}
	k.report(err)
	k.s.InFlight.Add(-1)
	k.s.release(k.c, err == nil && k.c.reusable())
	k.c = nil
	if err != nil && errors.Is(err, ErrServer) {
		k.s.Kick()
	}
}
