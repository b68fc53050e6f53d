//go:build cgo && linux

package fabric

/*
#include "fabric.h"
*/
import "C"

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MaxName bounds an endpoint's name.
const MaxName = 256

// Endpoint writes to one peer and is written to by it. Its methods may be called from any goroutine; Wait from one.
type Endpoint struct {
	d    *Device
	mu   sync.Mutex
	c    *C.td_end // nil: closed, and the library has let go of it
	over bool      // Close was called
	name []byte
	out  []C.td_write
	wait *os.File // readable when there may be completions; nil: the provider has no such thing
	raw  syscall.RawConn
	idle atomic.Int32 // calls of Wait since a Poll that found something

	peer *Endpoint // see inside; guarded by its mutex
}

// inside are the endpoints of this process by name. Between two of one process the provider shm shares the memory of one with the other and
// forgets that when it unmaps it, so that the other must not be used from then on: it is closed too.
var inside = struct {
	sync.Mutex
	ends map[string]*Endpoint
}{ends: make(map[string]*Endpoint)}

// Endpoint opens one for at most depth writes of this side at a time, and as many of the peer's that Poll has not told.
func (d *Device) Endpoint(depth int) (*Endpoint, error) {
	e := &Endpoint{d: d}
	if err := d.enter(); err != nil {
		return nil, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := said(ErrFabric, C.td_endpoint(d.c, C.int(depth), 1, &e.c)); err != nil {
		d.leave()
		return nil, fmt.Errorf("%w (%s)", err, d.info.Provider)
	}
	name, n := make([]byte, MaxName), C.size_t(MaxName)
	err := said(ErrFabric, C.td_name(e.c, unsafe.Pointer(&name[0]), &n))
	if err == nil {
		e.name = name[:n]
		err = e.openWait()
	}
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	inside.Lock()
	inside.ends[string(e.name)] = e
	inside.Unlock()
	return e, nil
}

// openWait takes what the provider offers to wait on, if it does.
func (e *Endpoint) openWait() error {
	fd := int(C.td_fd(e.c))
	if fd < 0 {
		return nil
	}
	fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		return fmt.Errorf("%w: what to wait on: %w", ErrFabric, err)
	}
	e.wait = os.NewFile(uintptr(fd), "fabric completions")
	if e.raw, err = e.wait.SyscallConn(); err == nil {
		err = e.wait.SetReadDeadline(time.Time{})
	}
	if err != nil { // the runtime cannot wait on it
		e.wait.Close()
		e.wait = nil
	}
	return nil
}

// Name is what a peer needs for Peer.
func (e *Endpoint) Name() []byte { return e.name }

// Peer says whom the endpoint is for, once, before the first Write. Names of one provider have one length or end in a zero byte.
func (e *Endpoint) Peer(name []byte) error {
	if len(name) == 0 || len(name) > MaxName || len(name) != len(e.name) && bytes.IndexByte(name, 0) != len(name)-1 {
		return fmt.Errorf("%w: a peer's name of %d bytes, this side's has %d", ErrFabric, len(name), len(e.name))
	}
	b := make([]byte, MaxName+1)
	copy(b, name)
	inside.Lock()
	defer inside.Unlock()
	if e.d.info.Provider == "shm" {
		e.peer = inside.ends[string(name)]
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return ErrClosed
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return said(ErrFabric, C.td_peer(e.c, unsafe.Pointer(&b[0])))
}

// Write starts writes, each of which brings data along, and returns how many it could start: fewer when the queue is full, until Poll has
// told of some. Their memory must not change until Written or Failed has told of each under token.
func (e *Endpoint) Write(w []Write, token uint64, data uint32) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return 0, ErrClosed
	}
	if len(w) == 0 {
		return 0, nil
	}
	e.out = e.out[:0]
	for _, x := range w {
		c := C.td_write{from: C.uint64_t(x.From), to: C.uint64_t(x.To), key: C.uint64_t(x.Key), len: C.uint64_t(x.Bytes)}
		if e.d.desc {
			c.mr = x.Source.r.c
		}
		e.out = append(e.out, c)
	}
	var why *C.char
	n := C.td_post(e.c, &e.out[0], C.int(len(w)), C.uint64_t(token), C.uint32_t(data), &why)
	return int(n), said(ErrFabric, why)
}

// Poll tells completions, and lets the provider work: without polls nothing lands here and nothing leaves. The error of a Failed
// event comes with it.
func (e *Endpoint) Poll(into []Event) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return 0, ErrClosed
	}
	var why *C.char
	n := C.td_poll(e.c, (*C.td_event)(unsafe.Pointer(&into[0])), C.int(len(into)), &why)
	if n > 0 {
		e.idle.Store(0)
	}
	return max(int(n), 0), said(ErrFabric, why)
}

// How Wait sleeps where the provider has nothing to wait on.
const (
	sleepsEach  = 32
	firstSleep  = 20 * time.Microsecond
	maxDoubling = 5
)

// Wait returns when Poll may find something, or after d; it may return for nothing, and does at once for so many looks after a Poll that found
// something.
func (e *Endpoint) Wait(d time.Duration, looks int) {
	idle := int(e.idle.Add(1))
	if idle < looks {
		runtime.Gosched()
		return
	}
	if e.wait == nil {
		time.Sleep(min(d, firstSleep<<min((idle-looks)/sleepsEach, maxDoubling)))
		return
	}
	e.mu.Lock()
	ready := e.over || C.td_trywait(e.c) != 0
	e.mu.Unlock()
	if ready {
		runtime.Gosched()
		return
	}
	_ = e.wait.SetReadDeadline(time.Now().Add(d)) // it was asked when it was opened
	_ = e.raw.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return n != 0 || err != nil
	})
}

// Close ends the endpoint: when it returns nil, nothing that the peer wrote or writes changes memory here any more, and no memory here is read. After
// an error that is not so; Close may be called again.
func (e *Endpoint) Close() error {
	inside.Lock()
	defer inside.Unlock()
	var err error
	for _, other := range inside.ends {
		if other.peer == e {
			err = errors.Join(err, other.close())
		}
	}
	return errors.Join(err, e.close())
}

// close needs inside's mutex.
func (e *Endpoint) close() error {
	if inside.ends[string(e.name)] == e { // a later one may have the name by now
		delete(inside.ends, string(e.name))
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.over, e.peer = true, nil
	if e.c == nil {
		return nil
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := said(ErrFabric, C.td_end_close(e.c)); err != nil {
		return err
	}
	e.c = nil
	e.d.leave()
	if e.wait != nil {
		return e.wait.Close()
	}
	return nil
}
