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

// maxReads bounds the reads of one event, so that a peer that sends without a pause does not delay
// the other registrations.
const maxReads = 64

// maxEvents is the number of events that epoll returns at once.
const maxEvents = 128

// Poller reads many sockets in one goroutine. The goroutine wakes once for all sockets that are
// readable, whereas a goroutine for each socket would be scheduled for each read. The zero Poller
// is empty and ready to use; Close ends it.
//
// The poller's epoll descriptor is registered with the runtime's own epoll, so that a waiting
// poller is a waiting goroutine and occupies no thread.
type Poller struct {
	mu     sync.Mutex
	file   *os.File // the epoll; nil before the first registration and after Close
	fd     int
	slots  []slot
	free   []uint32 // indices of slots without a registration
	closed bool
	done   chan struct{} // closed when the goroutine has ended
}

// slot holds a registration. Events carry the generation, so that late events of an earlier
// registration are dropped.
type slot struct {
	r          *Registration
	generation uint32
}

// Registration is one wait of a Poller for a connection. It is used once.
type Registration struct {
	from, to *Conn
	buffers  BufferSource
	onRead   func(n int) bool
	poller   *Poller

	mu     sync.Mutex // held while onRead runs
	active bool
	over   bool   // it has ended, or was cancelled before it began
	fds    [2]int // of from and to
	slot   uint32
	result chan error // why the wait ended
}

// NewRegistration returns a registration that reads from into the buffers of b. onRead is called
// after each read with the number of bytes, until it returns false; it must not block. The end of
// to also ends the wait; to may be nil.
func NewRegistration(from, to *Conn, b BufferSource, onRead func(n int) bool) *Registration {
	return &Registration{from: from, to: to, buffers: b, onRead: onRead, result: make(chan error, 1)}
}

// ErrPeerClosed reports that the second connection of a registration has ended.
var ErrPeerClosed = fmt.Errorf("sock: the second connection was closed: %w", net.ErrClosed)

// start starts the goroutine if it does not run yet. It returns false if epoll fails or the poller
// is closed. w.mu must be held.
func (w *Poller) start() bool {
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
	go w.run(rc)
	return true
}

// Close ends all waits with net.ErrClosed, and then the goroutine.
func (w *Poller) Close() {
	w.mu.Lock()
	file, done := w.file, w.done
	w.file, w.closed = nil, true
	var all []*Registration
	for _, p := range w.slots {
		if p.r != nil {
			all = append(all, p.r)
		}
	}
	w.mu.Unlock()
	if file == nil {
		return
	}
	for _, r := range all {
		r.Cancel(net.ErrClosed)
	}
	file.Close()
	<-done
}

// run handles events until the file is closed.
func (w *Poller) run(rc syscall.RawConn) {
	defer close(w.done)
	events := make([]syscall.EpollEvent, maxEvents)
	_ = rc.Read(func(fd uintptr) bool { // it fails when the file is closed
		for {
			n, _, errno := syscall.RawSyscall6(syscall.SYS_EPOLL_PWAIT, fd, uintptr(unsafe.Pointer(&events[0])), maxEvents, 0, 0, 0)
			if errno == syscall.EINTR {
				continue
			}
			if errno != 0 {
				return true
			}
			for i := range events[:n] {
				w.dispatch(&events[i])
			}
			if n < maxEvents {
				return false // later events wake the goroutine
			}
			runtime.Gosched()
		}
	})
}

// dispatch passes an event to its registration.
func (w *Poller) dispatch(e *syscall.EpollEvent) {
	at := uint32(e.Fd) >> 1
	w.mu.Lock()
	p := w.slots[at]
	w.mu.Unlock()
	if p.r == nil || p.generation != uint32(e.Pad) {
		return // the registration has ended
	}
	p.r.handle(uint32(e.Fd)&1 == 1, e.Events)
}

// handle reads from the first connection, or ends the wait if the event is of the second one.
func (r *Registration) handle(second bool, events uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.active {
		return
	}
	if second {
		r.finish(ErrPeerClosed)
		return
	}
	over := events&(syscall.EPOLLRDHUP|syscall.EPOLLHUP|syscall.EPOLLERR) != 0
	w := &r.from.in
	for range maxReads {
		w.p = r.buffers.Buffer()
		room := len(w.p)
		w.call(syscall.SYS_READ, uintptr(r.fds[0]))
		w.p = nil
		switch {
		case w.errno == syscall.EAGAIN:
			r.buffers.Release()
			return
		case w.errno != 0:
			r.finish(w.fail("read"))
			return
		case w.n == 0:
			r.finish(io.EOF)
			return
		case !r.onRead(w.n):
			r.finish(nil)
			return
		case w.n < room && !over:
			r.buffers.Release()
			return
		}
	}
	r.finish(nil)
}

// finish ends the wait with err. r.mu must be held.
func (r *Registration) finish(err error) {
	r.active, r.over = false, true
	w := r.poller
	w.mu.Lock()
	if w.file != nil {
		for _, fd := range r.fds {
			if fd >= 0 { // closing the socket has removed it already: the error is of no interest
				_ = syscall.EpollCtl(w.fd, syscall.EPOLL_CTL_DEL, fd, nil)
			}
		}
	}
	w.slots[r.slot].r = nil
	w.free = append(w.free, r.slot)
	w.mu.Unlock()
	r.result <- err
}

// Cancel ends the wait with err, or keeps it from beginning. Any goroutine may call it. When it
// returns, onRead neither runs nor will run, so that the descriptors may be closed.
func (r *Registration) Cancel(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.active {
		r.finish(err)
	}
	r.over = true
}

// Wait has w read until onRead returns false, which is no error, until reading or the second
// connection ends, or until the deadline. ok is false if it did not begin, because w cannot poll or
// Cancel came first. While it waits, neither connection may be closed before Cancel has returned.
func (r *Registration) Wait(w *Poller, deadline time.Time) (err error, ok bool) {
	patience := time.NewTimer(time.Until(deadline))
	defer patience.Stop()
	if !r.register(w) {
		return nil, false
	}
	select {
	case err := <-r.result:
		return err, true
	case <-patience.C:
		r.Cancel(os.ErrDeadlineExceeded)
		return <-r.result, true
	}
}

// register adds the descriptors to the poller's epoll.
func (r *Registration) register(w *Poller) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over {
		return false
	}
	r.fds = [2]int{r.from.fd(), -1}
	if r.to != nil {
		r.fds[1] = r.to.fd()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if r.fds[0] < 0 || r.to != nil && r.fds[1] < 0 || !w.start() {
		return false
	}
	if len(w.free) == 0 {
		w.free = append(w.free, uint32(len(w.slots)))
		w.slots = append(w.slots, slot{})
	}
	at := w.free[len(w.free)-1]
	p := &w.slots[at]
	p.generation++
	for i, fd := range r.fds {
		if fd < 0 {
			continue
		}
		e := syscall.EpollEvent{Events: syscall.EPOLLRDHUP | 1<<31, Fd: int32(at<<1 | uint32(i)), Pad: int32(p.generation)} // 1<<31: EPOLLET
		if i == 0 {
			e.Events |= syscall.EPOLLIN
		}
		if syscall.EpollCtl(w.fd, syscall.EPOLL_CTL_ADD, fd, &e) != nil {
			if i == 1 {
				_ = syscall.EpollCtl(w.fd, syscall.EPOLL_CTL_DEL, r.fds[0], nil)
			}
			return false
		}
	}
	w.free = w.free[:len(w.free)-1]
	p.r, r.slot, r.poller, r.active = r, at, w, true
	return true
}

// fd returns the socket's descriptor, or -1 if it is closed.
func (c *Conn) fd() int {
	n := -1
	if c.in.rc.Control(func(fd uintptr) { n = int(fd) }) != nil {
		return -1
	}
	return n
}

// Len returns the number of registrations that wait.
func (w *Poller) Len() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.slots) - len(w.free)
}
