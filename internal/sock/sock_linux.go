package sock

import (
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"
)

// Conn reads and writes a socket that the net package has opened and will close. One goroutine may
// read it and one may write it at a time.
type Conn struct {
	net.Conn
	in, out   direction
	writeRead func(fd uintptr) bool // of WriteThenRead
	writing   bool                  // WriteThenRead has not written yet
	total     int                   // bytes that WriteThenRead writes
	vec       [2]syscall.Iovec      // of WriteThenRead
}

// direction is one direction of a Conn. Its function is made once, so that no call allocates.
type direction struct {
	rc      syscall.RawConn
	f       func(fd uintptr) bool
	p       []byte       // to be read into, or written
	buffers BufferSource // of ReadInto, provides p; nil: p is the caller's
	n       int
	errno   syscall.Errno
}

// NewConn returns a Conn for nc, or nil if nc is not a TCP socket.
func NewConn(nc net.Conn) *Conn {
	tcp, ok := nc.(*net.TCPConn)
	if !ok {
		return nil
	}
	rc, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	c := &Conn{Conn: nc}
	c.in.rc, c.out.rc = rc, rc
	c.in.f = func(fd uintptr) bool {
		w := &c.in
		if w.buffers != nil {
			w.p = w.buffers.Buffer()
		}
		w.call(syscall.SYS_READ, fd)
		if w.errno == syscall.EAGAIN && w.buffers != nil {
			w.p = nil
			w.buffers.Release()
		}
		return w.errno != syscall.EAGAIN
	}
	c.writeRead = func(fd uintptr) bool {
		if !c.writing {
			return c.in.f(fd)
		}
		// The runtime wakes this goroutine for every byte that arrives from here on.
		c.writing = false
		c.in.n, c.in.errno = 0, 0
		c.out.repeat(syscall.SYS_WRITEV, fd, unsafe.Pointer(&c.vec), uintptr(len(c.vec)))
		return c.out.errno != 0 || c.out.n < c.total
	}
	c.out.f = func(fd uintptr) bool {
		c.out.call(syscall.SYS_WRITE, fd)
		return true
	}
	return c
}

// call makes a read(2) or write(2) of w.p.
func (w *direction) call(trap, fd uintptr) {
	w.repeat(trap, fd, unsafe.Pointer(unsafe.SliceData(w.p)), uintptr(len(w.p)))
}

// repeat makes a system call until no signal interrupts it.
func (w *direction) repeat(trap, fd uintptr, p unsafe.Pointer, n uintptr) {
	for {
		n, _, errno := syscall.RawSyscall(trap, fd, uintptr(p), n)
		if errno == syscall.EINTR {
			continue
		}
		if w.n, w.errno = int(n), errno; errno != 0 {
			w.n = 0
		}
		return
	}
}

func (w *direction) fail(op string) error {
	return &net.OpError{Op: op, Net: "tcp", Err: os.NewSyscallError(op, w.errno)}
}

// readResult returns the result of a read; err is the RawConn's.
func (w *direction) readResult(err error) (int, error) {
	switch {
	case err != nil:
		return 0, err
	case w.errno != 0:
		return 0, w.fail("read")
	case w.n == 0:
		return 0, io.EOF
	}
	return w.n, nil
}

// read waits for bytes and returns their number.
func (c *Conn) read() (int, error) {
	err := c.in.rc.Read(c.in.f)
	c.in.p, c.in.buffers = nil, nil
	return c.in.readResult(err)
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.in.p = p
	return c.read()
}

// BufferSource provides buffers for reads.
type BufferSource interface {
	Buffer() []byte // not empty
	Release()       // the socket was empty: the buffer is not used before the next call of Buffer
}

// ReadInto is Read into a buffer of b, which is not held while the socket is empty.
func (c *Conn) ReadInto(b BufferSource) (int, error) {
	c.in.buffers = b
	return c.read()
}

// WriteNow writes the bytes that the socket takes without waiting, and returns their number. Fewer
// bytes than p are no error.
func (c *Conn) WriteNow(p []byte) (int, error) {
	w := &c.out
	w.p = p
	err := w.rc.Write(w.f)
	w.p = nil
	return w.writeResult(err)
}

// Write implements net.Conn. Only the bytes that the socket does not take at once are written by
// the net package, which waits.
func (c *Conn) Write(p []byte) (int, error) {
	n, err := c.WriteNow(p)
	if err != nil || n == len(p) {
		return n, err
	}
	rest, err := c.Conn.Write(p[n:])
	return n + rest, err
}

// WriteThenRead writes p and q, neither of which is empty, as WriteNow does. If all of it was sent,
// it then waits for bytes and reads them into the third slice. It saves the first read that a Read
// makes, because nothing can have arrived before the request was sent. An end of the connection
// before the call is found by the next read only, so callers set a deadline. werr is the error of
// writing. rerr is the error of reading; another read may not return it again.
func (c *Conn) WriteThenRead(p, q, into []byte) (sent int, werr error, n int, rerr error) {
	w := &c.in
	for i, piece := range [...][]byte{p, q} {
		c.vec[i].Base = &piece[0]
		c.vec[i].SetLen(len(piece))
	}
	c.writing, c.total, w.p = true, len(p)+len(q), into
	rerr = w.rc.Read(c.writeRead)
	c.vec, w.p = [2]syscall.Iovec{}, nil
	if c.writing { // closed, or past the deadline, before anything was sent
		return 0, rerr, 0, nil
	}
	if sent, werr = c.out.writeResult(nil); werr != nil || sent < c.total {
		return sent, werr, 0, nil
	}
	n, rerr = w.readResult(rerr)
	return sent, nil, n, rerr
}

// writeResult returns the result of a write; err is the RawConn's.
func (w *direction) writeResult(err error) (int, error) {
	switch {
	case err != nil:
		return 0, err
	case w.errno == syscall.EAGAIN:
		return 0, nil
	case w.errno != 0:
		return 0, w.fail("write")
	}
	return w.n, nil
}

// Quiet reports whether the socket is open and has nothing to read.
func Quiet(fd uintptr) bool { return peek(fd) < 0 }

// peek returns 1 if the socket has bytes to read, 0 if it has ended, and -1 otherwise.
func peek(fd uintptr) int {
	var b [1]byte
	n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b)), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	switch errno {
	case 0:
		return int(n)
	case syscall.EAGAIN:
		return -1
	}
	return 0
}
