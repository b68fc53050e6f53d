//go:build linux

package sock

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// pair is two ends of a connection.
func pair(t *testing.T) (near, far *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a.(*net.TCPConn), b.(*net.TCPConn)
}

// lender lends one buffer, and counts.
type lender struct {
	buf  []byte
	idle int
}

func (l *lender) Buffer() []byte { return l.buf }
func (l *lender) Release()       { l.idle++ }

// What comes back is read without a look before it is asked for, whether it comes at once or
// later; what does not leave whole is told, as are deadlines and ends.
func TestWriteThenRead(t *testing.T) {
	near, far := pair(t)
	c, got := NewConn(near), make([]byte, 100)
	within := func(d time.Duration) {
		t.Helper()
		if err := near.SetReadDeadline(time.Now().Add(d)); err != nil {
			t.Fatal(err)
		}
	}
	go func() {
		b := make([]byte, 10)
		for i := range 100 {
			if _, err := io.ReadFull(far, b); err != nil {
				t.Error(err)
			}
			if i%10 == 0 {
				time.Sleep(time.Millisecond)
			}
			_, _ = far.Write([]byte("answer"))
		}
	}()
	for range 100 {
		sent, wrong, n, err := c.WriteThenRead([]byte("head, "), []byte("body"), got)
		if sent != 10 || wrong != nil || err != nil || string(got[:n]) != "answer" {
			t.Fatalf("%d %v %q %v", sent, wrong, got[:n], err)
		}
	}
	within(time.Second) // nobody answers any more
	if sent, wrong, n, err := c.WriteThenRead([]byte("he"), []byte("bo"), got); sent != 4 || wrong != nil || n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(sent, wrong, n, err)
	}
	if sent, wrong, _, _ := c.WriteThenRead([]byte("he"), []byte("bo"), got); sent != 0 || !errors.Is(wrong, os.ErrDeadlineExceeded) {
		t.Fatal(sent, wrong)
	}
	large := bytes.Repeat([]byte("x"), 16<<20) // two are more than the sockets hold
	within(time.Minute)
	for range 10 {
		if sent, wrong, _, _ := c.WriteThenRead(large, large, got); wrong != nil || sent == 2*len(large) {
			t.Fatal(sent, wrong)
		}
	}
	near.Close()
	if _, wrong, _, _ := c.WriteThenRead(large, large, got); !errors.Is(wrong, net.ErrClosed) {
		t.Fatal(wrong)
	}
}

// An end that came before the question, without the look, shows at the latest behind the deadline.
func TestWriteThenReadAfterTheEnd(t *testing.T) {
	near, far := pair(t)
	if err := far.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if err := near.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, _, n, err := NewConn(near).WriteThenRead([]byte("he"), []byte("bo"), make([]byte, 10)); n != 0 || err != io.EOF && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(n, err)
	}
}

// Nothing is held while nothing comes, and what comes is read as by Read.
func TestReadIntoHoldsNothingWhileItWaits(t *testing.T) {
	near, far := pair(t)
	c, l := NewConn(near), &lender{buf: make([]byte, 100)}
	if err := near.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.ReadInto(l); !errors.Is(err, os.ErrDeadlineExceeded) || l.idle == 0 {
		t.Fatal(err, l.idle)
	}
	if err := near.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if _, err := far.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if n, err := c.ReadInto(l); err != nil || string(l.buf[:n]) != "hello" {
		t.Fatalf("%q, %v", l.buf[:n], err)
	}
	far.Close()
	if _, err := c.ReadInto(l); err != io.EOF {
		t.Fatal(err)
	}
}

func TestReadEndsAsNetDoes(t *testing.T) {
	near, far := pair(t)
	c := NewConn(near)
	if _, err := far.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 100)
	if n, err := c.Read(p); err != nil || string(p[:n]) != "hello" {
		t.Fatalf("%q, %v", p[:n], err)
	}
	if err := near.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(p); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	if err := near.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	far.Close()
	if _, err := c.Read(p); err != io.EOF {
		t.Fatal(err)
	}
	near.Close()
	if _, err := c.Read(p); !errors.Is(err, net.ErrClosed) {
		t.Fatal(err)
	}
	if _, err := c.WriteNow(p); !errors.Is(err, net.ErrClosed) {
		t.Fatal(err)
	}
}

// Of a peer that does not read WriteNow writes what fits, and then nothing.
func TestWriteNowDoesNotWait(t *testing.T) {
	near, _ := pair(t)
	c, p := NewConn(near), make([]byte, 1<<20)
	for range 1 << 10 {
		n, err := c.WriteNow(p)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			return
		}
	}
	t.Fatal("a gigabyte was taken by nobody")
}

func TestNewConnOfNoSocket(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if NewConn(a) != nil {
		t.Fatal("a pipe is a socket")
	}
}

func TestNothingAllocates(t *testing.T) {
	near, far := pair(t)
	a, b, p := NewConn(near), NewConn(far), make([]byte, 200)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := a.WriteNow(p); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Read(p); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Fatalf("%g allocations", n)
	}
}

// What is spoken over a socket arrives whole, also where it has to wait, with the
// deadlines and the end of the connection below.
func TestWrap(t *testing.T) {
	near, far := pair(t)
	a, b := Wrap(near), Wrap(far)
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	go func() {
		_, _ = a.Write(want)
		near.Close()
	}()
	time.Sleep(time.Millisecond) // the writer is likely to wait by now
	if got, err := io.ReadAll(b); err != nil || !bytes.Equal(got, want) {
		t.Fatal(len(got), err)
	}
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Fatal(err)
	}
	if err := b.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	if p, q := net.Pipe(); Wrap(p) != p || Wrap(q) != q {
		t.Error("a pipe is a socket")
	}
}

// Unread sees bytes that have arrived, also below TLS, and neither silence nor an end.
func TestUnread(t *testing.T) {
	near, far := pair(t)
	over := tls.Server(NewConn(near), &tls.Config{})
	all := []net.Conn{near, NewConn(near), over}
	for _, c := range all {
		if Unread(c) {
			t.Errorf("%T: bytes before any were sent", c)
		}
	}
	if _, err := far.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); !Unread(near) && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	for _, c := range all {
		if !Unread(c) {
			t.Errorf("%T: no bytes after one was sent", c)
		}
	}
	if _, err := near.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	far.Close()
	if _, err := near.Read(make([]byte, 10)); err != io.EOF {
		t.Fatal(err)
	}
	for _, c := range all {
		if Unread(c) {
			t.Errorf("%T: bytes after the end", c)
		}
	}
	near.Close()
	pipe, _ := net.Pipe()
	if Unread(near) || Unread(pipe) {
		t.Error("bytes of a closed socket, or of no socket")
	}
}
