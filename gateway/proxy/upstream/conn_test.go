package upstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/internal/sock"
)

// script is a connection that gives bytes in pieces of a size, then ends.
type script struct {
	net.Conn
	data []byte
	size int
}

func (s *script) Read(p []byte) (int, error) {
	if len(s.data) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), s.size)], s.data)
	s.data = s.data[n:]
	return n, nil
}

func (*script) Close() error                    { return nil }
func (*script) SetReadDeadline(time.Time) error { return nil }

// receive reads an answer that comes in pieces of a size.
func receive(text string, size int) (rep Reply, body string, fit bool, err error) {
	c := &conn{nc: &script{data: []byte(text), size: size}, server: new(Server)}
	c.hold()
	defer c.drop()
	if rep, _, err = c.head(); err != nil {
		return rep, "", false, err
	}
	for {
		piece, err := c.next(true)
		if err == io.EOF {
			return rep, body, c.reusable(), nil
		}
		if err != nil {
			return rep, body, false, err
		}
		body += string(piece)
	}
}

// Every framing, however the bytes are cut.
func TestFraming(t *testing.T) {
	long := strings.Repeat("0123456789", 1000)
	for _, c := range []struct {
		answer string
		status int
		body   string
		fit    bool
	}{
		{"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, "hello", true},
		{"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nConnection: close\r\n\r\nhello", 200, "hello", false},
		{"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloextra", 200, "hello", false},
		{"HTTP/1.1 204 None\r\n\r\n", 204, "", true},
		{"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", 404, "", true},
		{"HTTP/1.1 200 OK\r\n\r\nto the end", 200, "to the end", false},
		{"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, "ok", false},
		{"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok", 200, "ok", true},
		{"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n", 200, "hello world", true},
		{"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTrailer: x\r\n\r\n", 200, "", true},
		{"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n2710\r\n" + long + "\r\n0\r\n\r\n", 200, long, true},
		{"HTTP/1.1 200\r\nContent-Length: 2\r\nX-Text: a\tb \xc3\xa9\r\n\r\nok", 200, "ok", true},
		{"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok", 200, "ok", true},
		{"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: x-y\r\nConnection: keep-alive, Close\r\n\r\nok", 200, "ok", false},
		{"HTTP/1.1 200 OK\r\nX-Long: " + long + "\r\nContent-Length: 2\r\n\r\nok", 200, "ok", true},
	} {
		for _, size := range []int{1, 2, 3, 7, 100, 1 << 20} {
			rep, body, fit, err := receive(c.answer, size)
			// What lies behind the answer is seen only where it came along.
			if err != nil || rep.Status != c.status || body != c.body || fit != c.fit && !strings.HasSuffix(c.answer, "extra") {
				t.Errorf("%.60q by %d: %d %q fit=%v %v", c.answer, size, rep.Status, body[:min(len(body), 60)], fit, err)
			}
		}
	}
}

func TestBrokenFraming(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
	for _, c := range []struct {
		answer string
		want   error
	}{
		{"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", ErrBroken},
		{head + "5\r\nhello\r\n", ErrBroken},
		{head + "5\r\nhello\r\n0\r\n", ErrBroken},
		{head + "5\r\nhello!\r\n0\r\n\r\n", ErrBroken},
		{head + "x\r\n", ErrBroken},
		{head + "ffffffffffffffffff\r\n", ErrBroken},
		{head + strings.Repeat("1", 2000), ErrBroken},
		{"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", ErrServer},
		{"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", ErrServer},
		{"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", ErrServer},
		{"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n2\r\nok\r\n0\r\n\r\n", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", ErrMalformed},
		{"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nTransfer-Encoding : chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nContent-Length: +7\r\n\r\n1234567", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\n", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nX-Folded: a\r\n b\r\nContent-Length: 2\r\n\r\nok", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nX-Folded: a\r\n\tContent-Length: 9\r\n\r\nok", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 2\r\n\r\nok", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nX: a\nY: b\r\nContent-Length: 2\r\n\r\nok", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nX: a\rY: b\r\nContent-Length: 2\r\n\r\nok", ErrMalformed},
		{"HTTP/1.1 200 OK\r\nno colon\r\nContent-Length: 2\r\n\r\nok", ErrMalformed},
		{"HTTP/1.1 200 OK\r\n: empty\r\nContent-Length: 2\r\n\r\nok", ErrMalformed},
		{"HTTP/1.1 999 OK\r\nContent-Length: 2\r\n\r\nok", ErrMalformed},
		{"HTTP/1.1 +20 OK\r\nContent-Length: 2\r\n\r\nok", ErrMalformed},
		{"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nok", ErrMalformed},
		{"SSH-2.0-OpenSSH_9.2p1\r\n\r\n", ErrMalformed},
		{"HTTP/1.1 xyz OK\r\n\r\n", ErrServer},
		{"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("y", maxHead), io.ErrShortBuffer},
		{"HTTP/1.1 200 OK\r\n", io.EOF},
		{"", io.EOF},
	} {
		for _, size := range []int{1, 5, 1 << 20} {
			if _, body, _, err := receive(c.answer, size); !errors.Is(err, c.want) {
				t.Errorf("%.80q by %d: %q %v, want %v", c.answer, size, body, err, c.want)
			}
		}
	}
}

// Any bytes end in an answer or an error, and the same one however they are cut.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"), 3)
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"), 1)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		size = 1 + max(0, size)%100
		r1, b1, _, e1 := receive(string(b), size)
		r2, b2, _, e2 := receive(string(b), 1<<20)
		if r1.Status != r2.Status || (e1 == nil) != (e2 == nil) || e1 == nil && b1 != b2 {
			t.Fatalf("%q by %d: %d %q %v; at once: %d %q %v", b, size, r1.Status, b1, e1, r2.Status, b2, e2)
		}
	})
}

// endless gives the same chunk again and again.
type endless struct {
	script
	chunk []byte
}

func (e *endless) Read(p []byte) (int, error) { return copy(p, e.chunk), nil }

// From the connection to an event's bytes nothing is allocated.
func TestNextDoesNotAllocate(t *testing.T) {
	event := "data: " + strings.Repeat("x", 200) + "\n\n"
	c := &conn{nc: &endless{chunk: fmt.Appendf(nil, "%x\r\n%s\r\n", len(event), event)}, body: chunked, server: new(Server)}
	c.hold()
	defer c.drop()
	if n := testing.AllocsPerRun(1000, func() {
		if piece, err := c.next(true); err != nil || !bytes.Equal(piece, []byte(event)) {
			t.Fatal(string(piece), err)
		}
		if piece, err := c.next(false); piece != nil || err != nil {
			t.Fatal(string(piece), err)
		}
	}); n != 0 {
		t.Fatalf("%g allocations an event", n)
	}
}

// ending is a connection that is closed before it is used.
type ending struct{ script }

func (*ending) SetReadDeadline(time.Time) error { return net.ErrClosed }

// A probe whose connection is closed under it leaves nothing in the books.
func TestProbeOfClosedConnection(t *testing.T) {
	p := &Pool{o: Options{Dial: func(context.Context, string, string) (net.Conn, error) { return new(ending), nil }, Log: slog.New(slog.DiscardHandler)}}
	s, err := newServer(p, Target{URL: "http://x"})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.get(t.Context(), "/health", 1); !errors.Is(err, net.ErrClosed) || len(s.active) != 0 {
		t.Fatalf("%d connections are in use: %v", len(s.active), err)
	}
}

// A server that reads no request, however small, keeps it no longer than its
// deadline.
func TestSendHasDeadline(t *testing.T) {
	for _, size := range []int{0, oneWrite, 4 * oneWrite, 64 * oneWrite} {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			defer near.Close()
			defer far.Close()
			began := time.Now()
			err := (&conn{nc: near}).send([]byte("POST / HTTP/1.1\r\n\r\n"), make([]byte, size), began.Add(time.Minute))
			if onRead := time.Since(began); !errors.Is(err, os.ErrDeadlineExceeded) || onRead != time.Minute {
				t.Errorf("%d bytes: %v after %v", size, err, onRead)
			}
		})
	}
}

// A probe's connection is kept for requests, and is as good as one opened for them.
func TestProbesLeavePlainSockets(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		_, _ = fmt.Fprint(nc, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		_, _ = io.Copy(io.Discard, nc)
	}()
	p := &Pool{o: Options{Dial: new(net.Dialer).DialContext, Log: slog.New(slog.DiscardHandler)}}
	s, err := newServer(p, Target{URL: "http://" + l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	if _, _, err := s.get(t.Context(), "/health", 1); err != nil || len(s.idle) != 1 {
		t.Fatalf("%d connections are kept: %v", len(s.idle), err)
	}
	if c := s.idle[0]; (c.raw == nil) != (sock.NewConn(c.nc) == nil) {
		t.Errorf("the socket is used as a plain one: %v", c.raw != nil)
	}
}

// An answer that breaks off is noticed, also where its last bytes and the connection's end
// come together, and its patience is what it was.
func TestPollNoticesEndsThatComeWithData(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = fmt.Fprint(nc, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
				_, _ = io.ReadFull(nc, make([]byte, 1))
				_, _ = fmt.Fprint(nc, "3\r\ntwo\r\n")
				nc.Close()
			}()
		}
	}()
	p := &Pool{o: Options{Dial: new(net.Dialer).DialContext, Log: slog.New(slog.DiscardHandler)}}
	s, err := newServer(p, Target{URL: "http://" + l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var poller sock.Poller
	defer poller.Close()
	for range 50 {
		wg.Go(func() {
			until := time.Now().Add(time.Minute)
			c, err := s.acquire(t.Context(), until, false)
			if err != nil {
				t.Error(err)
				return
			}
			defer s.release(c, false)
			c.hold()
			if _, _, err := c.head(); err != nil {
				t.Error(err)
				return
			}
			got := ""
			onRead := func() bool {
				for {
					piece, err := c.next(false)
					if got += string(piece); err != nil {
						t.Error(err)
					}
					if piece == nil {
						break
					}
				}
				if got == "one" {
					_, _ = c.nc.Write([]byte("x"))
				}
				return true
			}
			onRead() // of what came with the head
			if !c.canPoll() {
				return // no socket here
			}
			if err, ok := c.poll(&poller, nil, onRead); !ok || !errors.Is(err, ErrBroken) || got != "onetwo" || !c.deadline.Equal(until) {
				t.Errorf("%q, %v, %v", got, err, ok)
			}
		})
	}
	wg.Wait()
}
