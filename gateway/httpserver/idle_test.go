package httpserver

import (
	"net"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/sock"
)

// A new connection takes the place of an idle one on which no request is arriving: neither unread,
// nor read so far without its end. If there are no others, the longest idle one is closed.
func TestArrivingRequestsKeepTheirConnections(t *testing.T) {
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := newListener(raw, 3, Counters{Evicted: new(metrics.Value)}, nil)
	defer l.Close()
	defer l.CloseAll()
	l.SetLimits(limits.Limits{HeaderTimeout: time.Minute})
	connect := func() (client net.Conn, server *Conn) {
		t.Helper()
		client, err := net.Dial("tcp", raw.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { client.Close() })
		nc, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		return client, nc.(*Conn)
	}
	open := func(c *Conn) bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return c.idle.place != nil
	}
	client, unread := connect()
	_, begun := connect()
	_, silent := connect()
	if _, err := client.Write([]byte("POST / HTTP/1.1\r\n")); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); !sock.Unread(unread.Conn) && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	begun.idle.first.Store(int64(time.Hour)) // as if just now, for as long as this takes
	_, last := connect()
	if !open(unread) || !open(begun) || open(silent) || !open(last) {
		t.Fatalf("unread %v, begun %v, silent %v, last %v", open(unread), open(begun), open(silent), open(last))
	}
	if n, err := unread.Read(make([]byte, 1)); n != 1 || err != nil || unread.idle.first.Load() == 0 {
		t.Fatalf("read %d bytes at %v: %v", n, time.Duration(unread.idle.first.Load()), err)
	}
	for _, c := range []*Conn{unread, last} {
		c.idle.first.Store(begun.idle.first.Load())
	}
	if connect(); open(unread) || !open(begun) || !open(last) {
		t.Errorf("all are arriving: unread %v, begun %v, last %v", open(unread), open(begun), open(last))
	}
}

// The end of a head is found however its bytes are cut, and not before its first line.
func TestHeadEnds(t *testing.T) {
	for _, c := range []struct {
		text string
		ends bool
	}{
		{"GET / HTTP/1.1\r\nHost: x\r\n\r\n", true}, {"GET / HTTP/1.1\nHost: x\n\n", true}, {"\r\n\r\nGET / HTTP/1.1\r\n\r\n", true},
		{"\r\n\r\n\r\n", false}, {"GET / HTTP/1.1\r\nHost: x\r\n", false}, {"GET / HTTP/1.1\r\nHost: x\r\n\r", false}, {"", false},
	} {
		for first := range len(c.text) + 1 {
			for second := first; second <= len(c.text); second++ {
				var s idleState
				ends := false
				for _, part := range []string{c.text[:first], c.text[first:second], c.text[second:]} {
					ends = s.headEnds([]byte(part)) || ends
				}
				if ends != c.ends {
					t.Fatalf("%q cut at %d and %d: ends %v", c.text, first, second, ends)
				}
			}
		}
	}
}
