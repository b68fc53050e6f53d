// Package netio has a listener that retries Accept when file descriptors or memory run out.
package netio

import (
	"errors"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"
)

// Bounds of a Listener's backoff and of its log.
const (
	minBackoff  = 5 * time.Millisecond
	maxBackoff  = time.Second
	logInterval = time.Second
)

// Temporary errors of Accept: the process or the machine is short of file
// descriptors or memory, or the client has aborted the connection.
var temporary = []struct {
	errno syscall.Errno
	name  string
}{
	{syscall.EMFILE, "EMFILE"},
	{syscall.ENFILE, "ENFILE"},
	{syscall.ENOBUFS, "ENOBUFS"},
	{syscall.ENOMEM, "ENOMEM"},
	{syscall.ECONNABORTED, "ECONNABORTED"},
}

// ErrorNames returns the names that Options.Count is called with.
func ErrorNames() []string {
	var names []string
	for _, p := range temporary {
		names = append(names, p.name)
	}
	return names
}

// Options of a Listener.
type Options struct {
	Log   *slog.Logger      // nil: discarded
	Count func(name string) // called for each temporary error; nil: not called
	// MakeRoom closes an idle connection, and reports whether it did. It is called when
	// file descriptors or memory have run out; nil: not called.
	MakeRoom func() bool
}

// Listener retries Accept after temporary errors, with a backoff of 5 ms to 1 s.
// Servers such as fasthttp end at any error of Accept, so that clients could
// otherwise end the process by using up its file descriptors.
type Listener struct {
	net.Listener
	o      Options
	closed chan struct{}
	once   sync.Once

	// Of Accept.
	backoff time.Duration
	logged  time.Time
	silent  int // errors since the last log line
}

// NewListener wraps l. Accept must not be called concurrently.
func NewListener(l net.Listener, o Options) *Listener {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Listener{Listener: l, o: o, closed: make(chan struct{})}
}

// Accept implements net.Listener. It returns errors that are not temporary, and
// net.ErrClosed at once after Close.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err == nil {
			l.backoff = 0
			return c, nil
		}
		name := errorName(err)
		if name == "" {
			return nil, err
		}
		if l.o.Count != nil {
			l.o.Count(name)
		}
		room := name != "ECONNABORTED" && l.o.MakeRoom != nil && l.o.MakeRoom()
		if l.backoff = min(max(minBackoff, 2*l.backoff), maxBackoff); room {
			l.backoff = minBackoff
		}
		l.report(err)
		select {
		case <-l.closed:
			return nil, net.ErrClosed
		case <-time.After(l.backoff):
		}
	}
}

// Close implements net.Listener.
func (l *Listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// report logs err, at most once in logInterval.
func (l *Listener) report(err error) {
	l.silent++
	if now := time.Now(); now.Sub(l.logged) >= logInterval {
		l.o.Log.Warn("connections cannot be accepted", "addr", l.Addr(), "errors", l.silent, "retry_in", l.backoff, "error", err)
		l.logged, l.silent = now, 0
	}
}

// errorName returns the name of a temporary error; empty: err is not temporary.
func errorName(err error) string {
	for _, p := range temporary {
		if errors.Is(err, p.errno) {
			return p.name
		}
	}
	return ""
}
