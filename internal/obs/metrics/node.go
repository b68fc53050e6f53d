package metrics

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/internal/netio"
)

// NodeOptions configure ServeNode.
type NodeOptions struct {
	Set *Set
	// Ready returns why the node accepts no work: model not loaded, not joined, draining.
	// nil: it accepts work.
	Ready func() error
	// Live returns why the node must be restarted; a nil func or result: it is alive.
	Live    func() error
	Version string
	Level   *slog.LevelVar // of the process' log; nil: it cannot be changed here
	Log     *slog.Logger   // nil: discarded
	// MaxConns lowers nodeMaxConns; 0: no change.
	MaxConns int
}

// Bounds of a node's HTTP server. They are fixed, because it serves only scrapers and probes.
const (
	nodeReadTimeout = 10 * time.Second
	nodeIdleTimeout = 2 * time.Minute // longer than scrape intervals in use
	nodeMaxBody     = 4 << 10         // of PUT /log-level
	nodeMaxConns    = 256
	nodeDrain       = time.Second
)

// ServeNode answers /metrics, /livez, /readyz, /health and /version on l until
// ctx ends or the listener fails. It closes l.
func ServeNode(ctx context.Context, l net.Listener, o NodeOptions) error {
	if o.Set == nil || o.Ready == nil {
		return errors.New("metrics: ServeNode needs Set and Ready")
	}
	s := &fasthttp.Server{
		Handler:            o.handle,
		Name:               "tandem",
		ReadTimeout:        nodeReadTimeout,
		WriteTimeout:       nodeReadTimeout,
		IdleTimeout:        nodeIdleTimeout,
		MaxRequestBodySize: nodeMaxBody,
		Concurrency:        min(nodeMaxConns, cmp.Or(o.MaxConns, nodeMaxConns)),
		CloseOnShutdown:    true,
		NoDefaultDate:      true,
		Logger:             log.New(io.Discard, "", 0), // of port scans and aborted probes
	}
	l = netio.NewListener(l, netio.Options{Log: o.Log, Count: func(name string) { o.Set.Counter(AcceptErrors, name).Inc() }})
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	select {
	case err := <-served:
		if err != nil {
			return fmt.Errorf("metrics: serve on %s: %w", l.Addr(), err)
		}
		return nil
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.Background(), nodeDrain)
	defer cancel()
	err := s.ShutdownWithContext(stop)
	if serr := <-served; serr != nil {
		return fmt.Errorf("metrics: serve on %s: %w", l.Addr(), serr)
	}
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("metrics: close %s: %w", l.Addr(), err)
	}
	return nil
}

func (o NodeOptions) handle(ctx *fasthttp.RequestCtx) {
	if string(ctx.Path()) == LevelPath && o.Level != nil {
		if ctx.IsPut() && !ctx.RemoteIP().IsLoopback() {
			ctx.Error("the log level may be changed from this machine only\n", fasthttp.StatusForbidden)
			return
		}
		if err := ServeLevel(ctx, o.Level); err != nil {
			ctx.Error(err.Error()+"\n", fasthttp.StatusBadRequest)
		}
		return
	}
	if !ctx.IsGet() && !ctx.IsHead() {
		ctx.Error("method not allowed\n", fasthttp.StatusMethodNotAllowed)
		ctx.Response.Header.Set("Allow", "GET, HEAD")
		return
	}
	switch string(ctx.Path()) {
	case "/metrics":
		ctx.SetContentType(ContentType)
		ctx.Response.SetBodyRaw(o.Set.Append(nil))
	case "/livez":
		probe(ctx, o.Live)
	case "/readyz", "/health":
		probe(ctx, o.Ready)
	case "/version":
		ctx.SetContentType("application/json")
		fmt.Fprintf(ctx, "{\"version\":%q}\n", o.Version)
	default:
		ctx.Error("not found\n", fasthttp.StatusNotFound)
	}
}

func probe(ctx *fasthttp.RequestCtx, check func() error) {
	if check != nil {
		if err := check(); err != nil {
			ctx.Error(err.Error()+"\n", fasthttp.StatusServiceUnavailable)
			return
		}
	}
	ctx.SetBodyString("ok\n")
}
