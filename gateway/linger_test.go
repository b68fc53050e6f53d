package gateway

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// How long, and for how many bytes, the gateway reads from a client that it refused.
const (
	lingerTime  = time.Second
	lingerBytes = 8 << 20
)

// strictListener hands out connections that count what a socket would reset:
// those that are closed while bytes of the client wait to be read.
type strictListener struct {
	net.Listener
	resets atomic.Int64
}

func (l *strictListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return &strictConn{Conn: c, l: l}, err
}

type strictConn struct {
	net.Conn
	l *strictListener
}

func (c *strictConn) CloseWrite() error { return c.Conn.(interface{ CloseWrite() error }).CloseWrite() }

func (c *strictConn) Close() error {
	_ = c.Conn.SetReadDeadline(time.Now().Add(time.Millisecond)) // an error shows in Close
	if n, _ := c.Conn.Read(make([]byte, 1)); n > 0 {
		c.l.resets.Add(1)
	}
	return c.Conn.Close()
}

// tooMuch is a request whose body is refused before it was read.
func tooMuch(n int) string {
	return fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n", n)
}

// Clients that are refused while they send get their answer whole, whatever they
// go on to do, and each is let go within the bounds of the lingering, also when
// the gateway stops in the middle of it and closes what is open.
func TestLingeringCloses(t *testing.T) {
	const body = 3 << 20
	for seed := range uint64(12) {
		synctest.Test(t, func(t *testing.T) {
			t.Cleanup(func() { time.Sleep(time.Minute) }) // the server's own tickers
			rng := rand.New(rand.NewPCG(seed, 41))
			net := rpc.NewNetwork()
			raw, err := net.Listen("gateway")
			if err != nil {
				t.Fatal(err)
			}
			stops, kind := seed%3 == 0, seed%3 == 1 // kind: clients that read what they are told
			l, strict := raw, &strictListener{Listener: raw}
			if kind {
				l = strict
			}
			b := newBed(t, Options{Listener: l, Limits: Limits{MaxBodyBytes: 1 << 20}, ShutdownTimeout: time.Millisecond}, one(nodestest.Options{}))
			b.net = net
			var clients sync.WaitGroup
			for i := range 24 {
				way, pause := i%4, time.Duration(rng.IntN(1500))*time.Millisecond
				if kind {
					way &= 2
				}
				c := b.dial()
				clients.Go(func() {
					defer c.Close()
					refusedWhileSending(t, c, way, pause, body, true, stops)
				})
			}
			if stops {
				time.Sleep(time.Duration(rng.IntN(1000)) * time.Millisecond)
				b.stop()
			}
			clients.Wait()
			synctest.Wait()
			if n := strict.resets.Load(); n > 0 {
				t.Errorf("seed %d: %d answers would be lost to a reset", seed, n)
			}
			if n, _, _ := b.g.http.Connections(); n != 0 {
				t.Errorf("seed %d: %d connections are still open", seed, n)
			}
		})
	}
}

// refusedWhileSending is one client: it sends all, sends without end, falls
// silent, or goes away. virtual says that time is, stops that the gateway may stop
// meanwhile.
func refusedWhileSending(t *testing.T, c *client, way int, pause time.Duration, body int, virtual, stops bool) {
	time.Sleep(pause / 4)
	began := time.Now()
	sent := make(chan int, 1)
	go func() {
		n := 0
		defer func() { sent <- n }()
		if _, err := io.WriteString(c, tooMuch(body)); err != nil || way == 3 {
			return
		}
		piece := []byte(strings.Repeat("x", 64<<10))
		for n < body || way == 1 {
			m, err := c.Write(piece)
			if n += m; err != nil || way == 2 {
				return
			}
		}
	}()
	if way == 3 { // gone, at once or in the middle of the lingering
		time.Sleep(pause)
		c.Close()
		<-sent
		return
	}
	if !virtual { // as simple clients do
		n := <-sent
		sent <- n
	}
	resp, err := http.ReadResponse(c.r, nil)
	var text []byte
	if err == nil {
		text, err = io.ReadAll(resp.Body)
	}
	switch {
	case err != nil && stops: // refused, or closed with the rest
	case !virtual && time.Since(began) > lingerTime/2: // a machine too busy to tell
	case err != nil || resp.StatusCode != 413 || !strings.Contains(string(text), "1048576 bytes"):
		t.Errorf("way %d: %v %.100q, %v", way, resp, text, err)
	}
	if _, err := c.r.ReadByte(); err == nil {
		t.Errorf("way %d: something follows", way)
	}
	if way == 2 { // holds its side open
		time.Sleep(2 * lingerTime)
		if _, err := c.Write([]byte("x")); err == nil {
			t.Errorf("way %d: still read from after %v", way, time.Since(began))
		}
	}
	n := <-sent
	if took := time.Since(began); virtual && took > 4*lingerTime || n > body+lingerBytes {
		t.Errorf("way %d: let go after %v and %d bytes", way, took, n)
	}
}

// The same over sockets, where closing over unread bytes would reset the
// connection and lose the answer.
func TestRefusedWhileSendingOverSockets(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := newBed(t, Options{Listener: l, Limits: Limits{MaxBodyBytes: 1 << 20}}, one(nodestest.Options{}))
	var clients sync.WaitGroup
	for range 16 {
		clients.Go(func() {
			nc, err := net.Dial("tcp", b.g.Addr())
			if err != nil {
				t.Error(err)
				return
			}
			defer nc.Close()
			c := &client{bed: b, Conn: nc, r: bufio.NewReader(nc)}
			refusedWhileSending(t, c, 0, 0, 3<<20, false, false)
		})
	}
	clients.Wait()
	b.until(func() bool {
		n, _, _ := b.g.http.Connections()
		return n == 0
	})
}

// A request that does not arrive whole in time is told so.
func TestRequestThatStops(t *testing.T) {
	for what, part := range map[string]string{
		"in its head": "POST /v1/completions HTTP/1.1\r\nHost:", "in its body": tooMuch(100) + `{"prompt":"x`,
	} {
		synctest.Test(t, func(t *testing.T) {
			t.Cleanup(func() { time.Sleep(time.Minute) })
			b := newBed(t, Options{}, one(nodestest.Options{}))
			c := b.dial()
			defer c.Close()
			if err := c.SetDeadline(time.Time{}); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(c, part); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			r := c.receive()
			if took := time.Since(began); r.StatusCode != 408 || !strings.Contains(r.body, "10s") || took > 2*limits.Default().HeaderTimeout {
				t.Errorf("%s: %d %q after %v", what, r.StatusCode, r.body, took)
			}
		})
	}
}
