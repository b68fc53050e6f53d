package cluster

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Bounds of the embedded NATS server.
const (
	natsMaxPayload = 1 << 20  // bytes of one message
	natsMaxPending = 16 << 20 // bytes that wait for one client; beyond, it is dropped
	natsMaxConn    = 4096
	natsMaxSubs    = 1024 // of one client
	natsReady      = 10 * time.Second
	natsTLSSeconds = 5.0
)

// ErrNATS reports that the NATS server cannot start or be reached.
var ErrNATS = errors.New("cluster: NATS server")

// ServerOptions configure a gateway's NATS server.
type ServerOptions struct {
	Name   string      // of this node
	Listen string      // host:port for nodes; port 0: any
	Route  string      // host:port for other gateways' servers; empty: none
	TLS    *tls.Config // mutual, used for both; nil: plain (tests)
	Log    *slog.Logger
}

// Server is a NATS server in this process, in memory only and without accounts: every
// holder of a certificate of the cluster may publish and subscribe.
type Server struct {
	srv *server.Server

	mu     sync.Mutex
	opts   *server.Options
	routes []string
}

// StartServer starts a server and returns when it accepts connections.
func StartServer(o ServerOptions) (*Server, error) {
	host, port, err := splitListen(o.Listen)
	if err != nil {
		return nil, err
	}
	opts := &server.Options{
		ServerName: strings.Join(strings.Fields(o.Name), "_"), // NATS refuses spaces
		Host:       host, Port: port,
		TLSConfig: o.TLS, TLSTimeout: natsTLSSeconds,
		MaxPayload: natsMaxPayload, MaxPending: natsMaxPending,
		MaxConn: natsMaxConn, MaxSubs: natsMaxSubs,
		NoSigs: true, NoSystemAccount: true,
	}
	if o.Route != "" {
		host, port, err := splitListen(o.Route)
		if err != nil {
			return nil, err
		}
		opts.Cluster = server.ClusterOpts{
			Name: "tandem", Host: host, Port: port,
			TLSConfig: o.TLS, TLSTimeout: natsTLSSeconds,
			PoolSize: -1, NoAdvertise: true,
		}
	}
	srv, err := server.NewServer(opts.Clone())
	if err != nil {
		return nil, fmt.Errorf("%w on %s: %w", ErrNATS, o.Listen, err)
	}
	log := o.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	srv.SetLoggerV2(natsLog{log}, false, false, false)
	srv.Start()
	if !srv.ReadyForConnections(natsReady) {
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, fmt.Errorf("%w: not listening on %s within %v", ErrNATS, o.Listen, natsReady)
	}
	s := &Server{srv: srv, opts: opts}
	opts.Port = srv.Addr().(*net.TCPAddr).Port
	if a := srv.ClusterAddr(); a != nil {
		opts.Cluster.Port = a.Port
	}
	return s, nil
}

// splitListen parses host:port; NATS writes -1 for any port.
func splitListen(addr string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(addr)
	if err == nil {
		port, err = strconv.Atoi(p)
	}
	if err != nil {
		return "", 0, fmt.Errorf("%w: %q: %w", ErrNATS, addr, err)
	}
	if port == 0 {
		port = server.RANDOM_PORT
	}
	return host, port, nil
}

// Addr returns the address for nodes.
func (s *Server) Addr() string { return net.JoinHostPort(s.opts.Host, strconv.Itoa(s.opts.Port)) }

// RouteAddr returns the address for other gateways' servers; empty without Route.
func (s *Server) RouteAddr() string {
	if s.opts.Cluster.Port == 0 {
		return ""
	}
	return net.JoinHostPort(s.opts.Cluster.Host, strconv.Itoa(s.opts.Cluster.Port))
}

// SetRoutes connects to the servers of the other gateways, whose addresses come by gossip,
// so that subscribers of each server receive messages from all.
func (s *Server) SetRoutes(addrs []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	addrs = slices.Sorted(slices.Values(addrs))
	if slices.Equal(addrs, s.routes) {
		return nil
	}
	opts := s.opts.Clone()
	opts.Routes = nil
	for _, a := range addrs {
		if a != "" && a != s.RouteAddr() {
			opts.Routes = append(opts.Routes, &url.URL{Scheme: "nats", Host: a})
		}
	}
	if err := s.srv.ReloadOptions(opts); err != nil {
		return fmt.Errorf("%w: joining %v: %w", ErrNATS, addrs, err)
	}
	s.routes = addrs
	return nil
}

// Close shuts the server down and returns when it has ended.
func (s *Server) Close() {
	s.srv.Shutdown()
	s.srv.WaitForShutdown()
}

// natsLog passes the server's lines to slog at debug, because this package logs the
// state of the fleet itself.
type natsLog struct{ log *slog.Logger }

func (l natsLog) line(format string, v []any) {
	l.log.Debug("nats", "line", fmt.Sprintf(format, v...))
}

func (l natsLog) Noticef(format string, v ...any) { l.line(format, v) }
func (l natsLog) Warnf(format string, v ...any)   { l.line(format, v) }
func (l natsLog) Fatalf(format string, v ...any)  { l.line(format, v) }
func (l natsLog) Errorf(format string, v ...any)  { l.line(format, v) }
func (l natsLog) Debugf(format string, v ...any)  { l.line(format, v) }
func (l natsLog) Tracef(format string, v ...any)  { l.line(format, v) }
