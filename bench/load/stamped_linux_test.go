//go:build linux && (amd64 || arm64)

package load

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// The kernel's time of arrival is recorded: a client that wakes up late reports no later
// token, and reports that it was late.
func TestBusyClientIsNotTheServer(t *testing.T) {
	here, there := tcpPair(t)
	s := NewStamped(here)
	if s.raw == nil {
		t.Fatal("the kernel gives no times")
	}
	b := make([]byte, 10)
	for try := 1; ; try++ { // the kernel begins a little after it was asked
		before := time.Now()
		if _, err := there.Write([]byte("ab")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
		woken := time.Now()
		if n, err := s.Read(b); n != 2 || err != nil {
			t.Fatal(n, err)
		}
		// A millisecond for the clock of the wall being set while this runs.
		if at := s.At(); s.late > 0 && at.Before(woken) {
			if at.Before(before.Add(-time.Millisecond)) {
				t.Errorf("sent at 0, came at %v, woken at %v, read %v late", at.Sub(before), woken.Sub(before), s.late)
			}
			break
		}
		if try == 100 {
			t.Log("note: this kernel does not tell when bytes came")
			break
		}
	}
	if n := testing.AllocsPerRun(100, func() {
		if _, err := there.Write(b[:1]); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Read(b); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations per read", n)
	}
	there.Close()
	if n, err := s.Read(b); n != 0 || err != io.EOF {
		t.Errorf("at the end: %d, %v", n, err)
	}
	here.Close()
	if _, err := s.Read(b); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

func tcpPair(t *testing.T) (here, there net.Conn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if here, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if there, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { here.Close(); there.Close() })
	return here, there
}
