package sock

import (
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"
)

// Conn reads and writes a socket that the net package has opened and will close.
// One goroutine may read it and one may write it.
type Conn struct {
	in, out way
	ask     func(fd uintptr) bool // of Ask
	asking  bool                  // nothing was written yet
	all     int                   // to be written
	vec     [2]syscall.Iovec      // of Ask
}

// way is one direction. Its function is made once, so that no call allocates.
type way struct {
	rc     syscall.RawConn
	f      func(fd uintptr) bool
	p      []byte // to be read into, or written
	lender Lender // of ReadInto: has p; nil: p is the caller's
	n      int
	errno  syscall.Errno
}

// Of is the socket below a connection; nil: there is none that could be used, as
// below TLS.
func Of(nc net.Conn) *Conn {
	tcp, ok := nc.(*net.TCPConn)
	if !ok {
		return nil
	}
	rc, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	c := new(Conn)
	c.in.rc, c.out.rc = rc, rc
	c.in.f = func(fd uintptr) bool {
		w := &c.in
		if w.lender != nil {
			w.p = w.lender.Lend()
		}
		w.call(syscall.SYS_READ, fd)
		if w.errno == syscall.EAGAIN && w.lender != nil {
			w.p = nil
			w.lender.Idle()
		}
		return w.errno != syscall.EAGAIN
	}
	c.ask = func(fd uintptr) bool {
		if !c.asking {
			return c.in.f(fd)
		}
		// From here on the runtime reports what comes to the reader that waits.
		c.asking = false
		c.in.n, c.in.errno = 0, 0
		c.out.repeat(syscall.SYS_WRITEV, fd, unsafe.Pointer(&c.vec), uintptr(len(c.vec)))
		return c.out.errno != 0 || c.out.n < c.all
	}
	c.out.f = func(fd uintptr) bool {
		c.out.call(syscall.SYS_WRITE, fd)
		return true
	}
	return c
}

// call is read(2) or write(2).
func (w *way) call(trap, fd uintptr) {
	w.repeat(trap, fd, unsafe.Pointer(unsafe.SliceData(w.p)), uintptr(len(w.p)))
}

// repeat is a system call until no signal interrupts it.
func (w *way) repeat(trap, fd uintptr, p unsafe.Pointer, n uintptr) {
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

func (w *way) fail(op string) error {
	return &net.OpError{Op: op, Net: "tcp", Err: os.NewSyscallError(op, w.errno)}
}

// came is what a read gives that ended so.
func (w *way) came(err error) (int, error) {
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
	c.in.p, c.in.lender = nil, nil
	return c.in.came(err)
}

// Read is net.Conn's. p is not empty.
func (c *Conn) Read(p []byte) (int, error) {
	c.in.p = p
	return c.read()
}

// Lender has buffers for what comes.
type Lender interface {
	Lend() []byte // not empty
	Idle()        // nothing came: the buffer is not needed until the next Lend
}

// ReadInto is Read into what l lends, which is not held while nothing comes.
func (c *Conn) ReadInto(l Lender) (int, error) {
	c.in.lender = l
	return c.read()
}

// WriteNow writes what the socket takes without waiting; fewer bytes than p are
// no error.
func (c *Conn) WriteNow(p []byte) (int, error) {
	w := &c.out
	w.p = p
	err := w.rc.Write(w.f)
	w.p = nil
	return w.wrote(err)
}

// Ask is WriteNow of two pieces, neither of which is empty, and then, where all of it has left, Read
// of what comes back, without the look that a Read begins with: nothing can have come before what was asked. What
// came all the same, such as an end, shows at the next read, so a caller sets a deadline.
// wrong is of the writing; err is of the reading, which another read may not tell again.
func (c *Conn) Ask(p, q, into []byte) (sent int, wrong error, n int, err error) {
	w := &c.in
	for i, piece := range [...][]byte{p, q} {
		c.vec[i].Base = &piece[0]
		c.vec[i].SetLen(len(piece))
	}
	c.asking, c.all, w.p = true, len(p)+len(q), into
	err = w.rc.Read(c.ask)
	c.vec, w.p = [2]syscall.Iovec{}, nil
	if c.asking { // it was closed, or too late, before anything left
		return 0, err, 0, nil
	}
	if sent, wrong = c.out.wrote(nil); wrong != nil || sent < c.all {
		return sent, wrong, 0, nil
	}
	n, err = w.came(err)
	return sent, nil, n, err
}

func (w *way) wrote(err error) (int, error) {
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

// Quiet says whether a connection, or the one below TLS, is open with nothing to be
// read.
func Quiet(fd uintptr) bool {
	var b [1]byte
	_, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b)), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	return errno == syscall.EAGAIN
}
