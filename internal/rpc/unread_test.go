package rpc

import (
	"context"
	"net"
	"testing"
	"time"
)

// Bytes that wait for a busy reader are seen without reading them, in sockets and in
// memory; what was read moves ReceivedAt.
func TestUnread(t *testing.T) {
	for name, c := range map[string]struct {
		listen func(n *Network) (net.Listener, error)
		dial   func(n *Network) func(context.Context, string) (net.Conn, error)
	}{
		"sockets": {func(*Network) (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") },
			func(*Network) func(context.Context, string) (net.Conn, error) { return nil }},
		"memory": {func(n *Network) (net.Listener, error) { return n.Listen("node") },
			func(n *Network) func(context.Context, string) (net.Conn, error) { return n.Dial }},
	} {
		t.Run(name, func(t *testing.T) {
			network := NewNetwork()
			l, err := c.listen(network)
			if err != nil {
				t.Fatal(err)
			}
			server, client := newRecorder(), newRecorder()
			server.on = func(c *Conn, e event) { // answers twice: the second waits for the first
				if e.t == FrameDrain {
					_ = c.Send(FrameDrain, e.stream, nil)
					time.Sleep(10 * time.Millisecond)
					_ = c.Send(FrameDrain, e.stream, nil)
				}
			}
			busy := make(chan struct{})
			client.on = func(c *Conn, e event) {
				if e.t == FrameDrain {
					<-busy
				}
			}
			ctx, stop := context.WithCancel(t.Context())
			served := make(chan error, 1)
			go func() { served <- Serve(ctx, l, Options{Hello: hello("node")}, server) }()
			pool := NewPool(Options{Hello: hello("gw"), Dial: c.dial(network)}, client)
			conn, err := pool.Get(ctx, l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			until := func(what string, cond func() bool) {
				t.Helper()
				for end := time.Now().Add(time.Minute); !cond(); time.Sleep(time.Millisecond) {
					if time.Now().After(end) {
						t.Fatal(what)
					}
				}
			}
			until("an idle connection has unread bytes", func() bool { return !conn.Unread() })
			before := conn.ReceivedAt()
			if err := conn.Send(FrameDrain, 1, nil); err != nil {
				t.Fatal(err)
			}
			until("waiting bytes are not seen", conn.Unread)
			if !conn.ReceivedAt().After(before) {
				t.Errorf("ReceivedAt is %v, before the answer %v", conn.ReceivedAt(), before)
			}
			close(busy)
			until("bytes that were read are unread", func() bool { return !conn.Unread() })
			pool.Close()
			stop()
			if err := <-served; err != nil {
				t.Error(err)
			}
		})
	}
}
