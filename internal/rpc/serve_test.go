package rpc

import (
	"net"
	"testing"
	"time"
)

// A connection that ends before it sends anything, as of a check of the port, is not a refused node.
func TestPortCheckIsNotRefused(t *testing.T) {
	b := newRoleBed(t)
	for range 3 {
		c, err := net.Dial("tcp", b.addr)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	c, err := net.Dial("tcp", b.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("GET / HTTP/1.1\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); b.counters.Refused.Load() == 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if n := b.log.count("refused a node"); n != 1 || b.counters.Refused.Load() != 1 {
		t.Errorf("%d lines and %d refused, want the HTTP client alone", n, b.counters.Refused.Load())
	}
}
