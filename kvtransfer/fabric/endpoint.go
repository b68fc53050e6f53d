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

// Endpoint writes to one peer and is written to by it. It is safe for concurrent use.
type Endpoint struct {
	d    *Device
	mu   sync.Mutex
	c    *C.td_end // nil: closed, and released by the library
	over bool      // Close was called
	name []byte
	out  []C.td_write

	peer *Endpoint // see inside; guarded by its mutex
}

// inside holds the endpoints of this process by name. Between two endpoints of one process, the
// provider shm shares the memory of one with the other. When it unmaps that memory, the other
// endpoint must not be used any more, so it is closed, too. libfabric 1.17 keeps the address of
// that memory for good under the name of each endpoint, and reads it when the name becomes a peer.
var inside = struct {
	sync.Mutex
	ends   map[string]*Endpoint
	closed map[string]struct{} // names of closed endpoints of shm, which libfabric must not get
}{ends: make(map[string]*Endpoint), closed: make(map[string]struct{})}

// Endpoint opens an endpoint for at most depth writes in flight, and as many of the peer's that
// Poll has not reported.
func (d *Device) Endpoint(depth int) (*Endpoint, error) {
	e := &Endpoint{d: d}
	if err := d.enter(); err != nil {
		return nil, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cError(ErrFabric, C.td_endpoint(d.c, C.int(depth), &e.c)); err != nil {
		d.leave()
		return nil, fmt.Errorf("%w (%s)", err, d.info.Provider)
	}
	name, n := make([]byte, MaxName), C.size_t(MaxName)
	err := cError(ErrFabric, C.td_name(e.c, unsafe.Pointer(&name[0]), &n))
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	e.name = name[:n]
	inside.Lock()
	inside.ends[string(e.name)] = e
	delete(inside.closed, string(e.name))
	inside.Unlock()
	return e, nil
}

// Name returns the name that the peer passes to Peer.
func (e *Endpoint) Name() []byte { return e.name }

// Peer sets the endpoint's peer, once, before the first Write. Names of one provider have one
// length or end in a zero byte.
func (e *Endpoint) Peer(name []byte) error {
	if len(name) == 0 || len(name) > MaxName || len(name) != len(e.name) && bytes.IndexByte(name, 0) != len(name)-1 {
		return fmt.Errorf("%w: a peer's name of %d bytes, this side's has %d", ErrFabric, len(name), len(e.name))
	}
	b := make([]byte, MaxName+1)
	copy(b, name)
	inside.Lock()
	defer inside.Unlock()
	if e.d.info.Provider == "shm" {
		if _, closed := inside.closed[string(name)]; closed {
			return fmt.Errorf("%w: the peer, of this process, has closed its endpoint", ErrFabric)
		}
		e.peer = inside.ends[string(name)]
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return ErrClosed
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cError(ErrFabric, C.td_peer(e.c, unsafe.Pointer(&b[0])))
}

// Write starts writes, each of which carries data, and returns how many it could start. These are
// fewer when the queue is full, until Poll reports completions. The memory of a write must not
// change until Written or Failed has been reported for it under token.
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
	return int(n), cError(ErrFabric, why)
}

// Poll reports completions and drives the provider: without polls, nothing lands here and nothing
// is sent. Without completions it polls again at once, at most spins times, without leaving its
// thread. The error of a Failed event is returned with it.
func (e *Endpoint) Poll(into []Event, spins int) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return 0, ErrClosed
	}
	var why *C.char
	n := C.td_poll(e.c, (*C.td_event)(unsafe.Pointer(&into[0])), C.int(len(into)), C.int(spins), &why)
	return max(int(n), 0), cError(ErrFabric, why)
}

// Close closes the endpoint. After it returns nil, no write of the peer changes memory here, and no
// memory here is read. After an error that is not guaranteed; Close may be called again.
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

// close closes the endpoint. The caller holds inside's mutex.
func (e *Endpoint) close() error {
	if inside.ends[string(e.name)] == e { // the name may belong to a later endpoint
		delete(inside.ends, string(e.name))
		if e.d.info.Provider == "shm" {
			inside.closed[string(e.name)] = struct{}{}
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.over, e.peer = true, nil
	if e.c == nil {
		return nil
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cError(ErrFabric, C.td_end_close(e.c)); err != nil {
		return err
	}
	e.c = nil
	e.d.leave()
	return nil
}
