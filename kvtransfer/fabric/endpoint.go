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
	"runtime"
	"sync"
	"unsafe"
)

// MaxName bounds an endpoint's name.
const MaxName = 256

// Endpoint writes to one peer and is written to by it. Its methods may be called from any goroutine.
type Endpoint struct {
	d    *Device
	mu   sync.Mutex
	c    *C.td_end // nil: closed, and the library has let go of it
	over bool      // Close was called
	name []byte
	out  []C.td_write

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
	if err := said(ErrFabric, C.td_endpoint(d.c, C.int(depth), &e.c)); err != nil {
		d.leave()
		return nil, fmt.Errorf("%w (%s)", err, d.info.Provider)
	}
	name, n := make([]byte, MaxName), C.size_t(MaxName)
	err := said(ErrFabric, C.td_name(e.c, unsafe.Pointer(&name[0]), &n))
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	e.name = name[:n]
	inside.Lock()
	inside.ends[string(e.name)] = e
	inside.Unlock()
	return e, nil
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

// Poll tells completions, and lets the provider work: without polls nothing lands here and nothing leaves. While there are none it looks again at
// once, at most looks times, without leaving its thread. The error of a Failed event comes with it.
func (e *Endpoint) Poll(into []Event, looks int) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return 0, ErrClosed
	}
	var why *C.char
	n := C.td_poll(e.c, (*C.td_event)(unsafe.Pointer(&into[0])), C.int(len(into)), C.int(looks), &why)
	return max(int(n), 0), said(ErrFabric, why)
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
	return nil
}
