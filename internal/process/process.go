// Package process has the parts of every long-running command: a logger, signals,
// certificates, reloads, memory and descriptor limits, child processes, and a list of
// parts to stop in reverse.
//
// Invariant: when End returns, everything passed to OnEnd or Work has ended, the last
// started first.
//
// The package knows no roles and no flags.
package process

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tandem-serving/tandem/internal/obs/logs"
	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// ErrOption is wrapped by refusals of Options.
var ErrOption = errors.New("process: bad option")

// Options of a process.
type Options struct {
	Role, Name string // an empty name becomes that of the certificate in TLSDir, else the host's
	LogLevel   string // debug, info, warning or error
	LogFormat  string // text or json
	Out        io.Writer
	TLSDir     string // folder of the node's certificates; empty: none
}

// Process is a running command.
type Process struct {
	Log    *slog.Logger
	Ctx    context.Context // ends at the first SIGINT or SIGTERM
	Second <-chan struct{} // closed at the second
	Name   string
	Certs  *tlsconf.Material // nil without TLSDir
	Level  *slog.LevelVar    // of Log; may be set at any time
	stop   []func()
	hung   sync.Once // guards hangUp
	probes atomic.Pointer[probes]

	loading atomic.Pointer[string] // of Loading
}

// Logger returns a logger, which becomes the default of slog, and its level.
func Logger(level, format string, w io.Writer) (*slog.Logger, *slog.LevelVar, error) {
	log, v, err := newLogger(level, format, w)
	if err != nil {
		return nil, nil, err
	}
	slog.SetDefault(log)
	return log, v, nil
}

func newLogger(level, format string, w io.Writer) (*slog.Logger, *slog.LevelVar, error) {
	l, err := logs.ParseLevel(level)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: --log-level %w", ErrOption, err)
	}
	v := new(slog.LevelVar)
	v.Set(l)
	log, ok := logs.Log(w, v, logs.Format(format))
	if !ok {
		return nil, nil, fmt.Errorf("%w: --log-format %q; use text or json", ErrOption, format)
	}
	return log, v, nil
}

// Check returns the errors with which Start would refuse the options.
func (o Options) Check() error {
	log, _, err := newLogger(o.LogLevel, o.LogFormat, io.Discard)
	if o.TLSDir == "" {
		return err
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	certs, cerr := loadCerts(o.TLSDir, log)
	if cerr == nil {
		cerr = certs.Close()
	}
	return errors.Join(err, cerr)
}

// loadCerts loads the certificates of --tls-dir.
func loadCerts(dir string, log *slog.Logger) (*tlsconf.Material, error) {
	m, err := tlsconf.Load(dir, log)
	if errors.Is(err, tlsconf.ErrMaterial) {
		return nil, fmt.Errorf("%w: --tls-dir %s: %w; %s", ErrOption, dir, err, certsRemedy(err))
	}
	return m, err
}

// certsRemedy returns what to do about a folder of certificates that cannot be used.
func certsRemedy(err error) string {
	var invalid x509.CertificateInvalidError
	switch {
	case !errors.As(err, &invalid) || invalid.Reason != x509.Expired:
		return "`tandem ca DIR gateway/NAME` or `tandem ca DIR node/NAME` creates such a folder"
	case time.Now().Before(invalid.Cert.NotBefore):
		return "set this machine's clock, or that of the machine on which `tandem ca` ran"
	}
	return "`tandem ca renew DIR` issues new ones, unless this machine's clock is wrong"
}

// toggleDebug makes SIGUSR1 switch between the current level and debug, until stop.
func toggleDebug(log *slog.Logger, v *slog.LevelVar) (stop func()) {
	got, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(got, syscall.SIGUSR1)
	go func() {
		before := slog.LevelInfo
		for {
			select {
			case <-done:
				return
			case <-got:
			}
			to := slog.LevelDebug
			if now := v.Level(); now == to {
				to = before
			} else {
				before = now
			}
			v.Set(to)
			log.Info("log level changed", "level", logs.LevelName(to), "by", "SIGUSR1")
		}
	}()
	return func() { signal.Stop(got); close(done) }
}

// name returns the name of a process. Start refuses a certificate that cannot be read.
func name(o Options) string {
	if o.Name != "" {
		return o.Name
	}
	if o.TLSDir != "" {
		if id, err := tlsconf.FolderIdentity(o.TLSDir); err == nil && id.Name != "" {
			return id.Name
		}
	}
	if host, err := os.Hostname(); err == nil && host != "" {
		return host
	}
	return o.Role
}

// Start returns a process, which the caller must End.
func Start(o Options) (*Process, error) {
	log, level, err := Logger(o.LogLevel, o.LogFormat, o.Out)
	if err != nil {
		return nil, err
	}
	p := &Process{Log: log, Level: level, Name: name(o)}
	if logs.Format(o.LogFormat) == logs.JSON { // collectors mix the lines of several processes
		p.Log = log.With("role", o.Role, "node", p.Name)
	}
	p.OnEnd(toggleDebug(p.Log, level))
	if o.TLSDir != "" {
		if p.Certs, err = loadCerts(o.TLSDir, log); err != nil {
			return nil, err
		}
		p.OnEnd(func() { p.Report("certificates", p.Certs.Close()) })
		p.Work(func(ctx context.Context) {
			tlsconf.WarnExpiry(ctx, log, o.TLSDir, "`tandem ca renew DIR` issues new ones; a running process takes the copied files", p.Certs.Expiry)
		})
	}
	var stop func()
	p.Ctx, p.Second, stop = Signals()
	p.OnEnd(stop)
	p.supervise()
	return p, nil
}

// OnEnd makes End call f.
func (p *Process) OnEnd(f func()) { p.stop = append(p.stop, f) }

// Work runs f on a goroutine of its own until the process ends.
func (p *Process) Work(f func(context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); f(ctx) }()
	p.OnEnd(func() { cancel(); <-done })
}

// Report logs an error of a part while stopping; nil: nothing.
func (p *Process) Report(part string, err error) {
	if err != nil {
		p.Log.Error("while stopping", "part", part, "err", err)
	}
}

// End stops everything in reverse order.
func (p *Process) End() {
	for i := len(p.stop) - 1; i >= 0; i-- {
		p.stop[i]()
	}
	p.stop = nil
}

// ExitAtSecondSignal exits at once at the second signal, with the status of a process that the
// first one ended.
func (p *Process) ExitAtSecondSignal() {
	go func() {
		<-p.Second
		p.Log.Warn("second signal: ending now")
		var s Stopped
		errors.As(context.Cause(p.Ctx), &s)
		os.Exit(s.Status())
	}()
}

// Stopped is the error of a command that a signal ended before it was done.
type Stopped syscall.Signal

// Error names the signal.
func (s Stopped) Error() string { return "stopped: " + syscall.Signal(s).String() }

// Status returns the exit status of a process that the signal ended.
func (s Stopped) Status() int { return 128 + int(s) }

// Signals returns a context that ends at the first SIGINT or SIGTERM, with a Stopped as its cause,
// and a channel that is closed at the second.
func Signals() (ctx context.Context, second <-chan struct{}, stop func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	got := make(chan os.Signal, 2)
	signal.Notify(got, syscall.SIGINT, syscall.SIGTERM)
	again, done := make(chan struct{}), make(chan struct{})
	go func() {
		select {
		case s := <-got:
			cancel(Stopped(s.(syscall.Signal))) // the only kind of os.Signal on systems with these two
		case <-done:
			return
		}
		select {
		case <-got:
			close(again)
		case <-done:
		}
	}()
	return ctx, again, func() { signal.Stop(got); close(done); cancel(nil) }
}

// Listen binds a port. Its error names the flag of the port.
func Listen(host string, port int, flag string) (net.Listener, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("cannot listen for --%s: %w", flag, err)
	}
	return l, nil
}

// CheckPort returns an error if a port cannot be bound, which is that of Listen. It leaves the port
// free. Port 0 is always free.
func CheckPort(host string, port int, flag string) error {
	if port == 0 {
		return nil
	}
	l, err := Listen(host, port, flag)
	if err != nil {
		return err
	}
	return l.Close()
}

// At returns a host with the port of a listener's address.
func At(host string, l net.Addr) string {
	_, port, err := net.SplitHostPort(l.String())
	if err != nil {
		return l.String() // no port: an in-memory address
	}
	return net.JoinHostPort(host, port)
}

// Loopback reports whether a host is reachable from this machine only.
func Loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
