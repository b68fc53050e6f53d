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

// What comes on many connections arrives whole, each at its own member, also in pieces
// and larger than what is lent; each stay ends with its connection.
func TestCrowd(t *testing.T) {
	var w Crowd
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
				m := NewMember(Of(near), Of(to), l, func(n int) bool {
					got = append(got, l.buf[:n]...)
					return len(got)%7 != 3
				})
				err, ok := m.Stay(&w, time.Now().Add(longStay))
				if !ok || err == io.EOF {
					if !ok || !bytes.Equal(got, want) {
						t.Errorf("connection %d: %d bytes of %d, in a crowd: %v", i, len(got), len(want), ok)
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

// A stay ends with the peer that is written to, at its time, by End, and with the crowd; what
// was ended before does not begin.
func TestCrowdEnds(t *testing.T) {
	var w Crowd
	member := func() (m *Member, to *net.TCPConn) {
		near, _ := pair(t)
		writes, reads := pair(t)
		return NewMember(Of(near), Of(writes), &lender{buf: make([]byte, 8)}, func(int) bool { return true }), reads
	}
	for what, c := range map[string]struct {
		until time.Duration
		end   func(m *Member, to *net.TCPConn)
		want  error
	}{
		"the other's end":  {longStay, func(_ *Member, to *net.TCPConn) { to.Close() }, ErrLeft},
		"its half end":     {longStay, func(_ *Member, to *net.TCPConn) { _ = to.CloseWrite() }, ErrLeft},
		"what it sends is": {time.Millisecond, func(_ *Member, to *net.TCPConn) { _, _ = to.Write([]byte("no end")) }, os.ErrDeadlineExceeded},
		"time":             {time.Millisecond, func(*Member, *net.TCPConn) {}, os.ErrDeadlineExceeded},
		"an abort":         {longStay, func(m *Member, _ *net.TCPConn) { endIn(m, io.ErrClosedPipe) }, io.ErrClosedPipe},
	} {
		m, to := member()
		go c.end(m, to)
		if err, ok := m.Stay(&w, time.Now().Add(c.until)); !ok || !errors.Is(err, c.want) {
			t.Errorf("%s: %v, %v", what, err, ok)
		}
	}
	m, _ := member()
	m.End(io.EOF)
	if _, ok := m.Stay(&w, time.Now().Add(longStay)); ok {
		t.Error("a member stayed that was ended before")
	}
	m, _ = member()
	go func() {
		for !m.isIn() {
			time.Sleep(time.Millisecond)
		}
		w.Close()
	}()
	if err, ok := m.Stay(&w, time.Now().Add(longStay)); !ok || !errors.Is(err, net.ErrClosed) {
		t.Error(err, ok)
	}
	m, _ = member()
	if _, ok := m.Stay(&w, time.Now().Add(longStay)); ok {
		t.Error("a member stayed in a closed crowd")
	}
	w.Close()
}

// A peer that never pauses does not keep others waiting: its stay ends, and begins again with what is
// left.
func TestCrowdBoundsReads(t *testing.T) {
	var w Crowd
	defer w.Close()
	near, far := pair(t)
	if _, err := far.Write(make([]byte, 2*maxReads)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		reads := 0
		m := NewMember(Of(near), nil, &lender{buf: make([]byte, 1)}, func(int) bool { reads++; return true })
		if err, ok := m.Stay(&w, time.Now().Add(longStay)); err != nil || !ok || reads != maxReads {
			t.Errorf("%d reads: %v, %v", reads, err, ok)
		}
	}
}

func (m *Member) isIn() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.in
}

// endIn ends a stay that has begun.
func endIn(m *Member, err error) {
	for !m.isIn() {
		time.Sleep(time.Millisecond)
	}
	m.End(err)
}

// Members that are aborted and closed while others get what they wait for: no byte of a
// connection reaches another that has its descriptor next.
func TestCrowdAborts(t *testing.T) {
	var w Crowd
	defer w.Close()
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 40 {
				near, far := pair(t)
				to, _ := pair(t)
				mark, l := byte(g*40+i), &lender{buf: make([]byte, 16)}
				m := NewMember(Of(near), Of(to), l, func(n int) bool {
					for _, c := range l.buf[:n] {
						if c != mark {
							t.Errorf("a byte of connection %d reached %d", c, mark)
						}
					}
					return true
				})
				go func() { _, _ = far.Write(bytes.Repeat([]byte{mark}, 100)) }()
				go func() {
					m.End(net.ErrClosed)
					near.Close()
				}()
				if err, ok := m.Stay(&w, time.Now().Add(longStay)); ok && !errors.Is(err, net.ErrClosed) {
					t.Error(err)
				}
				to.Close()
				far.Close()
			}
		})
	}
	wg.Wait()
}

func TestCrowdDoesNotAllocate(t *testing.T) {
	var w Crowd
	near, far := pair(t)
	to, _ := pair(t)
	came := make(chan struct{}, 1)
	m := NewMember(Of(near), Of(to), &lender{buf: make([]byte, 64)}, func(int) bool {
		came <- struct{}{}
		return true
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = m.Stay(&w, time.Now().Add(longStay))
	}()
	out, p := Of(far), make([]byte, 8)
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
