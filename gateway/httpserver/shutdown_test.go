package httpserver

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/fasthttputil"

	"github.com/tandem-serving/tandem/internal/limits"
)

// draining is a server whose streams wait for release.
type draining struct {
	*Server
	l       *fasthttputil.InmemoryListener
	release chan struct{}
}

// inDrain runs f with a server in virtual time.
func inDrain(t *testing.T, f func(t *testing.T, d *draining)) {
	synctest.Test(t, func(t *testing.T) {
		d := &draining{l: fasthttputil.NewInmemoryListener(), release: make(chan struct{})}
		d.Server = New(d.l, Options{Log: slog.New(slog.DiscardHandler), Limits: limits.Limits{HeaderTimeout: time.Minute, SlowClientTimeout: time.Minute, MaxBodyBytes: 1 << 10},
			Handler: func(ctx *fasthttp.RequestCtx) {
				if string(ctx.Path()) == "/stream" {
					ctx.SetBodyStreamWriter(func(w *bufio.Writer) {
						_, _ = w.WriteString("first")
						_ = w.Flush()
						<-d.release
					})
				}
			}})
		ended := make(chan error, 1)
		go func() { ended <- d.Run() }()
		f(t, d)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		d.End()
		time.Sleep(time.Minute) // the workers of fasthttp end
	})
}

// client is a connection that is used for several requests.
type client struct {
	net.Conn
	r *bufio.Reader
}

func (d *draining) dial(t *testing.T) *client {
	t.Helper()
	conn, err := d.l.Dial()
	if err != nil {
		t.Fatal(err)
	}
	return &client{conn, bufio.NewReader(conn)}
}

// ask sends a request and returns its response, whose body is not read.
func (c *client) ask(t *testing.T, path string) *http.Response {
	t.Helper()
	if _, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: t\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// closed reports whether the server has closed the connection.
func (c *client) closed() bool {
	_, err := c.r.ReadByte()
	return err == io.EOF
}

// A connection whose answer began before the shutdown takes one more request, because its client
// cannot know of the shutdown. The answer of that request announces the end.
func TestShutdownKeepsReusedConnections(t *testing.T) {
	inDrain(t, func(t *testing.T, d *draining) {
		reused, left := d.dial(t), d.dial(t)
		streams := []*http.Response{reused.ask(t, "/stream"), left.ask(t, "/stream")}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		down := make(chan error, 1)
		go func() { down <- d.Shutdown(ctx) }()
		time.Sleep(10 * time.Second)
		close(d.release)
		for _, s := range streams {
			if text, err := io.ReadAll(s.Body); err != nil || string(text) != "first" || s.Close {
				t.Errorf("%q, close %v, %v", text, s.Close, err)
			}
		}
		time.Sleep(reuseTime / 2)
		next := reused.ask(t, "/")
		if _, err := io.Copy(io.Discard, next.Body); err != nil || next.StatusCode != 200 || !next.Close || !reused.closed() {
			t.Errorf("the next request: %s, close %v, %v", next.Status, next.Close, err)
		}
		begun := time.Now()
		if !left.closed() || time.Since(begun) > reuseTime {
			t.Errorf("a connection without a further request is open for %v", time.Since(begun))
		}
		if err := <-down; err != nil {
			t.Error(err)
		}
	})
}

// Connections that are idle for long are closed at once. From half of the time on connections end
// with their answers.
func TestShutdownEndsConnections(t *testing.T) {
	inDrain(t, func(t *testing.T, d *draining) {
		idle, busy := d.dial(t), d.dial(t)
		if resp := idle.ask(t, "/"); resp.Close {
			t.Error("an answer before the shutdown ends the connection")
		}
		stream := busy.ask(t, "/stream")
		time.Sleep(2 * reuseTime)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		down := make(chan error, 1)
		begun := time.Now()
		go func() { down <- d.Shutdown(ctx) }()
		if !idle.closed() || time.Since(begun) > 0 {
			t.Errorf("an idle connection is open for %v", time.Since(begun))
		}
		if _, err := d.l.Dial(); err == nil {
			t.Error("a new connection is accepted")
		}
		time.Sleep(40 * time.Second)
		begun = time.Now()
		close(d.release)
		if text, err := io.ReadAll(stream.Body); err != nil || string(text) != "first" || !busy.closed() || time.Since(begun) > 0 {
			t.Errorf("%q, %v; the connection is open for %v", text, err, time.Since(begun))
		}
		if err := <-down; err != nil {
			t.Error(err)
		}
	})
}
