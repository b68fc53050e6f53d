//go:build linux && (amd64 || arm64)

package load

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// kernel is the state of reading with recvmsg, made once per connection.
type kernel struct {
	raw   syscall.RawConn // nil: not a socket, or one without timestamps
	p     []byte          // buffer of the running Read
	n     int
	errno syscall.Errno
	vec   syscall.Iovec
	msg   syscall.Msghdr
	ctrl  [controlBytes / 8]uint64 // aligned as the headers in it are
	recv  func(fd uintptr) bool
}

// controlBytes holds the header and the timespec of a read, with room to spare.
const controlBytes = 64

// stamping makes the kernel record arrivals as long as this process runs. The kernel does
// so while any socket requests it, and starts and stops a little later than requested.
// With requests by connections only, the first bytes of the first ones would have no time.
var stamping = sync.OnceFunc(func() {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return // then arrival times are missing
	}
	if syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_TIMESTAMPNS, 1) != nil {
		_ = syscall.Close(fd) // it is not needed
	}
})

// NewStamped wraps a connection.
func NewStamped(c net.Conn) *Stamped {
	stamping()
	s := &Stamped{Conn: c}
	sc, ok := c.(syscall.Conn)
	if !ok {
		return s
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return s
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		failed = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_TIMESTAMPNS, 1)
	}); err != nil || failed != nil {
		return s
	}
	s.raw, s.recv = raw, s.receive
	return s
}

// receive calls recvmsg once. It returns false if there is nothing to read yet.
func (s *Stamped) receive(fd uintptr) bool {
	for {
		s.vec.Base = &s.p[0]
		s.vec.SetLen(len(s.p))
		s.msg = syscall.Msghdr{Iov: &s.vec, Iovlen: 1, Control: (*byte)(unsafe.Pointer(&s.ctrl[0]))}
		s.msg.SetControllen(controlBytes)
		n, _, errno := syscall.Syscall(syscall.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&s.msg)), 0)
		switch errno {
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return false
		}
		acquire(fd)
		s.n, s.errno = int(n), errno
		return true
	}
}

// Read reads and records the arrival time.
func (s *Stamped) Read(p []byte) (int, error) {
	if s.raw == nil || len(p) == 0 {
		return s.readPlain(p)
	}
	s.p = p
	err := s.raw.Read(s.recv)
	s.p, s.vec.Base = nil, nil
	switch {
	case err != nil:
		return 0, err
	case s.errno != 0:
		return 0, &net.OpError{Op: "read", Net: "tcp", Addr: s.RemoteAddr(), Err: os.NewSyscallError("recvmsg", s.errno)}
	case s.n == 0:
		return 0, io.EOF
	}
	h := (*syscall.Cmsghdr)(unsafe.Pointer(&s.ctrl[0]))
	if s.msg.Controllen >= uint64(syscall.CmsgLen(int(unsafe.Sizeof(syscall.Timespec{})))) && h.Level == syscall.SOL_SOCKET && h.Type == syscall.SO_TIMESTAMPNS {
		t := (*syscall.Timespec)(unsafe.Pointer(&s.ctrl[syscall.CmsgLen(0)/8]))
		s.came(time.Unix(t.Sec, t.Nsec))
	} else {
		s.at, s.late = time.Now(), 0
	}
	return s.n, nil
}
