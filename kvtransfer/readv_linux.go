package kvtransfer

import (
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// readvReader scatters the available bytes of a TCP socket over the window in one system call. It
// never waits in the middle of a page.
type readvReader struct {
	raw syscall.RawConn
	d   *dataReader
	err error
	try func(fd uintptr) bool // c.once, bound once
}

func newPageReader(conn net.Conn) pageReader {
	t, ok := conn.(*net.TCPConn)
	if !ok {
		return streamReader{conn}
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return streamReader{conn}
	}
	c := &readvReader{raw: raw}
	c.try = c.once
	return c
}

func (c *readvReader) read(d *dataReader) error {
	c.d, c.err = d, nil
	if err := c.raw.Read(c.try); err != nil {
		return err
	}
	return c.err
}

// once makes one attempt. False waits until the socket has bytes, and then checks the fence again.
func (c *readvReader) once(fd uintptr) bool {
	if !c.d.begin() {
		return true
	}
	n, err := unix.Readv(int(fd), c.d.window)
	if n > 0 {
		c.d.took(n)
	}
	c.d.end()
	switch {
	case err == unix.EAGAIN:
		return false
	case err == unix.EINTR:
	case err != nil:
		c.err = err
	case n == 0:
		c.err = io.ErrUnexpectedEOF
	}
	return true
}
