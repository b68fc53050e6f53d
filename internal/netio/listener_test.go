package netio

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// failing is a listener whose Accept returns the errors of a list, one after the
// other, and then connections; with no list it fails for ever.
type failing struct {
	net.Listener
	errs  []error
	calls []time.Time
	ended bool
}

func (f *failing) Accept() (net.Conn, error) {
	f.calls = append(f.calls, time.Now())
	if f.ended {
		return nil, net.ErrClosed
	}
	if f.errs == nil {
		return nil, accept(syscall.EMFILE)
	}
	if len(f.errs) > 0 {
		err := f.errs[0]
		f.errs = f.errs[1:]
		return nil, err
	}
	c, _ := net.Pipe()
	return c, nil
}

func (f *failing) Close() error   { f.ended = true; return nil }
func (f *failing) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

// accept is an error as package net returns it.
func accept(errno syscall.Errno) error {
	return &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", errno)}
}

// Errors that pass are retried and counted by name; the wait doubles up to a second,
// and begins anew after a connection.
func TestAcceptIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &failing{errs: []error{}}
		for range 3 {
			for _, p := range temporary {
				f.errs = append(f.errs, accept(p.errno))
			}
		}
		counts, log := map[string]int{}, new(strings.Builder)
		l := NewListener(f, Options{Log: slog.New(slog.NewTextHandler(log, nil)), Count: func(name string) { counts[name]++ }})
		began := time.Now()
		for range 2 {
			if _, err := l.Accept(); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range ErrorNames() {
			if counts[name] != 3 {
				t.Errorf("%s counted %d times of 3", name, counts[name])
			}
		}
		wait := minBackoff
		for i := 1; i < 16; i++ {
			if got := f.calls[i].Sub(f.calls[i-1]); got != wait {
				t.Errorf("wait %d is %v, want %v", i, got, wait)
			}
			wait = min(2*wait, maxBackoff)
		}
		seconds := int(time.Since(began) / time.Second)
		if n := strings.Count(log.String(), "\n"); n < 2 || n > seconds+1 {
			t.Errorf("%d log lines in %d s:\n%s", n, seconds, log)
		}
		f.errs = []error{accept(syscall.EMFILE)}
		f.calls = nil
		if _, err := l.Accept(); err != nil || f.calls[1].Sub(f.calls[0]) != minBackoff {
			t.Error("the wait after a connection:", f.calls, err)
		}
	})
}

// Room is made where descriptors or memory ran out, and not for an aborted connection.
func TestAcceptMakesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, made := &failing{errs: []error{accept(syscall.EMFILE), accept(syscall.ECONNABORTED), accept(syscall.ENOMEM), accept(syscall.ENFILE)}}, 0
		l := NewListener(f, Options{MakeRoom: func() bool { made++; return true }})
		if _, err := l.Accept(); err != nil || made != 3 {
			t.Errorf("room was made %d times, want 3; %v", made, err)
		}
		if got := f.calls[4].Sub(f.calls[3]); got != minBackoff {
			t.Errorf("a retry after room was made came after %v, want %v", got, minBackoff)
		}
	})
}

// Other errors are the server's.
func TestAcceptReturnsOtherErrors(t *testing.T) {
	for _, want := range []error{io.EOF, net.ErrClosed, accept(syscall.EBADF), fmt.Errorf("other")} {
		l := NewListener(&failing{errs: []error{want}}, Options{})
		if _, err := l.Accept(); !errors.Is(err, want) {
			t.Errorf("%v became %v", want, err)
		}
	}
}

// Close ends an Accept that waits for its next try, and one that comes later.
func TestCloseEndsAccept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewListener(&failing{}, Options{})
		ended := make(chan error)
		go func() {
			_, err := l.Accept()
			ended <- err
		}()
		time.Sleep(10*time.Second + 500*time.Millisecond)
		synctest.Wait()
		now := time.Now()
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; !errors.Is(err, net.ErrClosed) || time.Since(now) != 0 {
			t.Errorf("Accept returned %v, %v after Close", err, time.Since(now))
		}
		if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
		if err := l.Close(); err != nil {
			t.Error("the second Close:", err)
		}
	})
}
