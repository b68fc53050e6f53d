//go:build linux

package sock

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

const longStay = time.Minute

// What comes on many connections arrives whole, each at its own registration, also in pieces
// and larger than the buffer; each wait ends with its connection.
func TestPoller(t *testing.T) {
	var w Poller
	defer w.Close()
	var wg sync.WaitGroup
	for i := range 50 {
		near, far := pair(t)
		to, _ := pair(t)
		want := bytes.Repeat([]byte{byte(i), 1, 2, 3, 4, 5, 6}, 3000+100*i)
		wg.Go(func() {
			for rest := want; len(rest) > 0; {
				n := min(len(rest), 1+len(rest)%5000)
				if _, err := far.Write(rest[:n]); err != nil {
					t.Error(err)
					return
				}
				rest = rest[n:]
			}
			far.Close()
		})
		wg.Go(func() {
			var got []byte
			for {
				l := &lender{buf: make([]byte, 512)}
				m := NewRegistration(NewConn(near), NewConn(to), l, func(n int) bool {
					got = append(got, l.buf[:n]...)
					return len(got)%7 != 3
				})
				err, ok := m.Wait(&w, time.Now().Add(longStay))
				if !ok || err == io.EOF {
					if !ok || !bytes.Equal(got, want) {
						t.Errorf("connection %d: %d bytes of %d, in a poller: %v", i, len(got), len(want), ok)
					}
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// A wait ends with the peer that is written to, at its time, by End, and with the poller; what
// was ended before does not begin.
func TestPollerEnds(t *testing.T) {
	var w Poller
	registration := func() (m *Registration, to *net.TCPConn) {
		near, _ := pair(t)
		writes, reads := pair(t)
		return NewRegistration(NewConn(near), NewConn(writes), &lender{buf: make([]byte, 8)}, func(int) bool { return true }), reads
	}
	for what, c := range map[string]struct {
		until time.Duration
		end   func(m *Registration, to *net.TCPConn)
		want  error
	}{
		"the other's end":  {longStay, func(_ *Registration, to *net.TCPConn) { to.Close() }, ErrPeerClosed},
		"its half end":     {longStay, func(_ *Registration, to *net.TCPConn) { _ = to.CloseWrite() }, ErrPeerClosed},
		"what it sends is": {time.Millisecond, func(_ *Registration, to *net.TCPConn) { _, _ = to.Write([]byte("no end")) }, os.ErrDeadlineExceeded},
		"time":             {time.Millisecond, func(*Registration, *net.TCPConn) {}, os.ErrDeadlineExceeded},
		"an abort":         {longStay, func(m *Registration, _ *net.TCPConn) { endIn(m, io.ErrClosedPipe) }, io.ErrClosedPipe},
	} {
		m, to := registration()
		go c.end(m, to)
		if err, ok := m.Wait(&w, time.Now().Add(c.until)); !ok || !errors.Is(err, c.want) {
			t.Errorf("%s: %v, %v", what, err, ok)
		}
	}
	m, _ := registration()
	m.Cancel(io.EOF)
	if _, ok := m.Wait(&w, time.Now().Add(longStay)); ok {
		t.Error("a registration stayed that was ended before")
	}
	m, _ = registration()
	go func() {
		for !m.isIn() {
			time.Sleep(time.Millisecond)
		}
		w.Close()
	}()
	if err, ok := m.Wait(&w, time.Now().Add(longStay)); !ok || !errors.Is(err, net.ErrClosed) {
		t.Error(err, ok)
	}
	m, _ = registration()
	if _, ok := m.Wait(&w, time.Now().Add(longStay)); ok {
		t.Error("a registration stayed in a closed crowd")
	}
	w.Close()
}

// A peer that never pauses does not keep others waiting: its wait ends, and begins again with what
// is left.
func TestPollerBoundsReads(t *testing.T) {
	var w Poller
	defer w.Close()
	near, far := pair(t)
	if _, err := far.Write(make([]byte, 2*maxReads)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		reads := 0
		m := NewRegistration(NewConn(near), nil, &lender{buf: make([]byte, 1)}, func(int) bool { reads++; return true })
		if err, ok := m.Wait(&w, time.Now().Add(longStay)); err != nil || !ok || reads != maxReads {
			t.Errorf("%d reads: %v, %v", reads, err, ok)
		}
	}
}

func (m *Registration) isIn() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.active
}

// endIn ends a wait that has begun.
func endIn(m *Registration, err error) {
	for !m.isIn() {
		time.Sleep(time.Millisecond)
	}
	m.Cancel(err)
}

// Registrations that are aborted and closed while others get what they wait for: no byte of a
// connection reaches another that has its descriptor next.
func TestPollerAborts(t *testing.T) {
	var w Poller
	defer w.Close()
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 40 {
				near, far := pair(t)
				to, _ := pair(t)
				mark, l := byte(g*40+i), &lender{buf: make([]byte, 16)}
				m := NewRegistration(NewConn(near), NewConn(to), l, func(n int) bool {
					for _, c := range l.buf[:n] {
						if c != mark {
							t.Errorf("a byte of connection %d reached %d", c, mark)
						}
					}
					return true
				})
				go func() { _, _ = far.Write(bytes.Repeat([]byte{mark}, 100)) }()
				go func() {
					m.Cancel(net.ErrClosed)
					near.Close()
				}()
				if err, ok := m.Wait(&w, time.Now().Add(longStay)); ok && !errors.Is(err, net.ErrClosed) {
					t.Error(err)
				}
				to.Close()
				far.Close()
			}
		})
	}
	wg.Wait()
}

func TestPollerDoesNotAllocate(t *testing.T) {
	var w Poller
	near, far := pair(t)
	to, _ := pair(t)
	came := make(chan struct{}, 1)
	m := NewRegistration(NewConn(near), NewConn(to), &lender{buf: make([]byte, 64)}, func(int) bool {
		came <- struct{}{}
		return true
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = m.Wait(&w, time.Now().Add(longStay))
	}()
	out, p := NewConn(far), make([]byte, 8)
	if n := testing.AllocsPerRun(200, func() {
		if _, err := out.WriteNow(p); err != nil {
			t.Fatal(err)
		}
		<-came
	}); n != 0 {
		t.Errorf("%g allocations", n)
	}
	w.Close()
	<-ended
}
