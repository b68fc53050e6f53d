package sock

import (
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// maxReads bounds the reads of one look, so that a peer that sends without a pause does not hold up
// the others.
const maxReads = 64

// maxTold is how many sockets a Crowd is told of at once.
const maxTold = 128

// Crowd waits for what comes on many sockets by one goroutine, which is woken once for
// all that have something: a goroutine each would be woken, put to sleep and looked for
// each time. The zero Crowd is empty; Close ends it.
//
// The descriptor of its epoll lies in the runtime's own, so that a crowd that waits is a
// goroutine that waits, and no thread.
type Crowd struct {
	mu     sync.Mutex
	file   *os.File // the epoll; nil: not started, or closed
	fd     int
	places []place
	free   []uint32
	closed bool
	done   chan struct{} // closed when the goroutine has ended
}

// place is where a member stands; turn tells it from whoever stood there before.
type place struct {
	m    *Member
	turn uint32
}

// Member is a connection in a Crowd, with another one whose end ends its stay. It stays
// once.
type Member struct {
	from, to *Conn
	lender   Lender
	took     func(n int) bool
	crowd    *Crowd

	mu    sync.Mutex // held while took runs
	in    bool
	over  bool   // it has left, or will not come
	fds   [2]int // of from and to
	place uint32
	ended chan error // why the stay ended
}

// NewMember returns a member that reads from, into the buffers that l lends. took is called after
// each read with the number of bytes, until it returns false; it must not block. The end of to also
// ends the stay; nil: only from's does.
func NewMember(from, to *Conn, l Lender, took func(n int) bool) *Member {
	return &Member{from: from, to: to, lender: l, took: took, ended: make(chan error, 1)}
}

// ErrLeft says that the other connection of a member has ended.
var ErrLeft = fmt.Errorf("sock: the peer that is written to has gone: %w", net.ErrClosed)

// start has the crowd wait; false: it cannot, or is closed.
func (w *Crowd) start() bool {
	if w.file != nil || w.closed {
		return !w.closed
	}
	fd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return false
	}
	if err := syscall.SetNonblock(fd, true); err != nil {
		syscall.Close(fd)
		return false
	}
	w.fd, w.file, w.done = fd, os.NewFile(uintptr(fd), "epoll"), make(chan struct{})
	rc, err := w.file.SyscallConn()
	if err != nil {
		w.file.Close()
		w.file, w.closed = nil, true
		return false
	}
	go w.wait(rc)
	return true
}

// Close ends all stays, and the goroutine.
func (w *Crowd) Close() {
	w.mu.Lock()
	file, done := w.file, w.done
	w.file, w.closed = nil, true
	var all []*Member
	for _, p := range w.places {
		if p.m != nil {
			all = append(all, p.m)
		}
	}
	w.mu.Unlock()
	if file == nil {
		return
	}
	for _, m := range all {
		m.End(net.ErrClosed)
	}
	file.Close()
	<-done
}

// wait is the goroutine.
func (w *Crowd) wait(rc syscall.RawConn) {
	defer close(w.done)
	told := make([]syscall.EpollEvent, maxTold)
	_ = rc.Read(func(fd uintptr) bool { // it ends with the file
		for {
			n, _, errno := syscall.RawSyscall6(syscall.SYS_EPOLL_PWAIT, fd, uintptr(unsafe.Pointer(&told[0])), maxTold, 0, 0, 0)
			if errno == syscall.EINTR {
				continue
			}
			if errno != 0 {
				return true
			}
			for i := range told[:n] {
				w.tell(&told[i])
			}
			if n < maxTold {
				return false // what comes from here on is told
			}
			runtime.Gosched()
		}
	})
}

// tell has a member look.
func (w *Crowd) tell(e *syscall.EpollEvent) {
	at := uint32(e.Fd) >> 1
	w.mu.Lock()
	p := w.places[at]
	w.mu.Unlock()
	if p.m == nil || p.turn != uint32(e.Pad) {
		return // it has left
	}
	p.m.look(uint32(e.Fd)&1 == 1, e.Events)
}

// look reads what has come, or takes note of the other's end.
func (m *Member) look(other bool, events uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.in {
		return
	}
	if other {
		m.leave(ErrLeft)
		return
	}
	over := events&(syscall.EPOLLRDHUP|syscall.EPOLLHUP|syscall.EPOLLERR) != 0
	w := &m.from.in
	for range maxReads {
		w.p = m.lender.Lend()
		room := len(w.p)
		w.call(syscall.SYS_READ, uintptr(m.fds[0]))
		w.p = nil
		switch {
		case w.errno == syscall.EAGAIN:
			m.lender.Idle()
			return
		case w.errno != 0:
			m.leave(w.fail("read"))
			return
		case w.n == 0:
			m.leave(io.EOF)
			return
		case !m.took(w.n):
			m.leave(nil)
			return
		case w.n < room && !over:
			m.lender.Idle()
			return
		}
	}
	m.leave(nil)
}

// leave ends the stay; the caller holds mu.
func (m *Member) leave(err error) {
	m.in, m.over = false, true
	w := m.crowd
	w.mu.Lock()
	if w.file != nil {
		for _, fd := range m.fds {
			if fd >= 0 { // it may be closed: then it is not there any more
				_ = syscall.EpollCtl(w.fd, syscall.EPOLL_CTL_DEL, fd, nil)
			}
		}
	}
	w.places[m.place].m = nil
	w.free = append(w.free, m.place)
	w.mu.Unlock()
	m.ended <- err
}

// End ends the stay with err, from any goroutine, or has it not begin; when it returns
// took does not run and will not, and the descriptors may be closed.
func (m *Member) End(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.in {
		m.leave(err)
	}
	m.over = true
}

// Stay has the crowd read until took returns false, which is no error, reading or the other
// connection ends, or until is reached. ok is false where it did not: there is no crowd, or End
// came first. Neither connection may be closed meanwhile but behind End.
func (m *Member) Stay(w *Crowd, until time.Time) (err error, ok bool) {
	patience := time.NewTimer(time.Until(until))
	defer patience.Stop()
	if !m.join(w) {
		return nil, false
	}
	select {
	case err := <-m.ended:
		return err, true
	case <-patience.C:
		m.End(os.ErrDeadlineExceeded)
		return <-m.ended, true
	}
}

// join begins a stay.
func (m *Member) join(w *Crowd) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over {
		return false
	}
	m.fds = [2]int{m.from.number(), -1}
	if m.to != nil {
		m.fds[1] = m.to.number()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if m.fds[0] < 0 || m.to != nil && m.fds[1] < 0 || !w.start() {
		return false
	}
	if len(w.free) == 0 {
		w.free = append(w.free, uint32(len(w.places)))
		w.places = append(w.places, place{})
	}
	at := w.free[len(w.free)-1]
	p := &w.places[at]
	p.turn++
	for i, fd := range m.fds {
		if fd < 0 {
			continue
		}
		e := syscall.EpollEvent{Events: syscall.EPOLLRDHUP | 1<<31, Fd: int32(at<<1 | uint32(i)), Pad: int32(p.turn)}
		if i == 0 {
			e.Events |= syscall.EPOLLIN
		}
		if syscall.EpollCtl(w.fd, syscall.EPOLL_CTL_ADD, fd, &e) != nil {
			if i == 1 {
				_ = syscall.EpollCtl(w.fd, syscall.EPOLL_CTL_DEL, m.fds[0], nil)
			}
			return false
		}
	}
	w.free = w.free[:len(w.free)-1]
	p.m, m.place, m.crowd, m.in = m, at, w, true
	return true
}

// number is the socket's descriptor; -1: it is closed.
func (c *Conn) number() int {
	n := -1
	if c.in.rc.Control(func(fd uintptr) { n = int(fd) }) != nil {
		return -1
	}
	return n
}

// Len is how many stay.
func (w *Crowd) Len() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.places) - len(w.free)
}
